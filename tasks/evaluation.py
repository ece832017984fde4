"""An evaluation of any policy as one Prefect task."""

from __future__ import annotations

import logging

from prefect.artifacts import create_table_artifact

from agentgym.config import RunConfig
from agentgym.evaluation.intervals import FAILED
from agentgym.evaluation.protocol import EvaluationRequest
from agentgym.pipeline.policy_evaluation import Evaluated, evaluate_policy
from agentgym.steps.context import Progress
from tasks.artifacts import progress_artifact
from tasks.retries import retried
from tasks.steps import STEP_TIMEOUT_S

logger = logging.getLogger(__name__)


class EvaluationInvalid(RuntimeError):
    """An evaluation in which too few episodes count, or that ended before the last one."""


@retried("evaluate a policy", run_name="evaluate {request.policy}", timeout_s=STEP_TIMEOUT_S)
def evaluation_task(cfg: RunConfig, request: EvaluationRequest, progress: Progress) -> str:
    """Evaluate a policy and return a summary. Also create a table of its numbers in Prefect; an
    error of that is only logged.
    Errors: EvaluationInvalid; ConfigError before anything starts; LeaseHeld.
    """
    with progress_artifact("evaluation", progress) as shown:
        evaluated = evaluate_policy(cfg, request, shown)
    _table(evaluated)
    if evaluated.stopped or not evaluated.is_valid:
        reason = evaluated.stopped or f"coverage {evaluated.result.coverage:.1%} is below the floor"
        raise EvaluationInvalid(f"{reason}; {evaluated.folder} has what there is")
    return f"{evaluated.how} · evaluation {evaluated.result.digest[:12]} in {evaluated.folder}"


def _table(evaluated: Evaluated) -> None:
    rows = [
        {
            "environment": env,
            "metric": metric,
            **{name: float(f"{row[name]:.4g}") for name in ("mean", "low", "high")},
            "failed as failures": float(f"{numbers[FAILED][metric]['mean']:.4g}"),
            "coverage": float(f"{numbers['coverage']:.4g}"),
        }
        for env, numbers in evaluated.result.numbers.items()
        for metric, row in numbers["summary"].items()
    ]
    try:
        title = f"**{evaluated.result.about['policy']}**: {evaluated.folder}"
        create_table_artifact(table=rows, key="evaluation", description=title)
    except Exception as error:
        # the evaluation is done and must not fail because Prefect is unavailable
        logger.warning("no table in Prefect: %s: %s", type(error).__name__, error)
