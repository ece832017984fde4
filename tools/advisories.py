"""Compare the pinned versions with published advisories, through pip-audit.

An advisory whose number SECURITY.md mentions is known; any other fails. Components that the service
did not check (all of them if it is unreachable) are reported and fail nothing: no build waits for
another party's server.
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
    """A published advisory about a pinned component."""

    component: str  # name and version
    numbers: tuple[str, ...]
    fixed_in: tuple[str, ...]

    def __str__(self) -> str:
        fix = f"fixed in {', '.join(self.fixed_in)}" if self.fixed_in else "no version fixes it"
        return f"{self.component}: {' '.join(self.numbers)}, {fix}"


def pip_audit(pins: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run pip-audit on these `name==version` pins."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt", encoding="utf-8") as file:
        file.write("\n".join(pins))
        file.flush()
        words = ("--format=json", "--progress-spinner=off", "--disable-pip", "--no-deps")
        return subprocess.run(
            [sys.executable, "-m", "pip_audit", *words, f"--requirement={file.name}"],
            capture_output=True,
            check=False,
            timeout=TIMEOUT_S,
            encoding="utf-8",
        )


def read(output: str) -> tuple[list[Advisory], list[str]]:
    """Parse pip-audit's JSON.
    Result: (advisories, a line for each component that was not checked). Errors: ValueError.
    """
    dependencies: list[Any] = json.loads(output)["dependencies"]
    return [
        Advisory(
            f"{dependency['name']} {dependency['version']}",
            tuple(dict.fromkeys((vulnerability["id"], *vulnerability["aliases"]))),
            tuple(vulnerability["fix_versions"]),
        )
        for dependency in dependencies
        for vulnerability in dependency.get("vulns", ())
    ], [skipped["skip_reason"] for skipped in dependencies if "skip_reason" in skipped]


def judge(pins: Sequence[str], completed: subprocess.CompletedProcess[str], answers: str) -> int:
    """Print the advisories and a summary. answers: the text that names the known ones.
    Result: 1 for an advisory that `answers` does not name, 2 if pip-audit failed for a reason other
    than the network, else 0.
    """
    try:
        advisories, skipped = read(completed.stdout)
    except (ValueError, KeyError):
        reason = completed.stderr.strip().rpartition("\n")[2]
        if not UNREACHABLE.search(completed.stderr):
            reason = reason or f"exit code {completed.returncode}"
            print(f"pip-audit failed: {reason}", file=sys.stderr)
            return 2
        advisories, skipped = [], [f"the service cannot be reached: {reason}"] * len(pins)
    answered = set(NUMBER.findall(answers))
    new = [advisory for advisory in advisories if not answered & set(advisory.numbers)]
    for advisory in advisories:
        print(f"{'NEW' if advisory in new else 'known'}  {advisory}")
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
