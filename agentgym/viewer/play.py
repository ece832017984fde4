"""Episodes that are played while somebody watches: by a person, by an environment's expert, or by
any policy that `agentgym evaluate` takes. Nothing of it is recorded.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from starlette.concurrency import run_in_threadpool

from agentgym.config import ConfigError, EnvConfig, RunConfig
from agentgym.evaluation.asking import told_by
from agentgym.evaluation.policies import Contender, PolicyName, seated
from agentgym.evaluation.protocol import EnvProtocol
from agentgym.evaluation.request import EvaluationRequest
from agentgym.pipeline.contenders import invite
from agentgym.pipeline.evaluation import protocol_for
from agentgym.rollouts.client import EnvError
from agentgym.rollouts.episode import (
    ContextFull,
    Episode,
    EpisodeSettings,
    Player,
    PlayerFailed,
    Said,
    ending,
)
from agentgym.rollouts.players import TextPlayer
from agentgym.rollouts.pools import EnvPools
from agentgym.types import Item, Sampling, Usage
from agentgym.viewer.replay import Shot, shot_of
from agentgym.viewer.servers import Servers

YOU = "you"
MAX_GAMES = 8
IDLE_S = 900.0
TURN_LIMIT_S = 300.0
MAX_ACTION = 4_000  # characters


class Person(TextPlayer):
    """Who types what is done next."""

    def __init__(self) -> None:
        self.typed = ""

    async def act(self, session: Any, sampling: Sampling) -> Said:
        return Said(self.typed, self.typed)


@dataclass
class Game:
    """An episode under way."""

    id: str
    env: EnvConfig
    player_name: str
    player: Player
    session: Any
    episode: Episode
    stack: contextlib.AsyncExitStack
    instructions: str
    shots: list[Shot] = field(default_factory=list)
    hints: list[str] = field(default_factory=list)
    over: str = ""  # why it is; empty: it goes on
    used: float = field(default_factory=time.monotonic)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def by_hand(self) -> bool:
        return isinstance(self.player, Person)


class Room:
    """The games of a server; all of them live in its event loop."""

    def __init__(self, cfg: RunConfig, servers: Servers) -> None:
        self._cfg, self._servers = cfg, servers
        self._games: dict[str, Game] = {}

    def find(self, game: str) -> Game | None:
        found = self._games.get(game)
        if found is not None:
            found.used = time.monotonic()
        return found

    async def begin(self, env: EnvConfig, task_id: int, who: str) -> Game:
        """Open a session for a player. Errors: ConfigError, Missing, EnvError, ValueError."""
        await self._make_room()
        cfg = self._cfg.model_copy(update={"env": env, "mix": ()})
        told_as = "random" if who == YOU else who
        request = EvaluationRequest.model_validate({"policy": told_as, "envs": (env.name,)})
        protocol = protocol_for(cfg, request)
        invited, contender, playing = None, None, cfg
        if who != YOU:
            PolicyName.parse(who)  # a misspelled one is told before anything is loaded
            invited = await run_in_threadpool(invite, cfg, protocol, request)
            contender, protocol, playing = invited.contender, invited.protocol, invited.cfg
        async with contextlib.AsyncExitStack() as stack:
            endpoints = await run_in_threadpool(
                _entered, stack, lambda: self._servers.use(env, expert=_needs_expert(contender))
            )
            pools = await stack.enter_async_context(EnvPools.of([env], {env.name: endpoints}))
            guides = await pools.check([env], allow_expert=True)  # nothing is learned here
            told = told_by(guides, protocol)
            item, key = Item(env.name, task_id, "play"), f"play-{secrets.token_hex(8)}"
            session = await stack.enter_async_context(pools.session(item, key))
            if contender is None:
                player: Player = Person()
            else:
                seat = await stack.enter_async_context(seated(contender, playing, Usage()))
                player = seat.player_of(item, 1)
            given = {} if invited is None else invited.instructions(told)
            episode = _episode(protocol.envs[0], item, session.observation, given)
            game = Game(
                secrets.token_urlsafe(12),
                env,
                who,
                player,
                session,
                episode,
                stack.pop_all(),
                told.get(env.name, ""),
            )
        game.shots.append(await shot_of(session, 0, ""))
        game.over = "" if player.begin(episode) else "there is no room to act"
        await self._look(game)
        self._games[game.id] = game
        return game

    async def act(self, game: Game, action: str) -> None:
        """One turn; action: of a person. What goes wrong ends the game and is told."""
        async with game.lock:
            if game.over:
                return
            try:
                async with asyncio.timeout(TURN_LIMIT_S):
                    await self._turn(game, action)
            except (EnvError, PlayerFailed, ContextFull, TimeoutError) as error:
                game.over = f"it cannot go on: {error or type(error).__name__}"[:500]

    async def _turn(self, game: Game, action: str) -> None:
        episode, settings, number = game.episode, game.episode.settings, len(game.episode.turns)
        if isinstance(game.player, Person):
            game.player.typed = action[:MAX_ACTION]
        began = time.perf_counter()
        sampling = settings.sampling(episode.item, 1, number)
        said = await game.player.act(game.session, sampling)
        if said is None:
            game.over = "the player gives up"
            return
        reply = await episode.step(game.session, said, time.perf_counter() - began)
        ended = ending(reply)
        episode.success = ended is not None and reply.success
        game.shots.append(await shot_of(game.session, number + 1, ""))
        if ended:
            game.over = "solved" if episode.success else f"it is over ({ended}), not solved"
        elif not game.player.hear(reply.observation, last=False):
            game.over = "the context is used up"
        elif not game.by_hand and number + 1 >= settings.max_turns:
            game.over = f"max_turns {settings.max_turns} are taken"
        await self._look(game)

    async def _look(self, game: Game) -> None:
        """What a person could do now, where the environment tells."""
        game.hints = []
        if game.by_hand and not game.over and hasattr(game.session, "hints"):
            with contextlib.suppress(EnvError):
                game.hints = (await game.session.hints())[:200]

    async def end(self, game: Game) -> None:
        self._games.pop(game.id, None)
        with contextlib.suppress(EnvError, OSError, RuntimeError):
            await game.stack.aclose()

    async def close(self) -> None:
        for game in list(self._games.values()):
            await self.end(game)

    async def _make_room(self) -> None:
        now = time.monotonic()
        for game in list(self._games.values()):
            if now - game.used > IDLE_S:
                await self.end(game)
        if len(self._games) >= MAX_GAMES:
            raise ConfigError(f"{MAX_GAMES} games are open; end one of them")


def _needs_expert(contender: Contender | None) -> bool:
    return contender is not None and contender.needs_expert


def _entered(
    stack: contextlib.AsyncExitStack, use: Callable[[], contextlib.AbstractContextManager[Any]]
) -> Any:
    return stack.enter_context(use())


def _episode(
    asked: EnvProtocol, item: Item, observation: str, instructions: dict[str, str]
) -> Episode:
    settings = EpisodeSettings(
        seed=secrets.randbelow(2**31),
        step=0,
        max_turns=asked.max_turns,
        temperature=asked.temperature,
        max_new_tokens=asked.max_new_tokens,
        context_tokens=asked.context_tokens,
        instructions=instructions if asked.instructions else {},
        action_format=asked.action_format,
    )
    return Episode(item, 1, settings, observation)
