"""Kill parts of a run at random times, from outside, and check the result.

In copies of this repository, two at a time, a tiny run is started. At a random moment one of its
parts is killed, the disk is filled, or a second learner starts; then the same command is repeated
until it succeeds.
After each fault the run must pass its audit, no item may be lost or trained twice, no point or
model version doubled, and no process left running.
Writes docs/results/faults.md and faults.json.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil
from chaos_cluster import KINDS as ON_CLUSTER
from chaos_kinds import KINDS as HERE
from chaos_kinds import OURS, RAY_GONE_WITHIN_S, SHORT, Kind, Scene, Setting
from chaos_project import (
    COMMAND_TIMEOUT_S,
    GONE_WITHIN_S,
    PREPARATION,
    Project,
    Reference,
    Trial,
    check_gone,
    check_result,
    failure,
    last_line,
    num_versions,
)
from harness import POLL_S, origin, parser_of, read, table

KINDS = HERE | ON_CLUSTER
FAILED = (RuntimeError, OSError, KeyError, subprocess.SubprocessError, psutil.Error)
MAX_COMMANDS = 5  # repetitions; one of them must succeed
WATCH_S = 0.25  # poll interval of an undisturbed run
TRIES = 8  # for each fault that must hit
TOO_LATE_S = 2.0  # a command that succeeds so soon after the fault had ended before it


INTRODUCTION = (
    "Each fault comes from outside, at a random time at which its victim is alive in an"
    " undisturbed run. Then the same command is",
    "given again until it ends.",
    "",
)
TITLES = ("fault", "hits", "where", "commands until done, most", "recovery s, longest", "passed")
CHECKED = (
    "",
    "Checked after each: the command ended as it says (exit code, error line); in the end"
    " exit code 0; `agentgym audit` passes;",
    "every step is done; the items trained on, in order, are those of an undisturbed run;"
    " each (metric, step) once per MLflow run;",
    f"one model version per checkpoint; no process left {GONE_WITHIN_S:g} s later"
    f" ({RAY_GONE_WITHIN_S:g} s where a Ray cluster of the run's own was killed, too: its"
    " agents try for a minute to tell it); no port answers; no temporary file is left.",
)


def set_up(project: Project, setting: Setting) -> None:
    """Start with an empty state, or with a copy of a successful preparation, made once."""
    prepared = project.folder.parent / "prepared"
    project.clear()
    if setting.prepared and not prepared.exists():
        project.must("-m", "agentgym", "step", PREPARATION, "--with-parents")
        shutil.copytree(project.state, prepared)
    elif setting.prepared:
        shutil.copytree(prepared, project.state, dirs_exist_ok=True)


def observe(project: Project, setting: Setting, kinds: Sequence[Kind]) -> Reference:
    """Run the setting's command undisturbed; record when each victim is alive."""
    set_up(project, setting)
    with setting.around(project) as overrides:
        log = project.scratch / "reference.log"
        began = time.monotonic()
        process = project.start(setting.words(overrides), log)
        times_alive: dict[str, list[float]] = {kind.name: [] for kind in kinds}
        while process.poll() is None:
            for kind in kinds:
                if kind.victims(project, process):
                    times_alive[kind.name].append(time.monotonic() - began)
            if time.monotonic() - began > COMMAND_TIMEOUT_S:
                break
            time.sleep(WATCH_S)
        wall_s = time.monotonic() - began
        if process.returncode != 0:  # None: it does not end
            end = log.read_text(encoding="utf-8")[-2000:]
            raise RuntimeError(f"the undisturbed run ended with {process.returncode}\n{end}")
        alive_s = {name: times[-1] - times[0] for name, times in times_alive.items() if times}
        return Reference(wall_s, alive_s, *project.lineage(overrides), num_versions(project))


def attempt(project: Project, kind: Kind, reference: Reference, seed: int, number: int) -> Trial:
    """Inject the fault at a random time, repeat the command until it succeeds, check the result."""
    trial = Trial(kind.name, number)
    rng = random.Random(f"{seed} {kind.name} {number}")  # noqa: S311 - no secret
    set_up(project, kind.setting)
    with kind.setting.around(project) as overrides:
        words = kind.setting.words(overrides)
        log = project.scratch / f"{kind.name}-{number}.log"
        process = project.start(words, log)
        began = time.monotonic()
        scene = Scene(project, kind.setting, process, log, rng, trial)
        # the time counts from the victim's start: no two runs are equally fast
        while not kind.victims(project, process) and process.poll() is None:
            time.sleep(POLL_S)
        # 0.9: this run may be faster than the one observed
        moment = time.monotonic() + rng.uniform(0, 0.9 * reference.alive_s[kind.name])
        while time.monotonic() < moment and process.poll() is None:
            time.sleep(POLL_S)
        project.look_at_ports()
        while not (victims := kind.victims(project, process)) and process.poll() is None:
            time.sleep(POLL_S)  # this run is slower than the one observed
            project.look_at_ports()
        trial.at_s, trial.phase = time.monotonic() - began, project.phase()
        trial.hit = bool(victims) and process.poll() is None
        if trial.hit:
            kind.strike(scene, victims)
        struck = time.monotonic()
        trial.codes.append(ended(process, log, trial))
        scene.mend()
        if trial.codes[0] > 0:
            trial.notes.append(f"{trial.codes[0]}: {failure(log) or last_line(log)}")
        if trial.codes[0] == 0 and 0 not in kind.codes and time.monotonic() - struck < TOO_LATE_S:
            trial.hit = False  # it had just ended
        if trial.hit and trial.codes[0] not in kind.codes:
            wrong = f"it ended with {trial.codes[0]}, expected {kind.codes}: {last_line(log)}"
            trial.fail("command", wrong)
        if trial.codes[0] == 1 and kind.setting.command[1] in OURS and not failure(log):
            trial.fail("command", f"it did not say in a line what failed: {last_line(log)!r}")
        check_gone(project, trial, kind.setting.stays, kind.setting.gone_within_s)
        while trial.codes[-1] != 0 and len(trial.codes) < MAX_COMMANDS:
            again = log.with_suffix(f".{len(trial.codes)}.log")
            process = project.start(words, again)
            trial.codes.append(ended(process, again, trial))
            if trial.codes[-1]:
                trial.notes.append(f"{trial.codes[-1]}: {failure(again) or last_line(again)}")
        trial.recovery_s = time.monotonic() - struck
        no_end = f"not after {len(trial.codes)} commands: {trial.codes}; {trial.notes}"
        trial.fail("ended", *([no_end] if trial.codes[-1] else []))
        check_gone(project, trial, kind.setting.stays, kind.setting.gone_within_s)
        check_result(project, overrides, reference, trial)
    check_gone(project, trial, keep="")
    return trial


def ended(process: subprocess.Popen[bytes], log: Path, trial: Trial) -> int:
    """Return the exit code. Kill a command that does not end, and record it as a failure."""
    try:
        return process.wait(COMMAND_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        trial.fail("command", f"it did not end within {COMMAND_TIMEOUT_S:g} s: {last_line(log)}")
        os.killpg(process.pid, signal.SIGKILL)
        return process.wait()


def to_markdown(result: dict[str, Any]) -> str:
    trials = [Trial(**trial) for trial in result["trials"]]
    hits = [trial for trial in trials if trial.hit]
    head = (
        f"{len(hits)} faults of {len({trial.kind for trial in hits})} kinds;"
        f" {sum(trial.ok for trial in hits)} of them"
        f" left a run that passes every check below. Made by `{result['command']}` on"
        f" {result['machine']['cores']} cores of {', '.join(result['machine']['cpu'])}"
        f" ({result['wall_s'] / 60:.0f} minutes); every trial is in `faults.json`."
    )
    rows: list[tuple[Any, ...]] = []
    for name, what in result["kinds"].items():
        kind_hits = [trial for trial in hits if trial.kind == name]
        if name in result["not_run"]:
            rows.append((what, f"not run: {result['not_run'][name]}", "", "", "", ""))
        elif kind_hits:
            places = Counter(trial.phase.partition(",")[0] for trial in kind_hits)
            where = (f"{phase} {num}" if num > 1 else phase for phase, num in places.items())
            max_commands = max(len(trial.codes) for trial in kind_hits)
            longest = max(trial.recovery_s for trial in kind_hits)
            passed = f"{sum(trial.ok for trial in kind_hits)} of {len(kind_hits)}"
            num_hits = len(kind_hits)
            rows.append((what, num_hits, ", ".join(where), max_commands, f"{longest:.0f}", passed))
        else:
            rows.append((what, 0, "", "", "", ""))
    lines = ["# Faults", "", head, "", *INTRODUCTION, *table(TITLES, rows), *CHECKED]
    refusals = [note for trial in hits if trial.kind == "two-learners" for note in trial.notes[:1]]
    if refusals:
        lines += ["", "The second learner on a stage is refused:", "", f"    {refusals[0]}"]
    failed = [trial for trial in trials if not trial.ok]
    if failed:
        lines += ["", "## What failed", ""]
        lines += [
            f"- {trial.kind} {trial.number}, {trial.phase}: {check}: {failure}"
            for trial in failed
            for check, failures in trial.failures.items()
            for failure in failures[:3]
        ]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = parser_of(__doc__, "faults.md")
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), help="default: all")
    parser.add_argument("--kills", type=int, default=32, help="faults that hit, over all kinds")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random times")
    parser.add_argument(
        "--short", action="store_true", help=f"one fault each of {', '.join(SHORT)}"
    )
    again = "put these kinds' faults in place of those of an earlier report"
    parser.add_argument("--again", action="store_true", help=again)
    at_a_time = "trials at a time, each in a copy of its own"
    parser.add_argument("--parallel", type=int, default=2, help=at_a_time)
    arguments = parser.parse_args()
    names = arguments.kinds or list(SHORT if arguments.short else KINDS)
    # a shell's background job ignores SIGINT, and its child processes would inherit that
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.default_int_handler)
    kills = len(names) if arguments.short else arguments.kills
    earlier = read(arguments.out.with_suffix(".json")) if arguments.again else None
    kinds = [KINDS[name] for name in names]
    result = run(kinds, kills, arguments.seed, arguments.out, arguments.parallel, earlier)
    print(to_markdown(result))
    trials = [Trial(**trial) for trial in result["trials"]]
    num_hits = sum(trial.hit and trial.kind in names for trial in trials)
    return 0 if num_hits == kills and all(trial.ok for trial in trials) else 1


def save(out: Path, result: dict[str, Any]) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    figures = json.dumps(result, indent=1) + "\n"
    out.with_suffix(".json").write_text(figures, encoding="utf-8")
    out.write_text(to_markdown(result), encoding="utf-8")


def begun(kinds: Sequence[Kind], earlier: dict[str, Any] | None, **facts: Any) -> dict[str, Any]:
    """Return a report without trials of these kinds: a new one, or with all else of an earlier."""
    result: dict[str, Any] = {
        **origin(),
        **facts,
        "wall_s": 0.0,
        "kinds": {name: kind.what for name, kind in KINDS.items() if kind in kinds},
        "not_run": {kind.name: reason for kind in kinds if (reason := kind.setting.missing())},
        "references": {},
        "trials": [],
    }
    if not earlier:
        return result
    names = [kind.name for kind in kinds]
    cpu = [*earlier["machine"]["cpu"], *result["machine"]["cpu"]]
    return {
        **earlier,
        **{key: {**earlier[key], **result[key]} for key in ("kinds", "not_run", "references")},
        "machine": {**earlier["machine"], "cpu": list(dict.fromkeys(cpu))},
        "command": f"{earlier['command']}`, then `{result['command']}",
        "trials": [trial for trial in earlier["trials"] if trial["kind"] not in names],
    }


@dataclass
class Campaign:
    """Trials of a call. Each lane, a project, takes all kinds of one setting at a time."""

    wanted: dict[Kind, int]  # kind -> faults that must hit
    seed: int
    out: Path
    result: dict[str, Any]
    stopped: bool = False
    began: float = field(default_factory=time.monotonic)
    lock: threading.Lock = field(default_factory=threading.Lock)
    ray: threading.Lock = field(default_factory=threading.Lock)  # one Ray cluster fits in memory
    lanes: queue.SimpleQueue[Project] = field(default_factory=queue.SimpleQueue)

    def __post_init__(self) -> None:
        self.before_s = self.result["wall_s"]

    def run(self, setting: Setting) -> None:
        """Run the trials of all kinds of a setting, in a free lane."""
        kinds = [kind for kind in self.wanted if kind.setting == setting]
        with self.ray if setting.is_ray else contextlib.nullcontext():
            lane, reference = self.lanes.get(), None
            for kind in kinds:
                for number in self.numbers(kind):
                    try:
                        if reference is None:
                            reference = observe(lane, setting, kinds)
                            names = ", ".join(other.name for other in kinds)
                            self.result["references"][names] = asdict(reference)
                        trial = attempt(lane, kind, reference, self.seed, number)
                        if not trial.hit:
                            reference = reference.faster(trial.at_s)
                    except FAILED as error:  # the other trials still count
                        lane.end()
                        why = f"{type(error).__name__}: {error}"[-1000:]
                        trial = Trial(kind.name, number, failures={"ended": [why]})
                    self.note(lane, kind, trial)
            self.lanes.put(lane)

    def numbers(self, kind: Kind) -> Iterator[int]:
        """Yield the numbers of a kind's trials until enough have hit their victim: up to TRIES
        for each.
        """
        for number in range(TRIES * self.wanted[kind]):
            trials = [trial for trial in self.result["trials"] if trial["kind"] == kind.name]
            if self.stopped or sum(trial["hit"] for trial in trials) == self.wanted[kind]:
                return
            yield number

    def note(self, lane: Project, kind: Kind, trial: Trial) -> None:
        """Record the trial in the report; copy the logs of a failed one next to it."""
        with self.lock:
            if self.stopped:
                return
            now = time.monotonic() - self.began
            verdict = "ok" if trial.ok else "FAILED"
            print(f"{now:6.0f} s  {kind.what}: {verdict} {asdict(trial)}", flush=True)
            self.result["trials"].append(asdict(trial))
            self.result["wall_s"] = self.before_s + now
            save(self.out, self.result)
        if not trial.ok:
            folder = self.out.with_suffix("") / f"{trial.kind}-{trial.number}"
            folder.mkdir(parents=True, exist_ok=True)
            for log in [*lane.scratch.glob("*.log"), *lane.state.glob("logs/*.log")]:
                shutil.copy(log, folder)


def run(
    kinds: Sequence[Kind],
    kills: int,
    seed: int,
    out: Path,
    parallel: int,
    earlier: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Run all trials. The report is written after each, so that an interrupted run has one."""
    result = begun(kinds, earlier, seed=seed, parallel=parallel)
    kinds = [kind for kind in kinds if kind.name not in result["not_run"]]
    shares = [kills // len(kinds) + (i < kills % len(kinds)) for i in range(len(kinds))]
    campaign = Campaign(dict(zip(kinds, shares, strict=True)), seed, out, result)
    settings = dict.fromkeys(kind.setting for kind in kinds)
    with tempfile.TemporaryDirectory(
        prefix="agentgym-chaos-", ignore_cleanup_errors=True
    ) as folder:
        lanes: list[Project] = []
        with ThreadPoolExecutor(len(settings) or 1) as pool:
            try:
                for number in range(min(parallel, len(settings))):
                    (Path(folder) / str(number)).mkdir()
                    lanes.append(Project(Path(folder) / str(number)))
                    campaign.lanes.put(lanes[-1])
                for work in as_completed([pool.submit(campaign.run, one) for one in settings]):
                    work.result()
            finally:
                campaign.stopped = True  # no other trial starts, and running processes are killed
                for lane in lanes:
                    lane.close()
    return result


if __name__ == "__main__":
    sys.exit(main())
