"""Any policy under a protocol: what `agentgym evaluate`, the flow and a DVC stage run."""

from __future__ import annotations

import functools
import json
import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from agentgym.config import ConfigError, EnvConfig, RunConfig
from agentgym.data.items import parse_item_id
from agentgym.deploy.environment import environment_servers
from agentgym.deploy.local import IdentitiesUnknown, check_local_env, task_identities
from agentgym.evaluation import asking
from agentgym.evaluation.evaluate import (
    about,
    conclude,
    identity_of,
    open_local,
    pace,
    play_owed,
    show_progress,
    slots_of,
)
from agentgym.evaluation.policies import PolicyName, Who, recorded_contender
from agentgym.evaluation.protocol import (
    EvaluationProtocol,
    items_of,
    load_protocol,
    owned_protocol,
    protocol_of_run,
)
from agentgym.evaluation.record import STEP, Ledger, attempts_of, find, read_plan
from agentgym.evaluation.request import EvaluationRequest
from agentgym.evaluation.result import Result, digest_of
from agentgym.evaluation.stored import stored_result
from agentgym.pipeline.contenders import Invited, contender_of, invite, playing_config
from agentgym.pipeline.evaluated import Evaluated, How, from_store, kept
from agentgym.pipeline.table import open_store
from agentgym.rollouts.client import EnvError
from agentgym.rollouts.players import NoHints, hints_of
from agentgym.rollouts.pools import EnvPools
from agentgym.steps.context import NoProgress, Progress
from agentgym.store.manifest import Manifest, canonical_json
from agentgym.types import Item

logger = logging.getLogger(__name__)


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
            (first, *_) = store.history(STEP, head.key)
            planned = read_plan(store, first)
            if {(slot.env, slot.item_id) for slot in planned.slots} == ids:
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
    contender, cfg = invited.contender, invited.cfg
    store = open_store(cfg)
    for env in cfg.envs:
        check_local_env(env)
    tasks = {env.name: _tasks(env, items[env.name]) for env in cfg.envs}
    with (
        environment_servers(cfg, contender.needs_expert) as endpoints,
        open_local(cfg, contender, endpoints, protocol) as opened,
    ):
        told = opened.told
        identity = identity_of(protocol, items, tasks, _policy(protocol, invited, told), told)
        digest = digest_of(identity)
        final = store.final(STEP, digest)
        if final is not None:
            return from_store(cfg, store, final, "done")
        if contender.needs_hints and opened.pool is not None:
            opened.loop.run(_require_hints(opened.pool, items))
        with store.open(STEP, digest) as writer:
            before = writer.head

            def commit(*, wall_s: float, **parts: Any) -> Manifest:
                return writer.commit(
                    parents={}, config=identity, timings={"wall_s": wall_s}, **parts
                )

            given, lines = invited.instructions(told), invited.lines(told)
            ledger = Ledger.open(
                store,
                store.history(STEP, digest),
                commit,
                identity,
                slots_of(protocol, items, tasks),
                about(protocol, contender, given, lines),
                **pace(protocol),
            )
            show_progress(progress, f"evaluate {contender.about}"[:34], ledger)
            for line in lines:
                tell(line)
            stopped = play_owed(opened, invited.protocol, given, items, ledger, progress)
            tariff = contender.endpoint.tariff if contender.endpoint else None
            result = conclude(protocol, ledger, stopped, tariff)
            envs = {name: own["summary"] for name, own in result.numbers.items()}
            told_of = {"coverage": result.coverage, "outcomes": result.outcomes, "envs": envs}
            done = bool(result.about["valid"]) and not stopped
            manifest = ledger.conclude(result, told_of, done=done)
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


def regrade(cfg: RunConfig, digest: str, progress: Progress | None = None) -> Evaluated:
    """Play an evaluation's actions again, on the environments as they are now, and score what
    comes: another evaluation, of no policy. Errors: ConfigError.
    """
    store = open_store(cfg)
    head = find(store, digest)
    before = stored_result(store, head)
    protocol = owned_protocol(before.about["settings"], cfg.envs)
    slots = before.slots
    actions: dict[tuple[str, int], tuple[str, ...]] = {}
    for trajectory in attempts_of(store, store.history(STEP, head.key)):
        if trajectory.status.is_valid:
            key = (trajectory.item.item_id, trajectory.sample)
            actions[key] = tuple(turn.action for turn in trajectory.turns)
    counted = sum(slot.counts for slot in slots)
    if not counted:
        raise ConfigError(f"evaluation {head.key[:12]} has no episode that could be graded again")
    contender = recorded_contender(head.key, head.records_digest, actions, before.about["policy"])
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
