"""The index: a SQLite file that is derived from the store and may be deleted at any time.

One process writes it, any number of threads read it. A file that is damaged, or of another
schema or store, is removed and rebuilt. A row is an episode without its content: columns to filter
and sort by, and its words for the search.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import re
import secrets
import sqlite3
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import IO, Any, Self

from agentgym.store.manifest import sha256
from agentgym.store.runstore import FOLDER
from envs.plain import plain
from envs.wire import FAMILY, INVALID

# files of a commit that contain episodes, and the letter of each in an address
FILES = ("trajectories.jsonl.gz", "attempts.jsonl.gz", "demos.jsonl.gz")
LETTERS = "tad"
TOKENIZER = "tokenizer.json"  # in a commit with weights: the tokenizer's files, by name
DECISION = "decision.json"  # in a commit: the version that gets a model's alias, and why
MAX_TEXT = 20_000  # searched characters of one text
MAX_TEXTS = 400_000  # searched characters of one episode
MAX_ERROR = 300

_ADDRESS = re.compile(
    r"(?P<folder>[a-z0-9-]{1,140})\.(?P<seq>\d{1,9})\.(?P<file>[tad])(?P<line>\d{1,9})"
)


@dataclass(frozen=True, slots=True, order=True)
class Address:
    """Location of an episode in the store. Its text names the episode in every index."""

    folder: str  # of the step in the store
    seq: int  # of the commit
    file: int  # index into FILES
    line: int  # from 0

    def __str__(self) -> str:
        return f"{self.folder}.{self.seq}.{LETTERS[self.file]}{self.line}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse an address's text. Errors: ValueError if it is no address."""
        match = _ADDRESS.fullmatch(text)
        if not match or not FOLDER.fullmatch(match["folder"]):
            raise ValueError(f"{text[:80]!r} names no episode")
        file = LETTERS.index(match["file"])
        return cls(match["folder"], int(match["seq"]), file, int(match["line"]))


@dataclass(frozen=True, slots=True)
class Row:
    """An episode without its content. Its fields are the columns of the index."""

    step_id: int
    seq: int
    file: int
    line: int
    start: int  # first byte of its line in the unpacked file
    size: int  # bytes of the line
    env: str
    task_id: int
    item: str
    split: str
    family: str  # named by the environment; empty: it names none
    sample: int
    at: int  # optimizer step that it was played for, or whose weights played it
    version: int  # of the newest weights that sampled a turn
    oldest: int  # version of the oldest weights that sampled a turn
    status: str
    success: int
    reward: float | None
    advantage: float | None  # mean over its action tokens; None: not recorded
    turns: int
    tokens: int
    said: int  # tokens that the policy sampled
    invalid: int  # actions that the environment did not carry out
    max_turns: int
    temperature: float
    attempts: int
    excluded: str  # why it is not in the loss; empty: it is, or no update used its step
    kept: int  # 1: the numbers of its tokens are recorded
    began: float  # seconds since 1970
    wall: float  # seconds
    error: str


COLUMNS = tuple(column.name for column in fields(Row))


def row_of(
    record: Mapping[str, Any], location: tuple[int, int, int, int, int, int], committed: float
) -> Row:
    """Return the row of an episode's record.

    location: the first six columns; committed: time of its commit, for a record without times.
    Errors: KeyError, TypeError, ValueError if it is no record.
    """
    item, turns = record["item"], record["turns"]
    learned = record.get("learned") or {}
    infos = [turn.get("info") or {} for turn in turns]
    families = [str(info[FAMILY]) for info in infos if info.get(FAMILY) is not None]
    versions = [int(turn.get("version", 0)) for turn in turns]
    advantages, timing = learned.get("advantages") or (), record.get("timing") or {}
    reward, step = record["reward"], int(record["step"])
    return Row(
        *location,
        env=plain(str(item["env"])),
        task_id=int(item["task_id"]),
        item=plain(f"{item['env']}_{item['task_id']}"),
        split=plain(str(item.get("split", "train"))),
        family=plain(families[-1])[:80] if families else "",
        sample=int(record["sample"]),
        at=step or max(versions, default=0),
        version=max(versions, default=0),
        oldest=min(versions, default=0),
        status=plain(str(record["status"])),
        success=int(bool(record["success"])),
        reward=None if reward is None else float(reward),
        advantage=sum(advantages) / len(advantages) if advantages else None,
        turns=len(turns),
        tokens=len(record["input_ids"]),
        said=sum(map(bool, record["action_mask"])),
        invalid=sum(bool(info.get(INVALID)) for info in infos),
        max_turns=int(record["max_turns"]),
        temperature=float(record.get("temperature", 1.0)),
        attempts=int(record.get("num_attempts", 1)),
        excluded=plain(str(learned.get("excluded", ""))),
        kept=int(bool(learned.get("logprobs"))),
        began=float(timing.get("began_s") or committed),
        wall=float(timing.get("wall_s", 0.0)),
        error=plain(str(record.get("error") or ""))[:MAX_ERROR],
    )


def config_of(text: str | None) -> dict[str, Any]:
    """Return a step's settings from their JSON text in the index; {} if it is no JSON object."""
    config = json.loads(text or "{}")
    return config if isinstance(config, dict) else {}


def words_of(record: Mapping[str, Any]) -> str:
    """Return an episode's text for the search; each piece is cut at MAX_TEXT, all at MAX_TEXTS."""
    pieces, room = [], MAX_TEXTS
    for text in _texts(record):
        piece = text[: min(MAX_TEXT, room)]
        pieces.append(piece)
        room -= len(piece)
        if room <= 0:
            break
    return plain("\n".join(pieces))


def _texts(record: Mapping[str, Any]) -> Iterator[str]:
    yield str(record["first_observation"])
    for turn in record["turns"]:
        yield str(turn.get("reply") or turn["action"])
        yield str(turn["observation"])
    yield str(record.get("error") or "")


logger = logging.getLogger(__name__)

SCHEMA = 5  # increment when the tables change: an older file is rebuilt
CACHE_KIB = 4_096  # per connection
_TYPES = {
    **dict.fromkeys(("reward", "advantage", "temperature", "began", "wall"), "REAL"),
    **dict.fromkeys(("env", "item", "split", "family", "status", "excluded", "error"), "TEXT"),
}
# sort key of a list -> its SQL expression, which has a database index
SORTS = {
    "began": "began",
    "at": "at",
    "item": "item",
    "reward": "ifnull(reward, -1e300)",
    "advantage": "ifnull(advantage, -1e300)",
    "turns": "turns",
    "tokens": "tokens",
    "version": "version",
}
FACET_COLUMNS = ("step_id", "env", "split", "family", "status", "success", "excluded", "kept")
# other filters of a list; by_facet covers them, so that counting reads this index alone
RANGE_COLUMNS = ("reward", "advantage", "turns", "tokens", "at", "version", "seq", "sample")

_TABLES = f"""
CREATE TABLE meta(name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE steps(
    id INTEGER PRIMARY KEY, folder TEXT UNIQUE, name TEXT, key TEXT, mark TEXT,
    head INTEGER, head_digest TEXT, digest TEXT, done INTEGER, parents TEXT, config TEXT,
    results TEXT, policy TEXT, identity TEXT, created REAL,
    gone TEXT NOT NULL DEFAULT ''
);
CREATE TABLE commits(
    step_id INTEGER, seq INTEGER, created REAL, files TEXT, decision TEXT,
    PRIMARY KEY (step_id, seq)
) WITHOUT ROWID;
CREATE TABLE problems(step_id INTEGER, seq INTEGER, said TEXT);
CREATE TABLE runs(name TEXT PRIMARY KEY, created REAL, done INTEGER);
CREATE TABLE run_steps(run TEXT, step_id INTEGER, PRIMARY KEY (run, step_id)) WITHOUT ROWID;
CREATE TABLE episodes(
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    {", ".join(f"{name} {_TYPES.get(name, 'INTEGER')}" for name in COLUMNS)}
);
CREATE UNIQUE INDEX by_place ON episodes(step_id, seq, file, line);
CREATE INDEX by_item ON episodes(item, step_id, seq, sample);
CREATE INDEX by_facet ON episodes({", ".join([*FACET_COLUMNS, *RANGE_COLUMNS])});
{"".join(f"CREATE INDEX sort_{name} ON episodes({key}, id);" for name, key in SORTS.items())}
CREATE VIRTUAL TABLE words USING fts5(text, content='', columnsize=0);
"""


class IndexDamaged(RuntimeError):
    """Error for an index file that is missing or unreadable; its writer rebuilds it."""


class Index:
    """The open index file. `writes` is True in the one process that may change it."""

    def __init__(self, path: Path, root: str) -> None:
        """Open the file at `path` as the index of the store at `root`.
        A process that opens it while no other is its writer becomes the writer. The writer makes an
        empty file if there is none, or if it is damaged or of another schema or store.
        """
        self.path, self._root = path, root
        self._local = threading.local()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = self._claim()
        self.writes = self._lock is not None
        if self.writes and not self._is_sound():
            self.remake()

    @staticmethod
    def place(folder: Path, root: str) -> Path:
        """Return the path in `folder` of the index of the store at `root`."""
        return folder / f"index-{sha256(root.encode())[:12]}.sqlite"

    @property
    def reader(self) -> sqlite3.Connection:
        """Read-only connection of this thread. Errors: IndexDamaged while there is no file."""
        connection: sqlite3.Connection | None = getattr(self._local, "connection", None)
        if connection is None or self._local.generation != self._made:
            connection = self._local.connection = self._connect("ro")
            connection.execute("PRAGMA query_only = 1")
            self._local.generation = self._made
        return connection

    _made = 0  # how often this process rebuilt the file

    @property
    def stamp(self) -> str:
        """Text that changes with every change of the index, whichever process made it."""
        (value,) = self.reader.execute("SELECT value FROM meta WHERE name = 'changed'").fetchone()
        return str(value)

    @contextlib.contextmanager
    def writing(self) -> Iterator[sqlite3.Connection]:
        """Open a transaction: committed after the block, undone if the block raises.
        Errors: IndexDamaged for an error of SQLite.
        """
        assert self.writes, "another process writes this index"
        connection = self._connect("rw")
        try:
            with connection:
                yield connection
        except sqlite3.DatabaseError as error:
            raise IndexDamaged(f"{self.path}: {error}") from error
        finally:
            connection.close()

    def close(self) -> None:
        """Release the writer's lock and mark the file as closed, if this process is the writer."""
        if self._lock is not None:
            with contextlib.suppress(IndexDamaged), self.writing() as connection:
                connection.execute("UPDATE meta SET value = '' WHERE name = 'open'")
            self._lock.close()
            self._lock, self.writes = None, False

    def _connect(self, mode: str) -> sqlite3.Connection:
        try:
            uri = f"{self.path.absolute().as_uri()}?mode={mode}"
            connection = sqlite3.connect(uri, timeout=10.0, check_same_thread=False, uri=True)
            connection.execute(f"PRAGMA cache_size = -{CACHE_KIB}")
            # the index is derived: a power failure costs only a rebuild
            connection.execute("PRAGMA synchronous = OFF")
        except sqlite3.DatabaseError as error:
            raise IndexDamaged(f"{self.path}: {error}") from error
        connection.row_factory = sqlite3.Row
        return connection

    def _claim(self) -> IO[bytes] | None:
        """Take the writer's lock. Return its open file, or None if another process has it."""
        lock = self.path.with_suffix(".lock").open("ab")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.close()
            return None
        return lock

    def _is_sound(self) -> bool:
        """Return True for an undamaged file of this schema and store, and mark it as open.
        Its write-ahead log is applied; every page is read only if its last writer did not close it.
        """
        if not self.path.exists():
            return False
        try:
            with contextlib.closing(self._connect("rw")) as connection:
                meta = dict(connection.execute("SELECT name, value FROM meta").fetchall())
                if (meta.get("schema"), meta.get("root")) != (str(SCHEMA), self._root):
                    logger.warning("%s is of another schema or store; it is built anew", self.path)
                    return False
                # a killed process leaves a write-ahead log, whose content belongs to the file
                connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
                (pages,) = connection.execute("PRAGMA page_count").fetchone()
                (size,) = connection.execute("PRAGMA page_size").fetchone()
                if pages * size > self.path.stat().st_size:
                    raise IndexDamaged("it is cut short")
                if meta.get("open"):  # its process did not close it: read every page
                    (state,) = connection.execute("PRAGMA quick_check(1)").fetchone()
                    if state != "ok":
                        raise IndexDamaged(state)
                with connection:
                    connection.execute("UPDATE meta SET value = 'yes' WHERE name = 'open'")
                return True
        except (sqlite3.DatabaseError, IndexDamaged) as error:
            logger.warning("%s is damaged (%s); it is built anew", self.path, error)
            return False

    def remake(self) -> None:
        """Replace the file by an empty index, which this process's readers then use.
        Only the writer may call it.
        """
        for suffix in ("", "-wal", "-shm"):
            self.path.with_name(self.path.name + suffix).unlink(missing_ok=True)
        self.path.touch(mode=0o600)
        with contextlib.closing(self._connect("rw")) as connection:
            connection.execute("PRAGMA journal_mode = WAL")
            connection.executescript(_TABLES)
            meta = [("schema", str(SCHEMA)), ("root", self._root), ("open", "yes")]
            meta += [("changed", secrets.token_hex(8))]
            with connection:
                connection.executemany("INSERT INTO meta VALUES (?, ?)", meta)
        self._made += 1
