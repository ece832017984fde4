"""Open the policy that a run samples with, in this process or another one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentgym.config import RunConfig
from agentgym.rollouts.policies.engines import HOSTED, open_here, tolerance_of
from agentgym.types import Policy

if TYPE_CHECKING:  # experts and endpoints are evaluated without torch
    from agentgym.models.checkpoint import Checkpoint


def open_policy(cfg: RunConfig, checkpoint: Checkpoint, *, num_slots: int, version: int) -> Policy:
    """Open the policy that `rollout.engine` names; vLLM has its own process, started if necessary.
    Errors: ConfigError; those of the engine.
    """
    if cfg.rollout.engine not in HOSTED:
        return open_here(cfg, checkpoint, num_slots=num_slots, version=version)
    from agentgym.rollouts.policies.on_host import open_on_host

    tolerance_of(cfg, checkpoint.dtype)
    return open_on_host(cfg, checkpoint, num_slots=num_slots, version=version)
