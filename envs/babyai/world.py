"""One BabyAI episode behind the `Simulator` protocol, and the scripted bot that can solve most
of them.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from minigrid.envs.babyai.core.verifier import GoToInstr, PickupInstr
from minigrid.utils.baby_ai_bot import BabyAIBot
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from envs.babyai import views
from envs.babyai.actions import (
    CHECK,
    LOW,
    Command,
    Move,
    Refusal,
    normalise,
    offer,
    plan_high,
    plan_low,
)
from envs.babyai.levels import begin, pick_level
from envs.babyai.picture import grid_of
from envs.babyai.views import View, decode
from envs.env import Expert, ExpertFailed, StepResult
from envs.wire import FAMILY, INVALID

_TEXT_OF = {move: text for text, move in LOW.items()}


@dataclass(frozen=True, slots=True)
class Options:
    """The levels, and the style of observations, actions and rewards."""

    levels: tuple[str, ...]
    view: Literal["compact", "agentgym"]
    actions: Literal["low", "high"]
    reward: Literal["binary", "minigrid"]
    limited: bool = True  # minigrid's own limit ends an episode


class World:
    """One episode at a time. Each reset brings a minigrid environment of its own, so that no state
    leaks into the next episode.
    """

    def __init__(self, options: Options) -> None:
        self.options = options
        self.env: Any = None
        self.view = View((), frozenset(), "")
        self.level = ""
        self.num_moves = 0  # of this episode
        self.last_move: Move | None = None
        self._image: Any = None  # minigrid's observation after the last move
        self._ended = False

    @property
    def offered(self) -> Mapping[str, Command]:
        """Return the commands of the high grammar that are possible now, by their text."""
        return offer(self.view, int(self.env.agent_dir))

    def reset(self, task_id: int) -> str:
        self.level, seed = pick_level(self.options.levels, task_id)
        self.close()
        self.env, self._image = begin(self.level, seed)
        self.view = self._first_view()
        self.num_moves, self.last_move, self._ended = 0, None, False
        return self._told(goal=self.env.mission)

    def step(self, action: str) -> StepResult:
        assert not self._ended, "the episode is over"
        text = normalise(action)
        if self.options.actions == "high" and "check" in text:
            return self._stay(self._checked())
        is_low = self.options.actions == "low"
        plan = plan_low(text) if is_low else plan_high(text, self.view, self.offered)
        if isinstance(plan, Refusal):
            return self._stay(self._refused(plan), invalid=True)
        return self._carry_out(plan) if plan else self._stay(self._unmoved())

    def render(self) -> tuple[str, bytes]:
        """Return (media type, PNG of the grid); its text chunk `grid` lists the objects as JSON."""
        png, metadata = io.BytesIO(), PngInfo()
        metadata.add_text("grid", json.dumps(grid_of(self.env), separators=(",", ":")))
        Image.fromarray(self.env.render()).save(png, format="png", pnginfo=metadata)
        return "image/png", png.getvalue()

    def expert(self) -> Expert:
        return Bot(self)

    def hints(self) -> list[str]:
        """Return the commands of the grammar; for the high grammar only those possible now."""
        return list(self._possible())

    def close(self) -> None:
        if self.env is not None:
            self.env.close()
            self.env = None

    def _first_view(self) -> View:
        """Return the view after a reset.

        Some levels let the agent carry an object from the start. The reset's own image still shows
        the object in its cell. AgentGym's server shows that image, and so does view `agentgym`.
        """
        view = decode(self._image)
        if not self.env.carrying:
            return view
        now = decode(self.env.gen_obs()["image"])
        return now if self.options.view == "compact" else replace(view, carrying=now.carrying)

    def _stay(self, observation: str, *, invalid: bool = False) -> StepResult:
        info = {FAMILY: self.level, **({INVALID: True} if invalid else {})}
        return StepResult(observation, reward=0.0, terminated=False, info=info)

    def _carry_out(self, plan: Sequence[Move]) -> StepResult:
        """Carry out the moves of a plan until one leaves the image unchanged or passes minigrid's
        limit (if `limited`). The outcome is the mission's state after the last move.

        As in AgentGym, a success in the middle of a plan is lost if the plan continues.
        A failed mission may still be repaired: in the high grammar only success and minigrid's
        limit end an episode.
        Also as in AgentGym, minigrid's reward for a success long after that limit is negative.
        """
        terminated = truncated = False
        reward = 0.0
        for move in plan:
            observation, reward, terminated, over_limit, _ = self.env.step(move)
            truncated = over_limit and self.options.limited
            self.num_moves += 1
            self.last_move = move
            unchanged = observation["image"].tobytes() == self._image.tobytes()
            self._image = observation["image"]
            if truncated or unchanged:
                break
        self.view = decode(self._image)
        success = terminated and reward != 0
        terminated = success if self.options.actions == "high" else terminated
        self._ended = terminated or truncated
        paid = (1.0 if self.options.reward == "binary" else float(reward)) if success else 0.0
        observation = self._told(closing="The task is completed." if success else "")
        truncated = truncated and not terminated
        return StepResult(observation, paid, terminated, truncated, success, {FAMILY: self.level})

    def _told(self, *, goal: str = "", closing: str = "") -> str:
        if self.options.view == "compact":
            return views.compact(self.view, goal=goal)
        return views.agentgym(self.view, goal=goal, closing=closing, actions=self._possible())

    def _checked(self) -> str:
        if self.options.view == "compact":
            return views.compact(self.view, actions=self._possible())
        return views.agentgym_reply("This is what you can do now.", self._possible())

    def _unmoved(self) -> str:
        if self.options.view == "compact":
            return self._told()
        return views.agentgym_reply("You are there already.", self._possible())

    def _refused(self, refusal: Refusal) -> str:
        if self.options.view == "agentgym":
            return views.agentgym_reply(refusal.reason, self._possible())
        if not refusal.readable:
            return views.compact(self.view, note="invalid action", actions=self._possible())
        return views.compact(self.view, note="invalid action: not possible here")

    def _possible(self) -> tuple[str, ...]:
        return tuple(self.offered if self.options.actions == "high" else LOW)


class Bot:
    """An expert that translates minigrid's BabyAIBot into the grammar of its world.
    The bot may run forever, so the caller sets the time limit.

    In an unchanged state it returns the same action; after moves that it did not propose it plans
    again from the current state.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._bot: Any = None
        self._asked_at = -1  # world.num_moves at the last answer
        self._answer = ""
        self._took_shortcut = False

    def next_action(self) -> str:
        if self._asked_at != self._world.num_moves:
            self._answer = self._shortcut() or self._in_words(self._replan())
            self._asked_at = self._world.num_moves
        return self._answer

    def _replan(self) -> Move:
        try:
            if self._bot is not None and self._world.num_moves == self._asked_at + 1:
                return Move(self._bot.replan(self._world.last_move))
        except Exception:
            # the bot's assertions fail if another player's move broke its plan; a new bot may work
            self._bot = None
        try:
            self._bot = BabyAIBot(self._world.env)
            return Move(self._bot.replan())
        except Exception as error:
            self._bot = None
            raise ExpertFailed(
                f"BabyAIBot has no plan for {self._world.env.mission!r}: {type(error).__name__}"
                f" {error}"
            ) from error

    def _shortcut(self) -> str:
        """Return the high grammar's command that reaches a goal in view; empty if there is none.
        It returns at most one command per episode: if its plan is interrupted, the bot takes over.
        """
        instruction, is_high = self._world.env.instrs, self._world.options.actions == "high"
        is_simple = isinstance(instruction, GoToInstr | PickupInstr)
        if self._took_shortcut or not is_high or not is_simple:
            return ""
        verb = "go to" if isinstance(instruction, GoToInstr) else "pickup"
        if verb == "pickup" and self._world.view.carrying:
            return ""
        places = [obj.cur_pos for obj in instruction.desc.obj_set if obj.cur_pos is not None]
        wanted = {self._world.env.relative_coords(*place) for place in places}
        for text, command in self._world.offered.items():
            if command.target is None or not command.moves or not text.startswith(verb):
                continue
            ahead, left = command.target
            if (views.VIEW_SIZE // 2 - left, views.VIEW_SIZE - 1 - ahead) in wanted:
                self._took_shortcut = True
                return text
        return ""

    def _in_words(self, move: Move) -> str:
        """Return a move as an action's text.
        The grammars have no text for `done`, which only checks the mission. The low grammar gets a
        pickup or drop that is impossible now, which has the same effect. The high grammar gets
        "turn left"; a later action turns back. A pickup that is not offered becomes CHECK.
        """
        high = self._world.options.actions == "high"
        if move is Move.DONE:
            if high:
                return "turn left"
            move = Move.PICKUP if self._world.view.carrying else Move.DROP
        if high and move is Move.PICKUP:
            offered = self._world.offered.items()
            return next((text for text, c in offered if c.moves == (Move.PICKUP,)), CHECK)
        return _TEXT_OF[move]
