"""`agentgym play`: a game in the terminal."""

from __future__ import annotations

import argparse
import sys

from agentgym.commands.evaluate import run_meant
from agentgym.commands.parser import Commands, positive
from agentgym.config import RunConfig
from agentgym.console.ending import say


def add(commands: Commands) -> None:
    play = commands.add(
        "play",
        _play,
        "a game in the terminal: you, or a policy turn by turn",
        run_of=lambda arguments: run_meant(arguments.model),
    )
    play.add_argument("--env", help="environment (default: the configured one)")
    play.add_argument(
        "--model",
        default="",
        metavar="POLICY",
        help="who plays, as for `agentgym evaluate`: models:/NAME@champion, RUN:STEP, :STEP,"
        " expert, ... (default: you)",
    )
    play.add_argument(
        "--item",
        default="",
        help="its id (default: the first test items, or tasks if there are no lists)",
    )
    play.add_argument("--games", type=positive, default=1, metavar="N", help="default: 1")
    play.add_argument(
        "--temperature", type=float, default=0.0, help="of a model; 0: greedy (default)"
    )
    play.add_argument("--engine", choices=("torch", "vllm"), default="")


def _play(cfg: RunConfig, arguments: argparse.Namespace) -> int:
    from agentgym.pipeline.game import Game, play_games

    game = Game(
        arguments.env or cfg.env.name,
        arguments.model,
        arguments.item,
        arguments.games,
        arguments.temperature,
        arguments.engine,
    )
    played = play_games(cfg, game, say, _ask)
    return 0 if all(episode.status.is_valid for episode in played) else 1


def _ask(prompt: str) -> str | None:
    """Print the prompt and return a line from the terminal; None at end of file."""
    sys.stdout.write(prompt)
    sys.stdout.flush()
    line = sys.stdin.readline()
    return line if line else None
