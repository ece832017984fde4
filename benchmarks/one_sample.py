"""Code that one sample passes through: `python benchmarks/one_sample.py`.

Counts the files and statements that run while a stage of one optimizer step trains on one item of
BabyAI: session, episode, update, commit and delivery, with the environment server in this process.
A first run loads every module and fills every cache; a second one, with another seed, is counted.
Writes docs/results/one_sample.json.
"""

from __future__ import annotations

import ast
import contextlib
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

from harness import RESULTS, ROOT, config_in, parser_of, serving_app, write

SETTINGS = (
    *("warm_start.num_demos=16", "warm_start.steps=2", "horizon.kind=fixed"),
    *("horizon.max_turns=[6]", "horizon.stage_steps=[1]", "rollout.items_per_step=1"),
    *("rollout.group_size=2", "validation.every=0", "deterministic=true"),
)
DATA = ROOT / "data/AgentGym-RL-Data-ID"
PACKAGES = ("agentgym", "envs")


def main() -> None:
    parser_of(__doc__).parse_args()
    sys.path.insert(0, str(ROOT))
    counts = count()
    summary = {"files": len(counts), "statements": sum(counts.values())}
    print(summary)
    after = {**summary, "statements_by_file": counts}
    write(RESULTS / "one_sample.json", {"settings": SETTINGS, "after": after})


def count() -> dict[str, int]:
    from agentgym.pipeline.run import run_step
    from agentgym.pipeline.table import steps_of
    from envs.registry import load_spec
    from envs.server import ServerSettings, make_app

    with tempfile.TemporaryDirectory() as folder:
        for seed in (1, 0):
            cfg = config_in(f"{folder}/{seed}", *SETTINGS, f"seed={seed}", f"data.path={DATA}")
            names = [*steps_of(cfg)]
            for name in names[: names.index("stage-1")]:
                if not name.startswith("evaluate"):
                    run_step(name, cfg)
            app = make_app(load_spec(cfg.env.name, cfg.env.options), ServerSettings())
            with traced() as (lines, active), serving_app(lambda _, app=app: app) as url:
                active.set()
                run_step(
                    "stage-1", cfg, environment=lambda _: contextlib.nullcontext({"babyai": [url]})
                )
    return {
        str(path.relative_to(ROOT)): len({starts(path)[line] for line in line_numbers} - {0})
        for path, line_numbers in sorted(lines.items())
    }


@contextlib.contextmanager
def traced() -> Iterator[tuple[dict[Path, set[int]], threading.Event]]:
    """Yield (lines of our files that run, event that starts the recording), also of new threads."""
    active = threading.Event()
    lines: defaultdict[Path, set[int]] = defaultdict(set)
    roots = tuple(str(ROOT / package) + os.sep for package in PACKAGES)

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
