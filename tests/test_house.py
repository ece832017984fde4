"""Bounds on the measures of benchmarks/house.py, and a check of the architecture diagram."""

import re
import tomllib
from pathlib import Path

import pytest

from tests.benched import benchmark

ROOT = Path(__file__).resolve().parents[1]
CONCEPTS = ROOT / "docs/concepts"
DRAWING = (CONCEPTS / "architecture.md").read_text()
# functions longer than 60 lines that are easier to read as a whole, with their maximal number of
# lines
LONG = {
    "agentgym/audit/__init__.py audit": 72,
    "agentgym/training/offline.py train_stage": 65,
    "envs/server.py make_app": 130,
}


@pytest.fixture(scope="module")
def house():
    return benchmark("house")


@pytest.fixture(scope="module")
def found(house):
    return house.house()


def test_nothing_imports_itself_by_a_detour(found, house):
    assert found.circles == []
    graph = {"a": ["b"], "b": ["c"], "c": ["a", "d"], "d": []}
    assert house.circles(graph) == [["a", "b", "c"]]


def test_no_line_is_too_wide(found):
    assert found.wide_lines == []


def test_all_text_that_is_read_or_written_names_its_encoding(found, house):
    """With a locale such as C, a tokenizer would be garbled and an audit elsewhere would fail."""
    assert found.no_encodings == []
    bad = """
open(name)
open(name, "a")
path.open("w")
path.read_text(errors="replace")
path.write_text(text)
os.fdopen(1, "w")
NamedTemporaryFile("w")
run(["git"], text=True)
"""
    good = """
open(name, "rb")
path.open("wb")
store.open(name)
path.read_text(encoding="utf-8")
NamedTemporaryFile()
run(["git"])
"""
    assert house.no_encodings(bad) == list(range(2, 10))
    assert house.no_encodings(good) == []


def test_few_signatures_say_any(found, house):
    assert found.any_frac <= 0.03
    (function,) = house.ast.parse("def f(a: Any, *b: int, c, **d: Any) -> dict[str, Any]: ...").body
    assert [house.ast.unparse(each) for each in house.annotated(function)] == [
        "Any",
        "int",
        "Any",
        "dict[str, Any]",
    ]


def test_the_language_is_plain():
    plain = benchmark("plain")
    counts = plain.count(ROOT)
    assert counts.num_docstrings > 3000
    assert counts.openers_frac <= 0.03
    assert counts.vague_per_1000 <= 2
    assert max(counts.dialect_per_million, plain.dialect_of_documents()) <= 25
    odd = plain.text_of(['def two(each):  # somebody\n    """Of two digests."""\n    each = 1\n'])
    assert (odd.openers_frac, odd.vague_per_1000) == (1, 1000)
    assert odd.most_common == {"each": 2, "Of": 1, "somebody": 1}


def test_functions_are_short_or_named_here(found):
    assert {
        name: lines for name, lines in found.long_functions.items() if lines > LONG.get(name, 0)
    } == {}
    assert LONG.keys() <= found.long_functions.keys(), "one has become short: take it out"


def test_no_code_asks_what_a_step_is_called():
    names = r"(prepare|initialize|warm-start|stage-|evaluate-|register|report)"
    asks = re.compile(rf"""(startswith|removeprefix)\("{names}|[=!]= "{names}|"{names}\w*"\]""")
    asked = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for room in ("agentgym", "tasks", "flows", "services")
        for path in (ROOT / room).rglob("*.py")
        for line in path.read_text().splitlines()
        if asks.search(line)
    ]
    assert asked == []
    assert asks.search('if name.startswith("evaluate-"):')
    assert asks.search('ctx.parents["prepare"]')
    assert asks.search('record.name == "register"')


# upper bounds on the lines of Python in each folder
SIZES = {
    "agentgym": 50_105,
    "benchmarks": 9_495,
    "envs": 10_530,
    "flows": 940,
    "services": 1_930,
    "sites": 3_600,
    "tasks": 595,
    "tests": 67_255,
}


def test_no_folder_grows(found, house):
    assert {
        name: found.num_lines[name] for name in SIZES if found.num_lines[name] > SIZES[name]
    } == {}
    assert house.by_folder({"a/b.py": 2, "a/c/d.py": 3, "e.py": 1}) == {"a": 5, "all": 6}


def test_no_module_is_long(found):
    assert found.long_modules == {}


def test_few_files_of_different_folders_have_one_name(found, house):
    assert len(found.repeated_names) <= 15
    paths = ["a/__init__.py", "a/one.py", "b/__init__.py", "b/one.py", "b/c/one.py", "b/two.py"]
    assert house.repeated(paths) == {"one.py": 3}


def test_lines_of_a_renamed_file_are_moved(house, monkeypatch):
    """One of ten lines changed as the file moved; git lists two paths for a renamed file."""
    listed = {"--no-renames": "\0".join(["10\t0\tb/x.py", "0\t10\ta/x.py", ""])}
    renamed = "1\t1\t\0a/x.py\0b/x.py\0"
    monkeypatch.setattr(house, "git", lambda *words: listed.get(words[3], renamed))
    assert house.changed("HEAD") == {
        "added": {"all": 1, "b": 1},
        "removed": {"all": 1, "b": 1},
        "moved": {"a": 10, "all": 9},
    }


def test_few_files_lie_at_the_root_of_agentgym(found):
    assert len(found.loose_files) <= 8


def test_the_drawing_is_the_import_contract():
    drawn = re.search(r"```\n(flows .*?)```", DRAWING, re.S)[1].splitlines()
    names = [re.split(r" {2,}|$", line.strip())[0] for line in drawn]
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    top, rooms = (each["layers"] for each in contracts["contracts"] if each["type"] == "layers")
    first = top.index("agentgym") + 1
    assert names == [*top[:first], *rooms, *top[first:]]


def test_every_file_it_names_exists():
    text = DRAWING + "".join(
        (CONCEPTS / f"{page}.md").read_text() for page in ("one-sample", "promises")
    )
    named = re.findall(r"`((?:agentgym|envs|examples)/[\w/]+\.py)`", text)
    assert len(named) > 20
    assert [path for path in named if not (ROOT / path).is_file()] == []
