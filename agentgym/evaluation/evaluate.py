"""One checkpoint on held-out items: greedy, avg@n, pass@k, each with an interval that knows the
items and their families, paired against the baseline.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from agentgym.compute.placement import open_engine
from agentgym.config import EvaluationConfig
from agentgym.data.items import splits_from_json
from agentgym.evaluation import score as scoring
from agentgym.evaluation.passk import FAILED, num_failed
from agentgym.evaluation.result import family_of
from agentgym.evaluation.score import Asked, both_conventions, to_json
from agentgym.models.checkpoint import load_checkpoint
from agentgym.models.model import set_threads
from agentgym.records import TRAJECTORIES, decode_trajectories
from agentgym.rollouts.collect import RolloutError
from agentgym.rollouts.metrics import rollout_metrics
from agentgym.steps.context import FAMILIES, OUTCOMES, StepContext, now_ms
from agentgym.store.manifest import Manifest
from agentgym.tracking.points import Point
from agentgym.types import Item, Trajectory

Array = np.ndarray[Any, np.dtype[np.float64]]


def evaluate(ctx: StepContext) -> Manifest:
    """Play every item of the split once greedily and `num_samples` times sampled; commit a chunk
    of items at a time.

    The step's baseline is compared with it, item by item; it used the same items, horizon and
    random numbers.
    Errors: RolloutError as soon as more episodes failed than `evaluation.min_coverage` allows; what
    is committed stays.
    """
    set_threads(ctx.cfg.compute_threads)
    cfg, settings, step = ctx.cfg, ctx.cfg.evaluation, ctx.step
    splits = splits_from_json(ctx.read(ctx.data, "splits.json"))
    items = getattr(splits, settings.split)[: settings.num_items]
    if len(items) < settings.num_items:
        raise ValueError(
            f"evaluation.num_items {settings.num_items} is more than the {len(items)}"
            f" {settings.split} items of {cfg.env_names}; lower it"
        )
    version = int(ctx.checkpoint.state["global_step"])
    last = _play(ctx, items, version)
    earlier = [
        decode_trajectories(ctx.read(commit, TRAJECTORIES))
        for commit in ctx.store.history(step.name, ctx.writer.key)
    ]
    everything = [trajectory for part in earlier for trajectory in part] + last
    greedy, samples = outcomes(everything, items, settings.num_samples)
    families = families_of(everything, items)
    results = score(greedy, samples, settings, [item.env for item in items], families)
    if step.baseline:
        base = json.loads(ctx.read(ctx.parents[step.baseline], OUTCOMES))
        gains = paired(base, greedy, samples, settings, families)
        results["paired"] = {"baseline": step.baseline, **gains}
    results |= {
        "checkpoint": step.checkpoint,
        "num_items": len(items),
        "max_turns": settings.max_turns,
        "global_step": version,
    }
    return ctx.commit(
        done=True,
        state={"global_step": version, "num_items": len(items)},
        blobs={
            OUTCOMES: (
                json.dumps(
                    {
                        "items": [item.item_id for item in items],
                        "greedy": _plain(greedy),
                        "samples": _plain(samples),
                    }
                ).encode()
            ),
            FAMILIES: json.dumps(families).encode(),
        },
        results=results,
        points=[Point(version, now_ms(), evaluation_metrics(results, everything))],
        trajectories=last,
    )


def _play(ctx: StepContext, items: Sequence[Item], version: int) -> list[Trajectory]:
    """The episodes of the last chunk; those before it are committed here."""
    cfg, settings = ctx.cfg, ctx.cfg.evaluation
    num_episodes = len(items) * (1 + settings.num_samples)
    num_done, num_out = (
        int(ctx.head.state[name]) if ctx.head else 0 for name in ("num_items", "num_failed")
    )
    ctx.progress.start(f"evaluate {ctx.step.checkpoint}", num_episodes)
    ctx.progress.advance(num_done * (1 + settings.num_samples))
    checkpoint = load_checkpoint(ctx.store, ctx.checkpoint)
    with (
        ctx.environment(False) as endpoints,
        open_engine(cfg, checkpoint, endpoints, version=version) as engine,
    ):
        for first in range(num_done, len(items), settings.chunk_items):
            chunk = items[first : first + settings.chunk_items]
            trajectories: list[Trajectory] = []
            for temperature, num_samples, first_sample in (
                (0.0, 1, 0),
                (settings.temperature, settings.num_samples, 1),
            ):
                trajectories += engine.collect(
                    chunk,
                    num_samples=num_samples,
                    step=0,
                    max_turns=settings.max_turns,
                    temperature=temperature,
                    seed=settings.seed,
                    first_sample=first_sample,
                    progress=ctx.progress.advance,
                )
            num_out += sum(not trajectory.status.is_valid for trajectory in trajectories)
            require_coverage(num_out, num_episodes, settings.min_coverage)
            played = first + len(chunk)
            if played < len(items):
                ctx.commit(
                    done=False,
                    state={"global_step": version, "num_items": played, "num_failed": num_out},
                    blobs={},
                    trajectories=trajectories,
                )
    return trajectories


def outcomes(
    trajectories: Sequence[Trajectory], items: Sequence[Item], num_samples: int
) -> tuple[Array, Array]:
    """(greedy [I], samples [I, n]) success as 0 or 1, in the items' order; NaN where the
    environment failed.
    """
    row = {item.item_id: index for index, item in enumerate(items)}
    table = np.full((len(items), 1 + num_samples), np.nan)
    for trajectory in trajectories:
        if trajectory.status.is_valid:
            table[row[trajectory.item.item_id], trajectory.sample] = float(trajectory.success)
    return table[:, 0], table[:, 1:]


def families_of(trajectories: Sequence[Trajectory], items: Sequence[Item]) -> list[str | None]:
    """What kind of task each item is, as its environment told; None where it told nothing. Of
    several environments each has its own; an item without one is alone.
    """
    told: dict[str, str | None] = dict.fromkeys(item.item_id for item in items)
    for trajectory in trajectories:
        item_id = trajectory.item.item_id
        told[item_id] = told[item_id] or family_of(trajectory)
    if len({item.env for item in items}) == 1 or not any(told.values()):
        return list(told.values())
    return [
        f"{item.env} {family}" if (family := told[item.item_id]) else item.item_id for item in items
    ]


def score(
    greedy: Array,
    samples: Array,
    settings: EvaluationConfig,
    envs: Sequence[str],
    families: Sequence[str | None],
) -> dict[str, Any]:
    """The reported numbers of one evaluation, as JSON types. envs: [I] of each item; where they
    differ, each one's numbers, too. families: [I].

    `summary` leaves failed episodes out, `failed_as_failures` takes them for failures of the
    policy; `coverage` is the share of episodes that did not fail.
    """
    asked = Asked(settings.k, settings.confidence)

    def numbers(rows: Array) -> dict[str, Any]:
        own = [family for family, here in zip(families, rows, strict=True) if here]
        return both_conventions((greedy[rows], samples[rows]), own, asked)

    every = np.ones(len(envs), dtype=bool)
    result = {**numbers(every), "num_env_errors": num_failed(greedy, samples)}
    if len(set(envs)) > 1:
        table = np.array(envs)
        result["by_env"] = {
            env: {"num_items": envs.count(env), **numbers(table == env)}
            for env in sorted(set(envs))
        }
    return result


def require_coverage(num_out: int, num_episodes: int, least: float) -> None:
    """Errors: RolloutError where so many episodes failed that the rest cannot stand for all."""
    if num_out > (1 - least) * num_episodes + 1e-9:
        raise RolloutError(
            f"{num_out} of {num_episodes} episodes of this evaluation failed or ran out of time: at"
            f" most {1 - num_out / num_episodes:.1%} count, and evaluation.min_coverage is"
            f" {least:.1%}; see to the environment servers, raise rollout.episode_timeout_s, or"
            " lower the floor"
        )


def paired(
    base: dict[str, Any],
    greedy: Array,
    samples: Array,
    settings: EvaluationConfig,
    families: Sequence[str | None],
) -> dict[str, Any]:
    """Item by item differences to a baseline's stored outcomes, as JSON types."""
    before = np.array(base["greedy"], dtype=float), np.array(base["samples"], dtype=float)
    asked = Asked(settings.k, settings.confidence)
    return to_json(scoring.paired(before, (greedy, samples), families, asked))


def evaluation_metrics(
    results: dict[str, Any], trajectories: Sequence[Trajectory]
) -> dict[str, float]:
    """The same numbers under metric names."""
    metrics: dict[str, float] = {}
    for prefix, own in (
        ("eval", results),
        *((f"eval/{env}", own) for env, own in results.get("by_env", {}).items()),
    ):
        metrics |= {
            f"{prefix}/{name}": float(interval["mean"]) for name, interval in own["summary"].items()
        }
        metrics |= {
            f"{prefix}/{FAILED}/{name}": float(interval["mean"])
            for name, interval in own[FAILED].items()
        }
        metrics[f"{prefix}/coverage"] = float(own["coverage"])
    rollout = rollout_metrics(trajectories)
    shares = ("turns_mean", "max_turns_frac", "env_limit_frac", "env_error_frac")
    return metrics | {f"eval/{name}": rollout[f"rollout/{name}"] for name in shares}


def _plain(values: Array) -> Any:
    plain = values.astype(object)
    plain[np.isnan(values)] = None
    return plain.tolist()
