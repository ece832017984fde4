"""The last part of a run: evaluations, registered model, report; or one policy's evaluation."""

from __future__ import annotations

import argparse
import sys

from prefect import flow

from agentgym.commands.evaluate import add_options, request_of, run_meant
from agentgym.console.ending import guarded
from agentgym.console.progress import Bars, PlainConsole
from agentgym.evaluation.protocol import EvaluationRequest
from agentgym.private import private_state
from flows.common import (
    RunRequest,
    add_run,
    fleets_down,
    is_evaluation,
    run_name,
    run_of,
    run_steps,
)
from flows.shell import main, prefect_running
from services.recovery import begin_attempt
from tasks.evaluation import evaluation_task


@flow(name="evaluate", flow_run_name=run_name, persist_result=False, on_cancellation=[fleets_down])
def evaluate(
    run: RunRequest = RunRequest(),  # noqa: B008 (it is frozen)
    asked: EvaluationRequest | None = None,
) -> dict[str, str]:
    """Evaluate every checkpoint, register the last one, write the report; needs the results of
    `train`. With `asked`: only evaluate the policy that it names; needs no earlier results.
    """
    if asked is None:
        return run_steps(run, is_evaluation)
    begin_attempt()
    with Bars(PlainConsole()) as bars:
        cfg = run.config(run_meant(asked.policy))
        return {"evaluation": evaluation_task(cfg, asked, bars)}


def of_policy(argv: list[str]) -> int:
    """Run `python -m flows.evaluate --policy POLICY ...`. Exit code: as in `flows.shell.main`."""
    parser = argparse.ArgumentParser(prog="python -m flows.evaluate --policy POLICY")
    parser.add_argument("--policy", required=True, help="as `agentgym evaluate` takes it")
    add_run(parser)
    add_options(parser)
    arguments = parser.parse_intermixed_args(argv)

    def command() -> int:
        run = run_of(arguments)
        cfg, request = run.config(), request_of(arguments)
        private_state(cfg.state_dir)
        console = PlainConsole()
        with prefect_running(cfg.state_dir, console):
            for name, summary in evaluate(run, request).items():
                console.print(f"{name}: {summary}", highlight=False)
        return 0

    return guarded(command)


if __name__ == "__main__":
    words = sys.argv[1:]
    if any(word.partition("=")[0] == "--policy" for word in words):
        sys.exit(of_policy(words))
    sys.exit(main("flows.evaluate", evaluate, is_evaluation))
