"""Environment servers for the viewer, started on first use and ended when idle, and replays.

A replay plays a recorded episode's actions again, draws the environment at each turn and compares
it with the record. It is made once and stored; only the newest KEEP stay.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import sqlite3
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import astuple, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from fastapi.responses import Response
from starlette.exceptions import HTTPException

from agentgym.config import ConfigError, EnvConfig, RunConfig, owned_env
from agentgym.deploy.environment import environment_servers
from agentgym.deploy.local import check_local_env
from agentgym.rollouts.env_client import EnvError
from agentgym.rollouts.episode import ending
from agentgym.rollouts.pools import EnvPools
from agentgym.store.keys import environment_modules, source_digest
from agentgym.store.manifest import canonical_json, sha256
from agentgym.types import Status, Trajectory
from agentgym.viewer.bodies import IndexedEpisode
from agentgym.viewer.index import config_of

logger = logging.getLogger(__name__)

IDLE_S = 180.0  # after its last use a server is ended
MAX_SESSIONS = 16  # of a server that the viewer starts
SESSION_TTL_S = 1_800.0  # long, for a person who thinks
LIMIT_S = 300.0  # of the replay of an episode
MAX_WAITING = 8  # queued episodes
MAX_SHOTS = 400  # per episode; later turns are compared and not drawn
MAX_SHOT_BYTES = 2 * 1024 * 1024
KEEP = 2_000  # replays


class Missing(RuntimeError):
    """Error for an environment that cannot be used here. Its text gives the reason."""


@dataclass
class _Open:
    stack: contextlib.ExitStack
    endpoints: Sequence[str]
    users: int = 0
    used: float = field(default_factory=time.monotonic)


class Servers:
    """Environment servers of the viewer: one for each environment with its options."""

    def __init__(self, cfg: RunConfig, clock: Callable[[], float] = time.monotonic) -> None:
        """Trust only the environments of the owner's settings `cfg`. clock: seconds, monotonic."""
        self._cfg, self._clock = cfg, clock
        self._open: dict[tuple[bytes, bool], _Open] = {}
        self._lock = threading.Lock()  # locked while a server starts
        self._counting = threading.Lock()  # locked only while users are counted

    @contextlib.contextmanager
    def use(self, env: EnvConfig, *, expert: bool = False) -> Iterator[Sequence[str]]:
        """Yield the endpoints of an environment's server, started if there is none with these
        options; it continues to run until `end_idle` or `close`.

        expert: the server must also give expert actions.
        Errors: Missing, as for `known`, or if the server does not start.
        """
        # options from a store must not open anything the owner did not configure
        env = self.known(env)
        key = (canonical_json([env.name, env.options, env.dialect, list(env.endpoints)]), expert)
        with self._lock:  # a start takes seconds; other callers wait for the same server
            if key not in self._open:
                self._open[key] = self._start(env, expert)
            server = self._open[key]
            with self._counting:
                server.users += 1
        try:
            yield server.endpoints
        finally:
            with self._counting:
                server.users -= 1
                server.used = self._clock()

    def known(self, env: EnvConfig) -> EnvConfig:
        """Return the environment with the owner's endpoints, or none, to be served on this machine.
        Errors: Missing if its options name addresses, paths or variables the owner's do not name.
        """
        try:
            trusted = owned_env(env, self._cfg.envs)
        except ConfigError as error:
            raise Missing(str(error)) from None
        return trusted.model_copy(update={"deploy": "local", "replicas": "auto"})

    def end_idle(self, than_s: float = IDLE_S) -> None:
        """End the servers that have no user and were last used `than_s` seconds ago or earlier."""
        with self._lock, self._counting:
            now = self._clock()
            for key, server in list(self._open.items()):
                if not server.users and now - server.used >= than_s:
                    del self._open[key]
                    server.stack.close()

    def close(self) -> None:
        """End all servers, also those in use."""
        with self._lock:
            for server in self._open.values():
                server.stack.close()
            self._open.clear()

    def _start(self, env: EnvConfig, expert: bool) -> _Open:
        if env.dialect != "native" and not env.endpoints:
            raise Missing(
                f"environment {env.name} was served elsewhere (dialect {env.dialect}); name its"
                " servers: agentgym view --set env.endpoints=[URL]"
            )
        with contextlib.ExitStack() as stack:
            try:
                check_local_env(env)
                limits = {"max_sessions": MAX_SESSIONS, "session_ttl_s": SESSION_TTL_S}
                few = {"env": env.model_copy(update=limits), "mix": ()}
                cfg = self._cfg.model_copy(update=few)
                endpoints = stack.enter_context(environment_servers(cfg, expert))
            except (ConfigError, RuntimeError, OSError) as error:
                first = str(error).strip().splitlines()[0]
                raise Missing(f"environment {env.name} cannot be had here: {first}") from error
            return _Open(stack.pop_all(), endpoints[env.name], used=self._clock())


def environment_of(config: Mapping[str, Any], name: str) -> EnvConfig:
    """Return environment `name` with the options and the dialect from a step's settings.
    Errors: Missing if the settings do not have the environment or its options are invalid.
    """
    candidates = [config.get("env"), *(config.get("mix") or ())]
    candidates += [
        settings.get("env") for settings in (config.get("protocol") or {}).get("envs", ())
    ]
    for settings in candidates:
        if isinstance(settings, Mapping) and settings.get("name") == name:
            try:
                keys = settings.keys() & {"name", "options", "dialect"}
                return EnvConfig.model_validate({key: settings[key] for key in keys})
            except ValueError as error:
                raise Missing(f"the options of {name} on record are refused: {error}") from None
    raise Missing(f"the step does not say how its environment {name} was set up")


@dataclass(frozen=True, slots=True)
class Shot:
    """The environment after a turn; turn 0 is before the first action."""

    turn: int
    media_type: str  # empty: it was not drawn
    data: bytes
    differs: str  # how it differs from the record; empty: it does not


@dataclass(frozen=True, slots=True)
class Replay:
    """The result of playing an episode again."""

    said: str  # one line: agreement, the first difference, or why the replay failed
    agrees: bool | None  # None: the replay failed
    shots: Sequence[Shot] = ()

    def shot(self, turn: int) -> Shot | None:
        return self.shots[turn] if 0 <= turn < len(self.shots) else None


class Replays:
    """Stored replays, and the thread that makes them, one episode after the other."""

    def __init__(self, path: Path, servers: Servers) -> None:
        """Keep replays in the SQLite file at `path`. A missing or damaged file is made anew."""
        self._path, self._servers = path, servers
        self._thread = ThreadPoolExecutor(1, "replay")
        self._waiting: dict[str, Future[None]] = {}
        self._lock = threading.Lock()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._make()
        except sqlite3.DatabaseError as error:
            logger.warning("%s is damaged (%s); drawings are made again", self._path, error)
            self._path.unlink(missing_ok=True)
            self._make()

    def find(self, entry: IndexedEpisode) -> Replay | None:
        """Return an episode's stored replay. None if there is none with the environment's present
        code, or it was removed as one of the oldest.
        """
        about = "SELECT said, agrees FROM replays WHERE key = ?"
        drawn = "SELECT turn, media_type, data, differs FROM shots WHERE key = ? ORDER BY turn"
        key = (_key(entry),)
        with contextlib.closing(self._connect()) as connection:
            row = connection.execute(about, key).fetchone()
            if row is None:
                return None
            shots = connection.execute(drawn, key).fetchall()
        agrees = None if row[1] is None else bool(row[1])
        return Replay(row[0], agrees, [Shot(*shot) for shot in shots])

    def ask(self, entry: IndexedEpisode) -> bool:
        """Queue a replay unless the episode is queued. False if MAX_WAITING others are queued."""
        key = _key(entry)
        with self._lock:
            self._waiting = {k: future for k, future in self._waiting.items() if not future.done()}
            if key not in self._waiting and len(self._waiting) < MAX_WAITING:
                self._waiting[key] = self._thread.submit(self._play, entry)
            return key in self._waiting

    def is_waiting(self, entry: IndexedEpisode) -> bool:
        with self._lock:
            future = self._waiting.get(_key(entry))
        return future is not None and not future.done()

    def now(self, entry: IndexedEpisode) -> Replay:
        """Return an episode's replay; if none is stored, make it and wait for it.
        Errors: TimeoutError after 2 * LIMIT_S seconds.
        """
        if self.find(entry) is None:
            self._thread.submit(self._play, entry).result(LIMIT_S * 2)
        stored = self.find(entry)
        assert stored is not None
        return stored

    def close(self) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _play(self, entry: IndexedEpisode) -> None:
        try:
            self._store(_key(entry), self._played(entry))
        except Exception:  # a thread must log it; the page shows no replay
            logger.exception("episode %s could not be played again", entry.address)

    def _played(self, entry: IndexedEpisode) -> Replay:
        episode = entry.episode
        try:
            config = config_of(entry.step["config"])
            env = self._servers.known(environment_of(config, episode.item.env))
            with self._servers.use(env) as endpoints:
                return asyncio.run(replay(episode, env, endpoints))
        except Missing as missing:
            return Replay(f"{missing}; what is shown is the record", None)
        except (EnvError, TimeoutError, ValueError) as error:
            return Replay(f"it cannot be played again: {error or 'it took too long'}"[:500], None)

    def _store(self, key: str, replay: Replay) -> None:
        with contextlib.closing(self._connect()) as connection, connection:
            connection.execute("DELETE FROM shots WHERE key = ?", (key,))
            connection.execute(
                "INSERT OR REPLACE INTO replays VALUES (?, ?, ?, ?)",
                (key, replay.said, replay.agrees, time.time()),
            )
            connection.executemany(
                "INSERT INTO shots VALUES (?, ?, ?, ?, ?)",
                [(key, *astuple(shot)) for shot in replay.shots],
            )
            old = "SELECT key FROM replays ORDER BY made DESC LIMIT -1 OFFSET ?"
            for table in ("shots", "replays"):
                connection.execute(f"DELETE FROM {table} WHERE key IN ({old})", (KEEP,))

    def _make(self) -> None:
        with contextlib.closing(self._connect()) as connection, connection:
            connection.executescript(
                "CREATE TABLE IF NOT EXISTS replays(key TEXT PRIMARY KEY, said TEXT,"
                " agrees INTEGER, made REAL);"
                "CREATE TABLE IF NOT EXISTS shots(key TEXT, turn INTEGER, media_type TEXT,"
                " data BLOB, differs TEXT, PRIMARY KEY (key, turn)) WITHOUT ROWID;"
            )

    def _connect(self) -> sqlite3.Connection:
        return sqlite3.connect(self._path, timeout=10.0)


def _key(entry: IndexedEpisode) -> str:
    """Return a replay's key: the digest of the record, the environment's settings and its code."""
    name = entry.episode.item.env
    config = config_of(entry.step["config"])
    options = [config.get("env"), config.get("mix"), config.get("protocol")]
    episode, source = entry.episode, _source(name)
    turns = [(turn.action, turn.observation, turn.reward) for turn in episode.turns]
    record = [astuple(episode.item), episode.first_observation, turns, str(episode.status)]
    record_json = json.dumps([record, source]).encode()
    return sha256(record_json + canonical_json(options))[:32]


@cache
def _source(name: str) -> str:
    """Return the digest of an environment's code; empty if it is not installed here."""
    try:
        return source_digest(environment_modules(name))
    except (ImportError, ValueError, OSError):
        return ""


async def replay(episode: Trajectory, env: EnvConfig, endpoints: Sequence[str]) -> Replay:
    """Play an episode's actions again on a server and compare each answer with the record.

    Result: whether they agree, and a shot of the environment before the first action and after
    each turn, drawn up to MAX_SHOTS. It ends early if the environment ends the episode earlier.
    Errors: EnvError; ValueError for an unfit server; TimeoutError after LIMIT_S.
    """
    async with asyncio.timeout(LIMIT_S), EnvPools.of([env], {env.name: endpoints}) as pools:
        await pools.check([env], allow_expert=True)  # no training uses these episodes
        async with pools.session(episode.item, f"view-{uuid.uuid4().hex}") as session:
            first = ("first observation", session.observation, episode.first_observation)
            shots, ended = [await shot_of(session, 0, _difference(first))], None
            for number, turn in enumerate(episode.turns, 1):
                if ended:
                    differs = f"the environment had ended the task at turn {number - 1}"
                    shots.append(Shot(number, "", b"", differs))
                    break
                reply = await session.step(turn.action)
                ended = ending(reply)
                differs = _difference(
                    ("observation", reply.observation, turn.observation),
                    ("reward", reply.reward, turn.reward),
                )
                shots.append(await shot_of(session, number, differs))
    return Replay(*_verdict(episode, shots, ended), shots)


def _verdict(episode: Trajectory, shots: Sequence[Shot], ended: Status | None) -> tuple[str, bool]:
    first = next((shot for shot in shots if shot.differs), None)
    if first is not None:
        where = f"turn {first.turn}" if first.turn else "the beginning"
        return f"the replay differs from the record at {where}: {first.differs}", False
    all_turns = len(episode.turns) >= episode.max_turns
    as_played = ended or (Status.MAX_TURNS if all_turns else Status.MAX_TOKENS)
    is_given_up = ended is None and episode.status is Status.MAX_TURNS
    if episode.status.is_valid and as_played is not episode.status and not is_given_up:
        return f"the replay ends as {as_played}, the record as {episode.status}", False
    return f"played again, {len(episode.turns)} turns agree with the record", True


def _difference(*compared: tuple[str, object, object]) -> str:
    for what, now, recorded in compared:
        if now != recorded:
            return f"{what} is now {_short(now)}, on record {_short(recorded)}"
    return ""


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 160 else f"{text[:160]}..."


async def shot_of(session: object, turn: int, differs: str) -> Shot:
    """Return a shot of a session's environment. It has no data if the session cannot draw, drawing
    fails with EnvError, or MAX_SHOTS or MAX_SHOT_BYTES is exceeded.
    """
    draw = getattr(session, "render", None)
    if draw is not None and turn <= MAX_SHOTS:
        try:
            media_type, data = await draw()
            if len(data) <= MAX_SHOT_BYTES:
                return Shot(turn, media_type, data, differs)
        except EnvError as error:
            logger.info("no drawing of turn %d: %s", turn, error)
    return Shot(turn, "", b"", differs)


def picture_of(shot: Shot | None, max_age_s: int = 0) -> Response:
    """Return a response with a shot's PNG, cached for `max_age_s`. Errors: 404 if it is no PNG."""
    if shot is None or shot.media_type != "image/png":
        raise HTTPException(404)
    cached = {"Cache-Control": f"max-age={max_age_s}"} if max_age_s else {}
    headers = {"Content-Security-Policy": "sandbox", **cached}
    return Response(shot.data, media_type="image/png", headers=headers)
