"""Numbers about finished episodes.
The audit recomputes them from the stored episodes with the same function.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import compress

from agentgym.algorithms.batch import TRUNCATED
from agentgym.algorithms.signal import all_equal
from agentgym.types import Status, Trajectory


def validation_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Return `validation/success` and, with several environments, `validation/ENV/success`.
    A figure without a valid episode is missing.
    """
    metrics = rollout_metrics(trajectories)
    return {
        name.replace("rollout/", "validation/"): value
        for name, value in metrics.items()
        if name.endswith("/success")
    }


def success_share(trajectories: Sequence[Trajectory]) -> float:
    """Share of successes among the valid episodes; 0 if there are none."""
    valid = [trajectory for trajectory in trajectories if trajectory.status.is_valid]
    return sum(trajectory.success for trajectory in valid) / len(valid) if valid else 0.0


def rollout_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Return name -> count, share or mean over at least one episode. Failed episodes count only in
    `num_episodes` and `env_error_frac`; without a valid one, other shares and means are missing.
    With several environments, there are also figures by environment.
    """
    valid = [trajectory for trajectory in trajectories if trajectory.status.is_valid]
    total = len(trajectories)
    metrics = {
        "rollout/num_episodes": float(total),
        "rollout/env_error_frac": (total - len(valid)) / total,
        "rollout/max_turns": float(trajectories[0].max_turns),
    }
    if not valid:
        return metrics
    statuses = Counter(trajectory.status for trajectory in valid)
    groups: dict[str, list[float]] = defaultdict(list)
    for trajectory in valid:
        groups[trajectory.item.item_id].append(trajectory.reward or 0.0)
    for env in (
        sorted(envs)
        if len(envs := {trajectory.item.env for trajectory in trajectories}) > 1
        else ()
    ):
        env_valid = [trajectory for trajectory in valid if trajectory.item.env == env]
        metrics[f"rollout/{env}/num_episodes"] = float(len(env_valid))
        if env_valid:
            metrics[f"rollout/{env}/success"] = sum(
                trajectory.success for trajectory in env_valid
            ) / len(env_valid)
            metrics[f"rollout/{env}/reward_mean"] = sum(
                trajectory.reward or 0.0 for trajectory in env_valid
            ) / len(env_valid)
            metrics[f"rollout/{env}/turns_mean"] = sum(
                len(trajectory.turns) for trajectory in env_valid
            ) / len(env_valid)
    count = len(valid)
    logprobs = [
        logprob
        for trajectory in valid
        for logprob in compress(trajectory.logprobs, trajectory.action_mask)
    ]
    return metrics | {
        # entropy of the sampling distributions, estimated from the samples: known at every step,
        # also without training
        "rollout/entropy": -sum(logprobs) / max(len(logprobs), 1),
        "rollout/success": success_share(valid),
        "rollout/reward_mean": sum(trajectory.reward or 0.0 for trajectory in valid) / count,
        "rollout/turns_mean": sum(len(trajectory.turns) for trajectory in valid) / count,
        "rollout/tokens_mean": sum(len(trajectory.input_ids) for trajectory in valid) / count,
        "rollout/action_tokens_mean": (
            sum(sum(trajectory.action_mask) for trajectory in valid) / count
        ),
        "rollout/truncated_frac": sum(statuses[status] for status in TRUNCATED) / count,
        "rollout/max_turns_frac": statuses[Status.MAX_TURNS] / count,
        "rollout/max_tokens_frac": statuses[Status.MAX_TOKENS] / count,
        "rollout/env_limit_frac": statuses[Status.ENV_LIMIT] / count,
        "rollout/equal_reward_groups_frac": sum(map(all_equal, groups.values())) / len(groups),
    }
