"""The command line of a flow: check everything, run it, print the results."""

from __future__ import annotations

import argparse
import contextlib
import logging
import sys
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from prefect.logging.handlers import PrefectConsoleHandler
from rich.console import Console
from rich.table import Table

from agentgym.config import RunConfig, load_config
from agentgym.console.doctor import reference_s
from agentgym.console.ending import guarded, say
from agentgym.console.progress import PlainConsole
from agentgym.data.check import load_data, load_recorded
from agentgym.deploy.kubernetes import check_fleets
from agentgym.deploy.local import check_local_env
from agentgym.evaluation.history import sentence
from agentgym.evaluation.intervals import FAILED, Interval
from agentgym.pages import label
from agentgym.pipeline.forecast import forecast
from agentgym.pipeline.plan import check_model
from agentgym.pipeline.run import confirm, export_report
from agentgym.pipeline.stored_config import how_to_find, keep_run
from agentgym.pipeline.table import finished, open_store, run_label, steps_of
from agentgym.private import private_state
from agentgym.rollouts.policies.engines import check_engine
from agentgym.rollouts.pools import check_env_servers
from agentgym.steps.step import Kind, Step
from agentgym.store.manifest import Manifest
from agentgym.store.posix import full_disk_told
from agentgym.tracking.deliver import committed_alarms
from agentgym.tracking.reaching import check_server
from envs.plain import PlainFormatter
from flows.common import Wanted, add_run, check_parents, run_of
from services.prefect_server import prefect_api
from tasks.artifacts import mlflow_server
from tasks.dataset import dataset_pointer
from tasks.retries import FINAL

OURS = ("agentgym", "services", "tasks")  # packages with warnings on the terminal


def main(module: str, flow: Any, wanted: Wanted, argv: list[str] | None = None) -> int:
    """Run the command line `python -m MODULE` of a flow of the wanted steps. Exit code: 0 done,
    1 failed, 2 bad input (nothing was started), 130 interrupted (state is resumable).
    """
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=flow.description)
    add_run(parser)
    arguments = parser.parse_args(argv)
    return guarded(lambda: _run(flow, wanted, arguments, PlainConsole()))


def _run(flow: Any, wanted: Wanted, arguments: argparse.Namespace, console: Console) -> int:
    params, overrides = arguments.params, arguments.overrides
    cfg = load_config(params, overrides)
    private_state(cfg.state_dir)
    table = steps_of(cfg)
    names = [name for name, step in table.items() if wanted(step)]
    num_done, num_steps = len(_done(cfg, wanted)), len(names)
    pace_s = None
    title = f"[bold]{flow.name}[/bold]"
    if num_done < num_steps:
        done_so_far = f"{num_done} of {num_steps} steps are done"
        console.print(f"{title}: {done_so_far}; starting Prefect", highlight=False)
        pace_s = reference_s()
        console.print(f"reference work takes this machine {pace_s:.1f} s", highlight=False)
        if cfg.model.source == "hub":
            cost = forecast(cfg)
            console.print(f"the whole run takes {cost.duration} ({cost.speed})", highlight=False)
        with prefect_running(cfg.state_dir, console):
            flow(run_of(arguments))
    done = _confirmed(cfg, wanted)
    if num_done == num_steps:
        console.print(f"{title}: all {num_done} steps are done and verified", highlight=False)
    if any(table[name].kind is Kind.REPORT for name in names):
        summarise(cfg, done, console, pace_s, how_to_find(params, overrides, cfg))
    else:
        list_results(cfg, {name: done[name] for name in names}, console)
    return 0


@contextlib.contextmanager
def prefect_running(state_dir: Path, console: Console) -> Iterator[None]:
    """Quiet the terminal and provide a Prefect server for the block, see `prefect_api`.
    Errors: StoreFull if the disk of state_dir is full.
    """
    _quieten_console()
    with full_disk_told(state_dir), contextlib.ExitStack() as stack:
        with console.status("starting a Prefect server"):
            stack.enter_context(prefect_api(state_dir))
        yield


class _Warnings(logging.Handler):
    """Print warnings, wrapped. Standard error prints above the bars while these are shown."""

    def emit(self, record: logging.LogRecord) -> None:
        say(self.format(record), file=sys.stderr, indent=None if record.exc_info else 2)


_WARNINGS = _Warnings(logging.WARNING)


def _quieten_console() -> None:
    """Remove Prefect's progress lines from the terminal, because they would break the bars.
    The API and its UI still get all of them. Our warnings stay.
    """
    for name in ("", *logging.root.manager.loggerDict):
        for handler in logging.getLogger(name).handlers:  # one handler may serve several loggers
            if isinstance(handler, PrefectConsoleHandler) and not handler.filters:
                handler.addFilter(_worth_a_line)
                handler.setFormatter(PlainFormatter(handler.formatter))
    for name in OURS:
        logging.getLogger(name).addHandler(_WARNINGS)


def _worth_a_line(record: logging.LogRecord) -> bool:
    """Return True if Prefect's terminal handler should print a record: an error of other packages.

    Not printed are a run's final state and an error that a retry cannot help, because the command's
    last line reports them, and records of our packages, which have their own handler.
    """
    is_final = record.exc_info and isinstance(record.exc_info[1], FINAL)
    ends = record.getMessage().startswith("Finished in state")
    is_ours = record.name.startswith(OURS)
    return record.levelno >= logging.ERROR and not (is_final or ends or is_ours)


def _done(cfg: RunConfig, wanted: Wanted) -> dict[str, Manifest]:
    """Return the manifests of the wanted steps that are finished already, by step.
    If steps are left, check all that they need, except data not pulled yet. Errors: ConfigError.
    """
    for setting, folder in cfg.data_folders.items():
        dataset_pointer(folder, setting)
    is_pulled = all(folder.is_dir() for folder in cfg.data_folders.values())
    finished_steps = finished(cfg, open_store(cfg)) if is_pulled else {}
    names = [name for name, step in steps_of(cfg).items() if wanted(step)]
    done = {name: finished_steps[name] for name in names if name in finished_steps}
    if len(done) < len(names):
        check_parents(cfg, wanted, finished_steps)
        for env in cfg.envs:
            check_local_env(env)
            check_env_servers(env)
        check_fleets(cfg)
        check_server(cfg.tracking_uri)
        check_model(cfg.model, cfg.lora)
        check_engine(cfg)
        if is_pulled:
            load_data(cfg)
            load_recorded(cfg)
    return done


def _confirmed(cfg: RunConfig, wanted: Wanted) -> dict[str, Manifest]:
    """Record the run in the store, verify the wanted steps and bring MLflow up to date.
    Return the manifests of all finished steps, by step.
    """
    store = open_store(cfg)
    keep_run(cfg, store)
    done = finished(cfg, store)
    for name, step in steps_of(cfg).items():
        if wanted(step):
            confirm(cfg, store, step, done[name])
    return done


def list_results(cfg: RunConfig, done: dict[str, Manifest], console: Console) -> None:
    """Print title, time and digest of each of these steps, and their alarms."""
    titles = {name: step.title for name, step in steps_of(cfg).items()}
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for name, manifest in done.items():
        seconds = f"{manifest.timings.get('wall_s', 0.0):.0f} s"
        digest = f"[dim]{manifest.digest[:12]}[/dim]"
        table.add_row(f"[bold]{titles[name]}[/bold]", seconds, digest)
    console.print(table, highlight=False)
    for line in alarm_lines(cfg, done):
        console.print(line, style="yellow", markup=False, highlight=False)


def summarise(
    cfg: RunConfig,
    done: dict[str, Manifest],
    console: Console,
    pace_s: float | None = None,
    options: str = "",
) -> None:
    """Print success before and after, time per part and next commands; write the report's files.
    pace_s: time of the reference work; options: text that the printed commands end with.
    """
    settings, steps = cfg.evaluation, steps_of(cfg)
    of_kind = {steps[name].kind: manifest for name, manifest in done.items()}
    evaluations = {name: done[name] for name in done if steps[name].kind is Kind.EVALUATE}
    average = f"avg_at_{settings.num_samples}"
    first = next(iter(evaluations.values())).results["summary"]
    keys = [key for key in first if key != "pass_at_1"]  # which is avg@n under another name
    keys.sort(key=lambda key: key != "greedy")
    tight = len(keys) > 3  # else the table does not fit 80 columns
    table = Table(box=None, header_style="bold", padding=(0, 1 if tight else 2, 0, 0))
    table.add_column("success, %", no_wrap=True)
    for title in (*map(label, keys), f"{label(average)} gain"):
        table.add_column(title, justify="right", no_wrap=True)
    for manifest in evaluations.values():
        gain = manifest.results.get("paired", {}).get(average)
        summary = manifest.results["summary"]
        cells = [_percent(Interval(**summary[key]), tight) for key in keys]
        cells.append(_points(Interval(**gain)) if gain else "")
        table.add_row(_shown(cfg, steps[manifest.results["checkpoint"]]), *cells)
    console.print(table, highlight=False)
    console.print(
        f"[dim]{settings.num_items} {settings.split} items, {settings.max_turns} turns, greedy and"
        f" {settings.num_samples} samples at temperature {settings.temperature:g};"
        f" {settings.confidence:.0%} intervals;\ngain: paired, over"
        f" {_shown(cfg, steps[_baseline(evaluations)])}[/dim]\n",
        highlight=False,
    )
    for line in [*left_out(evaluations), *alarm_lines(cfg, done)]:
        console.print(line, style="yellow", markup=False, highlight=False)
    before = "warm start" if cfg.warm_start.enabled else "initial model"
    seconds = dict.fromkeys((before, "training", "evaluation", "other"), 0.0)
    for name, manifest in done.items():
        seconds[_part(steps[name], before)] += manifest.timings.get("wall_s", 0.0)
    registered = of_kind[Kind.REGISTER].results
    run = run_label(cfg)
    rows = {"time": " · ".join(f"{part} {value:.0f} s" for part, value in seconds.items())}
    if pace_s is not None:
        multiple = sum(seconds.values()) / pace_s
        rows["pace"] = f"{multiple:.0f} times the reference work, {pace_s:.1f} s on this machine"
    rows |= {
        "model": f"{registered['model']} version {registered['version']}",
        "alias": f"{registered['alias']} {sentence(registered)}",
        "report": str(export_report(cfg, of_kind[Kind.REPORT])),
        "compare": f"{mlflow_server(cfg) or 'make ui':<26} MLflow, run {run}",
        "see": f"agentgym view {run}{options}",
        "check": f"agentgym audit {run}{options}",
    }
    for title, text in rows.items():
        if title == "alias":
            text = textwrap.fill(text, 71).replace("\n", f"\n{'':9}")
        console.print(f"{title:<9}{text}", markup=False, highlight=False, soft_wrap=True)


def _shown(cfg: RunConfig, step: Step) -> str:
    """Return the name that the table shows for the checkpoint of a step."""
    if step.kind is Kind.INITIALIZE:
        return "untrained" if cfg.warm_start.enabled else "initial model"
    return step.name.replace("-", " ")


def _part(step: Step, before: str) -> str:
    """Return the part of the time that a step counts to. before: name of the part before RL."""
    if step.kind is Kind.EVALUATE:
        return "evaluation"
    if step.stage is not None:
        return "training"
    return before if step.kind in (Kind.DEMONSTRATE, Kind.INITIALIZE, Kind.TRAIN) else "other"


def left_out(evaluations: Mapping[str, Manifest]) -> list[str]:
    """Return lines of at most 80 columns about evaluations with failed episodes: the share of
    episodes that counts, and the numbers if the failed ones count as failures.
    """
    lines = []
    for manifest in evaluations.values():
        results = manifest.results
        if results["coverage"] < 1:
            means = {key: 100 * row["mean"] for key, row in results[FAILED].items()}
            means.pop("pass_at_1", None)
            numbers = ", ".join(f"{label(key)} {mean:.1f}" for key, mean in means.items())
            name, share = results["checkpoint"].replace("-", " "), 100 * results["coverage"]
            text = f"{name}: {share:.1f} % of its episodes count; with the failed ones as failures:"
            lines += textwrap.wrap(f"{text} {numbers}", 80, subsequent_indent="  ")
    return lines


def alarm_lines(cfg: RunConfig, done: Mapping[str, Manifest]) -> list[str]:
    """Return the first alarm of each trouble in training, in lines of at most 80 columns.

    done: step -> its last commit; only the stages of training among them count.
    """
    steps = steps_of(cfg)
    trained = [manifest for name, manifest in done.items() if steps[name].stage]
    alarms = committed_alarms(open_store(cfg), trained)
    wrapped = (textwrap.wrap(str(alarm), 80, subsequent_indent="  ") for alarm in alarms)
    return [line for lines in wrapped for line in lines]


def _baseline(evaluations: dict[str, Manifest]) -> str:
    """Return the name of the checkpoint that the others are compared with."""
    paired = (m.results["paired"] for m in evaluations.values() if "paired" in m.results)
    return str(evaluations[next(paired)["baseline"]].results["checkpoint"])


def _percent(interval: Interval, tight: bool) -> str:
    """Return a share and its interval in percent, with Rich markup; it prints as 13 characters or,
    if tight, as at most 12 without padding.
    """
    mean, low, high = 100 * interval.mean, f"{100 * interval.low:.0f}", f"{100 * interval.high:.0f}"
    if tight:
        return f"{mean:.1f} [dim]{low if low == high else f'{low}-{high}'}[/dim]"
    return f"{mean:5.1f} [dim]{low:>3}-{high:<3}[/dim]"


def _points(interval: Interval) -> str:
    mean, low, high = (100 * value for value in (interval.mean, interval.low, interval.high))
    return f"{mean:+5.1f} [dim]{low:+.0f} to {high:+.0f}[/dim]"
