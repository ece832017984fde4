"""Append-only history of a registered model's alias: which versions held it, and why.

It is a step of the store, `promotions`, whose key is a digest of the model's and the alias's name.
An entry is a commit under the step's lease, so several pipelines add entries one after the other.
It names the previous commit by digest, and its record with the decision is never deleted.
An entry is *owed* until MLflow has its decision and its alias: then a commit without a decision
marks it as settled. The next process that opens the history settles an owed entry.

An alias has one history, even if several stores are in use: a tag of the registered model names the
store that has it (`Home`), and processes with another store add to it there.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import pwd
import socket
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
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
FOLDER = "decisions"  # of a run's artifacts in MLflow, with a folder for each history
MADE_IN = "made_in"  # of a decision: the store that has its evidence
VERDICT, WHY, DECISION = "gate.verdict", "gate.why", "gate.decision"  # tags of a version
Kind = Literal["judged", "forced", "rolled back", "found"]


@dataclass(frozen=True)
class Version:
    """A version of a registered model: its number in the registry and digests of its content."""

    number: str
    checkpoint: str  # digest of the manifest whose weights these are; empty: not made by a run
    evaluation: Mapping[str, str] = field(default_factory=dict)  # step, key, digest in the store
    files: str = ""  # digest of its files' digests
    run_key: str = ""

    def evaluation_in(self, store: RunStore) -> Manifest | None:
        """Return the commit of this version's evaluation; None if unrecorded, or if `store` has no
        such commit or another one in its place.
        """
        evaluation = self.evaluation
        final = store.final(evaluation["step"], evaluation["key"]) if evaluation else None
        return final if final is not None and final.digest == evaluation["digest"] else None

    def is_same(self, other: Version | None) -> bool:
        """Return True for equal checkpoints or, if one is empty, equal numbers; else False."""
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
    """Return USER@HOST for the record of a decision: the operating system's user, not LOGNAME."""
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
        """Return the entries in order. Errors: DigestMismatch, BlobMissing; see `from_bytes`."""
        return [self.entry(commit) for commit in self.commits() if RECORD in commit.records]

    def commits(self) -> list[Manifest]:
        return self.store.history(STEP, self.key)

    def entry(self, commit: Manifest) -> Entry:
        """Return a commit's entry. Errors: as `entries`."""
        return Entry.from_bytes(self.store.read(commit, RECORD))

    @property
    def began(self) -> str:
        """Digest of the first decision, 64 hex digits: names the history. Empty before that."""
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
    """Error for an alias whose history is in a store that cannot be reached from here."""


@dataclass(frozen=True)
class Home:
    """Location of the history of an alias, as its registry states it."""

    # a folder (relative to the registry's database if below it, so that a copy of both is a history
    # of its own), or s3://bucket/prefix
    store: str
    host: str  # machine with the folder; empty: S3, or a folder below the database's
    began: str  # `History.began`

    @classmethod
    def of(cls, history: History, base: Path | None = None) -> Self:
        """Return a history's home. base: folder of the registry's database, if that is a file."""
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
        """Return the history to which decisions are added. local: the one in this process's store;
        base: as in `of`. The result is `local` if it is in the home's store or began with the same
        decision (a moved or copied store), or if the home's store was opened here and has lost the
        history. Errors: HistoryElsewhere if the home's store cannot be reached from here.
        """
        here = Home.of(local, base)
        if (self.store, self.host) == (here.store, here.host) or local.began == self.began:
            return local
        remote = self._history(local, base)
        if remote is not None and remote.began == self.began:
            return remote
        if remote is not None and self.host in ("", socket.gethostname()):
            return local
        location = f"{self.store} on {self.host}" if self.host else self.store
        raise HistoryElsewhere(
            f"the history of {local.model}@{local.alias} is in {location}, which cannot be reached"
            " from here: decide there with `agentgym promote VERSION`, or name a store that both"
            " can reach (store.uri)"
        )

    def _history(self, local: History, base: Path | None) -> History | None:
        """Return the alias's history in this home's store; None if it cannot be read from here."""
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
        """Open this home's store, with the lease time of `local`; None if that fails (logged) or
        its folder is on another host. base: as in `of`.
        """
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
    """A history opened to write, under a lease: no other process can add to it meanwhile."""

    history: History
    writer: StepWriter

    @cached_property
    def entries(self) -> list[Entry]:
        return self.history.entries()

    def add(self, entry: Entry) -> Entry:
        """Append the entry durably; return it with its number. `is_owed` is true until `settle`."""
        numbered = replace(entry, number=len(self.entries) + 1)
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
    """Return the version that holds the alias by the last entry; None without one."""
    return entries[-1].after if entries else None


def artifact(history: History, entry: Entry) -> str:
    """Return the path of an entry among the artifacts of its candidate's MLflow run."""
    return f"{FOLDER}/{history.began[:12]}/{entry.number:04d}.json"


def decision_tags(entry: Entry) -> dict[str, str]:
    """Return tags for the version decided on: verdict or kind, shortened reason, entry's digest."""
    verdict = entry.verdict or entry.kind.upper()
    return {VERDICT: verdict, WHY: entry.why[:5000], DECISION: sha256(entry.to_bytes())}


def note_of(entry: Entry, artifact_path: str) -> str:
    """Return the Markdown text for a version's page in MLflow: decision, rules and lineage."""
    when = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(entry.at))
    over = f" over version {entry.before.number}" if entry.before else ""
    lines = [
        f"**{entry.verdict or entry.kind}**{over}: {entry.why}",
        "",
        f"Decision {entry.number}, {when}, by {entry.who}; `{artifact_path}` among its run's"
        " artifacts has the numbers and the items.",
    ]
    if rules := entry.decision.get("rules", []):
        lines += ["", "| rule | verdict | why |", "|---|---|---|"]
        lines += [
            f"| {' '.join((rule['rule'], rule['env'])).strip()} | {rule['verdict']} |"
            f" {rule['why'].replace('|', ' ')} |"
            for rule in rules
        ]
    candidate = entry.candidate
    named = {
        "checkpoint": candidate.checkpoint[:12],
        "run": candidate.run_key and f"r{candidate.run_key[:12]}",
        "evaluation": candidate.evaluation.get("digest", "")[:12],
    }
    lineage = ", ".join(f"{name} `{value}`" for name, value in named.items() if value)
    lines += ["", f"Lineage: {lineage}; all it was made of: `agentgym lineage {candidate.number}`"]
    return "\n".join(lines)


def summary(entry: Entry) -> dict[str, Any]:
    """Return verdict, moved, why, over (number of the holder before), needed_items and rules.
    Without time and user, so that a repeated command gives an equal summary.
    """
    return {
        "verdict": entry.verdict,
        "moved": entry.moved,
        "why": entry.why,
        "over": entry.before.number if entry.before else None,
        "needed_items": entry.decision.get("needed_items"),
        "rules": [
            {name: rule[name] for name in ("rule", "env", "verdict", "why")}
            for rule in entry.decision.get("rules", [])
        ],
    }


def sentence(registered: Mapping[str, Any]) -> str:
    """Return what happened to the alias, for example "moves to version 3: ...".
    registered: the results of the step `register`.
    """
    decision = registered["champion"]
    verdict = f"{decision['verdict']}: " if decision.get("verdict") in ("HOLD", "REJECT") else ""
    if decision["moved"]:
        return f"moves to version {registered['version']}: {decision['why']}"
    holder = f"stays with version {decision['over']}" if decision["over"] else "has no version"
    return f"{holder}: {verdict}{decision['why']}"
