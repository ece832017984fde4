"""Measures of the code's structure: `python benchmarks/house.py` prints them as JSON.

tests/test_house.py bounds them.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import grimp

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("agentgym", "envs", "sites", "services", "tasks", "flows")
COLUMNS, LINES = 100, 60

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class House:
    circles: list[list[str]]  # of modules, and of rooms
    wide_lines: list[str]  # path:line
    any_frac: float  # share of `Any` among the annotations of parameters and results
    long_functions: dict[str, int]  # "path name" -> lines
    loose_files: list[str]  # at the root of agentgym/
    no_encodings: list[str]  # path:line that reads or writes text in the locale's encoding


def house() -> House:
    trees = {
        path: ast.parse((ROOT / path).read_text(encoding="utf-8")) for path in files(*PACKAGES)
    }
    functions = {
        path: [node for node in ast.walk(tree) if isinstance(node, Function)]
        for path, tree in trees.items()
    }
    annotations = [
        annotation
        for definitions in functions.values()
        for function in definitions
        for annotation in annotated(function)
    ]
    return House(
        circles=[*circles(imports()), *circles(between_rooms(imports()))],
        wide_lines=[
            f"{path}:{number}"
            for path in files(*PACKAGES, "tests", "benchmarks")
            for number, line in enumerate((ROOT / path).read_text(encoding="utf-8").splitlines(), 1)
            if len(line) > COLUMNS
        ],
        any_frac=sum(
            isinstance(annotation, ast.Name) and annotation.id == "Any"
            for annotation in annotations
        )
        / len(annotations),
        long_functions={
            f"{path} {function.name}": length
            for path, definitions in functions.items()
            for function in definitions
            if (length := (function.end_lineno or 0) - function.lineno + 1) > LINES
        },
        loose_files=sorted(
            path.name for path in (ROOT / "agentgym").glob("*.py") if path.name != "__init__.py"
        ),
        no_encodings=[
            f"{path}:{line}"
            for path in files(*PACKAGES, "benchmarks", "data", "docs", "examples")
            for line in no_encodings((ROOT / path).read_text(encoding="utf-8"))
        ],
    )


def files(*folders: str) -> list[str]:
    """Return the Python files under version control."""
    listing = subprocess.run(
        ["git", "ls-files", *(f"{folder}/*.py" for folder in folders)],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
        encoding="utf-8",
    )
    return [line for line in listing.stdout.splitlines() if (ROOT / line).exists()]


def no_encodings(source: str) -> list[int]:
    """Return lines of calls that open text, or a process with text output, without `encoding`."""
    calls = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))
    return sorted(call.lineno for call in calls if is_text(call) and not names_encoding(call))


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


def names_encoding(call: ast.Call) -> bool:
    return any(word.arg == "encoding" for word in call.keywords)


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
    """Return strongly connected components with more than one node (Tarjan 1972)."""
    index: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    components: list[list[str]] = []

    def visit(name: str) -> None:
        index[name] = lowest[name] = len(index)
        stack.append(name)
        for other in graph.get(name, ()):
            if other not in index:
                visit(other)
                lowest[name] = min(lowest[name], lowest[other])
            elif other in stack:
                lowest[name] = min(lowest[name], index[other])
        if lowest[name] == index[name]:
            members = [stack.pop()]
            while members[-1] != name:
                members.append(stack.pop())
            if len(members) > 1:
                components.append(sorted(members))

    sys.setrecursionlimit(10_000)
    for name in sorted(graph):
        if name not in index:
            visit(name)
    return components


if __name__ == "__main__":
    sys.stdout.write(json.dumps(asdict(house()), indent=1) + "\n")
