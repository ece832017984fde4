"""A game in the terminal: a person, or any policy that `agentgym evaluate` takes, turn by turn."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from agentgym.config import ConfigError, EnvConfig, RunConfig
from agentgym.data.items import has_lists, parse_item_id
from agentgym.deploy.environment import environment_servers
from agentgym.deploy.local import IdentitiesUnknown, check_local_env, task_identities
from agentgym.evaluation.playing import Table
from agentgym.evaluation.policies import Contender
from agentgym.evaluation.protocol import (
    EvaluationProtocol,
    EvaluationRequest,
    items_of,
    protocol_of_run,
)
from agentgym.pipeline.contenders import Invited, invite, playing_config
from agentgym.rollouts.env_client import EnvError
from agentgym.rollouts.episode import Episode, Player, PlayerReply, environment_waits
from agentgym.rollouts.players import TextPlayer
from agentgym.types import Item, Sampling, Trajectory, Usage

SEARCHED = 100  # task ids, in search of the first ones that an environment without lists knows
Tell = Callable[[str], None]
Ask = Callable[[str], str | None]  # prompt -> line that was typed; None: end of input


@dataclass(frozen=True)
class Game:
    """Settings of a game."""

    env: str
    policy: str = ""  # name of a policy for `agentgym evaluate`; empty: a person
    item: str = ""  # ids with commas; empty: the first test items, or tasks if there are no lists
    num_games: int = 1
    temperature: float = 0.0  # 0: greedy
    engine: str = ""


def play_games(cfg: RunConfig, game: Game, tell: Tell, ask: Ask) -> list[Trajectory]:
    """Play games on new servers and return the episodes. tell: shows a text; ask: reads an action
    of a person. Errors: ConfigError before anything starts.
    """
    protocol = _protocol(cfg, game)
    items = _items(cfg, protocol, game, tell)
    invited = _invited(cfg, protocol, game, tell, ask)
    contender, playing = invited.contender, invited.cfg
    check_local_env(playing.env)
    from agentgym.evaluation.evaluator import open_local

    with (
        environment_servers(playing, contender.needs_expert) as endpoints,
        open_local(
            playing, contender, endpoints, protocol, lambda player: ShownPlayer(player, tell)
        ) as opened,
    ):
        for line in invited.lines(opened.told) if game.policy else [opened.told[game.env]]:
            tell(line)

        async def play() -> list[Trajectory]:
            async with opened.seat(Usage()) as seat:
                by_id = {item.item_id: item for item in items}
                table = Table(invited.protocol, seat, invited.instructions(opened.told), by_id)
                attempts = table.attempts(invited.protocol.envs[0])[game.temperature == 0]
                sample = 0 if game.temperature == 0 else 1
                return [_ended(await attempts.play(item, sample), tell) for item in items]

        return opened.loop.run(play())


def _protocol(cfg: RunConfig, game: Game) -> EvaluationProtocol:
    changes: dict[str, Any] = {"num_samples": 1, "max_attempts": 1, "deterministic": False}
    changes["items"] = {"num": game.num_games}
    if game.temperature:
        changes["temperature"] = game.temperature
    if not game.policy:
        changes["action_format"] = "plain"
    return protocol_of_run(cfg, (game.env,), changes)


def _items(cfg: RunConfig, protocol: EvaluationProtocol, game: Game, tell: Tell) -> Sequence[Item]:
    if game.item:
        return [_item(game.env, name.strip()) for name in game.item.split(",")]
    if has_lists(cfg.data.path, game.env):
        return items_of(protocol, cfg)[game.env]
    tasks = _first_tasks(protocol.envs[0].env, game.num_games)
    items = [Item(game.env, task, "given") for task in tasks]
    names = ", ".join(item.item_id for item in items)
    tell(f"{cfg.data.path} has no lists of {game.env}: playing {names}; --item N plays another")
    return items


def _first_tasks(env: EnvConfig, num: int) -> list[int]:
    """Return the first task ids that the environment knows; from 0 on if it does not tell them."""
    searched = range(max(num, SEARCHED))
    try:
        digests = task_identities(env, searched)
    except IdentitiesUnknown:
        return list(searched)[:num]
    known = [task for task, digest in zip(searched, digests, strict=True) if digest is not None]
    return (known or list(searched))[:num]


def _item(env: str, text: str) -> Item:
    """Return the item of an id, with or without the environment's name. Errors: ConfigError."""
    name, task_id = parse_item_id(text if "_" in text else f"{env}_{text}")
    if name != env:
        raise ConfigError(f"--item {text} is of {name}, and --env is {env}")
    if task_id < 0:
        raise ConfigError(
            f"--item {text} ends in no number of a task; expected {env}_17, or 17 alone"
        )
    return Item(env, task_id, "given")


def _invited(
    cfg: RunConfig, protocol: EvaluationProtocol, game: Game, tell: Tell, ask: Ask
) -> Invited:
    if game.policy:
        request = EvaluationRequest.model_validate({"policy": game.policy, "engine": game.engine})
        return invite(cfg, protocol, request)
    person = Contender({"kind": "person"}, "a person", player_of=lambda *_: PersonPlayer(tell, ask))
    return Invited(person, protocol, playing_config(cfg, protocol, game.engine))


class PersonPlayer(TextPlayer):
    """A person who types actions. `?` lists possible ones; the end of input gives up."""

    def __init__(self, tell: Tell, ask: Ask) -> None:
        self._tell, self._ask = tell, ask

    async def act(self, session: Any, sampling: Sampling) -> PlayerReply | None:
        while True:
            with environment_waits():
                line = await asyncio.to_thread(self._ask, "> ")
            if line is None:
                return None
            if line.strip() != "?":
                return PlayerReply(line.strip(), line.strip())
            try:
                self._tell(", ".join(sorted(await session.hints())) or "nothing is suggested")
            except EnvError as error:
                self._tell(f"this environment suggests nothing: {error}")


class ShownPlayer:
    """A player whose observations and replies go to `tell`; a person's own replies do not."""

    def __init__(self, player: Player, tell: Tell) -> None:
        self._player, self._tell = player, tell
        self._types = isinstance(player, PersonPlayer)

    def begin(self, episode: Episode) -> bool:
        keys = "; ? lists actions, Ctrl-D gives up" if self._types else ""
        self._tell(f"--- {episode.item.item_id}, at most {episode.settings.max_turns} turns{keys}")
        self._tell(episode.first_observation)
        return self._player.begin(episode)

    async def act(self, session: Any, sampling: Sampling) -> PlayerReply | None:
        reply = await self._player.act(session, sampling)
        if reply is not None and not self._types:
            self._tell(f"> {reply.text}")
        return reply

    def hear(self, observation: str, *, last: bool) -> bool:
        self._tell(observation)
        return self._player.hear(observation, last=last)


def _ended(trajectory: Trajectory, tell: Tell) -> Trajectory:
    if trajectory.turns:
        tell(trajectory.turns[-1].observation)
    outcome = trajectory.error or ("solved" if trajectory.success else "not solved")
    reward = "" if trajectory.reward is None else f", reward {trajectory.reward:g}"
    tell(f"--- {outcome}: {trajectory.status}, {len(trajectory.turns)} turns{reward}")
    return trajectory
