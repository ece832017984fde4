"""`agentgym evaluate | play`: any policy under a protocol, and a game in the terminal."""

from __future__ import annotations

import argparse
import functools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentgym.commands.parser import Commands, add_waiting, positive
from agentgym.config import ConfigError, RunConfig
from agentgym.console.ending import say

if TYPE_CHECKING:
    from agentgym.evaluation.protocol import EvaluationRequest
    from agentgym.pipeline.policy_evaluation import Evaluated

INVALID = 3  # exit code of a result whose coverage is below the floor
SHOWN = 20  # failed attempts, or slots with another grade, in the output
ENDPOINT = (  # options that are fields of an EvaluationRequest under the same name
    *("engine", "model", "key_variable", "max_retries", "max_concurrency", "max_per_minute"),
    *("prices", "max_cost"),
)
LOOKED_AT = 20  # other results, the newest ones, that are searched for a comparable one


def add(commands: Commands) -> None:
    command = commands.add(
        "evaluate",
        _evaluate,
        "any policy on any environments: exit code 3 if too few episodes count",
        run_of=lambda arguments: run_meant(arguments.policy or ""),
    )
    option = command.add_argument
    option(
        "policy",
        nargs="?",
        metavar="POLICY",
        help="expert, random, echo:ACTION, RUN:STEP, :STEP, models:/NAME@ALIAS, the URL of an"
        " OpenAI-compatible endpoint, a folder, or OWNER/NAME[@REVISION] of the Hub",
    )
    add_options(command)
    option("--out", type=Path, help="also write a pointer for DVC to this file")
    option("--show", metavar="RESULT", help="print an evaluation's state, also while it runs")
    option(
        "--regrade",
        metavar="RESULT",
        help="score the recorded actions of an evaluation again, without a policy",
    )
    option("--json", action="store_true")
    add_waiting(command, "an evaluation")

    play = commands.add(
        "play",
        _play,
        "a game in the terminal: you, or a policy turn by turn",
        run_of=lambda arguments: run_meant(arguments.model),
    )
    option = play.add_argument
    option("--env", help="environment (default: the configured one)")
    option(
        "--model",
        default="",
        metavar="POLICY",
        help="who plays, as for `agentgym evaluate`: models:/NAME@champion, RUN:STEP, :STEP,"
        " expert, ... (default: you)",
    )
    option(
        "--item",
        default="",
        metavar="N",
        help="an item's or task's id, or several with commas; needs no item lists (default: the"
        " first test items, or the environment's first tasks if data.path has no lists of it)",
    )
    option("--games", type=positive, default=1, metavar="N", help="default: 1")
    option("--temperature", type=float, default=0.0, help="of a model; 0: greedy (default)")
    option("--engine", choices=("torch", "vllm"), default="")


def add_options(command: argparse.ArgumentParser) -> None:
    """Add the options of an evaluation, which `request_of` reads. Command and flow share them."""
    option = command.add_argument
    option("--env", action="append", default=[], metavar="NAME", help="may be repeated")
    option(
        "--protocol",
        default="",
        metavar="NAME|FILE",
        help="of profiles/eval (default: that of the run's own evaluations)",
    )
    for name, kind, meaning in (
        ("max-turns", positive, "turns an episode may have"),
        ("num-items", positive, "items of each environment, the first ones"),
        ("num-samples", positive, "samples of each item"),
        ("temperature", float, "of the samples"),
        ("examples", int, "worked examples after the instructions"),
        ("max-new-tokens", positive, "tokens of one action, at most"),
        ("context-tokens", positive, "tokens of the longest episode"),
        ("seed", int, "of the samples"),
        ("concurrency", positive, "episodes in flight, over all environments"),
        ("min-coverage", float, "share of the episodes that must count"),
    ):
        option(f"--{name}", type=kind, help=f"{meaning} (default: the protocol's)")
    option("--split", choices=("test", "validation", "train"))
    option("--items", type=Path, metavar="FILE", help="a JSON list of {item_id}")
    option("--greedy", action=argparse.BooleanOptionalAction, default=None)
    option("--deterministic", action=argparse.BooleanOptionalAction, default=None)
    option("--action-format", choices=("plain", "react"))
    option("--instructions", action=argparse.BooleanOptionalAction, default=None)
    option(
        "--fail-on-error",
        nargs="?",
        const=True,
        type=_limit,
        metavar="COUNT|SHARE",
        help="stop at the first episode that fails for good, or beyond so many",
    )
    option("--engine", choices=("torch", "vllm"), default="")
    endpoint = command.add_argument_group("endpoints")
    option = endpoint.add_argument
    option("--model", default="", help="(default: the only one it has)")
    option("--key-variable", default="", metavar="AGENTGYM_SECRET_...", help="holds the key")
    option("--timeout", type=float, default=60.0, metavar="S", help="of one request")
    option("--max-retries", type=int, default=5, help="of one request")
    option("--max-concurrency", type=positive, default=64, help="requests in flight")
    option("--max-per-minute", type=float, default=0.0, help="requests; 0: no limit")
    option("--prices", type=Path, metavar="FILE", help="of a million tokens")
    option("--max-cost", type=float, help="no request begins above it")


def run_meant(policy: str) -> str:
    """Return the run in a policy's name RUN:STEP; empty for other policies. Errors: ConfigError."""
    from agentgym.evaluation.policies import PolicyKind, PolicyName

    name = PolicyName.parse(policy) if ":" in policy else None
    return name.of if name is not None and name.who is PolicyKind.RUN else ""


def request_of(arguments: argparse.Namespace) -> EvaluationRequest:
    """Return the request for an evaluation from parsed arguments: `policy` and those of
    `add_options`. `set` and `overrides`, if the arguments have them, only show which settings of
    the prompt the user gave.
    Errors: ConfigError for a missing policy or a value that is not allowed.
    """
    from pydantic import ValidationError

    from agentgym.config import first_line
    from agentgym.evaluation.policies import OWN
    from agentgym.evaluation.protocol import EvaluationRequest

    # the command has `--set`, the flow has overrides
    overrides = (*getattr(arguments, "set", ()), *getattr(arguments, "overrides", ()))
    settings = {override.partition("=")[0] for override in overrides}
    items = {"num": arguments.num_items, "split": arguments.split, "file": arguments.items}
    names = (
        *("max_turns", "num_samples", "temperature", "max_new_tokens", "context_tokens", "seed"),
        *("concurrency", "min_coverage", "greedy", "deterministic", "action_format"),
        *("instructions", "examples", "fail_on_error"),
    )
    changes: dict[str, Any] = {
        name: value for name in names if (value := getattr(arguments, name)) is not None
    }
    if item_changes := {name: value for name, value in items.items() if value is not None}:
        changes["items"] = item_changes
    try:
        return EvaluationRequest(
            policy=arguments.policy or "",
            envs=tuple(name for names in arguments.env for name in names.split(",")),
            protocol=arguments.protocol,
            changes=changes,
            kept=tuple(name for name, setting in OWN.items() if setting in settings),
            timeout_s=arguments.timeout,
            **{name: getattr(arguments, name) for name in ENDPOINT},
        )
    except ValidationError as error:
        raise ConfigError(first_line(error, EvaluationRequest)) from None


def _evaluate(cfg: RunConfig, arguments: argparse.Namespace) -> int:
    from agentgym.console.progress import Bars, PlainConsole
    from agentgym.pipeline.policy_evaluation import evaluate_policy, regrade, show
    from agentgym.pipeline.stored_config import how_to_find
    from agentgym.store.lease import when_free
    from agentgym.store.posix import write_whole

    subjects = [name for name in (arguments.policy, arguments.show, arguments.regrade) if name]
    if len(subjects) != 1:
        raise ConfigError("expected one of POLICY, --show RESULT and --regrade RESULT")
    with Bars(PlainConsole(stderr=True)) as bars:
        if arguments.show:
            evaluated = show(cfg, arguments.show)
        elif arguments.regrade:
            evaluated = regrade(cfg, arguments.regrade, bars)
        else:
            request = request_of(arguments)
            tell = functools.partial(say, file=sys.stderr)
            evaluated = when_free(lambda: evaluate_policy(cfg, request, bars, tell), arguments.wait)
    if arguments.out is not None:
        write_whole(arguments.out, f"{json.dumps(pointer(evaluated), indent=1)}\n".encode())
    if arguments.json:
        say(json.dumps(told(evaluated)))
    else:
        _print(evaluated, how_to_find(arguments.params, arguments.set, cfg))
    return code_of(evaluated)


def code_of(evaluated: Evaluated) -> int:
    """Return the exit code: 0 valid, 1 stopped or not complete, 3 too few episodes count."""
    if evaluated.stopped or not evaluated.result.is_complete:
        return 1
    return 0 if evaluated.is_valid else INVALID


def told(evaluated: Evaluated) -> dict[str, Any]:
    """Return the output of `--json`: the result as in its file, without the rows of single
    episodes, and the keys valid, complete, stopped, how, folder, clock and graded_otherwise.
    """
    tree = evaluated.result.to_json()
    del tree["slots"], tree["columns"]
    return {
        **tree,
        "valid": evaluated.is_valid,
        "complete": evaluated.result.is_complete,
        "stopped": evaluated.stopped or None,
        "how": evaluated.how,
        "folder": str(evaluated.folder),
        "clock": dict(evaluated.result.clock),
        "graded_otherwise": evaluated.changed,
    }


def pointer(evaluated: Evaluated) -> dict[str, Any]:
    """Return the pointer that DVC tracks: {manifest: [{step, key, digest}], results: {...}}."""
    manifest = evaluated.manifest
    identity = {"step": manifest.step, "key": manifest.key, "digest": manifest.digest}
    return {"manifest": [identity], "results": manifest.results}


def _print(evaluated: Evaluated, options: str) -> None:
    from agentgym.evaluation.report import failures, headline, notes, usage_facts

    result = evaluated.result
    for line in (*headline(result), *notes(result)):
        say(line, indent=4)
    if result.usage.num_calls:
        say(", ".join(f"{name} {value}" for name, value in usage_facts(result).items()))
    rows = failures(result)
    for slot, attempt, outcome, error in rows[:SHOWN]:
        say(f"failed: {slot} attempt {attempt}: {outcome}: {error[:200]}", indent=4)
    if len(rows) > SHOWN:
        say(f"and {len(rows) - SHOWN} more attempts that failed; all are in the result")
    for slot, before, after in evaluated.changed[:SHOWN]:
        say(f"graded otherwise: {slot}: {before}, now {after}")
    if evaluated.stopped:
        say(f"stopped: {evaluated.stopped}; the same command continues it")
    say(f"{evaluated.how}: evaluation {result.digest[:12]} in {evaluated.folder}")
    for line in next_steps(evaluated, options):
        say(line)


def next_steps(evaluated: Evaluated, options: str) -> Iterator[str]:
    """Yield a line with the report's file and, for a complete and valid result, one on comparing
    it: a command with the newest other such result that differs at most in the policy, or a hint
    if the LOOKED_AT newest have none. options: text of the command, so that it finds their store.
    """
    from agentgym.evaluation.report import PAGE
    from agentgym.evaluation.result import RESULT, Result, ResultError, differences

    result, folder = evaluated.result, evaluated.folder
    yield f"report   {folder / PAGE}"
    if not (result.is_complete and evaluated.is_valid):
        return
    others = [path for path in folder.parent.glob(f"*/{RESULT}") if path.parent != folder]
    others.sort(key=lambda path: path.stat().st_mtime, reverse=True)
    for path in others[:LOOKED_AT]:
        try:
            other = Result.load(path)
        except ResultError:  # written by another version
            continue
        counts = other.is_complete and other.about.get("valid", True)
        if counts and not differences(result.identity, other.identity):
            yield f"compare  agentgym compare {other.digest[:12]} {result.digest[:12]}{options}"
            return
    example = "random" if result.identity["policy"]["kind"] == "expert" else "expert"
    yield f"compare  give the same command another policy, for example {example}"


def _limit(text: str) -> bool | int | float:
    """Parse a value of `--fail-on-error`: true, false, a count (int) or a share (float).
    Errors: ArgumentTypeError.
    """
    if text in ("true", "false"):
        return text == "true"
    try:
        value = float(text) if "." in text else int(text)
    except ValueError:
        value = -1
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text} is no count and no share such as 0.1")
    return value


def _play(cfg: RunConfig, arguments: argparse.Namespace) -> int:
    from agentgym.pipeline.game import Game, play_games

    env, options = arguments.env or cfg.env.name, (arguments.temperature, arguments.engine)
    game = Game(env, arguments.model, arguments.item, arguments.games, *options)
    played = play_games(cfg, game, functools.partial(say, indent=0), _ask)
    return 0 if all(episode.status.is_valid for episode in played) else 1


def _ask(prompt: str) -> str | None:
    """Print the prompt and return a line of standard input, with its newline; None at its end."""
    sys.stdout.write(prompt)
    sys.stdout.flush()
    return sys.stdin.readline() or None
