"""Evaluation of any policy under a protocol; results in the store, in files and in MLflow."""

from __future__ import annotations

import functools
import json
import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from agentgym.config import ConfigError, EnvConfig, RunConfig
from agentgym.data.items import parse_item_id
from agentgym.deploy.environment import environment_servers
from agentgym.deploy.local import IdentitiesUnknown, check_local_env, task_identities
from agentgym.evaluation.evaluator import (
    about,
    conclude,
    identity_of,
    open_local,
    play_owed,
    show_progress,
    slots_of,
)
from agentgym.evaluation.policies import PolicyKind, PolicyName, adaptations, recorded_contender
from agentgym.evaluation.protocol import (
    EvaluationProtocol,
    EvaluationRequest,
    items_of,
    load_protocol,
    owned_protocol,
    protocol_of_run,
)
from agentgym.evaluation.record import (
    EPISODES,
    STEP,
    Ledger,
    Plan,
    attempts_of,
    examples_of,
    find,
    read_plan,
    write_episodes,
)
from agentgym.evaluation.report import render
from agentgym.evaluation.result import RESULT, Result, digest_of
from agentgym.evaluation.stored import stored_result
from agentgym.pipeline.contenders import Invited, contender_of, invite, playing_config
from agentgym.pipeline.table import open_store
from agentgym.rollouts.env_client import EnvError
from agentgym.rollouts.players import NoHints, hints_of
from agentgym.rollouts.pools import EnvPools
from agentgym.steps.context import NoProgress, Progress
from agentgym.store.manifest import Manifest, canonical_json
from agentgym.store.runstore import RunStore
from agentgym.tracking.deliver import tracker_of
from agentgym.tracking.points import Point
from agentgym.tracking.reaching import LedgerUnavailable, reaching
from agentgym.types import Item

logger = logging.getLogger(__name__)

How = Literal["done", "resumed", "ran"]


@dataclass(frozen=True)
class Evaluated:
    """The result of an evaluation, and its files."""

    result: Result
    manifest: Manifest
    folder: Path  # with all files of the evaluation
    how: How
    stopped: str = ""  # why it ended before its last episode
    changed: Sequence[tuple[str, str, str]] = ()  # slots graded differently: slot, before, now

    @property
    def is_valid(self) -> bool:
        return bool(self.result.about["valid"])


def evaluate_policy(
    cfg: RunConfig,
    request: EvaluationRequest,
    progress: Progress | None = None,
    tell: Callable[[str], None] = logger.info,
) -> Evaluated:
    """Play the missing episodes of an evaluation, score them and store the result.

    A finished evaluation is returned from the store, and an interrupted one is resumed. Its files
    are then written to the state folder, and its numbers to MLflow if that can be reached.
    tell: called before the first turn with the prompt settings of a model not trained here.
    Errors: ConfigError before the first turn; LeaseHeld if another process runs the evaluation.
    """
    protocol = protocol_for(cfg, request)
    items = items_of(protocol, cfg)
    invited = invite(cfg, protocol, request)
    if protocol.deterministic and invited.contender.endpoint is not None:
        raise ConfigError("deterministic is nothing an endpoint promises; leave it out")
    return _evaluate(invited, protocol, items, progress or NoProgress(), tell)


def answered(cfg: RunConfig, policy: str, protocol: EvaluationProtocol) -> Manifest | None:
    """Return the newest finished evaluation of this policy by this protocol, or None.

    No server is started, so prompts and task identities are not compared. Errors: ConfigError.
    """
    items, playing = items_of(protocol, cfg), playing_config(cfg, protocol, "")
    contender = contender_of(cfg, playing, EvaluationRequest.model_validate({"policy": policy}))
    no_instructions: dict[str, Any] = dict.fromkeys(items, "")
    no_tasks = {env: [None] * len(its) for env, its in items.items()}
    identity = identity_of(protocol, items, no_tasks, contender.identity, no_instructions)
    wanted = json.loads(canonical_json(identity))
    names = sorted(wanted.keys() - {"items", "prompts"})
    ids = {(env, item.item_id) for env, its in items.items() for item in its}
    store = open_store(cfg)
    for head in reversed(store.heads(STEP)):
        if head.done and all(head.config.get(name) == wanted[name] for name in names):
            (first, *_) = store.history(STEP, head.key)
            if {(slot.env, slot.item_id) for slot in read_plan(store, first).slots} == ids:
                return head
    return None


def protocol_for(cfg: RunConfig, request: EvaluationRequest) -> EvaluationProtocol:
    """Return the protocol that the request names, else the run's, with the request's changes.
    In the run's, a model not trained here gets a context that is longer than its longest reply.
    Errors: ConfigError.
    """
    if request.protocol:
        protocol = load_protocol(request.protocol, request.changes)
        return protocol.only(request.envs) if request.envs else protocol
    changes, reply = request.changes, request.changes.get("max_new_tokens", 0)
    is_model = PolicyName.parse(request.policy).who in (PolicyKind.ENDPOINT, PolicyKind.MODEL)
    if is_model and reply >= cfg.model.context_tokens:  # `invite` enlarges the context later
        changes = {"context_tokens": reply + 1, **changes}
    return protocol_of_run(cfg, request.envs or tuple(env.name for env in cfg.envs), changes)


def _evaluate(
    invited: Invited,
    protocol: EvaluationProtocol,
    items: Mapping[str, Sequence[Item]],
    progress: Progress,
    tell: Callable[[str], None] = logger.info,
) -> Evaluated:
    """Play, score and store the evaluation of a policy, unless the store has its result. In both
    cases write its files and deliver it, see `kept`. Errors: ConfigError, LeaseHeld.

    protocol: the one for every policy; `invited` has the one adapted to this policy.
    """
    contender, cfg = invited.contender, invited.cfg
    store = open_store(cfg)
    for env in cfg.envs:
        check_local_env(env)
    tasks = {env.name: _tasks(env, items[env.name]) for env in cfg.envs}
    with (
        environment_servers(cfg, contender.needs_expert) as endpoints,
        open_local(cfg, contender, endpoints, protocol) as opened,
    ):
        rules = opened.told
        identity = identity_of(protocol, items, tasks, _policy(protocol, invited, rules), rules)
        digest = digest_of(identity)
        final = store.final(STEP, digest)
        if final is not None:
            return from_store(cfg, store, final)
        if contender.needs_hints and opened.pool is not None:
            opened.loop.run(_require_hints(opened.pool, items))
        with store.open(STEP, digest) as writer:
            before = writer.head

            def commit(*, wall_s: float, **parts: Any) -> Manifest:
                return writer.commit(config=identity, timings={"wall_s": wall_s}, **parts)

            instructions, lines = invited.instructions(rules), invited.lines(rules)
            description = about(protocol, contender, instructions, lines)
            plan = Plan(slots_of(protocol, items, tasks), description, identity)
            ledger = Ledger.open(store, store.history(STEP, digest), commit, protocol, plan)
            show_progress(progress, f"evaluate {contender.about}"[:34], ledger)
            for line in lines:
                tell(line)
            stopped = play_owed(opened, invited.protocol, instructions, items, ledger, progress)
            tariff = contender.endpoint.tariff if contender.endpoint else None
            result = conclude(protocol, ledger, stopped, tariff)
            envs = {name: numbers["summary"] for name, numbers in result.numbers.items()}
            totals = {"coverage": result.coverage, "outcomes": result.outcomes, "envs": envs}
            done = bool(result.about["valid"]) and not stopped
            manifest = ledger.conclude(result, totals, done=done)
    how: How = "resumed" if before is not None else "ran"
    return kept(cfg, store, manifest, result, how, stopped)


async def _require_hints(pool: EnvPools, items: Mapping[str, Sequence[Item]]) -> None:
    """Open a session on the first item of each environment. Raise ConfigError if it offers no
    hints; log any other EnvError.
    """
    for first, *_ in items.values():
        try:
            async with pool.session(first, f"hints-{secrets.token_hex(8)}") as session:
                await hints_of(session)
        except NoHints as error:
            raise ConfigError(f"{first.env}: {error}") from None
        except EnvError as error:  # episodes have several attempts, so this is not fatal
            logger.info("%s: %s", first.env, error)


def _policy(
    protocol: EvaluationProtocol, invited: Invited, rules: Mapping[str, str]
) -> dict[str, Any]:
    """Return a policy's identity; `asked` has its prompts' changes to the protocol, if any."""
    differences = (
        {}
        if invited.contender.knows_rules
        else adaptations(protocol, invited.protocol, rules, invited.instructions(rules))
    )
    return {**invited.contender.identity, **({"asked": differences} if differences else {})}


def _tasks(env: EnvConfig, items: Sequence[Item]) -> list[str | None]:
    """Return each item's task identity; None if the environment has none. Errors: ConfigError."""
    return list(_identities(env.model_dump_json(), tuple(item.task_id for item in items)))


@functools.cache  # it starts a process, and the result is the same for every policy
def _identities(env: str, task_ids: tuple[int, ...]) -> tuple[str | None, ...]:
    settings = EnvConfig.model_validate_json(env)
    try:
        return tuple(task_identities(settings, task_ids))
    except IdentitiesUnknown as reason:
        logger.info("%s: tasks are distinguished by their ids alone: %s", settings.name, reason)
        return (None,) * len(task_ids)


def regrade(cfg: RunConfig, digest: str, progress: Progress | None = None) -> Evaluated:
    """Play an evaluation's actions again on the environments as they are now, and score them.

    It is stored as an evaluation of its own; `changed` of the result lists slots that differ.
    digest: the first digits of the evaluation's key. Errors: ConfigError.
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
    if not any(slot.counts for slot in slots):
        raise ConfigError(f"evaluation {head.key[:12]} has no episode that could be graded again")
    contender = recorded_contender(head.key, head.records_digest, actions, before.about["policy"])
    ids = dict.fromkeys((slot.env, slot.item_id) for slot in slots)
    items = {
        settings.env.name: tuple(
            Item(env, parse_item_id(item_id)[1], "given")
            for env, item_id in ids
            if env == settings.env.name
        )
        for settings in protocol.envs
    }
    invited = Invited(contender, protocol, playing_config(cfg, protocol, "torch"))
    again = _evaluate(invited, protocol, items, progress or NoProgress())
    return replace(again, changed=changed(before, again.result))


def changed(before: Result, after: Result) -> list[tuple[str, str, str]]:
    """Return (slot, before, after), as texts, for each slot that differs in whether it counts, in
    success or in reward; another outcome alone is no difference. slot: item and sample.

    Both results must have the same slots in the same order. Errors: ValueError for another number.
    """
    changes = []
    for old, new in zip(before.slots, after.slots, strict=True):
        texts = [
            f"{slot.outcome}{' success' if slot.success else ''} reward {slot.reward}"
            for slot in (old, new)
        ]
        if (old.counts, old.success, old.reward) != (new.counts, new.success, new.reward):
            changes.append((f"{old.item_id} #{old.sample}", texts[0], texts[1]))
    return changes


def show(cfg: RunConfig, digest: str) -> Evaluated:
    """Return an evaluation as far as it has come, and write its files again. Another process may
    run it meanwhile.

    digest: the first digits of its key. No episode is played and MLflow is not changed.
    Errors: ConfigError if not exactly one evaluation has such a key.
    """
    store = open_store(cfg)
    return from_store(cfg, store, find(store, digest), tell=False)


def from_store(cfg: RunConfig, store: RunStore, head: Manifest, *, tell: bool = True) -> Evaluated:
    """Return a stored evaluation, with its files written again. tell: deliver it to MLflow, too."""
    return kept(cfg, store, head, stored_result(store, head), "done", "", tell=tell)


def kept(
    cfg: RunConfig,
    store: RunStore,
    manifest: Manifest,
    result: Result,
    how: How,
    stopped: str,
    *,
    tell: bool = True,
) -> Evaluated:
    """Write the files of an evaluation to the state folder, and return it with their folder.

    how, stopped: see `Evaluated`. tell: deliver it to MLflow, too, if it has a committed result.
    """
    folder = cfg.state_dir / "evaluations" / manifest.key[:12]
    folder.mkdir(parents=True, exist_ok=True)
    result.save(folder)
    commits = store.history(manifest.step, manifest.key)
    write_episodes(folder / EPISODES, attempts_of(store, commits))
    for name, content in render(result, examples_of(store, commits)).items():
        (folder / name).write_bytes(content)
    if tell and RESULT in manifest.blobs:
        _deliver(cfg, manifest, result, folder)
    return Evaluated(result, manifest, folder, how, stopped)


def _deliver(cfg: RunConfig, manifest: Manifest, result: Result, folder: Path) -> None:
    """Write an evaluation to its MLflow run and end the run; repeating it changes nothing.

    folder: its artifacts. If MLflow cannot be reached, that is only logged.
    """
    about = result.about
    metrics = {"eval/coverage": result.coverage}
    for env, numbers in result.numbers.items():
        rows = {
            **numbers["summary"],
            **({"reward": numbers["reward"]} if numbers["reward"] else {}),
        }
        metrics |= {f"eval/{env}/{name}": float(row["mean"]) for name, row in rows.items()}
        metrics[f"eval/{env}/coverage"] = float(numbers["coverage"])
    try:
        with reaching(cfg.tracking_uri):
            tracker = tracker_of(cfg)
            run_id = tracker.evaluation_run(
                result.digest,
                f"evaluation of {about['policy']}"[:200],
                params={"policy": about["policy"], "protocol": about["protocol"]},
                tags={"digest": manifest.digest, "valid": str(about["valid"]).lower()},
            )
            tracker.deliver(run_id, [Point(0, int(manifest.created_at * 1000), metrics)])
            tracker.log_artifacts(run_id, folder)
            tracker.end_run(run_id)
    except LedgerUnavailable as error:
        logger.warning("MLflow does not have this evaluation yet: %s", error)
