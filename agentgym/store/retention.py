"""Which steps of a store somebody needs, and why; what is left may be collected."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from agentgym.store.manifest import Manifest

DAY_S = 86_400.0
FRESH_S = 3_600.0


def kept(
    heads: Sequence[Manifest],
    *,
    now: float,
    days: float,
    runs: int,
    pinned: Mapping[str, str],
    live: Collection[str],
) -> dict[str, str]:
    """Digest of each head that is needed -> the reason, of itself or of what builds on it.

    now: seconds since 1970; days: younger heads are needed; runs: so many of the newest that
    nothing builds on; pinned: digest -> reason; live: digests that running steps build on. These,
    and what was committed within the last hour (its run may be between two steps), keep all that is
    connected with them: what else a run needs is known to it alone.
    """
    by_digest = {head.digest: head for head in heads}
    reasons: dict[str, str] = {}
    named = {parent for head in heads for parent in head.parents.values()}
    leaves = [head for head in heads if head.digest not in named]
    newest = sorted(leaves, key=lambda head: head.created_at)[
        len(leaves) - min(runs, len(leaves)) :
    ]
    for head in heads:
        if head.digest in pinned:
            reasons[head.digest] = pinned[head.digest]
        elif (now - head.created_at) / DAY_S < days:
            reasons[head.digest] = f"younger than {days:g} days"
    for head in newest:
        reasons.setdefault(head.digest, f"one of the {runs} newest ends of runs")
    fresh = {head.digest for head in heads if now - head.created_at < FRESH_S}
    for digest in connected(heads, fresh.union(live)):
        reasons.setdefault(digest, "connected with a step that runs now, or did an hour ago")
    waiting = list(reasons)
    while waiting:
        head = by_digest[waiting.pop()]
        for parent in head.parents.values():
            if parent in by_digest and parent not in reasons:
                reasons[parent] = f"{head.step} ({head.key[:12]}) builds on it"
                waiting.append(parent)
    return reasons


def connected(heads: Sequence[Manifest], digests: Iterable[str]) -> set[str]:
    """Digests of the heads that share an ancestor, through any number of others, with these."""
    neighbours: dict[str, set[str]] = {head.digest: set() for head in heads}
    for head in heads:
        for parent in head.parents.values():
            if parent in neighbours:
                neighbours[parent].add(head.digest)
                neighbours[head.digest].add(parent)
    found, waiting = set(), [digest for digest in digests if digest in neighbours]
    while waiting:
        digest = waiting.pop()
        if digest not in found:
            found.add(digest)
            waiting += neighbours[digest]
    return found
