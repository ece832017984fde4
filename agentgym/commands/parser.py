"""Shared parts of the commands: the options for settings, and types of arguments."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

from agentgym.config import RunConfig


class Commands:
    """The commands of a parser, added with the options that commands have in common."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self._commands: Any = parser.add_subparsers(required=True, metavar="COMMAND")

    def group(self, name: str, help_text: str) -> Self:
        """Add a group of commands, `agentgym NAME COMMAND`, and return it."""
        return type(self)(self._commands.add_parser(name, help=help_text))

    def add(
        self,
        name: str,
        run: Callable[[RunConfig, argparse.Namespace], int],
        help_text: str,
        *,
        params: bool = True,
        overrides: bool = True,
        takes_run: bool = False,
        run_of: Callable[[argparse.Namespace], str | None] = lambda _: None,
    ) -> argparse.ArgumentParser:
        """Add a command and return its parser, which has `--verbose`.
        run: executes the command, returns its exit code.
        params: add `--params` for a parameter file. overrides: add `--set` for single values.
        run_of: returns the run that the arguments name, or None; its settings come from the store.
        takes_run: add an argument `of_run` that names this run.
        """
        command: argparse.ArgumentParser = self._commands.add_parser(name, help=help_text)
        command.add_argument("-v", "--verbose", action="store_true")
        command.set_defaults(run=run, params=None, set=(), run_of=run_of)
        if takes_run:
            command.set_defaults(run_of=lambda arguments: arguments.of_run)
            command.add_argument(
                "of_run",
                nargs="?",
                metavar="RUN",
                help="a run of the store, r and 12 hex digits, with its settings (default: the"
                " configured one)",
            )
        if params:
            about = "parameter file (default: params.yaml)"
            command.add_argument("--params", default="params.yaml", help=about)
        if overrides:
            command.add_argument(
                "--set",
                action="append",
                default=[],
                metavar="key.path=value",
                help="over the parameter file; may be repeated",
            )
        return command


def add_pointers(command: argparse.ArgumentParser, help_text: str) -> None:
    """Add the option `--pointers`. help_text: continues its help, "folder of DVC's pointers"."""
    command.add_argument(
        "--pointers",
        type=Path,
        default=Path("outputs"),
        help=f"folder of DVC's pointers{help_text} (default: %(default)s)",
    )


def add_waiting(command: argparse.ArgumentParser, what: str) -> None:
    """Add `--wait` and `--owner-pipe`. what: noun for the help text, for example "a step"."""
    command.add_argument(
        "--wait",
        type=float,
        default=0.0,
        metavar="S",
        help=f"seconds to wait for {what} that another process runs (default: 0)",
    )
    add_owner_pipe(command)


def add_owner_pipe(command: argparse.ArgumentParser) -> None:
    """Add `--owner-pipe`: it ends a command together with the program that started it."""
    about = "end when standard input closes, so that no owner leaves it behind"
    command.add_argument("--owner-pipe", action="store_true", help=about)


def positive(text: str) -> int:
    """Parse a positive integer. Errors: ArgumentTypeError if below 1, ValueError if no integer."""
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not positive")
    return int(text)


def seed(text: str) -> int:
    """Parse a seed of 0 to 2**63 - 1. Errors: ArgumentTypeError; ValueError if no integer."""
    if not 0 <= int(text) < 2**63:
        raise argparse.ArgumentTypeError(f"{text} is no seed; expected 0 to {2**63 - 1}")
    return int(text)


def some(text: str) -> int | None:
    """Parse a positive integer; return None for `all`. Errors: those of `positive`."""
    return None if text == "all" else positive(text)
