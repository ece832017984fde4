"""The questions of the benchmarks: FlashRAG parquet files as AgentGym's setup writes them, with the
ids that AgentGym publishes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from envs.env import UnknownTask
from envs.searchqa.questions import Question

COLUMNS = ("question", "golden_answers", "data_source", "reward_model", "extra_info")


@dataclass(frozen=True, slots=True)
class Range:
    """The ids of one benchmark's questions, `first` to `last`; row 0 has the id `first`."""

    split: str  # also the stem of the file
    data_source: str
    first: int
    count: int

    @property
    def last(self) -> int:
        return self.first + self.count - 1


RANGES = (
    Range("test", "nq", 0, 3_610),
    Range("test", "triviaqa", 3_610, 11_313),
    Range("test", "popqa", 14_923, 14_267),
    Range("test", "hotpotqa", 29_190, 7_405),
    Range("test", "2wikimultihopqa", 36_595, 12_576),
    Range("test", "musique", 49_171, 2_417),
    Range("test", "bamboogle", 51_588, 125),
    Range("train", "nq", 51_713, 79_168),
    Range("train", "hotpotqa", 130_881, 90_447),
)


class FlashRag:
    """Questions of `train.parquet` and `test.parquet` in one folder.
    One of the files may be missing as long as none of its ids is requested.

    A row's id is the first id of its data set plus `extra_info.index`, the row number within the
    data set (counted if the column is missing). So an extract of the files serves the same
    questions under the same ids.
    """

    def __init__(self, folder: Path) -> None:
        """Read the files of a folder.
        Errors: ValueError if pyarrow, both files or a column are missing, if a file cannot be
        read, or if rows contradict the published ranges.
        """
        try:
            import pyarrow.parquet as parquet
        except ImportError as error:
            raise ValueError(
                "questions from parquet files need pyarrow; install it from the checkout:"
                " pip install -e '.[searchqa]'"
            ) from error
        self.folder = folder
        self._tables: dict[str, Any] = {}
        self._rows: dict[int, int] = {}  # task id -> row of the split's table
        for split in ("train", "test"):
            path = folder / f"{split}.parquet"
            if not path.is_file():
                continue
            try:
                present = set(parquet.read_schema(path).names)
                wanted = [name for name in COLUMNS if name in present]
                table = parquet.read_table(path, columns=wanted)
            except (OSError, ValueError) as error:  # pyarrow's own errors are ValueErrors
                raise ValueError(f"{path} cannot be read as parquet: {error}") from error
            if missing := {"question", "data_source"} - present:
                names = ", ".join(sorted(missing))
                raise ValueError(f"{path} has no column {names}; expected: {', '.join(COLUMNS)}")
            if not present & {"reward_model", "golden_answers"}:
                raise ValueError(
                    f"{path} has no answers: neither reward_model nor golden_answers is a column"
                )
            self._tables[split] = table
            self._number(split, table, path)
        if not self._tables:
            raise ValueError(f"questions: {folder} has neither train.parquet nor test.parquet")

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, task_id: int) -> Question:
        """Return a question.
        Errors: UnknownTask for an id outside the published ranges, or without a row (naming its
        data set, row and file); ValueError if the row has no answer.
        """
        id_range = find_range(task_id)
        row = self._rows.get(task_id)
        if row is None:
            path = self.folder / f"{id_range.split}.parquet"
            problem = "has no such row" if id_range.split in self._tables else "is not there"
            row = task_id - id_range.first
            raise UnknownTask(
                f"task id {task_id} is row {row} of {id_range.data_source} ({id_range.split}), but"
                f" {path} {problem}"
            )
        return _question(self._tables[id_range.split].slice(row, 1).to_pylist()[0], task_id)

    def _number(self, split: str, table: Any, path: Path) -> None:
        ranges = {id_range.data_source: id_range for id_range in RANGES if id_range.split == split}
        counted = dict.fromkeys(ranges, 0)
        sources = table.column("data_source").to_pylist()
        extra: list[Any] = [None] * len(sources)
        if "extra_info" in table.column_names:
            extra = table.column("extra_info").to_pylist()
        for row, (source, facts) in enumerate(zip(sources, extra, strict=True)):
            if source not in ranges:
                raise ValueError(
                    f"{path}, row {row}: unknown data_source {source!r}; known: {', '.join(ranges)}"
                )
            id_range = ranges[source]
            index = facts.get("index") if isinstance(facts, Mapping) else None
            index = counted[source] if index is None else index
            counted[source] += 1
            if not isinstance(index, int) or not 0 <= index < id_range.count:
                raise ValueError(
                    f"{path}, row {row}: index {index!r} of {source}, which has {id_range.count}"
                    f" questions ({split})"
                )
            if self._rows.setdefault(id_range.first + index, row) != row:
                raise ValueError(f"{path}, row {row}: index {index} of {source} comes twice")


def find_range(task_id: int) -> Range:
    """Return the range of an id. Errors: UnknownTask for an id outside the published ranges."""
    for id_range in RANGES:
        if id_range.first <= task_id <= id_range.last:
            return id_range
    raise UnknownTask(f"task id {task_id} is outside the published ranges 0..{RANGES[-1].last}")


def _question(row: Mapping[str, Any], task_id: int) -> Question:
    truth = (row.get("reward_model") or {}).get("ground_truth") or {}
    answers = truth.get("target") or row.get("golden_answers") or []
    answers = [answers] if isinstance(answers, str) else [str(answer) for answer in answers]
    if not answers:
        raise ValueError(f"task id {task_id}: the row has no golden answer")
    text = str(row["question"]).strip()
    text = text if text.endswith("?") else f"{text}?"
    return Question(text, tuple(answers), str(row["data_source"]))
