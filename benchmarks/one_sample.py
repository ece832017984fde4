"""Code that one sample passes through: `python benchmarks/one_sample.py [BEFORE]`.

Counts the files and statements that run while a stage of one optimizer step trains on one item of
BabyAI: session, episode, update, commit and delivery, with the environment server in this process.
A first run loads every module and fills every cache; a second one, with another seed, is counted.
BEFORE: a commit, counted in a separate checkout. Writes docs/results/one_sample.json.
"""

from __future__ import annotations

import ast
import contextlib
import json
import os
import sys
import tempfile
import threading
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

from harness import RESULTS, ROOT, checkout, commit_of, output_of, parser_of, serving_app, write

SETTINGS = (
    *("warm_start.num_demos=16", "warm_start.steps=2", "horizon.kind=fixed"),
    *("horizon.max_turns=[6]", "horizon.stage_steps=[1]", "rollout.items_per_step=1"),
    *("rollout.group_size=2", "validation.every=0", "deterministic=true"),
)
DATA = ROOT / "data/AgentGym-RL-Data-ID"
PACKAGES = ("agentgym", "envs")
COUNT_S = 600


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("before", nargs="?", help="a commit")
    parser.add_argument(
        "--count", metavar="FOLDER", help="count in this folder, and print the result"
    )
    chosen = parser.parse_args()
    if chosen.count:
        sys.stdout.write(json.dumps(count(Path(chosen.count))) + "\n")
        return
    result: dict[str, Any] = {"settings": SETTINGS}
    with contextlib.ExitStack() as stack:
        trees = {"after": ROOT}
        if chosen.before:
            result["before_commit"] = commit_of(chosen.before)
            trees["before"] = stack.enter_context(checkout(result["before_commit"]))
        for name, tree in trees.items():
            command = [sys.executable, __file__, "--count", str(tree)]
            environment = {**os.environ, "PYTHONPATH": str(tree)}
            printed = output_of(command, cwd=tree, env=environment, timeout_s=COUNT_S)
            counts = json.loads(printed.splitlines()[-1])
            result[name] = {
                "files": len(counts),
                "statements": sum(counts.values()),
                "statements_by_file": counts,
            }
            summary = result[name]
            sys.stdout.write(
                f"{name}: {summary['statements']} statements in {summary['files']} files\n"
            )
    write(RESULTS / "one_sample.json", result)


def count(tree: Path) -> dict[str, int]:
    from agentgym.config import load_config
    from agentgym.pipeline.run import run_step
    from agentgym.pipeline.table import steps_of
    from envs.registry import load_spec
    from envs.server import ServerSettings, make_app

    with tempfile.TemporaryDirectory() as folder:
        for seed in (1, 0):
            state = (f"seed={seed}", f"store.path={folder}/{seed}/store", f"data.path={DATA}")
            cfg = load_config(tree / "params.yaml", [*SETTINGS, *state])
            names = [*steps_of(cfg)]
            for name in names[: names.index("stage-1")]:
                if not name.startswith("evaluate"):
                    run_step(name, cfg)
            app = make_app(load_spec(cfg.env.name, cfg.env.options), ServerSettings())
            with traced(tree) as (lines, active), serving_app(lambda _, app=app: app) as url:
                active.set()
                run_step(
                    "stage-1", cfg, environment=lambda _: contextlib.nullcontext({"babyai": [url]})
                )
    return {
        str(path.relative_to(tree)): len({starts(path)[line] for line in line_numbers} - {0})
        for path, line_numbers in sorted(lines.items())
    }


@contextlib.contextmanager
def traced(tree: Path) -> Iterator[tuple[dict[Path, set[int]], threading.Event]]:
    """Yield (lines of our files that run, event that starts the recording), also of new threads."""
    active = threading.Event()
    lines: defaultdict[Path, set[int]] = defaultdict(set)
    roots = tuple(str(tree / package) + os.sep for package in PACKAGES)

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        name = frame.f_code.co_filename
        if not (active.is_set() and name.startswith(roots)):
            return None
        if event == "line":
            lines[Path(name)].add(frame.f_lineno)
        return trace

    threading.settrace(trace)
    sys.settrace(trace)
    try:
        yield lines, active
    finally:
        sys.settrace(None)
        threading.settrace(None)


@cache
def starts(path: Path) -> dict[int, int]:
    """Map each line to its innermost statement's first line; 0 if the statement is a definition."""
    first_lines: defaultdict[int, int] = defaultdict(int)
    tree = ast.parse(path.read_text(encoding="utf-8"))
    statements = [node for node in ast.walk(tree) if isinstance(node, ast.stmt)]
    for node in sorted(statements, key=lambda node: (node.lineno, -(node.end_lineno or 0))):
        defines = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1):
            first_lines[line] = 0 if defines else node.lineno
    return first_lines


if __name__ == "__main__":
    main()
