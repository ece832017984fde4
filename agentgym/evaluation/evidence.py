"""Evidence for the gate, from two results of one question."""

from __future__ import annotations

from collections.abc import Callable, Collection

import numpy as np

from agentgym.evaluation.gate import Evidence
from agentgym.evaluation.history import Version
from agentgym.evaluation.paired import Incomparable, Pair, align
from agentgym.evaluation.result import Result, ResultError
from agentgym.evaluation.stored import NumbersChanged, stored_result
from agentgym.store.manifest import BlobMissing, DigestMismatch, Manifest
from agentgym.store.runstore import RunStore
from agentgym.tracking.deliver import committed_points

KL = "actor/reference_kl"
# a model's name in the registry and its version -> its result under the gate's protocol
PlayAnew = Callable[[str], Result]


def first_evidence(result: Result) -> Evidence:
    """Return the evidence on a candidate without a champion to compare it with."""
    pairs = align(result, result)
    alone = {
        env: Pair(p.items, p.families, np.full_like(p.after, np.nan), p.after, p.num_slots)
        for env, p in pairs.items()
    }
    return Evidence(alone, False, (result.coverage, 1.0), (result.digest, ""))


def paired_evidence(champion: Result, candidate: Result, seen: Collection[str]) -> Evidence:
    """Return the evidence on a candidate and the champion it would replace.

    seen: ids of the items that the candidate was trained or chosen on.
    Errors: Incomparable.
    """
    pairs = align(champion, candidate)
    items = {item for pair in pairs.values() for item in pair.items}
    return Evidence(
        pairs,
        True,
        (candidate.coverage, champion.coverage),
        (candidate.digest, champion.digest),
        (_tokens(candidate), _tokens(champion)),
        num_seen=len(items & set(seen)),
    )


def incomparable(why: str) -> Evidence:
    """Return evidence that candidate and champion cannot be compared, with the reason `why`."""
    return Evidence({}, True, obstacle=why)


def _tokens(result: Result) -> float | None:
    """Mean number of tokens that the policy generates in an episode; None if not known."""
    num_tokens = [slot.usage.output_tokens for slot in result.slots if slot.counts]
    return float(np.mean(num_tokens)) if any(num_tokens) else None


def own_results(store: RunStore, evaluation: Manifest, champion: Version) -> tuple[Result, Result]:
    """Return the champion's and the candidate's result, from their runs' own evaluations.

    evaluation: the candidate's. Errors: Incomparable if the questions differ, or if the champion's
    result is missing or cannot be read; NumbersChanged.
    """
    ours = stored_result(store, evaluation)
    theirs = champion.evaluation_in(store)
    if theirs is None:
        raise Incomparable(f"the evaluation of version {champion.number} is not in this store")
    try:
        result = stored_result(store, theirs)
    except (BlobMissing, DigestMismatch, NumbersChanged, ResultError, KeyError) as error:
        raise Incomparable(f"the evaluation of version {champion.number}: {error}") from None
    align(result, ours)
    return result, ours


def reference_kl(store: RunStore, checkpoint: Manifest) -> float | None:
    """Return the last reference KL that the checkpoint's step measured; None if there is none."""
    points = committed_points(store, checkpoint.step, checkpoint.key)
    return next((p.metrics[KL] for p in reversed(points) if KL in p.metrics), None)
