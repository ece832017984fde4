"""Helpers for learner ranks and rollout workers: end an actor, and find the cause of its
failure.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

SLACK_S = 30.0  # on top of a remote call's own deadline


def node_id() -> str:
    import ray

    return str(ray.get_runtime_context().get_node_id())


def node_address() -> str:
    import ray

    return str(ray.util.get_node_ip_address())


def end(actors: Sequence[Any]) -> None:
    import ray

    if not ray.is_initialized():  # ray.kill would start a cluster
        return
    for actor in actors:
        with contextlib.suppress(Exception):  # already gone, or ends with the cluster
            ray.kill(actor, no_restart=True)


def cause_of(error: BaseException) -> BaseException:
    """Return the exception raised inside the actor, or the error itself if there is none."""
    cause = getattr(error, "cause", None)
    return cause if isinstance(cause, BaseException) else error


def first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else "no reason given"
