"""How long `make quick` and `make test` take, and where the time goes.

    python benchmarks/suite.py [quick test]

Each runs as a contributor runs it, on an otherwise idle machine, but for tests/test_suite.py:
that one bounds what is written here, docs/results/suite.json, by which the tests' processes also
share the files among them. `loop_s` says how fast the machine was before and after.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import psutil
from pipeline import machine

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "docs/results/suite.json"
LIMIT_S = 3600


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("targets", nargs="*", help="quick, test; both")
    asked = parser.parse_args()
    result = json.loads(OUT.read_text(encoding="utf-8")) if OUT.exists() else {}
    result |= {"machine": machine(), "command": "python benchmarks/suite.py"}
    for target in asked.targets or ("quick", "test"):
        found = measured(target)
        sys.stdout.write(
            f"make {target}: {found['tests']} tests in {found['seconds']} s"
            f" ({found['cpu_seconds']} s of CPU)\n"
        )
        result[target] = found
    OUT.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0


def measured(target: str) -> dict[str, Any]:
    """Errors: RuntimeError where a test fails."""
    with tempfile.TemporaryDirectory() as folder:
        report, loops = Path(folder, "report.xml"), [loop_s()]
        began, before = time.monotonic(), psutil.cpu_times()
        told = subprocess.run(
            [
                *("make", "--old-file=.venv/.installed", target),
                f"ARGS=--junit-xml={report} --deselect=tests/test_suite.py",
            ],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            encoding="utf-8",
        )
        seconds, after = time.monotonic() - began, psutil.cpu_times()
        if told.returncode:
            raise RuntimeError(f"make {target}\n{(told.stdout + told.stderr)[-20_000:]}")
        loops.append(loop_s())
        files: dict[str, list[float]] = defaultdict(list)
        for case in ElementTree.parse(report).iter("testcase"):  # noqa: S314  (our own)
            files[file_of(case.attrib["classname"])].append(float(case.attrib["time"]))
    spent = (after.user + after.system) - (before.user + before.system)  # of the idle machine
    return {
        "seconds": round(seconds, 1),
        "cpu_seconds": round(spent, 1),
        "loop_s": [round(each, 2) for each in loops],
        "tests": sum(map(len, files.values())),
        "skipped": int((re.findall(r"(\d+) skipped", told.stdout) or [0])[-1]),
        "files": {
            name: {"seconds": round(sum(times), 1), "tests": len(times)}
            for name, times in sorted(files.items(), key=lambda each: -sum(each[1]))
        },
    }


def loop_s() -> float:
    """Seconds of a fixed loop of Python, the slowest of one on each core at once."""
    cores = os.cpu_count() or 1
    with ProcessPoolExecutor(cores) as pool:
        return max(pool.map(looped_s, range(cores)))


def looped_s(_core: int) -> float:
    began = time.perf_counter()
    sum(i * i for i in range(5_000_000))
    return time.perf_counter() - began


def file_of(classname: str) -> str:
    """tests.flows.test_run -> tests/flows/test_run.py; the last words may be a class."""
    words = classname.split(".")
    last = max(place for place, word in enumerate(words) if word.startswith("test_"))
    return "/".join(words[: last + 1]) + ".py"


if __name__ == "__main__":
    sys.exit(main())
