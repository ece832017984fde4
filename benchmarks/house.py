"""Measures of the code's structure: `python benchmarks/house.py [BEFORE]` prints them as JSON.

BEFORE: a commit. It is measured, too, with the lines that were added, moved and removed since, and
the result is written to docs/results/house.json. tests/test_house.py bounds the measures.
"""

from __future__ import annotations

import ast
import json
import os
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath

import grimp
import networkx
from harness import PACKAGES, ROOT, checkout, commit_of, git, output_of, parser_of, write

COLUMNS, LINES, MODULE_LINES = 100, 60, 450

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class House:
    num_lines: dict[str, int]  # of Python, by top folder and in `all`
    long_modules: dict[str, int]  # path -> lines, over MODULE_LINES, also of tests and benchmarks
    repeated_names: dict[str, int]  # file name -> folders of the packages that have such a file
    circles: list[list[str]]  # of modules, and of rooms
    wide_lines: list[str]  # path:line
    any_frac: float  # share of `Any` among the annotations of parameters and results
    long_functions: dict[str, int]  # "path name" -> lines without the docstring
    loose_files: list[str]  # at the root of agentgym/
    no_encodings: list[str]  # path:line that reads or writes text in the locale's encoding


def _length(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Return a function's number of lines without its docstring."""
    first = function.body[0] if ast.get_docstring(function, clean=False) is not None else None
    docstring = (first.end_lineno or 0) - first.lineno + 1 if first else 0
    return (function.end_lineno or 0) - function.lineno + 1 - docstring


def house(root: Path = ROOT) -> House:
    """Measure a checkout. root: `import` must find its packages."""
    sources = {path: (root / path).read_text(encoding="utf-8") for path in files(root)}
    packages = {path: source for path, source in sources.items() if path.startswith(WITHIN)}
    functions = {
        path: [node for node in ast.walk(ast.parse(source)) if isinstance(node, Function)]
        for path, source in packages.items()
    }
    every = [function for definitions in functions.values() for function in definitions]
    annotations = [annotation for function in every for annotation in annotated(function)]
    any_count = sum(isinstance(one, ast.Name) and one.id == "Any" for one in annotations)
    lengths = {path: len(source.splitlines()) for path, source in sources.items()}
    return House(
        num_lines=by_folder(lengths),
        long_modules={path: lines for path, lines in lengths.items() if lines > MODULE_LINES},
        repeated_names=repeated(packages),
        circles=[*circles(imports()), *circles(between_rooms(imports()))],
        wide_lines=[
            f"{path}:{number}"
            for path, source in sources.items()
            if path.startswith((*WITHIN, "tests/", "benchmarks/"))
            for number, line in enumerate(source.splitlines(), 1)
            if len(line) > COLUMNS
        ],
        any_frac=any_count / len(annotations),
        long_functions={
            f"{path} {function.name}": length
            for path, definitions in functions.items()
            for function in definitions
            if (length := _length(function)) > LINES
        },
        loose_files=sorted(
            path.name for path in (root / "agentgym").glob("*.py") if path.name != "__init__.py"
        ),
        no_encodings=[
            f"{path}:{line}"
            for path, source in sources.items()
            if path.startswith((*WITHIN, "benchmarks/", "data/", "docs/", "examples/"))
            for line in no_encodings(source)
        ],
    )


WITHIN = tuple(f"{package}/" for package in PACKAGES)


def files(root: Path) -> list[str]:
    """Return the Python files: those under version control, or all of an extracted commit."""
    if (root / ".git").exists():
        listed = output_of(["git", "ls-files", "*.py"], cwd=root).splitlines()
        return [path for path in listed if (root / path).exists()]
    return sorted(str(path.relative_to(root)) for path in root.rglob("*.py"))


def by_folder(lines: Mapping[str, int]) -> dict[str, int]:
    """Sum the lines of each top folder, and of all; files outside all folders are in `all`."""
    totals = Counter(all=sum(lines.values()))
    for path, count in lines.items():
        if "/" in path:
            totals[path.partition("/")[0]] += count
    return dict(sorted(totals.items()))


def repeated(paths: Iterable[str]) -> dict[str, int]:
    """Return the file names that occur in more than one folder; `__init__.py` does not count."""
    folders = defaultdict(set)
    for path in map(PurePosixPath, paths):
        folders[path.name].add(path.parent)
    del folders["__init__.py"]
    return {name: len(known) for name, known in sorted(folders.items()) if len(known) > 1}


def changed(commit: str) -> dict[str, dict[str, int]]:
    """Count lines of Python added, removed and moved (renamed or copied) since a commit."""
    counts = numstat(commit, "--find-renames", "--find-copies")
    added, removed = (
        by_folder({path: both[side] for path, both in counts.items()}) for side in (0, 1)
    )
    plain = numstat(commit, "--no-renames")
    gone = Counter(by_folder({path: both[1] for path, both in plain.items()}))
    return {"added": added, "removed": removed, "moved": dict(gone - Counter(removed))}


def numstat(commit: str, *options: str) -> dict[str, tuple[int, int]]:
    """Return path -> (added, removed) lines of each Python file that changed since the commit."""
    rows = git("diff", "--numstat", "-z", *options, commit, "--", "*.py").split("\0")
    counts: dict[str, tuple[int, int]] = {}
    while rows and rows[0]:
        added, removed, path = rows.pop(0).split("\t")
        if not path:  # renamed or copied: two paths follow
            _, path = rows.pop(0), rows.pop(0)
        counts[path] = int(added), int(removed)
    return counts


def no_encodings(source: str) -> list[int]:
    """Return lines of calls that open text, or a process with text output, without `encoding`."""
    calls = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))
    texts = (call for call in calls if is_text(call))
    return sorted(c.lineno for c in texts if all(word.arg != "encoding" for word in c.keywords))


def is_text(call: ast.Call) -> bool:
    name = getattr(call.func, "attr", getattr(call.func, "id", ""))
    modes = [*call.args, *(word.value for word in call.keywords if word.arg == "mode")]
    texts = [mode.value for mode in modes if isinstance(mode, ast.Constant)]
    mode = next((text for text in texts if re.fullmatch("[rwax][bt+]*", str(text))), "")
    if name in ("read_text", "write_text", "FileHandler", "TextIOWrapper"):
        return True
    if name == "fdopen" or (name == "open" and isinstance(call.func, ast.Name)):
        return "b" not in mode  # the default is text
    if name == "open" or name.endswith("TemporaryFile"):
        return bool(mode) and "b" not in mode
    flags = {word.arg: getattr(word.value, "value", None) for word in call.keywords}
    return flags.get("text") is True or flags.get("universal_newlines") is True


def annotated(function: Function) -> Iterator[ast.expr]:
    inner = function.args
    for argument in (*inner.posonlyargs, *inner.args, *inner.kwonlyargs, inner.vararg, inner.kwarg):
        if argument is not None and argument.annotation is not None:
            yield argument.annotation
    if function.returns is not None:
        yield function.returns


def imports() -> dict[str, set[str]]:
    """Return module -> modules of ours that it imports, also inside functions."""
    graph = grimp.build_graph(*PACKAGES, exclude_type_checking_imports=True)
    return {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}


def between_rooms(modules: Mapping[str, Iterable[str]]) -> dict[str, set[str]]:
    """Return folder -> folders that it imports: `agentgym.store`, `envs.babyai`, `sites`."""
    rooms: dict[str, set[str]] = {}
    for module, imported in modules.items():
        imported_rooms = rooms.setdefault(room(module), set())
        imported_rooms |= {room(other) for other in imported} - {room(module)}
    return rooms


def room(module: str) -> str:
    """Return a module's folder below agentgym or envs, or its top-level package."""
    return ".".join(module.split(".")[: 2 if module.startswith(("agentgym.", "envs.")) else 1])


def circles(graph: Mapping[str, Iterable[str]]) -> list[list[str]]:
    """Return strongly connected components with more than one node."""
    directed = networkx.DiGraph({name: list(others) for name, others in graph.items()})
    components = networkx.strongly_connected_components(directed)
    return sorted(sorted(component) for component in components if len(component) > 1)


def main() -> None:
    parser = parser_of(__doc__, "house.json")
    parser.add_argument("before", nargs="?", metavar="BEFORE", help="a commit")
    parser.add_argument("--root", type=Path, default=ROOT, help="the checkout to measure")
    chosen = parser.parse_args()
    if not chosen.before:
        print(json.dumps(asdict(house(chosen.root)), indent=1))
        return
    commit = commit_of(chosen.before)
    with checkout(commit) as tree:  # in a process that imports its packages
        command = [sys.executable, __file__, "--root", str(tree)]
        measured = output_of(command, cwd=tree, env={**os.environ, "PYTHONPATH": str(tree)})
    numbers = {"now": asdict(house()), "before": {"commit": commit, **json.loads(measured)}}
    write(chosen.out, {**numbers, "lines": changed(commit)})
    print(json.dumps(numbers | {"lines": changed(commit)}, indent=1))


if __name__ == "__main__":
    main()
