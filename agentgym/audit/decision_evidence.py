"""The audit of the evaluations behind a promotion decision: like a run's own, each is played,
rendered and scored again under the weights of the version that it measured.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace

from agentgym.audit.episodes import check_replay, check_tokens
from agentgym.audit.findings import Checks
from agentgym.audit.sampling import check_sampling
from agentgym.audit.stored_steps import StepRecord
from agentgym.config import RunConfig
from agentgym.evaluation.gate import Evidence
from agentgym.evaluation.history import Entry, Version
from agentgym.evaluation.protocol import EnvProtocol, EvaluationProtocol, owned_protocol
from agentgym.evaluation.record import STEP
from agentgym.evaluation.stored import plan_of, stored_result
from agentgym.pipeline.table import steps_of
from agentgym.records import TRAJECTORIES, decode_trajectories
from agentgym.steps.step import Kind
from agentgym.store.manifest import Manifest, canonical_json
from agentgym.store.runstore import RunStore

WEIGHTS = "weights"  # the parent under which a record has the version's checkpoint


def check_judged(
    cfg: RunConfig,
    store: RunStore,
    entry: Entry,
    draws: tuple[int | None, int | None, int],
    checks: Mapping[str, Checks],
) -> None:
    """Check the evaluations by the gate's protocol that a decision names. Their episodes are played
    again on new servers; runs' own evaluations are left out.

    draws: (episodes to play again, episodes to score again, seed), as in `audit`.
    """
    num_episodes, num_rescored, seed = draws
    evidence = Evidence.from_json(entry.decision["evidence"])
    for version, question in zip((entry.candidate, entry.before), evidence.questions, strict=True):
        final = store.final(STEP, question) if len(question) == 64 else None
        if version is None or final is None:
            continue  # a run's own evaluation, or missing, which the decisions check reports
        where = f"evaluation {final.key[:12]} of version {version.number}"
        with checks["numbers"].guard(where):
            result = stored_result(store, final)
            checks["numbers"].expect(where, "its digest", final.key, result.digest)
            protocol = EvaluationProtocol.model_validate(result.about["settings"])
            settings_asked = json.loads(canonical_json(protocol.semantic()))
            settings_recorded = json.loads(canonical_json(result.identity["protocol"]))
            checks["numbers"].expect(where, "its settings", settings_asked, settings_recorded)
        weights = _weights(store, version)
        for settings, record in _records(cfg, store, final, weights):
            instructions: dict[str, str] = {}
            with checks["replay"].guard(where):
                instructions = check_replay(
                    settings, [record], num_episodes, seed, checks["replay"]
                )
            if weights is None:
                for name in ("tokens", "rescore", "sampling"):
                    weighs = version is entry.candidate
                    checks[name].skip(where, "its weights are not in this store", weighs=weighs)
                continue
            with checks["tokens"].guard(where):
                check_tokens(settings, store, record, instructions, checks["tokens"])
            with checks["rescore"].guard(where):
                check_sampling(
                    settings,
                    store,
                    record,
                    num_rescored,
                    seed,
                    checks["rescore"],
                    checks["sampling"],
                )


def _weights(store: RunStore, version: Version) -> Manifest | None:
    """Return the commit whose weights were registered; None if the store lacks it."""
    heads = (head for head in store.heads() if head.digest == version.checkpoint)
    head = next(heads, None)
    # an evaluation of a registered version counts no optimizer steps
    return head and head.model_copy(update={"state": {**head.state, "global_step": 0}})


def _records(
    cfg: RunConfig, store: RunStore, final: Manifest, weights: Manifest | None
) -> Iterator[tuple[RunConfig, StepRecord]]:
    """Yield (configuration, episodes as the record of a step) for each evaluated environment."""
    commits = store.history(final.step, final.key)
    protocol = owned_protocol(plan_of(store, commits).about["settings"], cfg.envs)
    episodes = {
        commit.seq: decode_trajectories(store.read(commit, TRAJECTORIES))
        for commit in commits
        if TRAJECTORIES in commit.records
    }
    parents = {WEIGHTS: weights} if weights is not None else {}
    evaluation = next(step for step in steps_of(cfg).values() if step.kind is Kind.EVALUATE)
    step = replace(evaluation, name=STEP, title=STEP, data="", baseline="", checkpoint=WEIGHTS)
    for settings in protocol.envs:
        record = StepRecord(step, final.key, parents, commits)
        record.episodes = {
            seq: [episode for episode in logged if episode.item.env == settings.env.name]
            for seq, logged in episodes.items()
        }
        yield _settings(cfg, protocol, settings), record


def _settings(cfg: RunConfig, protocol: EvaluationProtocol, settings: EnvProtocol) -> RunConfig:
    rollout = {
        "max_new_tokens": settings.max_new_tokens,
        "instructions": settings.instructions,
        "examples": settings.examples,
        "action_format": settings.action_format,
        "concurrency": protocol.concurrency,
        "max_attempts": settings.max_attempts,
    }
    evaluation = {"seed": protocol.seed, "max_turns": settings.max_turns}
    return cfg.model_copy(
        update={
            "env": settings.env,
            "mix": (),
            "rollout": cfg.rollout.model_copy(update=rollout),
            "model": cfg.model.model_copy(update={"context_tokens": settings.context_tokens}),
            "evaluation": cfg.evaluation.model_copy(update=evaluation),
        }
    )
