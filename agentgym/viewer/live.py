"""Pages for playing episodes: by a person, by an environment's expert, or by any policy that
`agentgym evaluate` accepts. Nothing is recorded.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs

from fastapi import FastAPI, Request
from fastapi.responses import RedirectResponse, Response
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException

from agentgym.config import ConfigError, EnvConfig, RunConfig, asked_of
from agentgym.data.items import PUBLISHED_COUNTS
from agentgym.evaluation.policies import PolicyName, seated, told_by
from agentgym.evaluation.protocol import EvaluationRequest
from agentgym.pages import Pages
from agentgym.pipeline.contenders import invite
from agentgym.pipeline.policy_evaluation import protocol_for
from agentgym.rollouts.env_client import EnvError
from agentgym.rollouts.episode import (
    ContextFull,
    Episode,
    Player,
    PlayerFailed,
    PlayerReply,
    ending,
)
from agentgym.rollouts.players import TextPlayer
from agentgym.rollouts.pools import EnvPools
from agentgym.types import Item, Sampling, Usage
from agentgym.viewer.bodies import Gone
from agentgym.viewer.drawing import drawing_of
from agentgym.viewer.index import config_of
from agentgym.viewer.replay import Missing, Servers, Shot, picture_of, shot_of
from agentgym.viewer.viewer import Viewer

YOU = "you"
MAX_GAMES = 8
IDLE_S = 900.0
TURN_LIMIT_S = 300.0
MAX_ACTION = 4_000  # characters
MAX_FORM = 64 * 1024  # bytes
MAX_FIELDS = 20
MAX_TASK = 2**53


class Person(TextPlayer):
    """Player for a person: its next action is the text in `typed`."""

    def __init__(self) -> None:
        self.typed = ""

    async def act(self, session: Any, sampling: Sampling) -> PlayerReply:
        return PlayerReply(self.typed, self.typed)


@dataclass
class Game:
    """An episode that is being played, with its player and its session."""

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
    over: str = ""  # why the game is over; empty: it is not
    used: float = field(default_factory=time.monotonic)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def by_hand(self) -> bool:
        return isinstance(self.player, Person)


class Room:
    """The games of a viewer; all of them run in its server's event loop."""

    def __init__(self, cfg: RunConfig, servers: Servers) -> None:
        self._cfg, self._servers = cfg, servers
        self._games: dict[str, Game] = {}

    def find(self, game: str) -> Game:
        """Return an open game, which is in use from now. Errors: Gone."""
        if game not in self._games:
            raise Gone("this game is over and put away; begin another at /play")
        self._games[game].used = time.monotonic()
        return self._games[game]

    async def begin(self, env: EnvConfig, task_id: int, player_name: str) -> Game:
        """Start a game and return it, with a session on the item and an environment server.

        player_name: YOU, or a policy as `agentgym evaluate` accepts it. Idle games are ended first.
        Errors: ConfigError, also if MAX_GAMES are open; Missing, EnvError, ValueError.
        """
        await self._make_room()
        cfg = self._cfg.model_copy(update={"env": env, "mix": ()})
        policy_name = "random" if player_name == YOU else player_name
        request = EvaluationRequest.model_validate({"policy": policy_name, "envs": (env.name,)})
        protocol = protocol_for(cfg, request)
        invited, contender, playing = None, None, cfg
        if player_name != YOU:
            PolicyName.parse(player_name)  # report a misspelled name before anything is loaded
            invited = await run_in_threadpool(invite, cfg, protocol, request)
            contender, protocol, playing = invited.contender, invited.protocol, invited.cfg
        async with contextlib.AsyncExitStack() as stack:
            expert = contender is not None and contender.needs_expert
            server = self._servers.use(env, expert=expert)
            endpoints = await run_in_threadpool(stack.enter_context, server)
            pools = await stack.enter_async_context(EnvPools.of([env], {env.name: endpoints}))
            guides = await pools.check([env], allow_expert=True)  # no training uses these episodes
            env_instructions = told_by(guides, protocol)
            item, key = Item(env.name, task_id, "play"), f"play-{secrets.token_hex(8)}"
            session = await stack.enter_async_context(pools.session(item, key))
            if contender is None:
                player: Player = Person()
            else:
                seat = await stack.enter_async_context(seated(contender, playing, Usage()))
                player = seat.player_of(item, 1)
            instructions = {} if invited is None else invited.instructions(env_instructions)
            settings = protocol.envs[0].episodes(secrets.randbelow(2**31), instructions)
            episode = Episode(item, 1, settings, session.observation)
            name, guide = secrets.token_urlsafe(12), env_instructions.get(env.name, "")
            resources = contextlib.AsyncExitStack()
            game = Game(name, env, player_name, player, session, episode, resources, guide)
            game.shots.append(await shot_of(session, 0, ""))
            game.over = "" if player.begin(episode) else "there is no room to act"
            await self._look(game)
            game.stack = stack.pop_all()
        self._games[game.id] = game
        return game

    async def act(self, game: Game, action: str) -> None:
        """Play one turn, unless the game is over. action: a person's; a policy ignores it.
        A failure of environment or player, or a timeout, ends the game and is stored in `over`.
        """
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
        response = await game.player.act(game.session, sampling)
        if response is None:
            game.over = "the player gives up"
            return
        reply = await episode.step(game.session, response, time.perf_counter() - began)
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
        """Set `game.hints`: up to 200 possible actions if a person plays and the environment lists
        them; else, or if listing them fails with EnvError, none.
        """
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


def add_play(app: FastAPI, viewer: Viewer, pages: Pages, room: Room) -> None:
    """Add the pages below `/play`."""

    @app.get("/play")
    def choose() -> str:
        withheld: list[str] = []
        envs = [(name, asked_of(env)) for name, env in environments(viewer, withheld).items()]
        context = {"envs": envs, "withheld": withheld, "game": None, "you": YOU}
        return pages.render("play.html", **context, section="play")

    @app.post("/play")
    async def begin(request: Request) -> RedirectResponse:
        form = await form_of(request)
        offered = environments(viewer)
        if form.get("env") not in offered:
            raise ConfigError(f"environment {form.get('env', '')[:60]!r} is none of those offered")
        task = form.get("task", "0")
        if not task.isdecimal() or len(task) > 16 or int(task) >= MAX_TASK:
            raise ConfigError(f"task {task[:20]!r}: expected a number, such as 0 or 17")
        who = form.get("who")
        player_name = form.get("policy", "").strip() if who == "policy" else who
        game = await room.begin(offered[form["env"]], int(task), player_name or YOU)
        return RedirectResponse(f"/play/{game.id}", 303)

    @app.get("/play/{game}")
    def show(game: str) -> str:
        current = room.find(game)
        context = {"game": current, "drawings": list(map(drawing_of, current.shots))}
        address = f"play/{current.id}"
        return pages.render("play.html", **context, address=address, words="", section="play")

    @app.post("/play/{game}")
    async def act(game: str, request: Request) -> RedirectResponse:
        current, form = room.find(game), await form_of(request)
        if form.get("do") == "end":
            await room.end(current)
            return RedirectResponse("/play", 303)
        await room.act(current, form.get("action", "").replace("\r\n", "\n"))
        watch = "?watch=yes" if form.get("watch") else ""
        return RedirectResponse(f"/play/{current.id}{watch}#turn-{len(current.episode.turns)}", 303)

    @app.get("/play/{game}/picture/{turn}")
    def picture(game: str, turn: int) -> Response:
        current = room.find(game)
        return picture_of(current.shots[turn] if 0 <= turn < len(current.shots) else None)


def environments(viewer: Viewer, withheld: list[str] | None = None) -> dict[str, EnvConfig]:
    """Return label -> environment to play on: configured ones, those of stored runs that
    `Servers.known` accepts, and each name in PUBLISHED_COUNTS with default options.
    withheld: list to which the reasons are added why environments of runs are not offered.
    """
    refused = [] if withheld is None else withheld
    by_label = {env.name: viewer.servers.known(env) for env in viewer.cfg.envs}
    for step in viewer.bodies.steps().values():
        config = config_of(step["config"])
        for options in (config.get("env"), *(config.get("mix") or ())):
            try:
                env = _env(options)
                env = env and viewer.servers.known(env)
            except Missing as missing:
                env = None
                if str(missing) not in refused:
                    refused.append(str(missing))
            if env is not None and env not in by_label.values():
                origin = f"{step['name']} {(step['key'] or '')[:6]}"
                by_label.setdefault(f"{env.name} as in {origin}", env)
    for name in PUBLISHED_COUNTS:
        by_label.setdefault(name, EnvConfig(name=name))
    return by_label


def _env(options: Any) -> EnvConfig | None:
    """Return the environment of these settings; None if they are invalid, or it is not native."""
    if not isinstance(options, Mapping) or options.get("dialect", "native") != "native":
        return None
    try:
        return EnvConfig(name=options["name"], options=options.get("options") or {})
    except (KeyError, ValueError):
        return None


async def form_of(request: Request) -> dict[str, str]:
    """Return name -> last value of a form's fields. Errors: HTTPException 413 beyond limits."""
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > MAX_FORM:
            raise HTTPException(413, f"a form may have {MAX_FORM} bytes")
    text = body.decode("utf-8", "replace")
    try:
        fields = parse_qs(text, keep_blank_values=True, max_num_fields=MAX_FIELDS)
    except ValueError:
        raise HTTPException(413, f"a form may have {MAX_FIELDS} fields") from None
    return {name: values[-1] for name, values in fields.items()}
