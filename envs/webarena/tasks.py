"""WebArena's task files in their published format: sites, start, intent and evaluation.

Source: config_files/test.raw.json of web-arena-x/webarena (812 tasks); arXiv:2307.13854, section 3,
describes the format.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from envs.env import UnknownTask

Json = Any
SITE_NAMES = ("shopping", "shopping_admin", "reddit", "gitlab", "wikipedia", "map", "homepage")
EVAL_TYPES = ("string_match", "url_match", "program_html")
_PLACEHOLDER = re.compile(r"__([A-Z_]+?)__")
_STRING_KEYS = ("exact_match", "must_include", "fuzzy_match")


@dataclass(frozen=True, slots=True)
class Target:
    """One check of a page after `stop`: URL ("last": the open page), element, required content."""

    url: str
    locator: str
    exact: str | None  # text that the content must equal; None: see must_include
    must_include: tuple[str, ...]  # texts that the content must all include
    prep_actions: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Evaluation:
    types: tuple[str, ...]
    exact: str | None = None
    must_include: tuple[str, ...] | None = None
    # "N/A": the task cannot be done; string_note has the reason
    fuzzy: tuple[str, ...] | str | None = None
    reference_url: str = ""
    targets: tuple[Target, ...] = ()
    string_note: str = ""


@dataclass(frozen=True, slots=True)
class Task:
    id: int
    sites: tuple[str, ...]
    start_urls: tuple[str, ...]
    intent: str
    evaluation: Evaluation
    storage_state: str = ""  # file name; empty: no login
    geolocation: Mapping[str, float] | None = None


@dataclass(frozen=True, slots=True)
class _Field:
    """A JSON value with its name and task, for error messages."""

    value: Json
    task: str
    name: str = ""

    def wrong(self, expected: str) -> ValueError:
        return ValueError(
            f"webarena task {self.task}: {self.name}: expected {expected}, got"
            f" {json.dumps(self.value)[:80]}"
        )

    def get(self, key: str) -> _Field:
        if not isinstance(self.value, dict):
            raise self.wrong("an object")
        return _Field(self.value.get(key), self.task, f"{self.name}.{key}".lstrip("."))

    def text(self, default: str | None = None) -> str:
        if self.value is None and default is not None:
            return default
        if not isinstance(self.value, str):
            raise self.wrong("a string")
        return self.value

    def rows(self) -> list[_Field]:
        if self.value is None:
            return []
        if not isinstance(self.value, list):
            raise self.wrong("a list")
        rows = enumerate(self.value)
        return [_Field(value, self.task, f"{self.name}[{index}]") for index, value in rows]

    def texts(self) -> tuple[str, ...]:
        return tuple(row.text() for row in self.rows())

    def text_or_texts(self) -> str | tuple[str, ...]:
        return self.value if isinstance(self.value, str) else self.texts()


def load(path: Path, sites: Mapping[str, str], *, skip_missing: bool) -> dict[int, Task]:
    """Load the tasks by id, with placeholders such as __SHOPPING__ replaced by the sites' URLs.

    path: a JSON list, or a folder with one file for each task. sites: name -> URL.
    skip_missing: leave out tasks of sites that are not configured.
    Errors: ValueError naming file, task and field.
    """
    tasks: dict[int, Task] = {}
    for row in _read(path):
        task_id = row.get("task_id") if isinstance(row, dict) else None
        if isinstance(task_id, bool) or not isinstance(task_id, int) or task_id < 0:
            raise ValueError(
                f"{path}: a task has no task_id, a whole number from 0; got"
                f" {json.dumps(task_id)[:40]}"
            )
        if task_id in tasks:
            raise ValueError(f"{path}: task {task_id} occurs twice")
        missing = _missing(row, sites)
        if missing and not skip_missing:
            known = ", ".join(sorted(sites))
            raise ValueError(
                f"webarena task {task_id}: sites: {', '.join(missing)} is not configured (there"
                f" are: {known}); add its URL to option sites, or set option missing_sites to"
                ' "skip"'
            )
        if not missing:
            tasks[task_id] = _task(_filled(row, sites), task_id)
    if not tasks:
        raise ValueError(f"{path}: no task is left for the sites {', '.join(sorted(sites))}")
    return tasks


def find_task(tasks: Mapping[int, Task], task_id: int) -> Task:
    """Return the task of an id. Errors: UnknownTask."""
    task = tasks.get(task_id)
    if task is None:
        known = sorted(tasks)
        span = f"{len(known)} tasks have ids from {known[0]} to {known[-1]}"
        raise UnknownTask(f"there is no task {task_id}; {span}")
    return task


def identity(tasks: Mapping[int, Task], task_id: int) -> str:
    """Return the task's intent, start, login and location as JSON. Errors: UnknownTask."""
    task = find_task(tasks, task_id)
    location = dict(task.geolocation or {})
    return json.dumps([task.intent, task.start_urls, task.storage_state, location])


def embedded_gold(sites: Mapping[str, str]) -> dict[int, tuple[str, ...]]:
    """Return the recorded actions that solve the embedded tasks, by task id.
    sites: name -> URL, which replaces the placeholders in the actions.
    """
    rows = _filled(_parsed(Path(__file__).with_name("gold.json")), sites)
    return {int(task_id): tuple(actions) for task_id, actions in rows.items()}


def _read(path: Path) -> list[Json]:
    if path.is_dir():
        files = [file for file in path.glob("*.json") if file.stem.isdigit()]
        rows: list[Json] = [_parsed(file) for file in sorted(files, key=lambda f: int(f.stem))]
    else:
        rows = _parsed(path)
    if not isinstance(rows, list) or not rows:
        raise ValueError(f"{path}: expected a list of tasks, or a folder of N.json files")
    return rows


def _parsed(file: Path) -> Json:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        problem = f"cannot be read: {error.strerror}"
    except ValueError as error:
        problem = f"is not JSON: {error}"
    raise ValueError(f"webarena option tasks: {file} {problem}")


def _missing(row: Json, sites: Mapping[str, str]) -> list[str]:
    """Return the sites that a task lists or has as placeholders, and that `sites` lacks."""
    listed = row.get("sites")
    named = [name for name in listed if isinstance(name, str)] if isinstance(listed, list) else []
    places = map(str.lower, _PLACEHOLDER.findall(json.dumps(row)))
    named += [name for name in places if name in SITE_NAMES]
    return [name for name in dict.fromkeys(named) if name not in sites]


def _filled(value: Json, sites: Mapping[str, str]) -> Json:
    if isinstance(value, str):
        return _PLACEHOLDER.sub(lambda match: sites.get(match[1].lower(), match[0]), value)
    if isinstance(value, list):
        return [_filled(entry, sites) for entry in value]
    if isinstance(value, dict):
        return {key: _filled(entry, sites) for key, entry in value.items()}
    return value


def _task(row: Json, task_id: int) -> Task:
    top = _Field(row, str(task_id))
    sites = top.get("sites").texts()
    starts = tuple(url.strip() for url in top.get("start_url").text().split(" |AND| "))
    if not sites or not all(starts):
        raise (top.get("start_url") if sites else top.get("sites")).wrong("at least one")
    return Task(
        task_id,
        sites,
        starts,
        top.get("intent").text(),
        _evaluation(top.get("eval")),
        storage_state=Path(top.get("storage_state").text("")).name,
        geolocation=top.get("geolocation").value,
    )


def _evaluation(row: _Field) -> Evaluation:
    types = row.get("eval_types").texts()
    for kind in types:
        if kind not in EVAL_TYPES:
            raise row.get("eval_types").wrong(f"of {', '.join(EVAL_TYPES)}")
    if not types:
        raise row.get("eval_types").wrong("at least one")
    answers = row.get("reference_answers")
    answers = answers if isinstance(answers.value, dict) else _Field({}, answers.task, answers.name)
    if "string_match" in types and not any(key in answers.value for key in _STRING_KEYS):
        raise row.get("reference_answers").wrong(f"one of {', '.join(_STRING_KEYS)}")
    if "url_match" in types and row.get("url_note").text("GOLD in PRED") != "GOLD in PRED":
        raise row.get("url_note").wrong('"GOLD in PRED"')
    fuzzy = answers.get("fuzzy_match")
    included = answers.get("must_include").texts() if "must_include" in answers.value else None
    targets = row.get("program_html").rows() if "program_html" in types else []
    return Evaluation(
        types,
        exact=answers.get("exact_match").text() if "exact_match" in answers.value else None,
        must_include=included,
        fuzzy=None if fuzzy.value is None else fuzzy.text_or_texts(),
        reference_url=row.get("reference_url").text("") if "url_match" in types else "",
        targets=tuple(map(_target, targets)),
        string_note=row.get("string_note").text(""),
    )


def _target(row: _Field) -> Target:
    locator = row.get("locator").text("").strip()
    if locator and not locator.startswith(("document.", "[...document.", "func:")):
        expected = "nothing, or what begins with document., [...document. or func:"
        raise row.get("locator").wrong(expected)
    required = row.get("required_contents")
    known = {"exact_match", "must_include"}
    if not isinstance(required.value, dict) or not required.value.keys() & known:
        raise required.wrong("an object with exact_match or must_include")
    exact = required.get("exact_match").text() if "exact_match" in required.value else None
    included = required.get("must_include").texts() if exact is None else ()
    for field in (row.get("url"), row.get("locator")):
        if field.text("").startswith("func:"):
            try:
                parse_call(field.text())
            except ValueError as error:
                expected = str(error).removeprefix("expected ").partition(", got ")[0]
                raise field.wrong(expected) from None
    url, prepare = row.get("url").text().strip(), row.get("prep_actions").texts()
    return Target(url, locator, exact, included, prepare)


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a helper; its arguments are texts, LAST_URL or PAGE."""

    name: str
    arguments: tuple[str, ...]


LAST_URL = "__last_url__"
PAGE = "__page__"
_CALL = re.compile(r"func:\s*([A-Za-z_]\w*)\s*\((.*)\)\s*", re.DOTALL)
_ARGUMENT = re.compile(r"\s*(?:'([^'\\]*)'|\"([^\"\\]*)\"|(__page__))\s*(,|$)")


def parse_call(text: str) -> Call:
    """Parse `func:NAME('literal', __page__)`; literals are quoted texts. Errors: ValueError."""
    match = _CALL.fullmatch(text)
    if match is None:
        raise ValueError(f"expected func:NAME('text', ...), got {text[:80]!r}")
    arguments, rest = [], match[2].strip()
    while rest:
        argument = _ARGUMENT.match(rest)
        if argument is None:
            expected = "expected texts in quotes or __page__ between the brackets"
            raise ValueError(f"{expected}, got {text[:80]!r}")
        arguments.append(next(part for part in argument.groups()[:3] if part is not None))
        rest = rest[argument.end() :]
    return Call(match[1], tuple(arguments))
