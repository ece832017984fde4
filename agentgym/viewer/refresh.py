"""From the store into the index: what was committed since the last look, and what is gone."""

from __future__ import annotations

import io
import json
import logging
import secrets
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass

from agentgym.pipeline.runs import STEP as RUNS
from agentgym.records import DAMAGE, RecordError, checked_row, lines_of
from agentgym.steps.context import METRICS
from agentgym.store.manifest import Manifest, ManifestError
from agentgym.store.runstore import FOLDER, BlobMissing, DigestMismatch, RunStore
from agentgym.viewer.index import Index
from agentgym.viewer.rows import COLUMNS, DECISION, FILES, TOKENIZER, Row, row_of, words_of
from envs.plain import plain

logger = logging.getLogger(__name__)

INSERT = f"INSERT INTO episodes({', '.join(COLUMNS)}) VALUES ({', '.join('?' * len(COLUMNS))})"
BATCH = 2_000  # episodes of one transaction, at least
DeliveredSteps = Callable[[], Mapping[str, set[tuple[str, str]]]]


@dataclass
class Refreshed:
    """What a look at the store came to."""

    steps: int = 0  # that changed
    episodes: int = 0  # that came
    dropped: int = 0  # that are gone
    seconds: float = 0.0


class Refresher:
    """Keeps an index up to the store. One thread uses it."""

    def __init__(self, store: RunStore, index: Index, delivered: DeliveredSteps = dict) -> None:
        """delivered: run key -> its steps, as (step, key), where that is known."""
        self._store, self._index, self._delivered = store, index, delivered

    def refresh(self, told: Callable[[int], None] = lambda _: None) -> Refreshed:
        """Bring the index up to the store. told: hears how many episodes have come so far.
        Errors: IndexDamaged; OSError of the store.
        """
        found, began = Refreshed(), time.perf_counter()
        marks = self._store.marks()
        with self._index.writing() as connection:
            known = {row["folder"]: row for row in connection.execute("SELECT * FROM steps")}
            for folder, mark in marks.items():
                if folder not in known or known[folder]["mark"] != mark:
                    self._step(connection, folder, mark, known.get(folder), found, told)
                    found.steps += 1
            for folder in known.keys() - marks.keys():
                if known[folder]["gone"] != "gone":
                    found.dropped += _forget(connection, known[folder]["id"], "gone")
                    found.steps += 1
            if found.steps:
                _name_runs(connection, self._delivered())
                connection.execute(
                    "UPDATE meta SET value = ? WHERE name = 'changed'", (secrets.token_hex(8),)
                )
        if found.episodes:
            with self._index.writing() as connection:
                connection.execute("PRAGMA optimize")
        found.seconds = time.perf_counter() - began
        return found

    def _step(
        self,
        connection: sqlite3.Connection,
        folder: str,
        mark: str,
        known: sqlite3.Row | None,
        found: Refreshed,
        told: Callable[[int], None],
    ) -> None:
        """One step that changed: its later commits, or all where those known are others now."""
        match = FOLDER.fullmatch(folder)
        assert match is not None
        name, key = match["step"], match["key"]
        step_id = known["id"] if known else _new_step(connection, folder, name)
        try:
            after = -1 if known is None or known["head"] is None else known["head"]
            commits = self._store.history(name, key, after=max(after - 1, -1))
            if after >= 0 and not _goes_on(commits, after, known):
                found.dropped += _forget(connection, step_id, "")
                commits, after = self._store.history(name, key), -1
        except (ManifestError, FileNotFoundError) as error:
            connection.execute("DELETE FROM problems WHERE step_id = ? AND seq = -1", (step_id,))
            connection.execute(
                "INSERT INTO problems VALUES (?, -1, ?)", (step_id, plain(str(error)))
            )
            connection.execute("UPDATE steps SET mark = ? WHERE id = ?", (mark, step_id))
            return
        if not commits:
            gone = "collected" if self._store.is_collected(name, key) else ""
            if known is not None and known["head"] is not None:
                found.dropped += _forget(connection, step_id, gone or "gone")
            connection.execute(
                "UPDATE steps SET mark = ?, gone = ? WHERE id = ?", (mark, gone, step_id)
            )
            return
        since = found.episodes
        for commit in commits:
            if commit.seq > after:
                found.episodes += self._commit(connection, step_id, commit)
                told(found.episodes)
                if found.episodes - since >= BATCH:
                    since = found.episodes
                    _update_step(connection, step_id, commit, "")  # a later look goes on from here
                    connection.commit()
        _update_step(connection, step_id, commits[-1], mark)

    def _commit(self, connection: sqlite3.Connection, step_id: int, commit: Manifest) -> int:
        """Result: how many episodes it has."""
        blobs = {**commit.blobs, **commit.records}
        files = {
            name: [blobs[name].digest, blobs[name].size]
            for name in (*FILES, TOKENIZER, DECISION)
            if name in blobs
        }
        metrics = ""
        if METRICS in commit.records:
            try:
                metrics = self._store.read(commit, METRICS).decode()
            except (BlobMissing, DigestMismatch, ValueError) as error:
                _problem(connection, step_id, commit, error)
        count = 0
        for number, name in enumerate(FILES):
            if name in files:
                try:
                    count += self._episodes(connection, step_id, commit, number)
                except BlobMissing as error:
                    if name in commit.records:  # of older commits, other content may be pruned
                        _problem(connection, step_id, commit, error)
                except (DigestMismatch, RecordError) as error:
                    _problem(connection, step_id, commit, error)
        connection.execute(
            "INSERT OR REPLACE INTO commits VALUES (?, ?, ?, ?, ?, ?, ?)",
            (
                step_id,
                commit.seq,
                commit.created_at,
                commit.state.get("global_step"),
                commit.state.get("max_turns"),
                metrics,
                json.dumps(files),
            ),
        )
        return count

    def _episodes(
        self, connection: sqlite3.Connection, step_id: int, commit: Manifest, file: int
    ) -> int:
        """All of them or, where one cannot be read, none. Errors: BlobMissing, DigestMismatch,
        RecordError.
        """
        data, place = self._store.read(commit, FILES[file]), (step_id, commit.seq, file)
        connection.execute("SAVEPOINT file")
        try:
            count = 0
            for row, words in _rows(data, place, commit.created_at):
                added = connection.execute(INSERT, astuple(row))
                connection.execute(
                    "INSERT INTO words(rowid, text) VALUES (?, ?)", (added.lastrowid, words)
                )
                count += 1
        except RecordError:
            connection.execute("ROLLBACK TO file")
            raise
        finally:
            connection.execute("RELEASE file")
        return count


def _rows(data: bytes, place: tuple[int, int, int], committed: float) -> Iterator[tuple[Row, str]]:
    """Row and words of each episode of a file. Errors: RecordError."""
    start, number = 0, 0
    try:
        for line in lines_of(io.BytesIO(data)):
            record = checked_row(json.loads(line))
            where = (*place, number, start, len(line))
            yield row_of(record, where, committed), words_of(record)
            start, number = start + len(line), number + 1
    except RecordError:
        raise
    except (*DAMAGE, AttributeError, OverflowError) as error:
        raise RecordError(
            f"line {number + 1} of {FILES[place[2]]} is no episode: {type(error).__name__} {error}"
        ) from error


def _goes_on(commits: Sequence[Manifest], after: int, known: sqlite3.Row | None) -> bool:
    """Whether the last commit that is known is still the one it was."""
    assert known is not None
    same = [commit for commit in commits if commit.seq == after]
    return bool(same) and same[0].records_digest == known["head_digest"]


def _new_step(connection: sqlite3.Connection, folder: str, name: str) -> int:
    made = connection.execute("INSERT INTO steps(folder, name) VALUES (?, ?)", (folder, name))
    assert made.lastrowid is not None
    return made.lastrowid


def _update_step(connection: sqlite3.Connection, step_id: int, head: Manifest, mark: str) -> None:
    connection.execute(
        "UPDATE steps SET key = ?, mark = ?, head = ?, head_digest = ?, digest = ?, done = ?,"
        " parents = ?, config = ?, results = ?, created = ?, gone = '' WHERE id = ?",
        (
            head.key,
            mark,
            head.seq,
            head.records_digest,
            head.digest,
            int(head.done),
            json.dumps(sorted(head.parents.values())),
            json.dumps(head.config),
            json.dumps(head.results),
            head.created_at,
            step_id,
        ),
    )


def _forget(connection: sqlite3.Connection, step_id: int, gone: str) -> int:
    """Drop a step's episodes. Their words stay where they are, as of nobody: numbers are never
    given twice. Result: how many there were.
    """
    dropped = connection.execute("DELETE FROM episodes WHERE step_id = ?", (step_id,)).rowcount
    for table in ("commits", "problems"):
        connection.execute(f"DELETE FROM {table} WHERE step_id = ?", (step_id,))
    connection.execute(
        "UPDATE steps SET head = NULL, head_digest = NULL, mark = '', gone = ? WHERE id = ?",
        (gone, step_id),
    )
    return dropped


def _problem(
    connection: sqlite3.Connection, step_id: int, commit: Manifest, error: Exception
) -> None:
    logger.warning("%s", error)
    connection.execute(
        "INSERT INTO problems VALUES (?, ?, ?)", (step_id, commit.seq, plain(str(error)))
    )


def _name_runs(
    connection: sqlite3.Connection, delivered: Mapping[str, set[tuple[str, str]]]
) -> None:
    """A run is a step that nothing builds on, with all that it builds on; it has the name it has
    in MLflow, where it was told of there.
    """
    steps = connection.execute(
        "SELECT * FROM steps WHERE head IS NOT NULL AND name != ?", (RUNS,)
    ).fetchall()
    by_digest = {row["digest"]: row for row in steps}
    parents = {row["id"]: json.loads(row["parents"]) for row in steps}
    named = {parent for own in parents.values() for parent in own}
    runs: dict[str, dict[int, sqlite3.Row]] = {}
    for leaf in (row for row in steps if row["digest"] not in named):
        line, waiting = {leaf["id"]: leaf}, list(parents[leaf["id"]])
        while waiting:
            row = by_digest.get(waiting.pop())
            if row is not None and row["id"] not in line:
                line[row["id"]] = row
                waiting += parents[row["id"]]
        name = _name_of(leaf, {row["folder"] for row in line.values()}, delivered)
        runs.setdefault(name, {}).update(line)
    connection.execute("DELETE FROM runs")
    connection.execute("DELETE FROM run_steps")
    for name, line in runs.items():
        newest = max(line.values(), key=lambda row: row["created"])
        done = int(all(row["done"] for row in line.values()))
        connection.execute(
            "INSERT INTO runs VALUES (?, ?, ?, ?)",
            (name, newest["name"], newest["created"], done),
        )
        connection.executemany(
            "INSERT INTO run_steps VALUES (?, ?)", [(name, step_id) for step_id in line]
        )


def _name_of(
    leaf: sqlite3.Row, line: set[str], delivered: Mapping[str, set[tuple[str, str]]]
) -> str:
    """Of the run that ends in `leaf`: the one in MLflow that shares most steps with it, where one
    has all of its own here.
    """
    best, most = f"{leaf['name']}-{leaf['key'][:12]}", 0
    for key, steps in delivered.items():
        folders = {f"{step}-{own}" for step, own in steps}
        if len(folders & line) > most and (leaf["folder"] in folders or folders <= line):
            best, most = f"r{key[:12]}", len(folders & line)
    return best
