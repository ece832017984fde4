"""The `agentgym` command. Heavy imports wait until a command needs them."""

from __future__ import annotations

import argparse
import json
import logging
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from agentgym.defaults import set_process_defaults

set_process_defaults()

from agentgym.config import ConfigError, EnvConfig, RunConfig, load_config, settings  # noqa: E402
from agentgym.private import STATE, private_folder, private_state  # noqa: E402
from envs.plain import log_to_stderr, plain  # noqa: E402

if TYPE_CHECKING:
    from agentgym.data.items import Splits

MEANINGS_AT = 40  # column of `agentgym config`


def main(argv: list[str] | None = None) -> int:
    """Exit code: 0 done, 1 failed, 2 bad input (nothing was started), 130 interrupted (state is
    resumable).
    """
    arguments = _parser().parse_args(argv)
    log_to_stderr(
        logging.INFO if arguments.verbose else logging.WARNING,
        "%(levelname)s %(name)s: %(message)s",
    )
    run: Callable[[RunConfig, argparse.Namespace], int] = arguments.run

    def command() -> int:
        own = arguments.params is None  # a comparison names its parameters itself
        cfg = RunConfig() if own else load_config(arguments.params, arguments.set or ())
        private_folder(STATE)
        private_state(cfg.state_dir)
        return run(cfg, arguments)

    return guarded(command, show_traceback=arguments.verbose)


def guarded(command: Callable[[], int], *, show_traceback: bool = False) -> int:
    """Run a command; its failures become one line and the exit code every command here has: see
    `main`.
    SIGTERM is Ctrl-C.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return command()
    except ConfigError as error:
        say(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from the last commit", file=sys.stderr)
        return 130
    except Exception as error:  # the last resort: whoever called hears of it by the code
        if show_traceback:
            say(traceback.format_exc(), file=sys.stderr, end="")
        say(f"failed: {type(error).__name__}: {error}", file=sys.stderr)
        return 1


def say(text: object, *, file: TextIO | None = None, end: str = "\n") -> None:
    """`print` for text that came from elsewhere: none of it steers the terminal."""
    print(plain(str(text)), file=file or sys.stdout, end=end)


def _parser() -> argparse.ArgumentParser:
    chosen = _chosen()
    common = argparse.ArgumentParser(add_help=False, parents=[chosen])
    common.add_argument(
        "--set",
        action="append",
        metavar="key.path=value",
        help="over the parameter file; may be repeated",
    )
    common.add_argument("-v", "--verbose", action="store_true")
    parser = argparse.ArgumentParser(
        prog="agentgym",
        description="Multi-turn reinforcement learning as a pipeline you can trust.",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    _add_dvc(commands, chosen)
    step = commands.add_parser(
        "step", parents=[common], help="one step of the pipeline, as dvc.yaml runs it"
    )
    step.add_argument("name")
    step.add_argument(
        "--out",
        type=Path,
        help="also write a pointer to the result (URI, digest, numbers) to this file",
    )
    step.add_argument(
        "--with-parents", action="store_true", help="first bring the steps it needs to their end"
    )
    step.add_argument(
        "--wait",
        type=float,
        default=0.0,
        metavar="S",
        help="seconds to wait for a step another process runs (default: 0)",
    )
    step.add_argument(
        "--owner-pipe",
        action="store_true",
        help="end when standard input closes, so that no owner leaves it behind",
    )
    step.set_defaults(run=_step)

    plan = commands.add_parser(
        "plan", parents=[common], help="what would run, resume or be skipped, and why"
    )
    plan.add_argument("--json", action="store_true")
    plan.set_defaults(run=_plan)

    config = commands.add_parser(
        "config", parents=[common], help="every setting, its value, default and meaning"
    )
    config.add_argument("--json", action="store_true")
    config.set_defaults(run=_config)

    audit = commands.add_parser("audit", parents=[common], help="is a run what it says it is")
    audit.add_argument(
        "run_name",
        nargs="?",
        metavar="RUN",
        help="the run's name, r and 12 hex digits (default: the configured one)",
    )
    every = "or all (default: %(default)s)"
    audit.add_argument(
        "--episodes",
        type=some,
        default=32,
        metavar="N",
        help=f"logged episodes to replay per step, {every}",
    )
    audit.add_argument(
        "--rescore",
        type=some,
        default="all",
        metavar="N",
        help=f"episodes to rescore per set of weights, {every}",
    )
    audit.add_argument(
        "--seed",
        type=int,
        help="of the draws, to repeat an audit (default: a new one, which is printed)",
    )
    audit.add_argument(
        "--pointers",
        type=Path,
        default=Path("outputs"),
        help="folder of DVC's pointers (default: %(default)s)",
    )
    audit.add_argument("--json", action="store_true")
    audit.set_defaults(run=_audit)

    compare = commands.add_parser(
        "compare", help="the table of a comparison, from what its runs left in the store"
    )
    compare.add_argument(
        "words",
        nargs="*",
        metavar="FILE | key.path=value",
        help="the comparison (default: comparisons/default.yaml); overrides, as for flows.compare",
    )
    compare.add_argument("--set", action="append", metavar="key.path=value", help="the same")
    compare.add_argument("-v", "--verbose", action="store_true")
    compare.add_argument("--json", action="store_true")
    compare.set_defaults(run=_compare, params=None)

    doctor = commands.add_parser("doctor", parents=[common], help="what is missing on this machine")
    doctor.add_argument("--json", action="store_true")
    doctor.set_defaults(run=_doctor)

    data = commands.add_parser("data", help="the dataset").add_subparsers(
        required=True, metavar="COMMAND"
    )
    importing = data.add_parser(
        "import",
        parents=[common],
        help="import the published lists at a revision, with `dvc import`",
    )
    importing.add_argument(
        "--rev", required=True, help="commit id, tag or branch; the commit it means is pinned"
    )
    importing.add_argument(
        "--url", help="git repository (default: AgentGym-RL-Data-ID on the Hugging Face Hub)"
    )
    importing.add_argument(
        "--out",
        type=Path,
        default=Path("data/hub/AgentGym-RL-Data-ID"),
        help="folder (default: %(default)s)",
    )
    importing.set_defaults(run=_import)
    others = data.add_parser(
        "import-trajectories",
        parents=[common],
        help="bring trajectories of others, in AgentGym's published layout, under DVC",
    )
    others.add_argument(
        "files",
        nargs="+",
        type=Path,
        metavar="FILE",
        help="a JSON list of {item_id, conversations}",
    )
    others.add_argument(
        "--out", type=Path, help="folder, replaced where it exists (default: data.trajectories)"
    )
    others.add_argument(
        "--drop-refused",
        action="store_true",
        help="leave out rows that cannot be learned from, and say which",
    )
    others.set_defaults(run=_import_trajectories)
    validate = data.add_parser(
        "validate", parents=[common], help="check files, schema, splits and leakage"
    )
    validate.set_defaults(run=_validate)
    return parser


def _chosen() -> argparse.ArgumentParser:
    """Which parameter file."""
    chosen = argparse.ArgumentParser(add_help=False)
    chosen.add_argument(
        "--params", default="params.yaml", help="parameter file (default: params.yaml)"
    )
    return chosen


def _add_dvc(commands: Any, chosen: argparse.ArgumentParser) -> None:
    dvc = commands.add_parser(
        "dvc", parents=[chosen], help="write dvc.yaml for the steps that a parameter file asks for"
    )
    dvc.set_defaults(run=_dvc, set=None, verbose=False)


def positive(text: str) -> int:
    """An argument's type. Errors: ArgumentTypeError."""
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not positive")
    return int(text)


def some(text: str) -> int | None:
    """An argument's type: a number, or None for all. Errors: ArgumentTypeError."""
    return None if text == "all" else positive(text)


def _step(cfg: RunConfig, arguments: argparse.Namespace) -> int:
    from agentgym.console.progress import Bars
    from agentgym.console.terminal import PlainConsole
    from agentgym.models.architecture import check_model
    from agentgym.pipeline.dvc import files_of, require_current
    from agentgym.pipeline.run import run_when_free, run_with_parents
    from agentgym.tracking.mlflow import check_server

    if arguments.out is not None:
        require_current(cfg, arguments.params)
    if arguments.owner_pipe:
        from agentgym.deploy.owned import end_with_owner

        end_with_owner()
    check_server(cfg.tracking_uri)
    check_model(cfg.model)
    with Bars(PlainConsole(stderr=True)) as bars:
        if arguments.with_parents:
            outcomes = run_with_parents(arguments.name, cfg, wait_s=arguments.wait, progress=bars)
        else:
            outcomes = [run_when_free(arguments.name, cfg, wait_s=arguments.wait, progress=bars)]
    if arguments.out is not None:
        for path, text in files_of(cfg, outcomes[-1], arguments.out).items():
            _write(path, text)
    for outcome in outcomes:
        say(f"{outcome.step.name}: {outcome} · manifest {outcome.manifest.digest[:12]}")
    return 0


def _dvc(cfg: RunConfig, arguments: argparse.Namespace) -> int:
    from agentgym.pipeline.dvc import FILE, dvc_yaml
    from agentgym.pipeline.table import steps_of

    _write(FILE, dvc_yaml(cfg, arguments.params).rstrip("\n"))
    say(f"{FILE}: {len(steps_of(cfg))} stages of {arguments.params}; `dvc repro` runs them")
    return 0


def _write(path: Path, text: str) -> None:
    """Whole or not at all."""
    from agentgym.store.files import discard, write_temp

    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = write_temp(path.parent, f"{text}\n".encode())
    try:
        temporary.replace(path)
    finally:
        discard(temporary)


def _doctor(cfg: RunConfig, arguments: argparse.Namespace) -> int:
    from dataclasses import asdict

    from agentgym.console.doctor import examine

    findings = examine(cfg)
    if arguments.json:
        say(json.dumps([asdict(finding) for finding in findings]))
    else:
        for finding in findings:
            state = "ok" if finding.ok else "MISSING" if finding.needed else "absent"
            say(f"{finding.name:<12}{state:<9}{finding.text}")
    return 0 if all(finding.ok for finding in findings if finding.needed) else 1


def _plan(cfg: RunConfig, arguments: argparse.Namespace) -> int:
    from agentgym.pipeline.plan import plan
    from agentgym.pipeline.table import run_key

    steps = plan(cfg)
    if arguments.json:
        say(
            json.dumps(
                {"run": f"r{run_key(cfg)[:12]}", "steps": [step.to_json() for step in steps]},
                indent=1,
            )
        )
        return 0
    say(f"run r{run_key(cfg)[:12]}")
    for step in steps:
        say(f"  {step.action:<7}{step.name:<22}{step.why}")
    return 0


def _config(cfg: RunConfig, arguments: argparse.Namespace) -> int:
    every = list(settings(cfg))
    if arguments.json:
        say(json.dumps([asdict(each) for each in every], indent=1))
        return 0
    say("* changes results; what has none changes where and how fast they are computed")
    section = ""
    for each in every:
        if each.section != section:
            section = each.section
            say(f"\n{section}")
        value, default = (json.dumps(what) for what in (each.value, each.default))
        changed = "" if value == default else f" (default {default})"
        mark = "*" if each.changes_results else " "
        shown = f"{mark} {each.name:<21}{value + changed}"
        if len(shown) >= MEANINGS_AT:
            say(shown)
            shown = ""
        say(f"{shown:<{MEANINGS_AT}}{each.description}")
    return 0


def _audit(cfg: RunConfig, arguments: argparse.Namespace) -> int:
    from agentgym.audit import audit
    from agentgym.console.progress import Bars
    from agentgym.console.terminal import PlainConsole

    with Bars(PlainConsole(stderr=True)) as bars:
        report = audit(
            cfg,
            run=arguments.run_name,
            num_episodes=arguments.episodes,
            num_rescored=arguments.rescore,
            seed=arguments.seed,
            pointers=arguments.pointers,
            progress=bars,
        )
    if arguments.json:
        say(json.dumps(report.to_json(), indent=1))
    else:
        for check in report.checks:
            found = (
                f"not checked: {check.not_checked}"
                if check.not_checked
                else f"{check.counted:<8}{check.note}".rstrip()
            )
            say(
                f"{'FAILED' if not check.ok else '-     ' if check.not_checked else 'ok    '} "
                f" {check.name:<12} {found}"
            )
            for failure in check.failures:
                say(f"        {failure}")
        say(f"audit {'passed' if report.ok else 'FAILED'}; to repeat it: --seed {report.seed}")
    return 0 if report.ok else 1


def _import(cfg: RunConfig, arguments: argparse.Namespace) -> int:
    from agentgym.data.items import PUBLISHED_COUNTS, DataError, load_splits
    from agentgym.data.published import HUB_URL, import_dataset

    imported = import_dataset(arguments.url or HUB_URL, arguments.rev, arguments.out)
    said = "imported into" if imported.is_new else "was imported already into"
    say(f"{imported.url} at {imported.sha} {said} {imported.path}")
    say(f"licence: {imported.licence or 'not known here; see its repository'}")
    for env in dict.fromkeys((*cfg.env_weights, *PUBLISHED_COUNTS)):
        try:
            splits = load_splits(
                imported.path, env, validation_fraction=cfg.data.validation_fraction, seed=cfg.seed
            )
        except DataError as error:
            if env in cfg.env_weights:
                raise
            say(f"warning: {error}")
            continue
        _describe(env, splits)
    say(f"keep in git: {imported.pointer}; to train on it: --set data.path={imported.path}")
    return 0


def _import_trajectories(cfg: RunConfig, arguments: argparse.Namespace) -> int:
    from agentgym.data.published import track_folder
    from agentgym.data.trajectories import FILE, read_files, write

    out = arguments.out or cfg.data.trajectories
    rows, left_out = read_files(arguments.files, cfg, drop_refused=arguments.drop_refused)
    for refusal in left_out:
        say(f"left out: {refusal}")
    pointer, counts = track_folder(
        out, lambda folder: write(folder, rows), pattern=FILE.format(env="*")
    )
    for env, count in counts.items():
        say(f"{env}: {count} trajectories")
    say(
        f"keep in git: {pointer}; to learn from them: --set warm_start.source=trajectories --set"
        f" data.trajectories={out}"
    )
    return 0


def _compare(_: RunConfig, arguments: argparse.Namespace) -> int:
    from agentgym.comparison.matrix import cells_of, file_and_overrides, load_comparison
    from agentgym.comparison.report import table_markdown
    from agentgym.comparison.results import read_rows, table

    file, overrides = file_and_overrides(arguments.words)
    comparison = load_comparison(file)
    cells = cells_of(comparison, (*overrides, *(arguments.set or ())))
    result = table(comparison, cells, *read_rows(cells))
    say(
        json.dumps(result, indent=1) if arguments.json else table_markdown(result),
        end="\n" if arguments.json else "",
    )
    return 0


def _validate(cfg: RunConfig, arguments: argparse.Namespace) -> int:
    """The run's own items must be in order; of the other lists beside them it is told what is
    not.
    """
    from agentgym.data.check import compare_tasks, load_data, load_recorded
    from agentgym.data.items import PUBLISHED_COUNTS, load_splits
    from agentgym.data.published import check_pin

    splits = load_data(cfg)
    num_recorded = len(load_recorded(cfg))
    for folder in cfg.data_folders.values():
        check_pin(folder)
    repeated, unknown = compare_tasks(cfg.envs, splits)
    _describe(cfg.env_names, replace(splits, warnings=(*splits.warnings, *repeated, *unknown)))
    if num_recorded:
        say(
            f"{cfg.env_names}: {num_recorded} trajectories of train items in"
            f" {cfg.data.trajectories}"
        )
    for name in PUBLISHED_COUNTS:
        if name in cfg.env_weights or not (cfg.data.path / "train" / f"{name}_train.json").exists():
            continue
        try:
            other = load_splits(
                cfg.data.path, name, validation_fraction=cfg.data.validation_fraction, seed=cfg.seed
            )
            found = [
                warning
                for part in compare_tasks((EnvConfig(name=name),), other)
                for warning in part
            ]
            _describe(name, replace(other, warnings=(*other.warnings, *found)))
        except ConfigError as error:
            say(f"warning: {error}")
    return 1 if repeated else 0


def _describe(env: str, splits: Splits) -> None:
    for warning in splits.warnings:
        say(f"warning: {warning}")
    sizes = (
        f"{len(splits.train)} train, {len(splits.validation)} validation, {len(splits.test)} test"
        " items"
    )
    say(f"{env}: {sizes}, sha256 {splits.digest[:12]}")
