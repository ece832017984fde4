"""How many modules have a test of their own name that runs most of their lines, alone.

    python benchmarks/like_named.py [--only PART] [--jobs N]

The test of agentgym/store/keys.py is tests/agentgym/store/test_keys.py; that of a package's own
code is test_<package>.py, in the package's room or beside it. Each runs by itself under coverage,
without what is slow or needs a GPU or Ray; what other processes run for it does not count.
A test that fails runs nothing. Writes docs/results/like_named.json, which tests/test_suite.py
bounds; with --only the other rows stay.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "docs/results/like_named.json"
PACKAGES = ("agentgym", "envs", "services", "tasks", "flows")
ENOUGH = 0.6  # of a module's lines
FEW = "not slow and not gpu and not ray and not vllm and not kubernetes and not real"
LIMIT_S = 1800
LIBRARIES = (
    "torch",
    "transformers",
    "mlflow",
    "pandas",
    "matplotlib",
    "fastapi",
    "uvicorn",
    "boto3",
)
SHARED = "AGENTGYM_TEST_SHARED"  # names the folder of logs, and of what several tests prepare once


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--only", nargs="*", default=[""], help="parts of the paths to measure anew"
    )
    parser.add_argument("--jobs", type=int, default=2)
    asked = parser.parse_args()
    found = {path: like_named(path) for path in modules()}
    anew = {path for path in found if any(part in path for part in asked.only)}
    tests = sorted({test for path, test in found.items() if test and path in anew})
    ran = measured(tests, asked.jobs)
    from pipeline import machine  # it imports what is measured

    before = {row["module"]: row for row in known()}
    rows = [
        before[path]
        if path not in anew and path in before and before[path]["test"] == test
        else {"module": path, "test": test, "share": ran.get(test, {}).get(path, 0.0)}
        for path, test in found.items()
    ]
    for row in sorted(rows, key=lambda row: row["share"]):
        sys.stdout.write(f"{row['share']:4.0%}  {row['module']}  {row['test'] or ''}\n")
    enough = sum(row["share"] >= ENOUGH for row in rows)
    share = round(enough / len(rows), 3)
    sys.stdout.write(f"{enough} of {len(rows)} modules: {share:.1%}\n")
    result = {
        "machine": machine(),
        "command": "python benchmarks/like_named.py",
        "enough": ENOUGH,
        "num_modules": len(rows),
        "num_enough": enough,
        "share": share,
        "modules": rows,
    }
    OUT.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0


def measured(tests: Sequence[str], jobs: int) -> dict[str, dict[str, float]]:
    """What each test file runs: in a process that has imported the libraries, and none of ours."""
    sys.path.remove(str(Path(__file__).parent))  # a file of it is called coverage.py
    for name in LIBRARIES:
        importlib.import_module(name)
    ran: dict[str, dict[str, float]] = {}
    os.environ[SHARED] = shared = tempfile.mkdtemp(prefix="like-named-")
    context = multiprocessing.get_context("fork")
    with context.Pool(jobs, maxtasksperchild=1) as pool:
        waiting = {test: pool.apply_async(lines_run, (test,)) for test in tests}
        for test, each in waiting.items():
            ran[test] = each.get(LIMIT_S)
            sys.stderr.write(f"{test}{'' if ran[test] else ' FAILED: ' + shared}\n")
    sys.path.insert(0, str(Path(__file__).parent))
    return ran


def known() -> list[dict[str, Any]]:
    """What was measured last."""
    rows: list[dict[str, Any]] = (
        json.loads(OUT.read_text(encoding="utf-8"))["modules"] if OUT.exists() else []
    )
    return rows


def modules(packages: Sequence[str] = PACKAGES) -> list[str]:
    """Paths of what holds code: a package that only says what it is for has nothing to test."""
    return [
        str(path.relative_to(ROOT))
        for package in packages
        for path in sorted((ROOT / package).rglob("*.py"))
        if path.name != "__init__.py" or has_code(path)
    ]


def has_code(path: Path) -> bool:
    body = ast.parse(path.read_text(encoding="utf-8")).body
    return any(
        not (isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant)) for each in body
    )


def like_named(module: str) -> str | None:
    """The test file of a module's name, where there is one."""
    path = Path("tests") / module
    if path.name == "__init__.py":
        own = f"test_{path.parent.name}.py"
        places = [path.with_name(own), path.parent.with_name(own)]
    else:
        places = [path.with_name(f"test_{path.stem.strip('_')}.py")]
    return next((str(each) for each in places if (ROOT / each).is_file()), None)


def lines_run(test: str) -> dict[str, float]:
    """Of each module, the share of its lines that a test file runs in its own process: this one,
    which nothing else has used.
    """
    import pytest
    from coverage import Coverage

    os.chdir(ROOT)
    sys.path[0] = str(ROOT)
    shared, name = os.environ[SHARED], test.replace("/", ".")
    command = ["-m", FEW, "--basetemp", f"{shared}/{name}", test]
    with open(f"{shared}/{name}.log", "wb") as log:
        for stream in (1, 2):
            os.dup2(log.fileno(), stream)
    measured = Coverage(data_file=f"{shared}/{name}.data", source=PACKAGES)
    measured.start()
    ended = pytest.main(command)
    measured.stop()
    if ended not in (0, 5):  # 5: nothing in it runs without what is left out
        return {}
    measured.save()
    # by another process: what a test has done to this one's stack may keep it from parsing
    report = [sys.executable, "-m", "coverage", "json", "--data-file", f"{shared}/{name}.data"]
    subprocess.run([*report, "-o", f"{shared}/{name}.json"], check=True, timeout=LIMIT_S)
    files = json.loads(Path(f"{shared}/{name}.json").read_text(encoding="utf-8"))["files"]
    return {
        path: round(each["summary"]["covered_lines"] / max(each["summary"]["num_statements"], 1), 3)
        for path, each in files.items()
    }


if __name__ == "__main__":
    sys.exit(main())
