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
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from pipeline import machine

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "docs/results/like_named.json"
PACKAGES = ("agentgym", "envs", "services", "tasks", "flows")
ENOUGH = 0.6  # of a module's lines
FEW = "not slow and not gpu and not ray"
LIMIT_S = 1200


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", default="", help="measure modules whose path holds this anew")
    parser.add_argument("--jobs", type=int, default=2)
    asked = parser.parse_args()
    found = {path: like_named(path) for path in modules()}
    tests = sorted({test for path, test in found.items() if test and asked.only in path})
    with ThreadPoolExecutor(asked.jobs) as pool:
        ran = dict(zip(tests, pool.map(lines_run, tests), strict=True))
    before = {row["module"]: row for row in known()}
    rows = [
        before[path]
        if asked.only not in path and path in before and before[path]["test"] == test
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
    OUT.write_text(json.dumps(result, indent=1) + "\n")
    return 0


def known() -> list[dict[str, Any]]:
    """What was measured last."""
    rows: list[dict[str, Any]] = json.loads(OUT.read_text())["modules"] if OUT.exists() else []
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
    body = ast.parse(path.read_text()).body
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
    """Of each module, the share of its lines that a test file runs in its own process."""
    with tempfile.TemporaryDirectory() as folder:
        data = f"--data-file={folder}/data"
        command = [sys.executable, "-m", "coverage", "run", data]
        command += [f"--source={','.join(PACKAGES)}", "-m", "pytest", "-m", FEW, test]
        told = subprocess.run(
            command,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
        if told.returncode not in (0, 5):  # 5: nothing in it runs without what is left out
            sys.stderr.write(f"{test} failed\n{(told.stdout + told.stderr)[-3000:]}\n")
            return {}
        sys.stderr.write(f"{test}\n")
        report = [sys.executable, "-m", "coverage", "json", data, "--quiet", "-o"]
        subprocess.run([*report, f"{folder}/json"], cwd=ROOT, check=True, timeout=LIMIT_S)
        files = json.loads(Path(folder, "json").read_text())["files"]
    return {
        path: round(each["summary"]["covered_lines"] / max(each["summary"]["num_statements"], 1), 3)
        for path, each in files.items()
    }


if __name__ == "__main__":
    sys.exit(main())
