"""How the code is built: `python benchmarks/house.py` prints what tests/test_house.py bounds."""

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
    any_frac: float  # of the annotations of parameters and results, those that are `Any`
    long_functions: dict[str, int]  # "path name" -> lines
    loose_files: list[str]  # at the root of agentgym/
    no_encodings: list[str]  # path:line that reads or writes text in whatever the locale says


def house() -> House:
    trees = {
        path: ast.parse((ROOT / path).read_text(encoding="utf-8")) for path in files(*PACKAGES)
    }
    functions = {
        path: [node for node in ast.walk(tree) if isinstance(node, Function)]
        for path, tree in trees.items()
    }
    annotations = [
        each for found in functions.values() for function in found for each in annotated(function)
    ]
    return House(
        circles=[*circles(imports()), *circles(between_rooms(imports()))],
        wide_lines=[
            f"{path}:{number}"
            for path in files(*PACKAGES, "tests", "benchmarks")
            for number, line in enumerate((ROOT / path).read_text(encoding="utf-8").splitlines(), 1)
            if len(line) > COLUMNS
        ],
        any_frac=sum(isinstance(each, ast.Name) and each.id == "Any" for each in annotations)
        / len(annotations),
        long_functions={
            f"{path} {function.name}": length
            for path, found in functions.items()
            for function in found
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
    """The Python files under version control."""
    told = subprocess.run(
        ["git", "ls-files", *(f"{folder}/*.py" for folder in folders)],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
        encoding="utf-8",
    )
    return [line for line in told.stdout.splitlines() if (ROOT / line).exists()]


def no_encodings(source: str) -> list[int]:
    """Lines of calls that open text, or a process whose output is text, without `encoding`."""
    calls = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))
    return sorted(call.lineno for call in calls if is_text(call) and not names_encoding(call))


def is_text(call: ast.Call) -> bool:
    name = getattr(call.func, "attr", getattr(call.func, "id", ""))
    modes = [*call.args, *(word.value for word in call.keywords if word.arg == "mode")]
    texts = [each.value for each in modes if isinstance(each, ast.Constant)]
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
    for each in (*inner.posonlyargs, *inner.args, *inner.kwonlyargs, inner.vararg, inner.kwarg):
        if each is not None and each.annotation is not None:
            yield each.annotation
    if function.returns is not None:
        yield function.returns


def imports() -> dict[str, set[str]]:
    """module -> modules of ours that it imports, inside of functions, too."""
    graph = grimp.build_graph(*PACKAGES, exclude_type_checking_imports=True)
    return {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}


def between_rooms(modules: Mapping[str, Iterable[str]]) -> dict[str, set[str]]:
    """The same between folders: `agentgym.store`, `envs.babyai`, `sites`."""
    rooms: dict[str, set[str]] = {}
    for module, imported in modules.items():
        found = rooms.setdefault(room(module), set())
        found |= {room(other) for other in imported} - {room(module)}
    return rooms


def room(module: str) -> str:
    """The others are a room each."""
    return ".".join(module.split(".")[: 2 if module.startswith(("agentgym.", "envs.")) else 1])


def circles(graph: Mapping[str, Iterable[str]]) -> list[list[str]]:
    """Strongly connected sets of more than one (Tarjan 1972)."""
    index: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

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
                found.append(sorted(members))

    sys.setrecursionlimit(10_000)
    for name in sorted(graph):
        if name not in index:
            visit(name)
    return found


if __name__ == "__main__":
    sys.stdout.write(json.dumps(asdict(house()), indent=1) + "\n")
