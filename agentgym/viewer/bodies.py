"""Reader of whole episodes from the store. Each is checked against its row in the index."""

from __future__ import annotations

import gzip
import io
import json
import sqlite3
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from operator import itemgetter

from tokenizers import Tokenizer

from agentgym.records import DAMAGE, RecordError, from_json
from agentgym.store.manifest import Blob, Manifest
from agentgym.store.runstore import FOLDER, RunStore
from agentgym.types import Trajectory
from agentgym.viewer.index import FILES, TOKENIZER, Address, Index

_HELD = 4  # tokenizers kept in memory, and also files of episodes
_MAX_HELD = 16 * 2**20  # bytes of a file that is kept; a larger one is read again each time


class Gone(LookupError):
    """An episode or game that cannot be shown; the text gives the reason."""


@dataclass(frozen=True, slots=True)
class IndexedEpisode:
    """An episode with its rows in the index."""

    row: sqlite3.Row  # of `episodes` in the index
    step: sqlite3.Row
    episode: Trajectory

    @property
    def address(self) -> str:
        return address_of(self.row, self.step)


def address_of(row: sqlite3.Row, step: sqlite3.Row) -> str:
    return str(Address(step["folder"], row["seq"], row["file"], row["line"]))


class Bodies:
    """Reader of stored episodes and of the tokenizers of their tokens. Both are cached."""

    def __init__(self, store: RunStore, index: Index) -> None:
        self._store, self._index = store, index
        self._tokenizers: dict[str, Tokenizer] = {}
        # an episode and each of its pictures are separate requests: read a remote store once
        self._held = lru_cache(_HELD)(self._content)

    def steps(self) -> dict[int, sqlite3.Row]:
        """Return id in the index -> row, for every step, also those gone from the store."""
        return {row["id"]: row for row in self._index.reader.execute("SELECT * FROM steps")}

    def find(self, address: Address) -> IndexedEpisode:
        """Read the episode at an address.
        Errors: Gone if it is not indexed or its step was removed; those of `read`.
        """
        reader = self._index.reader
        step = reader.execute("SELECT * FROM steps WHERE folder = ?", (address.folder,)).fetchone()
        if step is None:
            raise Gone(f"no step {address.folder} lies in this store, nor is known to have")
        if step["gone"] == "collected":
            raise Gone(
                f"{address.folder} was removed by `agentgym gc`, its episodes with it; the run can"
                " be started again"
            )
        if step["gone"]:
            raise Gone(f"{address.folder} is no longer in this store")
        row = reader.execute(
            "SELECT * FROM episodes WHERE (step_id, seq, file, line) = (?, ?, ?, ?)",
            (step["id"], address.seq, address.file, address.line),
        ).fetchone()
        if row is None:
            raise Gone(
                f"{address.folder} has no such episode in commit {address.seq}; it may not have"
                " been read yet, or the commit was dropped"
            )
        return next(self.read([row]))

    def read(self, rows: Sequence[sqlite3.Row]) -> Iterator[IndexedEpisode]:
        """Yield episodes in the order of `rows`; a file is read once for adjacent rows in it.
        Errors: DigestMismatch, BlobMissing, RecordError.
        """
        steps = self.steps()
        for (step_id, seq, file), file_rows in groupby(rows, itemgetter("step_id", "seq", "file")):
            step, data = steps[step_id], self.file(steps[step_id], seq, FILES[file])
            with gzip.open(io.BytesIO(data), "rb") as lines:
                for row in file_rows:
                    lines.seek(row["start"])
                    yield IndexedEpisode(row, step, _episode(lines.read(row["size"]), row))

    def tokenizer(self, step: sqlite3.Row) -> Tokenizer | None:
        """Return the tokenizer of a step's episodes; None if no step's newest commit has it.
        If the settings name a tokenizer (an evaluation's policy), only that one is returned.
        Else it is the step's own, or its nearest ancestor's. Errors: see `file`.
        """
        steps = list(self.steps().values())
        wanted = (json.loads(step["config"] or "{}").get("policy") or {}).get("tokenizer")
        if wanted:
            named = (self._tokenizer_in(candidate, wanted) for candidate in steps)
            return next(filter(None, named), None)
        by_digest = {row["digest"]: row for row in steps}
        waiting, seen = [step], set()
        while waiting:
            candidate = waiting.pop(0)
            if candidate["id"] in seen:
                continue
            seen.add(candidate["id"])
            if (tokenizer := self._tokenizer_in(candidate)) is not None:
                return tokenizer
            digests = json.loads(candidate["parents"] or "[]")
            waiting += [by_digest[digest] for digest in digests if digest in by_digest]
        return None

    def _tokenizer_in(self, step: sqlite3.Row, wanted: str = "") -> Tokenizer | None:
        """Return the tokenizer in a step's newest commit; None if there is none.
        wanted: required digest of the tokenizer; empty: any. A parsed tokenizer is cached.
        """
        commit = self._index.reader.execute(
            "SELECT seq, files FROM commits WHERE (step_id, seq) = (?, ?)",
            (step["id"], step["head"]),
        ).fetchone()
        digest, _ = json.loads(commit["files"]).get(TOKENIZER, ("", 0)) if commit else ("", 0)
        if not digest or (wanted and digest != wanted):
            return None
        if digest not in self._tokenizers:
            files = json.loads(self.file(step, commit["seq"], TOKENIZER))  # name -> text
            tokenizer = Tokenizer.from_str(files[TOKENIZER])
            while len(self._tokenizers) >= _HELD:
                self._tokenizers.pop(next(iter(self._tokenizers)))
            self._tokenizers[digest] = tokenizer
        return self._tokenizers[digest]

    def file(self, step: sqlite3.Row, seq: int, name: str) -> bytes:
        """Return the content of a commit's file, checked against its digest.
        Errors: KeyError if the index lists no such file; DigestMismatch, BlobMissing.
        """
        commit = self._index.reader.execute(
            "SELECT files FROM commits WHERE step_id = ? AND seq = ?", (step["id"], seq)
        ).fetchone()
        digest, size = json.loads(commit["files"] if commit else "{}")[name]
        assert FOLDER.fullmatch(step["folder"])
        read = self._held if size <= _MAX_HELD else self._content
        return read(step["name"], step["key"], seq, name, digest, size)

    def _content(self, step: str, key: str, seq: int, name: str, digest: str, size: int) -> bytes:
        records = {name: Blob(digest=digest, size=size)}
        commit = {"step": step, "key": key, "seq": seq, "done": False, "records": records}
        rest = ("parents", "config", "state", "blobs", "results")
        manifest = Manifest.model_validate({**commit, **{part: {} for part in rest}})
        return self._store.read(manifest, name)


def _episode(line: bytes, row: sqlite3.Row) -> Trajectory:
    try:
        episode = from_json(json.loads(line))
    except DAMAGE as error:
        raise RecordError(f"it is no episode: {type(error).__name__} {error}") from error
    if (episode.item.item_id, episode.sample) != (row["item"], row["sample"]):
        raise RecordError(
            f"the index has {row['item']} sample {row['sample']}, the record"
            f" {episode.item.item_id} sample {episode.sample}; the index is of another store"
        )
    return episode
