"""Compare the pinned versions with published advisories, through pip-audit.

An advisory that SECURITY.md answers, by its number, is known; any other fails. Components that the
service did not look at, all of them where it cannot be reached, are told and fail nothing: nobody's
work waits for another's server.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

ANSWERS = Path(__file__).parents[1] / "SECURITY.md"
NUMBER = re.compile(r"\b(?:CVE-\d{4}-\d+|GHSA(?:-[a-z0-9]{4}){3}|PYSEC-\d{4}-\d+)\b")
UNREACHABLE = re.compile(r"ConnectionError|ServiceError|Timeout|NameResolution|Max retries")
PIN = re.compile(r"^[A-Za-z0-9._-]+==[^\s;]+", re.MULTILINE)
TIMEOUT_S = 1800.0


class Advisory(NamedTuple):
    """One of a pinned component."""

    component: str  # name and version
    numbers: tuple[str, ...]
    fixed_in: tuple[str, ...]

    def __str__(self) -> str:
        fix = f"fixed in {', '.join(self.fixed_in)}" if self.fixed_in else "no version fixes it"
        return f"{self.component}: {' '.join(self.numbers)}, {fix}"


def pip_audit(pins: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Ask for these `name==version`."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt", encoding="utf-8") as file:
        file.write("\n".join(pins))
        file.flush()
        words = ("--format=json", "--progress-spinner=off", "--disable-pip", "--no-deps")
        return subprocess.run(
            [sys.executable, "-m", "pip_audit", *words, f"--requirement={file.name}"],
            capture_output=True,
            text=True,
            check=False,
            timeout=TIMEOUT_S,
            encoding="utf-8",
        )


def read(output: str) -> tuple[list[Advisory], list[str]]:
    """(advisories, a line for each component that was not looked at) of pip-audit's JSON.
    Errors: ValueError.
    """
    dependencies: list[Any] = json.loads(output)["dependencies"]
    return [
        Advisory(
            f"{each['name']} {each['version']}",
            tuple(dict.fromkeys((found["id"], *found["aliases"]))),
            tuple(found["fix_versions"]),
        )
        for each in dependencies
        for found in each.get("vulns", ())
    ], [each["skip_reason"] for each in dependencies if "skip_reason" in each]


def judge(pins: Sequence[str], done: subprocess.CompletedProcess[str], answers: str) -> int:
    """Say what came of it. answers: the text that names the known ones.
    Result: 1 for an advisory nobody has answered, 2 where pip-audit failed for another reason.
    """
    try:
        advisories, skipped = read(done.stdout)
    except (ValueError, KeyError):
        reason = done.stderr.strip().rpartition("\n")[2]
        if not UNREACHABLE.search(done.stderr):
            print(f"pip-audit failed: {reason or f'exit code {done.returncode}'}", file=sys.stderr)
            return 2
        advisories, skipped = [], [f"the service cannot be reached: {reason}"] * len(pins)
    answered = set(NUMBER.findall(answers))
    new = [each for each in advisories if not answered & set(each.numbers)]
    for each in advisories:
        print(f"{'NEW' if each in new else 'known'}  {each}")
    print(
        f"{len(pins)} pinned components: {len(pins) - len(skipped)} looked at, {len(advisories)}"
        f" advisories, {len(new)} of them not in {ANSWERS.name}"
    )
    if skipped:
        print(f"NOT CHECKED: {len(skipped)} components, for example: {skipped[0]}")
    return 1 if new else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("lock", type=Path, help="a file of name==version lines")
    pins = PIN.findall(parser.parse_args().lock.read_text(encoding="utf-8"))
    return judge(pins, pip_audit(pins), ANSWERS.read_text(encoding="utf-8"))


if __name__ == "__main__":
    sys.exit(main())
