"""Is a run what it says it is: content, lineage, episodes, log-probabilities, numbers and ledger,
checked against each other.

Nothing here trusts a digest to prove more than that bytes did not change.
Episodes are played again, tokens are scored again, numbers are computed again.
What only training again could show (losses, gradient norms) is not claimed.
"""

from __future__ import annotations

import secrets
from pathlib import Path

from agentgym.audit.episodes import check_episodes, check_replay, check_tokens
from agentgym.audit.excluded import check_excluded
from agentgym.audit.ledger import check_ledger, check_registry
from agentgym.audit.lines import check_lineage, read_lines
from agentgym.audit.numbers import Tables, check_numbers, read_splits
from agentgym.audit.records import check_records
from agentgym.audit.report import AuditReport, Check, Tally
from agentgym.audit.sampling import check_sampling
from agentgym.config import ConfigError, RunConfig
from agentgym.context import NoProgress, Progress
from agentgym.steps import open_store, run_key
from agentgym.training.model import set_threads

__all__ = ["CHECKS", "AuditReport", "Check", "audit"]

CHECKS = {
    "content": "every blob and record that must still be there has its digest",
    "records": (
        "logs and times have the second digest, each commit names the one before, pointers and"
        " MLflow the last"
    ),
    "lineage": (
        "keys, parents, commits, optimiser steps, stream positions and horizons follow from one"
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
    "numbers": "reported numbers follow from the stored episodes",
    "ledger": "MLflow holds each committed point once and nothing else",
    "registry": "the registered model is the checkpoint",
}


def audit(
    cfg: RunConfig,
    *,
    run: str | None = None,
    num_episodes: int | None = 32,
    num_rescored: int | None = None,
    seed: int | None = None,
    pointers: Path | None = None,
    progress: Progress | None = None,
) -> AuditReport:
    """Check the run of this configuration as far as it went; nothing is written, all checks run
    even where one fails.

    run: prefix of a run key, to make sure that it is the run you mean.
    num_episodes: of each step, how many are played again (at least one of every commit); None: all.
    num_rescored: of each set of weights, how many episodes are scored again; None: all.
    seed: of both draws; None: a new one, so that nobody can know beforehand what will be looked at.
    pointers: folder of the pointers that DVC keeps, if there is one.
    Errors: ConfigError where `run` is another run, or where nothing of this configuration was ever
    committed.
    """
    set_threads()
    seed = secrets.randbits(32) if seed is None else seed
    store, key, show = open_store(cfg), run_key(cfg), progress or NoProgress()
    if run is not None and not key.startswith(run.removeprefix("r")):
        raise ConfigError(
            f"run {run} is not the run of this configuration and source, r{key[:12]};"
            f" {_existing(cfg)}"
        )
    tallies = {name: Tally(name) for name in CHECKS}
    lines = read_lines(cfg, store, tallies["content"], tallies["lineage"])
    if not lines and not tallies["content"].num_failures:
        raise ConfigError(
            f"nothing to audit: no step of run r{key[:12]} was committed in {store.root};"
            f" {_existing(cfg)}"
        )
    show.start("audit", 2 * len(lines) + 4)
    splits = read_splits(cfg, store, lines, tallies["numbers"])
    with tallies["records"].guard("records"):
        check_records(key, lines, pointers, tallies["records"])
    tables: Tables = {}
    for line in lines:
        with tallies["lineage"].guard(line.name):
            check_lineage(cfg, line, splits, tallies["lineage"])
        if splits is not None:
            with tallies["episodes"].guard(line.name):
                check_episodes(cfg, line, splits, tallies["episodes"])
            with tallies["numbers"].guard(line.name):
                check_numbers(cfg, store, line, lines, splits, tables, tallies["numbers"])
        show.advance(1, f"{line.name}: numbers")
    manuals: dict[str, str] = {}
    with tallies["replay"].guard("environment"):
        manuals = check_replay(cfg, lines, num_episodes, seed, tallies["replay"])
    show.advance(1, "replay")
    with tallies["excluded"].guard("environment"):
        check_excluded(cfg, store, lines, tallies["excluded"])
    show.advance(1, "left out")
    for line in lines:
        with tallies["tokens"].guard(line.name):
            check_tokens(cfg, store, line, manuals, tallies["tokens"])
        with tallies["rescore"].guard(line.name):
            check_sampling(
                cfg, store, line, num_rescored, seed, tallies["rescore"], tallies["sampling"]
            )
        show.advance(1, f"{line.name}: tokens")
    for name in ("rescore", "sampling"):
        if num_pruned := tallies["rescore"].skipped:
            tallies[name].notes.append(
                f"{num_pruned} episodes of pruned weights are not (store.keep_checkpoints)"
            )
    with tallies["ledger"].guard("MLflow"):
        check_ledger(cfg, store, key, lines, tallies["ledger"])
    show.advance(1, "ledger")
    with tallies["registry"].guard("MLflow"):
        check_registry(cfg, store, key, lines, tallies["registry"])
    show.advance(1, "registry")
    return AuditReport(
        key,
        tuple(line.name for line in lines),
        tuple(tally.check() for tally in tallies.values()),
        seed,
    )


def _existing(cfg: RunConfig) -> str:
    runs = sorted(
        {f"r{path.name[:12]}" for path in (cfg.state_dir / "delivered").glob("*") if path.is_dir()}
    )
    return f"known under {cfg.state_dir}: {', '.join(runs) or 'no run'}"
