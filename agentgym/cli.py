"""The `agentgym` command. Heavy imports wait until a command needs them."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable

from agentgym.defaults import set_process_defaults

set_process_defaults()

from agentgym.commands import (  # noqa: E402
    data,
    evaluate,
    machine,
    models,
    new,
    pipeline_steps,
    store,
    verify,
    view,
)
from agentgym.commands.parser import Commands  # noqa: E402
from agentgym.config import RunConfig, load_config  # noqa: E402
from agentgym.console.ending import guarded  # noqa: E402
from agentgym.private import STATE, private_folder, private_state  # noqa: E402
from envs.plain import log_to_stderr  # noqa: E402


def main(argv: list[str] | None = None) -> int:
    """Run a command and return its exit code: 0 done, 1 failed, 2 bad input, 130 interrupted (state
    is resumable), 141 if the reader of its output is gone.
    3: audit not proven, evaluation with too low coverage, or candidate not promoted.
    argv: None: the process's arguments. Errors: SystemExit for --help, or if they are malformed.
    """
    arguments = _parser().parse_args(argv)
    log_to_stderr(
        logging.INFO if arguments.verbose else logging.WARNING,
        "%(levelname)s %(name)s: %(message)s" if arguments.verbose else "%(message)s",
    )
    run: Callable[[RunConfig, argparse.Namespace], int] = arguments.run

    def command() -> int:
        if getattr(arguments, "owner_pipe", False):
            from agentgym.deploy.owned import end_with_owner

            end_with_owner()
        has_no_params = arguments.params is None  # a comparison of runs names its parameters itself
        cfg = RunConfig() if has_no_params else load_config(arguments.params, arguments.set)
        if name := arguments.run_of(arguments):
            from agentgym.pipeline.stored_config import config_of_run

            cfg = config_of_run(name, cfg, arguments.params, arguments.set)
        private_folder(STATE)
        private_state(cfg.state_dir)
        return run(cfg, arguments)

    return guarded(command, show_traceback=arguments.verbose)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="agentgym",
        description="Multi-turn reinforcement learning as a pipeline you can trust.",
    )
    commands = Commands(parser)
    for about in (pipeline_steps, evaluate, verify, view, models, store, machine, data, new):
        about.add(commands)
    return parser
