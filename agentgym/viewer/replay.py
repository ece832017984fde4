"""Episodes played again to draw what the environment was like at each turn, and to say where it
answers otherwise than the record. A drawing is made once and kept.
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
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import astuple, dataclass
from functools import cache
from pathlib import Path

from agentgym.config import EnvConfig
from agentgym.rollouts.client import EnvError
from agentgym.rollouts.episode import ending
from agentgym.rollouts.pools import EnvPools
from agentgym.store.keys import environment_modules, source_digest
from agentgym.store.manifest import canonical_json, sha256
from agentgym.types import Status, Trajectory
from agentgym.viewer.bodies import Found
from agentgym.viewer.index import IndexDamaged
from agentgym.viewer.servers import Missing, Servers, config_of, environment_of

logger = logging.getLogger(__name__)

LIMIT_S = 300.0  # of one episode
MAX_WAITING = 8  # episodes
MAX_SHOTS = 400  # of one episode; later turns are compared and not drawn
MAX_SHOT_BYTES = 2 * 1024 * 1024
KEEP = 2_000  # episodes


@dataclass(frozen=True, slots=True)
class Shot:
    """The environment after a turn; turn 0 is before the first action."""

    turn: int
    media_type: str  # empty: it was not drawn
    data: bytes
    differs: str  # from the record, and how; empty: it does not


@dataclass(frozen=True, slots=True)
class Replay:
    """An episode played again."""

    said: str  # one line: agreement, or the first difference, or why there is none
    agrees: bool | None  # None: it could not be played
    shots: Sequence[Shot] = ()

    def shot(self, turn: int) -> Shot | None:
        return self.shots[turn] if turn < len(self.shots) else None


class Replays:
    """What was played again, and the thread that does it, one episode after the other."""

    def __init__(self, path: Path, servers: Servers) -> None:
        """path: of the file that keeps drawings; it may be deleted."""
        self._path, self._servers = path, servers
        self._thread = ThreadPoolExecutor(1, "replay")
        self._waiting: dict[str, Future[None]] = {}
        self._lock = threading.Lock()
        with contextlib.suppress(IndexDamaged):
            self._prepare()

    def find(self, found: Found) -> Replay | None:
        """What is kept of an episode; None: it has not been played again."""
        with contextlib.closing(self._connect()) as connection:
            row = connection.execute(
                "SELECT said, agrees FROM replays WHERE key = ?", (_key(found),)
            ).fetchone()
            if row is None:
                return None
            shots = connection.execute(
                "SELECT turn, media_type, data, differs FROM shots WHERE key = ? ORDER BY turn",
                (_key(found),),
            ).fetchall()
        agrees = None if row[1] is None else bool(row[1])
        return Replay(row[0], agrees, [Shot(*shot) for shot in shots])

    def ask(self, found: Found) -> str:
        """Have it played again, soon. Result: how that stands."""
        key = _key(found)
        with self._lock:
            self._waiting = {k: each for k, each in self._waiting.items() if not each.done()}
            if key in self._waiting:
                return "it is being played again"
            if len(self._waiting) >= MAX_WAITING:
                return f"{MAX_WAITING} others are being played; ask again in a moment"
            self._waiting[key] = self._thread.submit(self._play, found)
        return "it is being played again"

    def is_waiting(self, found: Found) -> bool:
        with self._lock:
            future = self._waiting.get(_key(found))
        return future is not None and not future.done()

    def now(self, found: Found) -> Replay:
        """Play it again and wait for it, if it was not yet."""
        kept = self.find(found)
        if kept is None:
            self._thread.submit(self._play, found).result(LIMIT_S * 2)
            kept = self.find(found)
        assert kept is not None
        return kept

    def close(self) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _play(self, found: Found) -> None:
        try:
            self._store(_key(found), self._played(found))
        except Exception:  # whoever asked looks at the page again
            logger.exception("episode %s could not be played again", found.address)

    def _played(self, found: Found) -> Replay:
        episode = found.episode
        try:
            config = config_of(found.step["config"])
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
                [(key, s.turn, s.media_type, s.data, s.differs) for s in replay.shots],
            )
            old = "SELECT key FROM replays ORDER BY made DESC LIMIT -1 OFFSET ?"
            for table in ("shots", "replays"):
                connection.execute(f"DELETE FROM {table} WHERE key IN ({old})", (KEEP,))

    def _prepare(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._make()
        except sqlite3.DatabaseError as error:
            logger.warning("%s is damaged (%s); drawings are made again", self._path, error)
            self._path.unlink(missing_ok=True)
            self._make()

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


def _key(found: Found) -> str:
    """Another one where the record, the environment's options or its code are others."""
    name = found.episode.item.env
    config = config_of(found.step["config"])
    options = [config.get("env"), config.get("mix"), config.get("protocol")]
    episode, source = found.episode, _source(name)
    turns = [(turn.action, turn.observation, turn.reward) for turn in episode.turns]
    record = [astuple(episode.item), episode.first_observation, turns, str(episode.status)]
    told = json.dumps([record, source]).encode()
    return sha256(told + canonical_json(options))[:32]


@cache
def _source(name: str) -> str:
    """Digest of an environment's code; empty where it is not installed here."""
    try:
        return source_digest(environment_modules(name))
    except (ImportError, ValueError, OSError):
        return ""


async def replay(episode: Trajectory, env: EnvConfig, endpoints: Sequence[str]) -> Replay:
    """Play an episode's actions on a server. Errors: EnvError, ValueError, TimeoutError."""
    async with asyncio.timeout(LIMIT_S), EnvPools.of([env], {env.name: endpoints}) as pools:
        await pools.check([env], allow_expert=True)  # nothing is learned here
        async with pools.session(episode.item, f"view-{uuid.uuid4().hex}") as session:
            differs = _difference(
                ("first observation", session.observation, episode.first_observation)
            )
            shots, ended = [await shot_of(session, 0, differs)], None
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
    as_played = ended or (
        Status.MAX_TURNS if len(episode.turns) >= episode.max_turns else Status.MAX_TOKENS
    )
    if episode.status.is_valid and as_played is not episode.status:
        is_given_up = ended is None and episode.status is Status.MAX_TURNS
        if not is_given_up:
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
    """Drawn where the environment draws."""
    draw = getattr(session, "render", None)
    if draw is None or turn > MAX_SHOTS:
        return Shot(turn, "", b"", differs)
    try:
        media_type, data = await draw()
    except EnvError as error:
        logger.info("no drawing of turn %d: %s", turn, error)
        return Shot(turn, "", b"", differs)
    if len(data) > MAX_SHOT_BYTES:
        return Shot(turn, "", b"", differs)
    return Shot(turn, media_type, data, differs)
