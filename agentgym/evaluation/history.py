"""History of a registered model's alias: who held it, and why. It is append-only, in the store.

It is its own step of the store, `promotions`, under a key of the model's and the alias's name.
An entry is a commit made under the step's lease, so entries are serial however many pipelines
decide at once. Its decision is a record, which names the previous one by digest and is never
deleted.
An entry is *owed* until MLflow has its decision and its alias: then a commit without a decision
marks it as settled. The next process that opens the history settles an owed entry, so after a kill
between any two commits you run the same command again.

One history decides in a registry, wherever the stores are: a tag of the registered model names the
store (`Home`), and every store that can reach it adds to its history.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import pwd
import socket
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Self

from agentgym.config import ConfigError
from agentgym.store.lease import when_free
from agentgym.store.manifest import Manifest, StepWriter, canonical_json, sha256
from agentgym.store.runstore import RunStore, StorePlace

logger = logging.getLogger(__name__)

STEP, RECORD = "promotions", "decision.json"
WAIT_S = 120.0  # for another process that decides; a decision takes a second
SCHEMA = 1
Kind = Literal["judged", "forced", "rolled back", "found"]


@dataclass(frozen=True)
class Version:
    """A version of a registered model: its number in the registry and digests of its content."""

    number: str
    checkpoint: str  # digest of the manifest whose weights these are; empty: not one of ours
    evaluation: Mapping[str, str] = field(default_factory=dict)  # step, key, digest in the store
    files: str = ""  # digest of its files' digests
    run_key: str = ""

    def evaluation_in(self, store: RunStore) -> Manifest | None:
        """Return its run's evaluation of it; None if none is recorded or this store lacks it."""
        evaluation = self.evaluation
        final = store.final(evaluation["step"], evaluation["key"]) if evaluation else None
        return final if final is not None and final.digest == evaluation["digest"] else None

    def is_same(self, other: Version | None) -> bool:
        """Return True for the same model. A replaced registry numbers versions anew, so checkpoints
        are compared first.
        """
        if other is None:
            return False
        if self.checkpoint and other.checkpoint:
            return self.checkpoint == other.checkpoint
        return self.number == other.number


@dataclass(frozen=True)
class Entry:
    """One decision in an alias's history."""

    kind: Kind
    asked: str  # identity of the question to decide: equal for a command and its repetition
    candidate: Version
    before: Version | None  # holder before this entry
    after: Version | None  # holder after this entry
    who: str
    at: float  # seconds since 1970
    why: str
    # of kind "judged": verdict, rules, evidence
    decision: Mapping[str, Any] = field(default_factory=dict)
    number: int = 0  # from 1, in order
    schema_version: int = SCHEMA

    @property
    def verdict(self) -> str:
        """PROMOTE, HOLD or REJECT; empty if the entry was not judged."""
        return str(self.decision.get("verdict", ""))

    @property
    def moved(self) -> bool:
        return self.after is not None and not self.after.is_same(self.before)

    def to_bytes(self) -> bytes:
        return json.dumps(asdict(self), separators=(",", ":"), allow_nan=False).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Read an entry. Errors: ValueError, KeyError or TypeError if it is not one."""
        tree = json.loads(data)
        if tree["schema_version"] != SCHEMA:
            raise ValueError(
                f"a decision of schema {tree['schema_version']!r}, this version reads {SCHEMA}"
            )
        for name in ("candidate", "before", "after"):
            tree[name] = None if tree[name] is None else Version(**tree[name])
        return cls(**tree)


def me() -> str:
    """Return USER@HOST as the name of who decides: the operating system's user, not LOGNAME."""
    try:
        user = pwd.getpwuid(os.getuid()).pw_name
    except KeyError:  # a container's user may have no name
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"


class History:
    """History of one alias of one registered model. Reading needs no lease."""

    def __init__(self, store: RunStore, model: str, alias: str) -> None:
        self.store, self.model, self.alias = store, model, alias
        self.key = sha256(canonical_json({"model": model, "alias": alias}))
        self._began = ""

    def entries(self) -> list[Entry]:
        """Return the entries in order. Errors: DigestMismatch, BlobMissing, ValueError for a broken
        one.
        """
        return [self.entry(commit) for commit in self.commits() if RECORD in commit.records]

    def commits(self) -> list[Manifest]:
        return self.store.history(STEP, self.key)

    def entry(self, commit: Manifest) -> Entry:
        """Return a commit's entry. Errors: as `entries`."""
        return Entry.from_bytes(self.store.read(commit, RECORD))

    @property
    def began(self) -> str:
        """Name of this history among others of the alias: its first decision's digest, 64 hex
        digits. Empty before that.
        """
        if not self._began:
            decisions = (c.records[RECORD] for c in self.commits() if RECORD in c.records)
            self._began = next((decision.digest for decision in decisions), "")
        return self._began

    @property
    def is_owed(self) -> bool:
        """True while MLflow lacks the last entry."""
        head = self.store.head(STEP, self.key)
        return head is not None and RECORD in head.records

    @contextlib.contextmanager
    def open(self) -> Iterator[OpenHistory]:
        """Wait for the lease, at most WAIT_S, and open the history to write. Errors: LeaseHeld."""
        with contextlib.ExitStack() as stack:
            writer = when_free(lambda: stack.enter_context(self.store.open(STEP, self.key)), WAIT_S)
            yield OpenHistory(self, writer)


class HistoryElsewhere(ConfigError):
    """The history that decides is in a store that cannot be reached from here."""


@dataclass(frozen=True)
class Home:
    """Location of the history of an alias, as its registry states it."""

    # a folder, relative to that of the registry's database if it lies below it, so that a copy of
    # both is a history of its own; or s3://bucket/prefix
    store: str
    host: str  # machine with the folder; empty: S3, or a folder below the database's
    began: str  # `History.began`

    @classmethod
    def of(cls, history: History, base: Path | None = None) -> Self:
        """Return a history's home. base: folder of the registry's database, if it is a file."""
        root = StorePlace.of(history.store).root
        if base is not None and not _is_s3(root) and Path(root).is_relative_to(base):
            return cls(str(Path(root).relative_to(base)), "", history.began)
        return cls(root, "" if _is_s3(root) else socket.gethostname(), history.began)

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read a home. Errors: ValueError or TypeError if it is not one."""
        return cls(**json.loads(text))

    def deciding(self, local: History, base: Path | None = None) -> History:
        """Return the history that decides, as seen from a store whose own history is `local`.

        A store that was moved or copied has the same history. If it is deleted, `local` decides,
        and begins with the version that holds the alias.
        Errors: HistoryElsewhere.
        """
        here = Home.of(local, base)
        if (self.store, self.host) == (here.store, here.host) or local.began == self.began:
            return local
        is_here = self.host in ("", socket.gethostname())
        remote = self._history(local, base)
        if remote is not None and remote.began == self.began:
            return remote
        if is_here and remote is not None:
            return local
        location = f"{self.store} on {self.host}" if self.host else self.store
        raise HistoryElsewhere(
            f"the history of {local.model}@{local.alias} is in {location}, which cannot be reached"
            " from here: decide there with `agentgym promote VERSION`, or name a store that both"
            " can reach (store.uri)"
        )

    def _history(self, local: History, base: Path | None) -> History | None:
        """Return the history; None if its store cannot be read from here."""
        store = self.opened(local.store, base)
        if store is None:
            return None
        try:
            history = History(store, local.model, local.alias)
            history.commits()
        except (ConfigError, OSError) as error:
            logger.warning("the store %s cannot be read: %s", self.store, error)
            return None
        return history

    def opened(self, local: RunStore, base: Path | None) -> RunStore | None:
        """Return the store; None if it cannot be read from here."""
        root = self.store
        if not _is_s3(root):
            root = str(Path(base or "/", root))
            if not Path(root).is_dir() and self.host not in ("", socket.gethostname()):
                return None
        try:
            return StorePlace(root, local.lease_ttl_s).open()
        except (ConfigError, OSError) as error:
            logger.warning("the store %s cannot be opened: %s", self.store, error)
            return None


def _is_s3(root: str) -> bool:
    return root.startswith("s3://")


@dataclass
class OpenHistory:
    """A history under lease: no other process adds to it."""

    history: History
    writer: StepWriter

    @cached_property
    def entries(self) -> list[Entry]:
        return self.history.entries()

    def add(self, entry: Entry) -> Entry:
        """Append the entry durably; it is owed from now on. Result: the entry with its number."""
        numbered = Entry(**{**vars(entry), "number": len(self.entries) + 1})
        self._commit({RECORD: numbered.to_bytes()})
        self.entries.append(numbered)
        return numbered

    def settle(self) -> None:
        """Record that MLflow has the last entry."""
        self._commit({})

    def _commit(self, records: Mapping[str, bytes]) -> None:
        self.writer.commit(
            done=False,
            state={},
            parents={},
            config={"model": self.history.model, "alias": self.history.alias},
            blobs={},
            records=records,
            results={},
            timings={},
        )


def champion_of(entries: list[Entry]) -> Version | None:
    """Return the version that holds the alias by the last entry."""
    return entries[-1].after if entries else None
