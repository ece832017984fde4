"""Evaluate a policy: play the slots (item and sample) still missing, then compute the result."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any

from agentgym.config import RunConfig
from agentgym.data.check import TASKS
from agentgym.data.items import Splits, splits_from_json
from agentgym.evaluation.numbers import headline, metrics_of, numbers_of, paired
from agentgym.evaluation.playing import EvaluationStopped, Playing, Table, play
from agentgym.evaluation.policies import (
    Contender,
    checkpoint_contender,
    env_version,
    prompts_digest,
    seated,
    told_by,
)
from agentgym.evaluation.protocol import EvaluationProtocol, protocol_of_run
from agentgym.evaluation.record import Ledger, Plan
from agentgym.evaluation.result import Result, Slot, coverage_of, expected_slots
from agentgym.evaluation.stored import stored_result
from agentgym.models.model import set_threads
from agentgym.rollouts.collect import Attempts, RolloutError
from agentgym.rollouts.engine import LoopThread, open_pool
from agentgym.rollouts.episode import Player
from agentgym.rollouts.policies.prices import Tariff
from agentgym.rollouts.pools import EnvPools
from agentgym.steps.context import Progress, StepContext, now_ms
from agentgym.store.keys import source_digest
from agentgym.store.manifest import Manifest, sha256
from agentgym.store.runstore import RunStore
from agentgym.tracking.points import Point
from agentgym.types import Endpoints, Item, Usage

SCHEMA = 1  # version of the fields that an evaluation's digest covers
HARNESS = ("agentgym.evaluation.playing", "agentgym.rollouts.collect", "agentgym.rollouts.episode")
Items = Mapping[str, Sequence[Item]]  # by environment


@dataclass(frozen=True)
class Opened:
    """Environments connected for a policy, and `seat`, which opens the policy to play in them."""

    loop: LoopThread
    told: Mapping[str, str]  # instructions of the servers, by environment
    # opens the policy; takes the usage of earlier processes, which counts against a cost limit
    seat: Callable[[Usage], AbstractAsyncContextManager[Playing]]
    pool: EnvPools | None = None  # None: Ray's rollout workers open the connections


def evaluate(ctx: StepContext) -> Manifest:
    """Evaluate a run's checkpoint and compare it with the step's baseline, if any. Return the final
    commit. A resumed step plays the missing episodes: those not yet played and those that failed.
    Errors: RolloutError if more episodes failed than `evaluation.min_coverage` allows.
    """
    cfg, settings, step, store = ctx.cfg, ctx.cfg.evaluation, ctx.step, ctx.store
    set_threads(cfg.engine_threads)
    version = int(ctx.checkpoint.state["global_step"])
    items = items_of_step(cfg, splits_from_json(ctx.read(ctx.data, "splits.json")))
    protocol = protocol_of_step(cfg, items)
    contender = checkpoint_contender(cfg, store, ctx.checkpoint)
    tasks = tasks_of_step(store, ctx.data, items)
    points: list[Point] = []

    def commit(*, done: bool, state: dict[str, Any], wall_s: float, **parts: Any) -> Manifest:
        state = {"global_step": version, **state}
        return ctx.commit(done=done, state=state, points=points if done else (), **parts)

    with ctx.environment(False) as endpoints, _open(cfg, contender, endpoints, protocol) as opened:
        ledger = Ledger.open(
            store,
            store.history(step.name, ctx.writer.key),
            commit,
            protocol,
            Plan(
                slots_of(protocol, items, tasks),
                about(protocol, contender, instructions := asked_of(protocol, opened.told), ()),
                identity_of(protocol, items, tasks, contender.identity, opened.told),
            ),
        )
        show_progress(ctx.progress, f"evaluate {step.checkpoint}", ledger)
        stopped = play_owed(opened, protocol, instructions, items, ledger, ctx.progress)
    require_coverage(ledger, settings.min_coverage)
    result = conclude(protocol, ledger, stopped)
    results = headline(result, settings.k, settings.confidence)
    points.append(Point(version, now_ms(), metrics_of(results, result)))
    if step.baseline:
        base = stored_result(store, ctx.parents[step.baseline])
        gains = paired(base, result, settings.k, settings.confidence)
        results["paired"] = {"baseline": step.baseline, **gains}
    results |= {
        "checkpoint": step.checkpoint,
        "num_items": sum(map(len, items.values())),
        "max_turns": settings.max_turns,
        "global_step": version,
    }
    return ledger.conclude(result, results, done=True)


def items_of_step(cfg: RunConfig, splits: Splits) -> dict[str, tuple[Item, ...]]:
    """Return the first `evaluation.num_items` items of `evaluation.split`, by environment; without
    environments that have none of them. Errors: ValueError if the split has fewer.
    """
    settings = cfg.evaluation
    items = getattr(splits, settings.split)[: settings.num_items]
    if len(items) < settings.num_items:
        raise ValueError(
            f"evaluation.num_items {settings.num_items} is more than the {len(items)}"
            f" {settings.split} items of {cfg.env_names}; lower it"
        )
    by_env = {env.name: tuple(item for item in items if item.env == env.name) for env in cfg.envs}
    return {env: its for env, its in by_env.items() if its}


def tasks_of_step(store: RunStore, data: Manifest, items: Items) -> dict[str, list[str | None]]:
    """Return each item's task digest, by environment; None if the environment reports no tasks.
    data: commit of the step `prepare`, which has the digests.
    """
    digests = json.loads(store.read(data, TASKS))
    return {env: [digests[item.item_id] for item in its] for env, its in items.items()}


def protocol_of_step(cfg: RunConfig, items: Items) -> EvaluationProtocol:
    """Return the protocol of a run's evaluations of these items. evaluation.chunk_items gives the
    chunk size, evaluation.min_coverage the number of episodes that may fail.
    """
    settings = cfg.evaluation
    protocol = protocol_of_run(cfg, list(items))
    num_episodes = sum(map(len, items.values())) * (1 + settings.num_samples)
    envs = []
    for env_protocol in protocol.envs:
        num = {"num": len(items[env_protocol.env.name])}
        listed = env_protocol.items.model_copy(update=num)
        envs.append(env_protocol.model_copy(update={"items": listed}))
    most_failed = int((1 - settings.min_coverage) * num_episodes + 1e-9)
    chunk = settings.chunk_items * (1 + settings.num_samples)
    update = {"envs": tuple(envs), "fail_on_error": most_failed, "chunk_episodes": chunk}
    return protocol.model_copy(update=update)


def require_coverage(ledger: Ledger, least: float) -> None:
    """Raise RolloutError if a share of more than 1 - `least` of the slots failed for good."""
    failed = [slot for slot in ledger.slots.values() if slot.failed and not slot.counts]
    num_out, num = len(failed), len(ledger.slots)
    if num_out > (1 - least) * num + 1e-9:
        raise RolloutError(
            f"{num_out} of {num} episodes of this evaluation failed or ran out of time: at most"
            f" {1 - num_out / num:.1%} count, and evaluation.min_coverage is {least:.1%}; see to"
            " the environment servers, raise rollout.episode_timeout_s, or lower the floor. Last:"
            f" {failed[-1].item_id} sample {failed[-1].sample}: {failed[-1].failed[-1].error}"
        )


@contextmanager
def _open(
    cfg: RunConfig, contender: Contender, endpoints: Endpoints, protocol: EvaluationProtocol
) -> Iterator[Opened]:
    """Connect the environments and yield the means to play a run's checkpoint in them: in this
    process or, with `compute` ray, in Ray's rollout workers. All is closed after the block.
    """
    if cfg.compute != "ray":
        with open_local(cfg, contender, endpoints, protocol) as opened:
            yield opened
        return
    from agentgym.compute.cluster import open_cluster

    assert contender.checkpoint is not None
    with (
        open_cluster(cfg, num_ranks=0, num_workers=cfg.ray.num_workers) as cluster,
        cluster.engine(contender.checkpoint, endpoints, version=contender.version) as engine,
    ):
        playing = Playing(lambda settings, _protocol: engine.attempts(settings))
        told = {**dict.fromkeys(endpoints, ""), **engine.instructions}
        yield Opened(engine.loop, told, lambda spent: nullcontext(playing))


@contextmanager
def open_local(
    cfg: RunConfig,
    contender: Contender,
    endpoints: Endpoints,
    protocol: EvaluationProtocol,
    watched: Callable[[Player], Player] = lambda player: player,
) -> Iterator[Opened]:
    """Connect to the environments for the block, to play in this process; `Opened.seat` then opens
    the policy. watched: wraps a player before it plays an episode.
    Errors: as `open_pool` and `told_by`.
    """
    with open_pool(cfg, endpoints, allow_expert=contender.needs_expert) as (pool, loop, guides):

        @asynccontextmanager
        async def seat(spent: Usage) -> AsyncIterator[Playing]:
            async with seated(contender, cfg, spent) as taken:
                yield Playing(
                    lambda settings, played: Attempts(
                        pool,
                        lambda item, sample: watched(taken.player_of(item, sample)),
                        settings,
                        played.episode_timeout_s,
                        played.max_attempts,
                    ),
                    taken.stopped,
                )

        yield Opened(loop, told_by(guides, protocol), seat, pool)


def asked_of(protocol: EvaluationProtocol, openings: Mapping[str, str]) -> dict[str, str]:
    """Return environment -> instructions, for environments whose protocol sets `instructions`.
    openings: environment -> instructions, from `told_by`.
    """
    return {s.env.name: openings[s.env.name] for s in protocol.envs if s.instructions}


def slots_of(
    protocol: EvaluationProtocol, items: Items, tasks: Mapping[str, Sequence[str | None]]
) -> tuple[Slot, ...]:
    """Return every slot (item and sample), unplayed. tasks: each item's task digest, or None."""
    samples = {settings.env.name: settings.sample_numbers for settings in protocol.envs}
    return expected_slots(items, samples, tasks)


def about(
    protocol: EvaluationProtocol,
    contender: Contender,
    instructions: Mapping[str, str],
    notes: Sequence[str],
) -> dict[str, Any]:
    """Return the facts about an evaluation that reports show. notes: further lines for readers."""
    departs = [f"Not as {protocol.follows}: {line}" for line in protocol.departs]
    return {
        "policy": contender.about,
        "protocol": protocol.name,
        "follows": protocol.follows,
        "min_coverage": protocol.min_coverage,
        "settings": protocol.semantic(),  # without the addresses of servers, which may be private
        "instructions": dict(instructions),
        "notes": [*departs, *notes],
    }


def show_progress(progress: Progress, title: str, ledger: Ledger) -> None:
    """Start a progress bar over all slots, at the number of those that are not to be played."""
    progress.start(title, len(ledger.slots))
    progress.advance(len(ledger.slots) - len(ledger.owed))


def play_owed(
    opened: Opened,
    protocol: EvaluationProtocol,
    instructions: Mapping[str, str],
    items: Items,
    ledger: Ledger,
    progress: Progress,
) -> str:
    """Play each missing slot, a failed attempt again within the protocol's max_attempts, and commit
    it. Return the reason if it stopped early, else "".
    """

    async def playing() -> str:
        spent = sum((slot.total_usage for slot in ledger.slots.values()), Usage())
        async with opened.seat(spent) as seat:
            by_id = {item.item_id: item for its in items.values() for item in its}
            table = Table(protocol, seat, instructions, by_id, progress.advance)
            try:
                await play(table, ledger)
            except EvaluationStopped as stop:
                return str(stop)
        return ""

    try:
        return opened.loop.run(playing())
    finally:  # if interrupted: commit finished episodes before the lease is returned
        opened.loop.cancel()


def conclude(
    protocol: EvaluationProtocol, ledger: Ledger, stopped: str, tariff: Tariff | None = None
) -> Result:
    """Return the result of all slots, played so far or not, with their cost if there is a tariff.
    Commit nothing. stopped: the result of `play_owed`.
    """
    slots = tuple(ledger.slots.values())
    facts = {**ledger.about, "valid": protocol.is_covered(coverage_of(slots))}
    if tariff is not None:
        usage = sum((slot.total_usage for slot in slots), Usage())
        facts["cost"] = asdict(tariff.cost(usage))
    if stopped:
        facts["notes"] = [*facts["notes"], f"It stopped before its last episode: {stopped}"]
    wall_s = ledger.elapsed_s
    played = sum(slot.outcome is not None for slot in slots)
    clock = {"took_s": round(wall_s, 3), "episodes_per_s": round(played / max(wall_s, 1e-9), 3)}
    return Result(ledger.identity, slots, numbers_of(slots, protocol), facts, clock)


def identity_of(
    protocol: EvaluationProtocol,
    items: Items,
    tasks: Mapping[str, Sequence[str | None]],
    policy: Mapping[str, Any],
    instructions: Mapping[str, str],
) -> dict[str, Any]:
    """Return all that can change an evaluation's result. tasks: each item's task digest, or None;
    policy: `Contender.identity`; instructions: the result of `told_by`.
    """
    asked = asked_of(protocol, instructions)
    listed = {
        env: "\n".join(f"{item.item_id} {task}" for item, task in zip(its, tasks[env], strict=True))
        for env, its in items.items()
    }
    return {
        "schema": SCHEMA,
        "policy": dict(policy),
        "protocol": protocol.semantic(),
        "items": {
            env: {"num": len(items[env]), "digest": sha256(text.encode())}
            for env, text in listed.items()
        },
        "prompts": {e.name: prompts_digest(asked.get(e.name, "")) for e in protocol.env_configs},
        "environments": {
            env.name: env_version(env.name, env.options) for env in protocol.env_configs
        },
        "harness": source_digest(HARNESS),
    }
