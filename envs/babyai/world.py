"""One BabyAI episode behind the `Simulator` protocol, and the scripted bot that can solve most of them."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from minigrid.envs.babyai.core.verifier import GoToInstr, PickupInstr
from minigrid.utils.baby_ai_bot import BabyAIBot
from PIL import Image

from envs.babyai import views
from envs.babyai.actions import CHECK, LOW, PORTABLE, Move, Refusal, available_high, find_path, normalise, plan_high, plan_low
from envs.babyai.levels import make_level, pick_level
from envs.babyai.views import Seen, View, decode
from envs.env import Expert, ExpertFailed, StepResult

_TEXT_OF = {move: text for text, move in LOW.items()}


@dataclass(frozen=True, slots=True)
class Options:
    """How tasks are numbered, shown, acted upon and paid."""

    levels: tuple[str, ...]
    view: Literal["compact", "agentgym"]
    actions: Literal["low", "high"]
    reward: Literal["binary", "minigrid"]


class World:
    """A fresh minigrid environment per reset: whatever happened before cannot leak into the next episode."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.env: Any = None
        self.view = View((), frozenset(), frozenset(), "")
        self.num_moves = 0  # of this episode
        self.last_move: Move | None = None
        self._ended = False

    def reset(self, task_id: int) -> str:
        level, seed = pick_level(self.options.levels, task_id)
        self.close()
        self.env = make_level(level)
        self.env.reset(seed=seed)
        self.view = decode(self.env.gen_obs()["image"])  # reset's own observation misses what some levels put into the agent's hands
        self.num_moves, self.last_move, self._ended = 0, None, False
        return self._text(goal=self.env.mission)

    def step(self, action: str) -> StepResult:
        assert not self._ended, "the episode is over"
        text = normalise(action)
        if self.options.actions == "high" and "check" in text:
            return StepResult(self._text(actions=available_high(self.view)), reward=0.0, terminated=False)
        plan = plan_high(text, self.view) if self.options.actions == "high" else plan_low(text)
        if isinstance(plan, Refusal):
            return StepResult(self._text(note=self._refusal(plan)), reward=0.0, terminated=False)
        return self._carry_out(plan)

    def render(self) -> tuple[str, bytes]:
        png = io.BytesIO()
        Image.fromarray(self.env.render()).save(png, format="png")
        return "image/png", png.getvalue()

    def expert(self) -> Expert:
        return Bot(self)

    def close(self) -> None:
        if self.env is not None:
            self.env.close()
            self.env = None

    def _carry_out(self, plan: Sequence[Move]) -> StepResult:
        """A plan is given up at the first move that changes nothing: the way is not what it looked like."""
        terminated = truncated = changed = False
        reward = 0.0
        for move in plan:
            before = (self.env.agent_pos, self.env.agent_dir, self.view)
            observation, reward, terminated, truncated, _ = self.env.step(move)
            self.num_moves += 1
            self.last_move = move
            self.view = decode(observation["image"])
            moved = before != (self.env.agent_pos, self.env.agent_dir, self.view)
            changed |= moved
            if terminated or truncated or not moved:
                break
        self._ended = terminated or truncated
        success = terminated and reward > 0
        paid = (1.0 if self.options.reward == "binary" else float(reward)) if success else 0.0
        note = ""
        if self.options.view == "agentgym":
            note = "The task is completed." if success else "" if changed or terminated else "No change in state."
        return StepResult(self._text(note=note), paid, terminated, truncated and not terminated, success)

    def _text(self, *, goal: str = "", note: str = "", actions: Sequence[str] = ()) -> str:
        if self.options.view == "compact":
            return views.compact(self.view, goal=goal, note=note, actions=actions)
        possible = actions or (available_high(self.view) if self.options.actions == "high" else list(LOW))
        return views.agentgym(self.view, goal=goal, note=note, actions=possible)

    def _refusal(self, refusal: Refusal) -> str:
        if self.options.view == "agentgym":
            return refusal.reason
        return "invalid action" if self.options.actions == "low" or not refusal.readable else "invalid action: not possible here"


class Bot:
    """minigrid's BabyAIBot in the grammar of the world it plays. It may think for ever: whoever asks sets the time limit.

    Asked again in the same state it repeats itself; after moves it did not follow it starts again from what it sees now.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._bot: Any = None
        self._asked_at = -1  # world.num_moves at the last answer
        self._answer = ""

    def next_action(self) -> str:
        if self._asked_at != self._world.num_moves:
            self._answer = self._shortcut() or self._in_words(self._replan())
            self._asked_at = self._world.num_moves
        return self._answer

    def _replan(self) -> Move:
        try:
            if self._bot is not None and self._world.num_moves == self._asked_at + 1:
                return Move(self._bot.replan(self._world.last_move))
        except Exception:  # the bot asserts where a foreign move broke its plan: a new one may still find a way
            self._bot = None
        try:
            self._bot = BabyAIBot(self._world.env)
            return Move(self._bot.replan())
        except Exception as error:
            self._bot = None
            raise ExpertFailed(f"BabyAIBot has no plan for {self._world.env.mission!r}: {type(error).__name__} {error}") from error

    def _shortcut(self) -> str:
        """In the high grammar a goal in view is one command away."""
        instruction = self._world.env.instrs
        if self._world.options.actions != "high" or not isinstance(instruction, GoToInstr | PickupInstr):
            return ""
        verb = "go to" if isinstance(instruction, GoToInstr) else "pickup"
        if verb == "pickup" and self._world.view.carrying:
            return ""
        wanted = {self._world.env.relative_coords(*obj.cur_pos) for obj in instruction.desc.obj_set if obj.cur_pos is not None}
        for seen, number in self._world.view.numbered():
            column_row = (views.VIEW_SIZE // 2 - seen.left, views.VIEW_SIZE - 1 - seen.ahead)
            if column_row in wanted and find_path(self._world.view, seen.cell) is not None:
                return f"{verb} {seen.agentgym_name} {number}"
        return ""

    def _in_words(self, move: Move) -> str:
        """`done` has no word: a pickup or drop that cannot happen looks around just as well."""
        if move is Move.DONE:
            move = Move.PICKUP if self._world.view.carrying else Move.DROP
        front: Seen | None = self._world.view.in_front
        if self._world.options.actions == "high" and move is Move.PICKUP:
            if front is None or front.kind not in PORTABLE:
                return CHECK
            number = next(number for seen, number in self._world.view.numbered() if seen is front)
            return f"pickup {front.agentgym_name} {number}"
        return _TEXT_OF[move]
