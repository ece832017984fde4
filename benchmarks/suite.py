"""Duration of `make quick` and `make test`, and of each test file.

Each runs as for a contributor, on an otherwise idle machine. Writes docs/results/suite.json, which
tests/test_suite.py checks. `loop_s` measures the machine's speed before and after.
"""

from __future__ import annotations

import os
import re
import statistics
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import psutil
from harness import RESULTS, ROOT, output_of, parser_of, read, write

OUT = RESULTS / "suite.json"
LIMIT_S = 3600


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("targets", nargs="*", help="quick, test; both")
    arguments = parser.parse_args()
    result = read(OUT, {})
    for target in arguments.targets or ("quick", "test"):
        measurement = measured(target)
        took = f"{measurement['seconds']} s ({measurement['cpu_seconds']} s of CPU)"
        print(f"make {target}: {measurement['tests']} tests in {took}")
        result[target] = measurement
    write(OUT, result)
    return 0


def measured(target: str) -> dict[str, Any]:
    """Run the target and measure it. Errors: RuntimeError if a test fails."""
    with tempfile.TemporaryDirectory() as folder:
        report, loops = Path(folder, "report.xml"), [loop_s()]
        began, before = time.monotonic(), psutil.cpu_times()
        arguments = f"ARGS=--junit-xml={report} --deselect=tests/test_suite.py"
        command = ["make", "--old-file=.venv/.installed", target, arguments]
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        printed = output_of(command, env=env, timeout_s=LIMIT_S)
        seconds, after = time.monotonic() - began, psutil.cpu_times()
        loops.append(loop_s())
        files: dict[str, list[float]] = defaultdict(list)
        for case in ElementTree.parse(report).iter("testcase"):  # noqa: S314  (our own report)
            files[file_of(case.attrib["classname"])].append(float(case.attrib["time"]))
    # of the whole machine, which is otherwise idle
    spent = (after.user + after.system) - (before.user + before.system)
    longest_first = sorted(files.items(), key=lambda times_of_file: -sum(times_of_file[1]))
    return {
        "seconds": round(seconds, 1),
        "cpu_seconds": round(spent, 1),
        "loop_s": [round(elapsed_s, 2) for elapsed_s in loops],
        "tests": sum(map(len, files.values())),
        "skipped": int((re.findall(r"(\d+) skipped", printed) or [0])[-1]),
        "files": {
            name: {"seconds": round(sum(times), 1), "tests": len(times)}
            for name, times in longest_first
        },
    }


def loop_s() -> float:
    """Return the seconds of a fixed Python loop on all cores at once; the slowest core's."""
    cores = os.cpu_count() or 1
    with ProcessPoolExecutor(cores) as pool:
        return max(pool.map(looped_s, range(cores)))


def looped_s(_core: int) -> float:
    def once() -> float:
        began = time.perf_counter()
        sum(i * i for i in range(5_000_000))
        return time.perf_counter() - began

    return statistics.median(once() for _ in range(9))  # a single one varies by a third


def file_of(classname: str) -> str:
    """Convert tests.flows.test_common to its path; the last words may name a class."""
    words = classname.split(".")
    last = max(index for index, word in enumerate(words) if word.startswith("test_"))
    return "/".join(words[: last + 1]) + ".py"


if __name__ == "__main__":
    sys.exit(main())
