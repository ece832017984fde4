"""`agentgym step | plan | stored | dvc`: the steps of a pipeline."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from agentgym.commands.parser import Commands, add_pointers, add_waiting
from agentgym.config import ConfigError, RunConfig
from agentgym.console.ending import say


def add(commands: Commands) -> None:
    step = commands.add(
        "step",
        _step,
        "one step of the pipeline, as dvc.yaml runs it",
        run_of=lambda arguments: arguments.of_run,
    )
    option = step.add_argument
    option("name")
    run = "of this run of the store, with its settings (default: the configured one)"
    option("--run", dest="of_run", metavar="RUN", help=run)
    pointer = "also write a pointer to the result (URI, digest, numbers) to this file"
    option("--out", type=Path, help=pointer)
    parents = "first bring the steps it needs to their end"
    option("--with-parents", action="store_true", help=parents)
    add_waiting(step, "a step")
    option("--key", default="", help="exit with code 2 (bad input) if the step has another key")
    about = "what would run, resume or be skipped, and why"
    plan = commands.add("plan", _plan, about, takes_run=True)
    plan.add_argument("--json", action="store_true")
    about = "check that the store and MLflow have all that DVC's pointers name"
    stored = commands.add("stored", _stored, about)
    add_pointers(stored, "")
    stored.add_argument("--out", type=Path, help="also write the digests to this file, for DVC")
    about = "write dvc.yaml for the steps that a parameter file asks for"
    commands.add("dvc", _dvc, about, overrides=False)


def _step(cfg: RunConfig, arguments: argparse.Namespace) -> int:
    from agentgym.console.progress import Bars, PlainConsole
    from agentgym.data.copies import fetch_data
    from agentgym.pipeline.dvc import files_of, numbers, require_current
    from agentgym.pipeline.plan import check_model
    from agentgym.pipeline.run import export_report, require_key, run_when_free, run_with_parents
    from agentgym.pipeline.stored_config import require_run
    from agentgym.pipeline.table import open_store
    from agentgym.steps.step import Kind
    from agentgym.store.posix import write_whole
    from agentgym.tracking.reaching import check_server

    if arguments.out is not None:
        require_current(cfg, arguments.params)
    store = open_store(cfg)
    fetch_data(cfg, store)
    if arguments.of_run:
        require_run(cfg, arguments.of_run)
    if arguments.key:
        require_key(arguments.name, cfg, arguments.key)
    check_server(cfg.tracking_uri)
    check_model(cfg.model, cfg.lora)
    with Bars(PlainConsole(stderr=True)) as bars:
        if arguments.with_parents:
            outcomes = run_with_parents(arguments.name, cfg, wait_s=arguments.wait, progress=bars)
        else:
            outcomes = [run_when_free(arguments.name, cfg, wait_s=arguments.wait, progress=bars)]
    if arguments.out is not None:
        for path, text in files_of(cfg, outcomes[-1], arguments.out).items():
            write_whole(path, f"{text}\n".encode())
    for outcome in outcomes:
        figures = (
            f"{name} {value if type(value) is int else f'{value:.4g}'}"
            for name, value in numbers(outcome, store).items()
        )
        manifest = f"manifest {outcome.manifest.digest[:12]}"
        say(" · ".join([f"{outcome.step.name}: {outcome}", *figures, manifest]), indent=4)
        if outcome.step.kind is Kind.REPORT:
            say(f"report   {export_report(cfg, outcome.manifest)}")
    if arguments.out is None:  # DVC has a plan of its own
        say(f"next     {_next_command(cfg, arguments)}")
    return 0


def _next_command(cfg: RunConfig, arguments: argparse.Namespace) -> str:
    """Return the command of the first step that is not done, or the audit of the whole run."""
    from agentgym.pipeline.stored_config import how_to_find
    from agentgym.pipeline.table import finished, open_store, run_label, steps_of

    run, options = run_label(cfg), how_to_find(arguments.params, arguments.set, cfg)
    done = finished(cfg, open_store(cfg))
    missing = next((name for name in steps_of(cfg) if name not in done), "")
    command = f"step {missing} --run {run}" if missing else f"audit {run}"
    return f"agentgym {command}{options}"


def _stored(cfg: RunConfig, arguments: argparse.Namespace) -> int:
    from agentgym.pipeline.dvc import confirm_pointers
    from agentgym.pipeline.table import open_store
    from agentgym.store.posix import write_whole

    pointers = confirm_pointers(cfg, arguments.pointers)
    if arguments.out is not None:
        write_whole(arguments.out, f"{json.dumps(pointers, indent=1)}\n".encode())
    say(
        f"{open_store(cfg).root} has all that {len(pointers)} pointers in {arguments.pointers} name"
    )
    return 0


def _dvc(cfg: RunConfig, arguments: argparse.Namespace) -> int:
    from agentgym.pipeline.dvc import FILE, dvc_yaml
    from agentgym.pipeline.table import steps_of
    from agentgym.store.posix import write_whole

    write_whole(FILE, dvc_yaml(cfg, arguments.params).encode())
    say(f"{FILE}: {len(steps_of(cfg)) + 2} stages of {arguments.params}; `dvc repro` runs them")
    return 0


def _plan(cfg: RunConfig, arguments: argparse.Namespace) -> int:
    from agentgym.data.check import load_data
    from agentgym.pages import moment
    from agentgym.pipeline.forecast import forecast, usual_pretrained
    from agentgym.pipeline.plan import check_model, commit_bytes, num_commits, plan
    from agentgym.pipeline.stored_config import find_run, require_run
    from agentgym.pipeline.table import open_store, run_label

    if arguments.of_run and find_run(open_store(cfg), arguments.of_run) is None:
        require_run(cfg, arguments.of_run)
    if cfg.model.source == "tiny" or Path(cfg.model.name).is_dir():  # not on the Hub
        check_model(cfg.model, cfg.lora)
    steps = plan(cfg)
    load_data(cfg)  # or an error: its items must suffice
    is_done = all(step.action == "skip" for step in steps)
    cost, unknown = None, ""
    if not is_done:
        try:
            cost = forecast(cfg, commit_bytes(cfg))
        except ConfigError as error:
            unknown = str(error)
    defaults = usual_pretrained(cfg) if cfg.model.source == "hub" else []
    if arguments.json:
        tree = {
            "run": run_label(cfg),
            "steps": [asdict(step) for step in steps],
            "forecast": cost and {**asdict(cost), "num_commits": num_commits(cfg)},
            "pretrained": [asdict(default) for default in defaults],
        }
        say(json.dumps(tree, indent=1))
        return 0
    store, names = open_store(cfg), {step.name for step in steps}
    compared = f"{'all steps are done' if is_done else 'compared with the newest steps'} in"
    last = next((head for head in reversed(store.heads()) if head.step in names), None)
    newest = f"{last.step} {last.digest[:12]} of {moment(last.created_at)}" if last else "none"
    say(f"run {run_label(cfg)}, {compared} {store.root}; last commit: {newest}", indent=2)
    for step in steps:
        say(f"  {step.action:<7}{step.name:<22}{step.why}", indent=31)
    if unknown:
        say(f"memory and time are not known: {unknown}", indent=9)
    if cost is not None:
        for line in cost.lines(num_commits(cfg)):
            say(line, indent=9)
    if defaults:
        say("pretrained model, settings with defaults of their own:")
    for default in defaults:
        say(f"  {default}", indent=4)
    if defaults and not cfg.rollout.instructions:
        say(
            "note: rollout.instructions false: the model learns the environment's grammar from"
            f" warm_start.num_demos {cfg.warm_start.num_demos} alone"
            if cfg.warm_start.enabled
            else "warning: rollout.instructions false and warm_start.enabled false: the model"
            " never sees the environment's grammar; set one of them true"
        )
    return 0
