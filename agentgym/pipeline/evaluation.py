"""Any policy under a protocol: what `agentgym evaluate`, the flow and a DVC stage run."""

from __future__ import annotations

import functools
import json
import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from agentgym.config import ConfigError, EnvConfig, RunConfig
from agentgym.data.items import parse_item_id
from agentgym.deploy.environment import environment_servers
from agentgym.deploy.local import IdentitiesUnknown, check_local_env, task_identities
from agentgym.evaluation import asking
from agentgym.evaluation.numbers import numbers_of
from agentgym.evaluation.play import EvaluationStopped, Table, play
from agentgym.evaluation.policies import (
    Contender,
    PolicyName,
    Who,
    env_version,
    prompts_digest,
    recorded_contender,
    seated,
)
from agentgym.evaluation.protocol import (
    EvaluationProtocol,
    items_of,
    load_protocol,
    protocol_of_run,
)
from agentgym.evaluation.record import (
    STEP,
    Ledger,
    attempts_of,
    find,
    planned_slots,
    stored_slots,
)
from agentgym.evaluation.request import EvaluationRequest
from agentgym.evaluation.result import (
    Result,
    Slot,
    coverage_of,
    digest_of,
    expected_slots,
)
from agentgym.pipeline.contenders import Invited, contender_of, invite, playing_config
from agentgym.pipeline.evaluated import Evaluated, How, from_store, kept
from agentgym.pipeline.table import open_store
from agentgym.rollouts.client import EnvError
from agentgym.rollouts.players import NoHints, hints_of
from agentgym.rollouts.policies.prices import Tariff
from agentgym.rollouts.pools import EnvPools
from agentgym.steps.context import NoProgress, Progress
from agentgym.store.keys import source_digest
from agentgym.store.manifest import Manifest, canonical_json, sha256
from agentgym.types import Item, Usage

logger = logging.getLogger(__name__)

SCHEMA = 1  # of what an evaluation's digest is made of
HARNESS = ("agentgym.evaluation.play", "agentgym.rollouts.collect", "agentgym.rollouts.episode")


def evaluate_policy(
    cfg: RunConfig,
    request: EvaluationRequest,
    progress: Progress | None = None,
    tell: Callable[[str], None] = logger.info,
) -> Evaluated:
    """Play what is owed, score it, keep it. The same question, asked again, is answered from the
    store; one that was interrupted goes on.

    tell: told, before the first turn, how a model that was not trained here is asked.
    Errors: ConfigError before anything starts; LeaseHeld where another process is at it.
    """
    protocol = protocol_for(cfg, request)
    items = items_of(protocol, cfg)
    invited = invite(cfg, protocol, request)
    if protocol.deterministic and invited.contender.endpoint is not None:
        raise ConfigError("deterministic is nothing an endpoint promises; leave it out")
    return _evaluate(invited, protocol, items, progress or NoProgress(), tell)


def answered(cfg: RunConfig, policy: str, protocol: EvaluationProtocol) -> Manifest | None:
    """The finished evaluation of this policy by this protocol, the newest one, found by all that is
    known of it where no server runs: only the prompts are read off the environment's source.
    Errors: ConfigError.
    """
    items, playing = items_of(protocol, cfg), playing_config(cfg, protocol, "")
    contender = contender_of(cfg, playing, EvaluationRequest.model_validate({"policy": policy}))
    nothing: dict[str, Any] = dict.fromkeys(items, "")
    untold = {env: [None] * len(its) for env, its in items.items()}
    identity = identity_of(protocol, items, untold, contender.identity, nothing)
    asked = json.loads(canonical_json(identity))
    names = sorted(asked.keys() - {"items", "prompts"})
    ids = {(env, item.item_id) for env, its in items.items() for item in its}
    store = open_store(cfg)
    for head in reversed(store.heads(STEP)):
        if head.done and all(head.config.get(name) == asked[name] for name in names):
            planned, _ = planned_slots(store, head)
            if {(slot.env, slot.item_id) for slot in planned} == ids:
                return head
    return None


def protocol_for(cfg: RunConfig, request: EvaluationRequest) -> EvaluationProtocol:
    """Errors: ConfigError."""
    if request.protocol:
        protocol = load_protocol(request.protocol, request.changes)
        return protocol.only(request.envs) if request.envs else protocol
    envs = request.envs or tuple(env.name for env in cfg.envs)
    changes, reply = request.changes, request.changes.get("max_new_tokens", 0)
    is_model = PolicyName.parse(request.policy).who in (Who.ENDPOINT, Who.MODEL)
    if is_model and reply >= cfg.model.context_tokens:  # not its context, which is made to fit
        changes = {"context_tokens": reply + 1, **changes}
    return protocol_of_run(cfg, envs, changes)


def _evaluate(
    invited: Invited,
    protocol: EvaluationProtocol,
    items: Mapping[str, Sequence[Item]],
    progress: Progress,
    tell: Callable[[str], None] = logger.info,
) -> Evaluated:
    """protocol: what is asked of every policy; `invited` has what is asked of this one."""
    from agentgym.rollouts.engine import open_pool

    contender, cfg = invited.contender, invited.cfg
    store = open_store(cfg)
    for env in cfg.envs:
        check_local_env(env)
    tasks = {env.name: _tasks(env, items[env.name]) for env in cfg.envs}
    with (
        environment_servers(cfg, contender.needs_expert) as endpoints,
        open_pool(cfg, endpoints, allow_expert=contender.needs_expert) as (pool, loop, guides),
    ):
        told = asking.told_by(guides, protocol)
        policy = _policy(protocol, invited, told)
        identity = identity_of(protocol, items, tasks, policy, told)
        digest = digest_of(identity)
        final = store.final(STEP, digest)
        if final is not None:
            return from_store(cfg, store, final, "done")
        if contender.needs_hints:
            loop.run(_require_hints(pool, items))
        slots = expected_slots(
            items, {each.env.name: each.sample_numbers for each in protocol.envs}, tasks
        )
        with store.open(STEP, digest) as writer:
            before = writer.head
            ledger = Ledger.open(
                store,
                writer,
                identity,
                slots,
                _about(protocol, invited, told),
                commit_every_s=protocol.commit_every_s,
                chunk_episodes=protocol.chunk_episodes,
            )
            progress.start(f"evaluate {contender.about}"[:34], len(slots))
            progress.advance(len(slots) - len(ledger.owed))
            for line in invited.lines(told):
                tell(line)
            given = invited.instructions(told)
            table = _Opened(invited.protocol, pool, given, items, progress.advance)
            try:
                stopped = loop.run(_play(contender, cfg, table, ledger))
            finally:  # interrupted: what is finished is committed before the lease is given back
                loop.cancel()
            result, valid = conclude(protocol, contender, ledger, stopped)
            done = valid and not stopped
            manifest = ledger.conclude(result, done=done)
    how: How = "resumed" if before is not None else "ran"
    return kept(cfg, store, manifest, result, how, stopped)


async def _require_hints(pool: EnvPools, items: Mapping[str, Sequence[Item]]) -> None:
    """Errors: ConfigError where an environment gives none: it gives none in any episode."""
    for first, *_ in items.values():
        try:
            async with pool.session(first, f"hints-{secrets.token_hex(8)}") as session:
                await hints_of(session)
        except NoHints as error:
            raise ConfigError(f"{first.env}: {error}") from None
        except EnvError as error:  # the episodes have their attempts
            logger.info("%s: %s", first.env, error)


def _policy(
    protocol: EvaluationProtocol, invited: Invited, told: Mapping[str, str]
) -> dict[str, Any]:
    """The identity of a policy, with what it is asked otherwise than the protocol says."""
    otherwise = (
        {}
        if invited.contender.knows_rules
        else asking.differences(protocol, invited.protocol, told, invited.instructions(told))
    )
    return {**invited.contender.identity, **({"asked": otherwise} if otherwise else {})}


@dataclass(frozen=True)
class _Opened:
    """What `Table` is made of, but for the policy."""

    protocol: EvaluationProtocol
    pool: Any
    instructions: Mapping[str, str]
    items: Mapping[str, Sequence[Item]]
    progress: Any


async def _play(contender: Contender, cfg: RunConfig, opened: _Opened, ledger: Ledger) -> str:
    """Result: why it stopped before its last episode; empty: it did not."""
    spent = sum((slot.total_usage for slot in ledger.slots.values()), Usage())
    async with seated(contender, cfg, spent) as seat:
        table = Table(
            opened.protocol,
            opened.pool,
            seat,
            opened.instructions,
            {item.item_id: item for its in opened.items.values() for item in its},
            opened.progress,
        )
        try:
            await play(table, ledger)
        except EvaluationStopped as stop:
            return str(stop)
    return ""


def _tasks(env: EnvConfig, items: Sequence[Item]) -> list[str | None]:
    """What each item's task is, where the environment can say. Errors: ConfigError."""
    return list(_identities(env.model_dump_json(), tuple(item.task_id for item in items)))


@functools.cache  # a process of its own says it, and it is the same for every policy
def _identities(env: str, task_ids: tuple[int, ...]) -> tuple[str | None, ...]:
    asked = EnvConfig.model_validate_json(env)
    try:
        return tuple(task_identities(asked, task_ids))
    except IdentitiesUnknown as reason:
        logger.info("%s: tasks are told apart by their ids alone: %s", asked.name, reason)
        return (None,) * len(task_ids)


def identity_of(
    protocol: EvaluationProtocol,
    items: Mapping[str, Sequence[Item]],
    tasks: Mapping[str, Sequence[str | None]],
    policy: Mapping[str, Any],
    instructions: Mapping[str, str],
) -> dict[str, Any]:
    """All that decides what a result means, and nothing else. instructions: of the servers."""
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
        "prompts": {
            each.env.name: prompts_digest(instructions[each.env.name]) if each.instructions else ""
            for each in protocol.envs
        },
        "environments": {
            each.env.name: env_version(each.env.name, each.env.options) for each in protocol.envs
        },
        "harness": source_digest(HARNESS),
    }


def _about(
    protocol: EvaluationProtocol, invited: Invited, told: Mapping[str, str]
) -> dict[str, Any]:
    departs = [f"Not as {protocol.follows}: {line}" for line in protocol.departs]
    return {
        "policy": invited.contender.about,
        "protocol": protocol.name,
        "follows": protocol.follows,
        "min_coverage": protocol.min_coverage,
        "settings": protocol.model_dump(mode="json"),
        "instructions": invited.instructions(told),
        "notes": [*departs, *invited.lines(told)],
    }


def conclude(
    protocol: EvaluationProtocol, contender: Contender, ledger: Ledger, stopped: str
) -> tuple[Result, bool]:
    """The result as far as it is, and whether it is valid."""
    slots = tuple(ledger.slots.values())
    valid = coverage_of(slots) >= protocol.min_coverage - 1e-9
    tariff = contender.endpoint.tariff if contender.endpoint else None
    about = {**ledger.about, "valid": valid, **_cost(tariff, slots)}
    if stopped:
        about["notes"] = [*about["notes"], f"It stopped before its last episode: {stopped}"]
    wall_s = ledger.elapsed_s
    played = sum(slot.outcome is not None for slot in slots)
    clock = {"took_s": round(wall_s, 3), "episodes_per_s": round(played / max(wall_s, 1e-9), 3)}
    return Result(ledger.identity, slots, numbers_of(slots, protocol), about, clock), valid


def _cost(tariff: Tariff | None, slots: Sequence[Slot]) -> dict[str, Any]:
    if tariff is None:
        return {}
    return {"cost": asdict(tariff.cost(sum((slot.total_usage for slot in slots), Usage())))}


def regrade(cfg: RunConfig, digest: str, progress: Progress | None = None) -> Evaluated:
    """Play an evaluation's actions again, on the environments as they are now, and score what
    comes: another evaluation, of no policy. Errors: ConfigError.
    """
    store = open_store(cfg)
    head = find(store, digest)
    slots, about = stored_slots(store, head)
    protocol = EvaluationProtocol.model_validate(about["settings"])
    actions: dict[tuple[str, int], tuple[str, ...]] = {}
    for trajectory in attempts_of(store, store.history(STEP, head.key)):
        if trajectory.status.is_valid:
            key = (trajectory.item.item_id, trajectory.sample)
            actions[key] = tuple(turn.action for turn in trajectory.turns)
    counted = sum(slot.counts for slot in slots)
    if not counted:
        raise ConfigError(f"evaluation {head.key[:12]} has no episode that could be graded again")
    contender = recorded_contender(head.key, head.records_digest, actions, about["policy"])
    ids = dict.fromkeys((slot.env, slot.item_id) for slot in slots)
    items = {
        each.env.name: tuple(
            Item(env, parse_item_id(item_id)[1], "given")
            for env, item_id in ids
            if env == each.env.name
        )
        for each in protocol.envs
    }
    invited = Invited(contender, protocol, playing_config(cfg, protocol, "torch"))
    again = _evaluate(invited, protocol, items, progress or NoProgress())
    before = Result(head.config, slots)
    return replace(again, changed=changed(before, again.result))


def changed(before: Result, after: Result) -> list[tuple[str, str, str]]:
    """Slots that another grading judges otherwise: (slot, before, after)."""
    found = []
    for old, new in zip(before.slots, after.slots, strict=True):
        told = [
            f"{each.outcome}{' success' if each.success else ''} reward {each.reward}"
            for each in (old, new)
        ]
        if (old.counts, old.success, old.reward) != (new.counts, new.success, new.reward):
            found.append((f"{old.item_id} #{old.sample}", told[0], told[1]))
    return found
