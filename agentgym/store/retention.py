"""Rules for which steps of a store are still needed, and why; the rest may be collected."""

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
    """Return digest -> reason for each head that is needed, itself or for a step that builds on it.

    now: seconds since 1970.
    days: younger heads are needed.
    runs: number of newest leaves (heads that nothing builds on) to keep.
    pinned: digest -> reason.
    live: digests that running steps build on.
    Live heads, and those committed within the last hour (their run may be between two steps), keep
    every head connected with them, because only the run knows what else it needs.
    """
    by_digest = {head.digest: head for head in heads}
    reasons: dict[str, str] = {}
    parent_digests = {parent for head in heads for parent in head.parents.values()}
    leaves = [head for head in heads if head.digest not in parent_digests]
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
    """Return the digests of the heads in the same connected components as `digests`."""
    neighbours: dict[str, set[str]] = {head.digest: set() for head in heads}
    for head in heads:
        for parent in head.parents.values():
            if parent in neighbours:
                neighbours[parent].add(head.digest)
                neighbours[head.digest].add(parent)
    component, waiting = set(), [digest for digest in digests if digest in neighbours]
    while waiting:
        digest = waiting.pop()
        if digest not in component:
            component.add(digest)
            waiting += neighbours[digest]
    return component
