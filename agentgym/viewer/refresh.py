"""Update of the index from the store: add new commits, remove those that the store lost."""

from __future__ import annotations

import io
import json
import logging
import secrets
import sqlite3
from collections.abc import Callable, Iterator, Mapping
from dataclasses import astuple, dataclass

from agentgym.evaluation.record import PLAN, read_plan
from agentgym.pipeline.stored_config import STEP as RUNS
from agentgym.records import DAMAGE, RecordError, checked_row, lines_of
from agentgym.store.manifest import BlobMissing, DigestMismatch, Manifest, ManifestError
from agentgym.store.runstore import FOLDER, RunStore
from agentgym.viewer.decisions import decision_text
from agentgym.viewer.index import COLUMNS, DECISION, FILES, TOKENIZER, Index, Row, row_of, words_of
from envs.plain import plain

logger = logging.getLogger(__name__)

INSERT = f"INSERT INTO episodes({', '.join(COLUMNS)}) VALUES ({', '.join('?' * len(COLUMNS))})"
# errors of a missing, changed or malformed file; an OSError of the store is none
_UNREADABLE = (ValueError, LookupError, TypeError, AttributeError, RecursionError)
BATCH = 2_000  # minimum number of episodes in one transaction
DeliveredSteps = Callable[[], Mapping[str, set[tuple[str, str]]]]


@dataclass
class Refreshed:
    """Counts of one update of the index."""

    steps: int = 0  # changed
    episodes: int = 0  # added
    dropped: int = 0  # episodes removed


class Refresher:
    """Updater of an index from its store. One thread uses it."""

    def __init__(self, store: RunStore, index: Index, delivered: DeliveredSteps = dict) -> None:
        """Connect an index with its store.
        delivered: returns the key of each MLflow run -> its (step, step's key); see `_name_of`.
        """
        self._store, self._index, self._delivered = store, index, delivered

    def refresh(self, on_count: Callable[[int], None] = lambda _: None) -> Refreshed:
        """Bring the index up to date with the store. Return counts of the changes.
        Commits and files that cannot be read are recorded as problems.
        on_count: called after each commit with the number of episodes added so far.
        Errors: IndexDamaged; OSError of the store. Changes made before it may remain.
        """
        refreshed = Refreshed()
        marks = self._store.marks()
        with self._index.writing() as connection:
            known = {row["folder"]: row for row in connection.execute("SELECT * FROM steps")}
            for folder, mark in marks.items():
                if folder not in known or known[folder]["mark"] != mark:
                    self._step(connection, folder, mark, known.get(folder), refreshed, on_count)
                    refreshed.steps += 1
            for folder in known.keys() - marks.keys():
                if known[folder]["gone"] != "gone":
                    refreshed.dropped += _forget(connection, known[folder]["id"], "gone")
                    refreshed.steps += 1
            if refreshed.steps:
                _name_runs(connection, self._delivered())
                stamp = "UPDATE meta SET value = ? WHERE name = 'changed'"
                connection.execute(stamp, (secrets.token_hex(8),))
        if refreshed.episodes:
            with self._index.writing() as connection:
                connection.execute("PRAGMA optimize")
        return refreshed

    def _step(
        self,
        connection: sqlite3.Connection,
        folder: str,
        mark: str,
        known: sqlite3.Row | None,
        refreshed: Refreshed,
        on_count: Callable[[int], None],
    ) -> None:
        """Index a step's new commits, or all if it was replaced; record errors as problems.
        If it has no commits left, remove its episodes. The transaction commits per BATCH episodes.
        mark: from `RunStore.marks`. known: the step's row, None if new. refreshed: its counts grow.
        """
        match = FOLDER.fullmatch(folder)
        assert match is not None
        name, key = match["step"], match["key"]
        insert = "INSERT INTO steps(folder, name) VALUES (?, ?) RETURNING id"
        step_id = (known or connection.execute(insert, (folder, name)).fetchone())["id"]
        execute = connection.execute
        try:
            after = -1 if known is None or known["head"] is None else known["head"]
            commits = self._store.history(name, key, after=max(after - 1, -1))
            last_indexed = [commit.records_digest for commit in commits if commit.seq == after]
            if known is not None and after >= 0 and last_indexed != [known["head_digest"]]:
                refreshed.dropped += _forget(connection, step_id, "")
                commits, after = self._store.history(name, key), -1
        except (ManifestError, FileNotFoundError) as error:
            execute("DELETE FROM problems WHERE step_id = ? AND seq = -1", (step_id,))
            execute("INSERT INTO problems VALUES (?, -1, ?)", (step_id, plain(str(error))))
            execute("UPDATE steps SET mark = ? WHERE id = ?", (mark, step_id))
            return
        if not commits:
            gone = "collected" if self._store.is_collected(name, key) else ""
            if known is not None and known["head"] is not None:
                refreshed.dropped += _forget(connection, step_id, gone or "gone")
            execute("UPDATE steps SET mark = ?, gone = ? WHERE id = ?", (mark, gone, step_id))
            return
        since = refreshed.episodes
        for commit in commits:
            if commit.seq > after:
                refreshed.episodes += self._commit(connection, step_id, commit)
                on_count(refreshed.episodes)
                if refreshed.episodes - since >= BATCH:
                    since = refreshed.episodes
                    _update_step(connection, step_id, commit, "")  # the next update resumes here
                    connection.commit()
        _update_step(connection, step_id, commits[-1], mark)

    def _commit(self, connection: sqlite3.Connection, step_id: int, commit: Manifest) -> int:
        """Index a commit and return the number of episodes indexed.

        Damaged files and missing records are noted as problems and add no episodes; a missing blob
        that is not a record may have been pruned and is skipped.
        """
        blobs = {**commit.blobs, **commit.records}
        files = {n: [blobs[n].digest, blobs[n].size] for n in (*FILES, TOKENIZER) if n in blobs}
        count = 0
        for number, name in enumerate(FILES):
            if name in files:
                try:
                    count += self._episodes(connection, step_id, commit, number)
                except BlobMissing as error:
                    # blobs of older commits may be pruned, records are kept
                    if name in commit.records:
                        _problem(connection, step_id, commit, error)
                except (DigestMismatch, RecordError) as error:
                    _problem(connection, step_id, commit, error)
        decision = None
        try:
            if DECISION in commit.records:
                decision = decision_text(self._store.read(commit, DECISION))
            if PLAN in commit.records:
                plan = read_plan(self._store, commit)
                connection.execute(
                    "UPDATE steps SET policy = ?, identity = ? WHERE id = ?",
                    (str(plan.about.get("policy", "")), json.dumps(plan.identity), step_id),
                )
        except _UNREADABLE as error:
            _problem(connection, step_id, commit, error)
        connection.execute(
            "INSERT OR REPLACE INTO commits VALUES (?, ?, ?, ?, ?)",
            (step_id, commit.seq, commit.created_at, json.dumps(files), decision),
        )
        return count

    def _episodes(
        self, connection: sqlite3.Connection, step_id: int, commit: Manifest, file: int
    ) -> int:
        """Index all episodes of a file and return their number; none of a damaged file.
        file: index into FILES. Errors: BlobMissing, DigestMismatch, RecordError.
        """
        data, origin = self._store.read(commit, FILES[file]), (step_id, commit.seq, file)
        connection.execute("SAVEPOINT file")
        try:
            count = 0
            for row, words in _rows(data, origin, commit.created_at):
                added = connection.execute(INSERT, astuple(row)).lastrowid
                connection.execute("INSERT INTO words(rowid, text) VALUES (?, ?)", (added, words))
                count += 1
        except RecordError:
            connection.execute("ROLLBACK TO file")
            raise
        finally:
            connection.execute("RELEASE file")
        return count


def _rows(data: bytes, origin: tuple[int, int, int], committed: float) -> Iterator[tuple[Row, str]]:
    """Yield (row, words) of each episode of a file. origin: (step id, seq, index into FILES).
    Errors: RecordError for a line that is no episode.
    """
    start, number = 0, 0
    try:
        for line in lines_of(io.BytesIO(data)):
            record = checked_row(json.loads(line))
            location = (*origin, number, start, len(line))
            yield row_of(record, location, committed), words_of(record)
            start, number = start + len(line), number + 1
    except RecordError:
        raise
    except (*DAMAGE, AttributeError, OverflowError) as error:
        raise RecordError(
            f"line {number + 1} of {FILES[origin[2]]} is no episode: {type(error).__name__} {error}"
        ) from error


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
    """Remove a step's episodes, commits and problems. Return the number of episodes.

    gone: stored as the step's state: "gone", "collected" (by gc) or "" (in the store).
    The words stay in the search table, but no search finds them: row ids are never reused.
    """
    dropped = connection.execute("DELETE FROM episodes WHERE step_id = ?", (step_id,)).rowcount
    for table in ("commits", "problems"):
        connection.execute(f"DELETE FROM {table} WHERE step_id = ?", (step_id,))
    connection.execute(
        "UPDATE steps SET head = NULL, head_digest = NULL, identity = NULL, mark = '', gone = ?"
        " WHERE id = ?",
        (gone, step_id),
    )
    return dropped


def _problem(
    connection: sqlite3.Connection, step_id: int, commit: Manifest, error: Exception
) -> None:
    logger.warning("%s", error)
    problem = (step_id, commit.seq, plain(str(error)))
    connection.execute("INSERT INTO problems VALUES (?, ?, ?)", problem)


def _name_runs(
    connection: sqlite3.Connection, delivered: Mapping[str, set[tuple[str, str]]]
) -> None:
    """Rewrite the tables of runs. A run is a step that no other builds on, and its ancestors.
    delivered: MLflow's runs, which give the names. Runs with the same name become one.
    """
    query = "SELECT * FROM steps WHERE head IS NOT NULL AND name != ?"
    steps = connection.execute(query, (RUNS,)).fetchall()
    by_digest = {row["digest"]: row for row in steps}
    parents = {row["id"]: json.loads(row["parents"]) for row in steps}
    named = {parent for parent_digests in parents.values() for parent in parent_digests}
    runs: dict[str, dict[int, sqlite3.Row]] = {}
    for leaf in (row for row in steps if row["digest"] not in named):
        members, waiting = {leaf["id"]: leaf}, list(parents[leaf["id"]])
        while waiting:
            row = by_digest.get(waiting.pop())
            if row is not None and row["id"] not in members:
                members[row["id"]] = row
                waiting += parents[row["id"]]
        name = _name_of(leaf, {row["folder"] for row in members.values()}, delivered)
        runs.setdefault(name, {}).update(members)
    connection.execute("DELETE FROM runs")
    connection.execute("DELETE FROM run_steps")
    for name, members in runs.items():
        newest = max(row["created"] for row in members.values())
        done = int(all(row["done"] for row in members.values()))
        connection.execute("INSERT INTO runs VALUES (?, ?, ?)", (name, newest, done))
        rows = [(name, step_id) for step_id in members]
        connection.executemany("INSERT INTO run_steps VALUES (?, ?)", rows)


def _name_of(
    leaf: sqlite3.Row, run_folders: set[str], delivered: Mapping[str, set[tuple[str, str]]]
) -> str:
    """Return the name of the MLflow run that shares the most steps with the run ending in `leaf`.
    It must have the leaf, or only steps of that run. Without one, return the leaf's name and key.
    run_folders: the folders of all steps of the run. delivered: see `delivered_steps`.
    """
    best, num_shared = f"{leaf['name']}-{leaf['key'][:12]}", 0
    for key, steps in delivered.items():
        folders = {f"{step}-{step_key}" for step, step_key in steps}
        if len(folders & run_folders) > num_shared and (
            leaf["folder"] in folders or folders <= run_folders
        ):
            best, num_shared = f"r{key[:12]}", len(folders & run_folders)
    return best
