"""Unmodified runs of every kind, each audited: `python benchmarks/honest.py`.

Twenty runs at `.ci/run`'s budget (free-running, deterministic, overlapping, on Ray, on S3, killed
and resumed) and three of the default pipeline, one after the other in a copy of this repository.
If an audit fails on one of them, the audit is wrong.
It resumes after an earlier call; writes docs/results/honest.json.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from chaos_project import GONE_WITHIN_S, Project, last_line
from chaos_servers import s3_store
from harness import parser_of, read, set_words, write

BUDGET = ("evaluation.num_items=128", "horizon.stage_steps=[10,10,15]")  # as in .ci/run
KINDS: dict[str, tuple[str, ...]] = {
    "free-running": (),
    "deterministic": ("deterministic=true",),
    "overlapping": ("rollout.max_staleness=1",),
    "ray": ("compute=ray", "ray.num_workers=2", "ray.placement_timeout_s=300"),
    "s3": (),
}
# (kind, number of kills), 20 in all
PLAN = (
    ("free-running", 1),
    ("s3", 1),
    ("ray", 0),
    ("free-running", 0),
    ("overlapping", 1),
    ("free-running", 2),
    ("s3", 0),
    ("deterministic", 1),
    ("ray", 1),
    ("free-running", 3),
) * 2
COMMAND_TIMEOUT_S = 2400.0
AUDIT_TIMEOUT_S = 1200.0
NUM_DEFAULT = 3


@dataclass
class Run:
    number: int
    kind: str
    command: list[str]
    codes: list[int] = field(default_factory=list)  # exit code of each repetition of the command
    killed_at_s: list[float] = field(default_factory=list)
    wall_s: float = 0.0
    audit_s: float = 0.0
    audit_code: int = -1
    # name -> counts, or failures
    checks: dict[str, Any] = field(default_factory=dict)
    problem: str = ""

    @property
    def ok(self) -> bool:
        return self.audit_code == 0 and not self.problem


def play(project: Project, run: Run, overrides: tuple[str, ...], num_kills: int) -> None:
    """Repeat the command until it succeeds, killing it `num_kills` times; then audit."""
    rng = random.Random(f"honest {run.number}")  # noqa: S311 - no secret
    project.clear()
    began = time.monotonic()
    for attempt in range(num_kills + 2):
        log = project.scratch / f"{run.number}-{attempt}.log"
        process = project.start(("-m", "flows.pipeline", *overrides), log)
        limit_s = rng.uniform(30, 150) if attempt < num_kills else COMMAND_TIMEOUT_S
        try:
            run.codes.append(process.wait(limit_s))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            run.codes.append(process.wait())
            run.killed_at_s.append(round(limit_s, 1))
            if attempt >= num_kills:
                run.problem = f"no end within {limit_s:g} s: {last_line(log)}"
                break
            # a second command beside the first one's processes would be another test
            deadline = time.monotonic() + GONE_WITHIN_S
            while project.processes() and time.monotonic() < deadline:
                time.sleep(0.5)
        if run.codes[-1] == 0:
            break
    run.wall_s = round(time.monotonic() - began, 1)
    if run.codes[-1] != 0:
        run.problem = run.problem or f"the command ended with {run.codes}: {last_line(log)}"
        return
    began = time.monotonic()
    command = ("-m", "agentgym", "audit", "--json", *set_words(overrides))
    audit = project.completed(*command, timeout_s=AUDIT_TIMEOUT_S)
    run.audit_s, run.audit_code = round(time.monotonic() - began, 1), audit.returncode
    try:
        report = json.loads(audit.stdout)
    except ValueError:
        run.problem = f"audit ended with {audit.returncode}: {audit.stderr[-500:]}"
        return
    run.checks = {"seed": report["seed"]}
    for check in report["checks"]:
        names = ("counted", "skipped", "note", "not_checked", "failures")
        run.checks[check["name"]] = {name: check[name] for name in names if check[name]}


def main() -> int:
    parser = parser_of(__doc__, "honest.json")
    only = "only these runs, by their indices in the plan, in this order (default: all)"
    every = range(len(PLAN) + NUM_DEFAULT)
    parser.add_argument("--only", type=int, nargs="+", default=every, metavar="NUMBER", help=only)
    minutes = "start no run after so many minutes (default 240)"
    parser.add_argument("--minutes", type=float, default=240.0, help=minutes)
    parser.add_argument("--anew", action="store_true", help="ignore the results of an earlier call")
    arguments = parser.parse_args()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.default_int_handler)
    result = {"runs": []} if arguments.anew else read(arguments.out, {"runs": []})
    finished_numbers, began = {run["number"] for run in result["runs"]}, time.monotonic()
    plan = [(*planned, BUDGET) for planned in PLAN] + [("free-running", 0, ())] * NUM_DEFAULT
    with tempfile.TemporaryDirectory(prefix="honest-") as folder:
        project = Project(Path(folder), {})
        try:
            for number in arguments.only:
                kind, kills, budget = plan[number]
                if number in finished_numbers:
                    continue
                if time.monotonic() - began > 60 * arguments.minutes:
                    break
                overrides = (*budget, *KINDS[kind], f"seed={number}")
                is_s3 = kind == "s3"
                with s3_store(project) if is_s3 else contextlib.nullcontext(()) as store:
                    command = ["python", "-m", "flows.pipeline", *overrides]
                    run = Run(number, kind if budget else "default", command)
                    play(project, run, (*overrides, *store), kills)
                result["runs"].append({**asdict(run), "ok": run.ok})
                num_passed = sum(row["ok"] for row in result["runs"])
                result["passed"] = f"{num_passed} of {len(result['runs'])}"
                write(arguments.out, result)
                print(
                    f"{number} {run.kind} kills {run.killed_at_s} {run.wall_s:.0f} s, audit"
                    f" {run.audit_s:.0f} s: {run.ok} {run.problem}",
                    flush=True,
                )
        finally:
            project.close()
    return 0 if all(run["ok"] for run in result["runs"]) else 1


if __name__ == "__main__":
    sys.exit(main())
