"""The audit of a run: stored files, episodes, log-probabilities, reported numbers and MLflow are
checked against each other.

A digest proves only that bytes did not change.
The audit plays episodes again, scores tokens again and computes numbers again.
It does not verify losses and gradient norms, because that would need the training again; it trains
again, to verify weights, only the steps that `num_updates` allows.
"""

from __future__ import annotations

import secrets
from pathlib import Path

from agentgym.audit.decisions import check_decisions, check_judged
from agentgym.audit.episodes import check_episodes, check_replay, check_tokens
from agentgym.audit.excluded import check_excluded
from agentgym.audit.findings import AuditReport, Check, Checks
from agentgym.audit.ledger import check_ledger
from agentgym.audit.logs import check_records
from agentgym.audit.mlflow_runs import check_pages
from agentgym.audit.registered import check_registry
from agentgym.audit.reported import Results, check_numbers, read_splits
from agentgym.audit.sampling import check_sampling
from agentgym.audit.stored_steps import check_lineage, read_steps
from agentgym.audit.updates import check_updates
from agentgym.config import ConfigError, RunConfig
from agentgym.models.model import set_threads
from agentgym.pipeline.stored_config import existing, require_run
from agentgym.pipeline.table import open_store, run_key
from agentgym.steps.context import NoProgress, Progress

__all__ = ["CHECKS", "AuditReport", "Check", "audit"]

CHECKS = {
    "content": "every blob and record that must still be there has its digest",
    "records": (
        "logs and times have the second digest, each commit names the one before, pointers and"
        " MLflow the last"
    ),
    "lineage": (
        "keys, parents, commits, optimizer steps, stream positions and horizons follow from one"
        " another"
    ),
    "episodes": "each commit logs the episodes it claims, sampled by the version it claims",
    "tokens": "masks, spans, actions and observations say the same as the token ids",
    "replay": (
        "logged actions played again on a new server meet the same observations, rewards and end"
    ),
    "excluded": (
        "episodes that failing environments left out are few, and not chosen by their outcome"
    ),
    "rescore": "logged ids have the logged log-probabilities under the weights that sampled them",
    "sampling": (
        "each token is the one that the random numbers of its sample draw from those weights"
    ),
    "updates": "weights are what optimizer steps make of the logged episodes",
    "numbers": "reported numbers follow from the stored episodes",
    "ledger": "MLflow holds each committed point once and nothing else",
    "pages": "data, checkpoints and traces in MLflow are those of the steps",
    "registry": "the registered model is the checkpoint, file by file",
    "decisions": "each decision follows from its evidence, and the alias is where decisions put it",
}

IN_MLFLOW = {"ledger": check_ledger, "pages": check_pages, "registry": check_registry}


def audit(
    cfg: RunConfig,
    *,
    run: str | None = None,
    num_episodes: int | None = 32,
    num_rescored: int | None = None,
    num_updates: int = 0,
    seed: int | None = None,
    pointers: Path | None = None,
    progress: Progress | None = None,
) -> AuditReport:
    """Check the committed steps of a run and return the results. A failed check stops no other.
    Environment servers are started and torch's threads are set; store and MLflow stay unchanged.
    run: prefix of a run key or of a run's name (r and 12 hex digits), to make sure that it is the
    run you mean; None: not compared.
    num_episodes: episodes of each step to play again (at least one of every commit); None: all.
    num_rescored: episodes to score again for each set of weights; None: all.
    num_updates: a stage with more optimizer steps than this is not trained again.
    seed: for both draws; None: a new one, so that no one can know beforehand what will be checked.
    pointers: folder of DVC's pointers; None: they are not compared.
    progress: shows how far the audit is; None: nothing is shown.
    Errors: ConfigError if `run` is another run, the data is invalid, or nothing was committed.
    """
    set_threads(cfg.learner_settings.threads)
    seed = secrets.randbits(32) if seed is None else seed
    store, key, show = open_store(cfg), run_key(cfg), progress or NoProgress()
    if run is not None:
        require_run(cfg, run)
    checks_of = {name: Checks(name) for name in CHECKS}
    steps = read_steps(cfg, store, checks_of["content"], checks_of["lineage"])
    if not steps and not checks_of["content"].num_failures:
        raise ConfigError(
            f"nothing to audit: no step of run r{key[:12]} was committed in {store.root};"
            f" {existing(cfg)}"
        )
    show.start("audit", 2 * len(steps) + 6)
    splits = None
    with checks_of["numbers"].guard("prepare"):
        splits = read_splits(cfg, store, steps, checks_of["numbers"])
    with checks_of["records"].guard("records"):
        check_records(key, steps, pointers, checks_of["records"])
    results: Results = {}
    for record in steps:
        with checks_of["lineage"].guard(record.name):
            check_lineage(record, splits, checks_of["lineage"])
        if splits is not None:
            with checks_of["episodes"].guard(record.name):
                check_episodes(record, splits, checks_of["episodes"])
            with checks_of["numbers"].guard(record.name):
                check_numbers(record, steps, splits, results, checks_of["numbers"])
        show.advance(1, f"{record.name}: numbers")
    instructions: dict[str, str] = {}
    with checks_of["replay"].guard("environment"):
        instructions = check_replay(cfg, steps, num_episodes, seed, checks_of["replay"])
    show.advance(1, "replay")
    with checks_of["excluded"].guard("environment"):
        check_excluded(cfg, steps, checks_of["excluded"])
    show.advance(1, "left out")
    for record in steps:
        with checks_of["tokens"].guard(record.name):
            check_tokens(record, instructions, checks_of["tokens"])
        with checks_of["rescore"].guard(record.name):
            judges = checks_of["rescore"], checks_of["sampling"]
            check_sampling(record, num_rescored, seed, *judges)
        show.advance(1, f"{record.name}: tokens")
    check_updates(cfg, steps, num_updates, checks_of["updates"])
    for name, check in IN_MLFLOW.items():
        with checks_of[name].guard("MLflow"):
            check(cfg, store, key, steps, checks_of[name])
        show.advance(1, name)
    with checks_of["decisions"].guard("MLflow"):
        draws = num_episodes, num_rescored, seed
        for evidence_store, entry in check_decisions(
            cfg, store, key, steps, checks_of["decisions"]
        ):
            check_judged(cfg, evidence_store, entry, draws, checks_of)
    show.advance(1, "decisions")
    return AuditReport(
        key,
        tuple(record.name for record in steps),
        tuple(checks.check() for checks in checks_of.values()),
        seed,
        {record.name: record.final.digest for record in steps if record.final is not None},
    )
