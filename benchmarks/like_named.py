"""Share of modules whose like-named test alone runs most of their lines.

The test of agentgym/store/keys.py is tests/agentgym/store/test_keys.py; that of a package's own
code is test_<package>.py, in the package's folder or its parent. Each runs alone under coverage,
without tests that are slow or need a GPU or Ray; lines that other processes run do not count.
A test that fails runs nothing. Writes docs/results/like_named.json, which tests/test_suite.py
checks; with --only the other rows stay.
"""

from __future__ import annotations

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

from harness import RESULTS, ROOT, parser_of, read, write

OUT = RESULTS / "like_named.json"
PACKAGES = ("agentgym", "envs", "services", "tasks", "flows")
ENOUGH = 0.6  # of a module's lines
FEW = "not slow and not gpu and not ray and not vllm and not kubernetes and not real"
LIMIT_S = 1800
LIBRARIES = (
    *("torch", "transformers", "mlflow", "pandas"),
    *("matplotlib", "fastapi", "uvicorn", "boto3"),
)
SHARED = "AGENTGYM_TEST_SHARED"  # folder of logs and of files that several tests share


def main() -> int:
    parser = parser_of(__doc__)
    only = "measure only paths that contain one of these"
    parser.add_argument("--only", nargs="*", default=[""], help=only)
    parser.add_argument("--jobs", type=int, default=2)
    arguments = parser.parse_args()
    test_of_module = {path: like_named(path) for path in modules()}
    chosen_paths = {path for path in test_of_module if any(part in path for part in arguments.only)}
    tests = sorted({test for path, test in test_of_module.items() if test and path in chosen_paths})
    ran = measured(tests, arguments.jobs)

    before = {row["module"]: row for row in read(OUT, {"modules": []})["modules"]}
    rows = [
        before[path]
        if path not in chosen_paths and path in before and before[path]["test"] == test
        else {"module": path, "test": test, "share": ran.get(test, {}).get(path, 0.0)}
        for path, test in test_of_module.items()
    ]
    for row in sorted(rows, key=lambda row: row["share"]):
        sys.stdout.write(f"{row['share']:4.0%}  {row['module']}  {row['test'] or ''}\n")
    enough = sum(row["share"] >= ENOUGH for row in rows)
    share = round(enough / len(rows), 3)
    sys.stdout.write(f"{enough} of {len(rows)} modules: {share:.1%}\n")
    counts = {"enough": ENOUGH, "num_modules": len(rows), "num_enough": enough, "share": share}
    write(OUT, {**counts, "modules": rows})
    return 0


def measured(tests: Sequence[str], jobs: int) -> dict[str, dict[str, float]]:
    """Measure the lines that each test file runs, in a fork that has imported only libraries."""
    for name in LIBRARIES:
        importlib.import_module(name)
    ran: dict[str, dict[str, float]] = {}
    os.environ[SHARED] = shared = tempfile.mkdtemp(prefix="like-named-")
    context = multiprocessing.get_context("fork")
    with context.Pool(jobs, maxtasksperchild=1) as pool:
        waiting = {test: pool.apply_async(lines_run, (test,)) for test in tests}
        for test, pending_result in waiting.items():
            ran[test] = pending_result.get(LIMIT_S)
            sys.stderr.write(f"{test}{'' if ran[test] else ' FAILED: ' + shared}\n")
    return ran


def modules(packages: Sequence[str] = PACKAGES) -> list[str]:
    """Return paths of modules with code: a package with only a docstring has nothing to test."""
    return [
        str(path.relative_to(ROOT))
        for package in packages
        for path in sorted((ROOT / package).rglob("*.py"))
        if path.name != "__init__.py" or has_code(path)
    ]


def has_code(path: Path) -> bool:
    body = ast.parse(path.read_text(encoding="utf-8")).body
    return any(
        not (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant))
        for statement in body
    )


def like_named(module: str) -> str | None:
    """Return the test file that has the module's name, if it exists."""
    path = Path("tests") / module
    if path.name == "__init__.py":
        file_name = f"test_{path.parent.name}.py"
        candidates = [path.with_name(file_name), path.parent.with_name(file_name)]
    else:
        candidates = [path.with_name(f"test_{path.stem.strip('_')}.py")]
    return next((str(candidate) for candidate in candidates if (ROOT / candidate).is_file()), None)


def lines_run(test: str) -> dict[str, float]:
    """Return the share of each module's lines that a test file runs in this fresh process."""
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
    if ended not in (0, 5):  # 5: all its tests are deselected
        return {}
    measured.save()
    # in another process: the test may have left this one unable to parse files (deep stacks)
    report = [sys.executable, "-m", "coverage", "json", "--data-file", f"{shared}/{name}.data"]
    subprocess.run([*report, "-o", f"{shared}/{name}.json"], check=True, timeout=LIMIT_S)
    files = json.loads(Path(f"{shared}/{name}.json").read_text(encoding="utf-8"))["files"]
    lines = {path: report["summary"] for path, report in files.items()}
    return {
        path: round(summary["covered_lines"] / max(summary["num_statements"], 1), 3)
        for path, summary in lines.items()
    }


if __name__ == "__main__":
    sys.exit(main())
