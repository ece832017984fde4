"""Kills parts of a run at random times, from outside, and checks what is left: `python benchmarks/chaos.py`.

In a copy of this repository a tiny run is started; at a random moment one of its parts is killed, the disk is filled, or a
second learner comes; the same command is then given again until it ends. After each fault the run must be audited, no item
lost or trained twice, no point or model version doubled, nothing left running. Writes docs/results/faults.md and faults.json.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from chaos_kinds import KINDS, OURS, SHORT, Kind, Scene, Setting
from chaos_project import (
    COMMAND_TIMEOUT_S,
    GONE_WITHIN_S,
    POLL_S,
    PREPARATION,
    ROOT,
    Project,
    Reference,
    Trial,
    check_gone,
    check_result,
    last_line,
    num_versions,
)
from pipeline import machine

MAX_COMMANDS = 5  # until one must have ended well


@dataclass(frozen=True)
class Prepared:
    """State to begin with: nothing, or a copy of a preparation that went well."""

    project: Project
    copy: Path

    def make(self) -> None:
        self.project.clear()
        for name in PREPARATION:
            self.project.must("-m", "agentgym", "step", name)
        shutil.copytree(self.project.state, self.copy)

    def set_up(self, setting: Setting) -> None:
        self.project.clear()
        if setting.prepared:
            shutil.copytree(self.copy, self.project.state, dirs_exist_ok=True)


def observe(project: Project, prepared: Prepared, setting: Setting, kinds: Sequence[Kind]) -> Reference:
    """Run the setting's command undisturbed; see when each victim is alive."""
    prepared.set_up(setting)
    with setting.around(project) as overrides:
        log = project.scratch / "reference.log"
        began = time.monotonic()
        process = project.start(setting.words(overrides), log)
        seen: dict[str, list[float]] = {kind.name: [] for kind in kinds}
        while process.poll() is None:
            for kind in kinds:
                if kind.victims(project, process):
                    seen[kind.name].append(time.monotonic() - began)
            if time.monotonic() - began > COMMAND_TIMEOUT_S:
                raise RuntimeError(f"the undisturbed run does not end\n{log.read_text()[-2000:]}")
            time.sleep(POLL_S)
        wall_s = time.monotonic() - began
        if process.returncode:
            raise RuntimeError(f"the undisturbed run ended with {process.returncode}\n{log.read_text()[-2000:]}")
        spans = {name: (times[0], times[-1]) for name, times in seen.items() if times}
        return Reference(wall_s, spans, *project.lineage(overrides), num_versions(project))


def attempt(project: Project, prepared: Prepared, kind: Kind, reference: Reference, seed: int, number: int) -> Trial:
    """Start the command, do the harm at a random time while its victim is there, give the command until it ends, check."""
    trial = Trial(kind.name, number)
    chance = random.Random(f"{seed} {kind.name} {number}")  # noqa: S311 - no secret
    prepared.set_up(kind.setting)
    with kind.setting.around(project) as overrides:
        words = kind.setting.words(overrides)
        log = project.scratch / f"{kind.name}-{number}.log"
        process = project.start(words, log)
        began = time.monotonic()
        scene = Scene(project, kind.setting, process, log, chance, trial)
        first_s, last_s = reference.spans[kind.name]
        moment = began + chance.uniform(first_s, first_s + 0.9 * (last_s - first_s))  # a faster run than the one observed is hit, too
        while time.monotonic() < moment and process.poll() is None:
            time.sleep(min(POLL_S, max(0.0, moment - time.monotonic())))
        while not (victims := kind.victims(project, process)) and process.poll() is None:
            time.sleep(POLL_S)  # this run is slower than the one observed
        project.look_at_ports()
        trial.at_s, trial.phase, trial.hit = time.monotonic() - began, project.phase(), bool(victims) and process.poll() is None
        if trial.hit:
            kind.strike(scene, victims)
        struck = time.monotonic()
        trial.codes.append(ended(process, log, trial))
        scene.mend()
        if trial.hit and trial.codes[0] not in kind.codes:
            trial.failures.setdefault("command", []).append(f"it ended with {trial.codes[0]}, expected {kind.codes}: {last_line(log)}")
        if trial.codes[0] == 1 and kind.setting.command[1] in OURS and not last_line(log).startswith("failed: "):
            trial.failures.setdefault("command", []).append(f"it did not say in a line what failed: {last_line(log)!r}")
        check_gone(project, trial, keep=kind.setting.stays)
        while trial.codes[-1] != 0 and len(trial.codes) < MAX_COMMANDS:
            again = log.with_suffix(f".{len(trial.codes)}.log")
            process = project.start(words, again)
            trial.codes.append(ended(process, again, trial))
            if trial.codes[-1]:
                trial.notes.append(f"{trial.codes[-1]}: {last_line(again)}")
        trial.recovery_s = time.monotonic() - struck
        trial.failures["ended"] = [] if trial.codes[-1] == 0 else [f"not after {len(trial.codes)} commands: {trial.codes}; {trial.notes}"]
        check_gone(project, trial, keep=kind.setting.stays)
        check_result(project, overrides, reference, trial)
    check_gone(project, trial, keep="")
    return trial


def ended(process: subprocess.Popen[bytes], log: Path, trial: Trial) -> int:
    """Its exit code; a command that does not end is itself a failure, and is killed."""
    try:
        return process.wait(COMMAND_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        trial.failures.setdefault("command", []).append(f"it did not end within {COMMAND_TIMEOUT_S:g} s: {last_line(log)}")
        os.killpg(process.pid, signal.SIGKILL)
        return process.wait()


def to_markdown(result: dict[str, Any]) -> str:
    """The table people read, from what faults.json holds."""
    trials = [Trial(**trial) for trial in result["trials"]]
    hits = [trial for trial in trials if trial.hit]
    struck = sorted({trial.kind for trial in hits})
    lines = [
        "# Faults",
        "",
        f"{len(hits)} faults of {len(struck)} kinds; {sum(trial.ok for trial in hits)} of them left a run that passes every check below. "
        f"Made by `{result['command']}` on {result['machine']['cores']} cores of {', '.join(result['machine']['cpu'])} "
        f"({result['wall_s'] / 60:.0f} minutes); every trial is in `faults.json`.",
        "",
        "Each fault comes from outside, at a random time at which its victim is alive in an undisturbed run. Then the same command is",
        "given again until it ends.",
        "",
        "| fault | hits | where | commands until done, most | recovery s, longest | passed |",
        "|---|---|---|---|---|---|",
    ]
    for name, what in result["kinds"].items():
        own = [trial for trial in hits if trial.kind == name]
        if name in result["not_run"]:
            lines.append(f"| {what} | not run: {result['not_run'][name]} | | | | |")
        elif own:
            places = Counter(trial.phase.partition(",")[0] for trial in own)
            where = ", ".join(f"{place} {count}" if count > 1 else place for place, count in places.items())
            most, longest = max(len(trial.codes) for trial in own), max(trial.recovery_s for trial in own)
            lines.append(f"| {what} | {len(own)} | {where} | {most} | {longest:.0f} | {sum(trial.ok for trial in own)} of {len(own)} |")
        else:
            lines.append(f"| {what} | 0 | | | | |")
    lines += [
        "",
        "Checked after each: the command ended as it says (exit code, error line); in the end exit code 0; `agentgym audit` passes;",
        "every step is done; the items trained on, in order, are those of an undisturbed run; each (metric, step) once per MLflow run;",
        f"one model version per checkpoint; no process left {GONE_WITHIN_S:g} s later; no port answers; no temporary file left over.",
    ]
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
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), help="default: all")
    parser.add_argument("--kills", type=int, default=32, help="faults that hit, over all kinds (default 32)")
    parser.add_argument("--seed", type=int, default=0, help="of the random times")
    parser.add_argument("--short", action="store_true", help=f"one fault each of {', '.join(SHORT)}")
    parser.add_argument("--out", type=Path, default=ROOT / "docs/results/faults.md", help="report; the figures lie beside it as .json")
    arguments = parser.parse_args()
    names = arguments.kinds or (list(SHORT) if arguments.short else list(KINDS))
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    result = run([KINDS[name] for name in names], len(names) if arguments.short else arguments.kills, arguments.seed, arguments.out)
    print(to_markdown(result))
    hit = {trial["kind"] for trial in result["trials"] if trial["hit"]}
    return 0 if hit == result["kinds"].keys() - result["not_run"].keys() and all(Trial(**trial).ok for trial in result["trials"]) else 1


def run(kinds: Sequence[Kind], kills: int, seed: int, out: Path) -> dict[str, Any]:
    """All trials; the report is written after each, so that an interrupted run has one."""
    began = time.monotonic()
    not_run = {kind.name: reason for kind in kinds if (reason := kind.setting.missing())}
    kinds = [kind for kind in kinds if kind.name not in not_run]
    result: dict[str, Any] = {
        "machine": machine(),
        "command": " ".join(["python", *sys.argv]),
        "seed": seed,
        "kinds": {name: kind.what for name, kind in KINDS.items() if kind in kinds or name in not_run},
        "not_run": not_run,
        "references": {},
        "trials": [],
    }
    with tempfile.TemporaryDirectory(prefix="agentgym-chaos-") as folder:
        project = Project(Path(folder))
        prepared = Prepared(project, Path(folder) / "prepared")
        try:
            if any(kind.setting.prepared for kind in kinds):
                prepared.make()
            references: dict[Setting, Reference] = {}
            wanted = {kind.name: kills // len(kinds) + (index < kills % len(kinds)) for index, kind in enumerate(kinds)}
            for number in range(4 * max(wanted.values(), default=0)):  # not every fault hits
                for kind in kinds:
                    if sum(trial["hit"] for trial in result["trials"] if trial["kind"] == kind.name) >= wanted[kind.name]:
                        continue
                    try:
                        if kind.setting not in references:
                            same = [other for other in kinds if other.setting == kind.setting]
                            references[kind.setting] = observe(project, prepared, kind.setting, same)
                            result["references"][", ".join(other.name for other in same)] = asdict(references[kind.setting])
                        trial = attempt(project, prepared, kind, references[kind.setting], seed, number)
                    except (RuntimeError, OSError, KeyError, subprocess.SubprocessError) as error:  # the others still count
                        project.end()
                        trial = Trial(kind.name, number, failures={"ended": [f"{type(error).__name__}: {error}"[-1000:]]})
                    print(f"{time.monotonic() - began:6.0f} s  {kind.what}: {'ok' if trial.ok else 'FAILED'} {asdict(trial)}", flush=True)
                    result["trials"].append(asdict(trial))
                    result["wall_s"] = time.monotonic() - began
                    out.parent.mkdir(parents=True, exist_ok=True)
                    out.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
                    out.write_text(to_markdown(result))
        finally:
            project.end()
    return result


if __name__ == "__main__":
    sys.exit(main())
