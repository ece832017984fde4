"""Checks of logged episodes: their claims, their tokens, and a replay of their actions."""

from __future__ import annotations

import asyncio
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from agentgym.audit.findings import Checks
from agentgym.audit.stored_steps import StepRecord, draw, load, place
from agentgym.config import RunConfig
from agentgym.data.items import Splits
from agentgym.deploy.environment import environment_servers
from agentgym.evaluation.evaluator import items_of_step
from agentgym.rollouts.engine import open_pool, openings
from agentgym.rollouts.env_client import EnvError
from agentgym.rollouts.episode import ending, extract_action
from agentgym.rollouts.pools import EnvPools
from agentgym.steps.step import Kind, Stage
from agentgym.store.manifest import Manifest
from agentgym.training.ahead import reads_last
from agentgym.types import Item, Status, Trajectory
from envs.wire import FAMILY, INVALID, PARTS

# version of the weights, item, sample, step, max_turns, temperature
Expected = tuple[int, Item, int, int, int, float]


def check_episodes(record: StepRecord, splits: Splits, checks: Checks) -> None:
    """Check the number of episodes, and each one's item, settings, weights version, reward and end.
    Demonstrations are passed over.
    """
    if record.step.kind is Kind.DEMONSTRATE:
        return
    if record.stage is None:
        _check_evaluated(record, splits, checks)
        return
    for commit in record.commits:
        episodes = record.episodes.get(commit.seq)
        if episodes is None:
            continue
        expected = _expected_of_stage(record.cfg, record.stage, commit, splits)
        checks.expect(record.at(commit), "number of episodes", len(expected), len(episodes))
        for wanted, episode in zip(expected, episodes, strict=False):
            _check_one(record.cfg, place(record.at(commit), episode), wanted, episode, checks)


def _expected_of_stage(
    cfg: RunConfig, stage: Stage, commit: Manifest, splits: Splits
) -> list[Expected]:
    step, rollout = int(commit.state["global_step"]), cfg.rollout
    by_id = {item.item_id: item for item in splits.train}
    items = [by_id[item_id] for item_id in commit.state["consumed"] if item_id in by_id]
    turns = int(commit.state["max_turns"])  # the lineage check compares it
    # an offline stage samples all its train episodes for its first step
    played = step if cfg.algorithm.loop.samples_every_step else stage.first_step
    expected = [
        (played - 1, item, sample, played, turns, rollout.temperature)
        for item in items
        for sample in range(rollout.group_size)
    ]
    if cfg.validation.every and step % cfg.validation.every == 0 and step >= played:
        fixed = (0, step, cfg.validation.max_turns, cfg.validation.temperature)
        expected += [(step, item, *fixed) for item in splits.validation[: cfg.validation.num_items]]
    return expected


def _check_evaluated(record: StepRecord, splits: Splits, checks: Checks) -> None:
    """Check each episode of an evaluation. Each slot (item, sample) must belong to the evaluation,
    and must not be played again after a valid episode.
    """
    cfg, settings = record.cfg, record.cfg.evaluation
    version = int(record.checkpoint.state["global_step"]) if record.checkpoint else -1
    by_id = {item.item_id: item for items in items_of_step(cfg, splits).values() for item in items}
    open_slots = {(item, sample) for item in by_id for sample in range(settings.num_samples + 1)}
    for commit, episode in record.logged:
        where = place(record.at(commit), episode)
        slot = (episode.item.item_id, episode.sample)
        if not checks.expect(where, "a slot that was asked for, once", True, slot in open_slots):
            continue
        if episode.status.is_valid:
            open_slots.remove(slot)
        temperature = settings.temperature if episode.sample else 0.0
        wanted = (version, by_id[slot[0]], slot[1], 0, settings.max_turns, temperature)
        _check_one(cfg, where, wanted, episode, checks)


def _check_one(
    cfg: RunConfig, where: str, wanted: Expected, episode: Trajectory, checks: Checks
) -> None:
    version, *rest = wanted
    lag = cfg.rollout.max_staleness if episode.item.split == "train" else 0
    versions = [turn.version for turn in episode.turns]
    got = [episode.item, episode.sample, episode.step, episode.max_turns, episode.temperature]
    checks.expect(where, "[item, sample, step, max_turns, temperature]", rest, got)
    fit = versions == sorted(versions) and all(
        version - lag <= turn_version <= version for turn_version in versions
    )
    newest = [version] * len(versions)
    checks.expect(where, "versions of the weights", newest, newest if fit else versions)
    outcome = sum(turn.reward for turn in episode.turns) if episode.status.is_valid else None
    checks.expect(where, "reward as the sum of its turns'", outcome, episode.reward)
    _check_end(cfg, where, episode, checks)


def _check_end(cfg: RunConfig, where: str, episode: Trajectory, checks: Checks) -> None:
    """Check the length, error, attempts and success of an episode against how it ended."""
    max_turns, attempts = episode.max_turns, cfg.rollout.max_attempts
    fits = {
        Status.TERMINATED: 0 < len(episode.turns) <= max_turns,
        Status.MAX_TURNS: len(episode.turns) == max_turns,
    }.get(episode.status, len(episode.turns) < max_turns)
    what = f"a number of turns that fits {episode.status} under max_turns {max_turns}"
    checks.expect(where, what, True, fits)
    if episode.status.is_valid:
        checks.expect(where, "error", None, episode.error)
        what = f"attempts within rollout.max_attempts {attempts}"
        checks.expect(where, what, True, 1 <= episode.num_attempts <= attempts)
        what = "success of an episode that the environment did not end"
        checks.expect(where, what, False, episode.success and episode.status.is_truncated)
    else:
        checks.expect(where, "success of an episode that is left out", False, episode.success)
        checks.expect(
            where, "attempts, all of rollout.max_attempts", attempts, episode.num_attempts
        )
        checks.expect(where, "an error that names what failed", True, bool(episode.error))


def check_tokens(record: StepRecord, instructions: Mapping[str, str], checks: Checks) -> None:
    """Check token ids and action mask against the logged text, log-probabilities against the mask.
    The renderer must give the ids between actions, and an action's ids must decode to the action.
    Nothing is checked if the step has no readable checkpoint or no readable episodes.
    instructions: environment -> text that its episodes begin with; a missing one counts as empty.
    """
    checkpoint = load(record.store, record.checkpoint, weights=False)
    if checkpoint is None or not record.episodes:
        return
    cfg, renderer = record.cfg, checkpoint.renderer
    checks.notes += [note for note in renderer.notes if note not in checks.notes]
    bootstraps = record.stage is not None and reads_last(cfg)
    start, bridge, text = cache(renderer.start), cache(renderer.bridge), cache(renderer.text)
    for commit, episode in record.logged:
        where = place(record.at(commit), episode)
        ended = episode.status.is_valid
        # the environment failed before a session was open
        if not ended and not episode.first_observation and not episode.turns:
            what = "token ids of an episode that did not begin"
            checks.expect(where, what, (), episode.input_ids)
            continue
        rebuilt = list(start(episode.first_observation, instructions.get(episode.item.env, "")))
        mask = [False] * len(rebuilt)
        for number, turn in enumerate(episode.turns, 1):
            ids, at = episode.input_ids[turn.start : turn.end], f"{where} turn {number}"
            checks.expect(at, "start of its action", len(rebuilt), turn.start)
            action = extract_action(
                text(ids), cfg.rollout.action_format, opens_thought=renderer.opens_thought
            )
            checks.expect(at, "action", action, turn.action)
            rebuilt += ids
            mask += [True] * len(ids)
            answer = bridge(turn.observation, stopped=renderer.ends_turn(ids))
            room = cfg.model.context_tokens - len(rebuilt) - len(answer)
            is_last = ended and number == len(episode.turns)
            if is_last and episode.status is Status.MAX_TOKENS:
                checks.expect(where, "context used up", True, room < cfg.rollout.max_new_tokens)
            read_last = (
                bootstraps
                and episode.status.is_truncated
                and episode.item.split == "train"
                and room >= 0
            )
            if not is_last or read_last:
                rebuilt += answer
                mask += [False] * len(answer)
        if not ended:  # the environment may have failed on one more action
            pending = episode.input_ids[len(rebuilt) :][: cfg.rollout.max_new_tokens]
            rebuilt += pending
            mask += [True] * len(pending)
        checks.expect(where, "token ids as rendered", tuple(rebuilt), episode.input_ids)
        checks.expect(where, "action mask", tuple(mask), episode.action_mask)
        num_ids, num_logprobs = len(episode.input_ids), len(episode.logprobs)
        checks.expect(where, "log-probabilities, one per token", num_ids, num_logprobs)
        outside = [
            value
            for value, sampled in zip(episode.logprobs, mask, strict=False)
            if value and not sampled
        ]
        checks.expect(where, "log-probabilities outside actions other than 0", [], outside)


def replay_sample(
    steps: Sequence[StepRecord], num_episodes: int | None, seed: int
) -> list[tuple[StepRecord, Manifest, Trajectory]]:
    """Draw valid episodes of each commit, and add all failed ones that had begun.

    num_episodes: to draw for each step, at least one of every commit; None: all.
    Result: (step, commit, episode) of each.
    """
    chosen: list[tuple[StepRecord, Manifest, Trajectory]] = []
    for record in steps:
        logged = [commit for commit in record.commits if record.episodes.get(commit.seq)]
        for commit in logged:
            episodes = record.episodes[commit.seq]
            counted = [episode for episode in episodes if episode.status.is_valid]
            share = None if num_episodes is None else max(1, num_episodes // len(logged))
            drawn = draw(counted, share, seed, record.name, commit.seq)
            begun = [
                episode
                for episode in episodes
                if not episode.status.is_valid and (episode.first_observation or episode.turns)
            ]
            chosen += [(record, commit, episode) for episode in [*drawn, *begun]]
    return chosen


def check_replay(
    cfg: RunConfig, steps: Sequence[StepRecord], num_episodes: int | None, seed: int, checks: Checks
) -> dict[str, str]:
    """Play logged actions again on new servers and compare what the environment returns.

    num_episodes, seed: see `replay_sample`. Failed episodes that fail again are skipped.
    Result: the instructions that episodes begin with, by environment; empty without episodes.
    """
    chosen = [
        (place(record.at(commit), episode), episode)
        for record, commit, episode in replay_sample(steps, num_episodes, seed)
    ]
    num_logged = sum(len(episodes) for record in steps for episodes in record.episodes.values())
    left_out = Counter(str(episode.status) for _, episode in chosen if not episode.status.is_valid)
    failed_note = "".join(
        f", {left_out[status]} {status} replayed to their end"
        for status in ("env_error", "timeout")
    )
    checks.notes.append(f"{len(chosen) - left_out.total()} of {num_logged} episodes{failed_note}")
    if num_without_info := sum(not _has_info(episode) for _, episode in chosen):
        checks.notes.append(
            f"not checked: families of {num_without_info} episodes whose records have no info"
        )
    if not chosen:
        return {}
    with (
        environment_servers(cfg, False) as endpoints,
        open_pool(cfg, endpoints, allow_expert=False) as (pool, loop, guides),
    ):
        loop.run(_replay(pool, chosen, cfg.rollout.concurrency, checks))
        return openings(cfg, guides)


def _has_info(episode: Trajectory) -> bool:
    """Return True if an episode's record has an id or info; those of schema 1 have neither."""
    return bool(episode.id) or any(turn.info for turn in episode.turns)


def _counted(info: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of a turn's info that results need: family, invalid and parts."""
    return {name: info[name] for name in (FAMILY, INVALID, PARTS) if name in info}


async def _replay(
    pool: EnvPools, chosen: Sequence[tuple[str, Trajectory]], concurrency: int, checks: Checks
) -> None:
    slots, nonce = asyncio.Semaphore(concurrency), uuid.uuid4().hex

    async def one(index: int, where: str, episode: Trajectory) -> None:
        ended: Status | None = None
        success, has_info = False, _has_info(episode)
        async with slots, pool.session(episode.item, f"{nonce}-{index}") as session:
            if not checks.expect(
                where, "first observation", session.observation, episode.first_observation
            ):
                return
            for number, turn in enumerate(episode.turns, 1):
                at = f"{where} turn {number}"
                if ended:
                    checks.fail(f"{at}: the environment had ended the task at turn {number - 1}")
                    return
                reply = await session.step(turn.action)
                ended = ending(reply)
                success = ended is not None and reply.success
                now, logged = (reply.observation, reply.reward), (turn.observation, turn.reward)
                if not checks.expect(at, "(observation, reward)", now, logged):
                    return
                if has_info:
                    counted, was = _counted(reply.info), _counted(turn.info)
                    checks.expect(at, "info that results are made of", counted, was)
        if not episode.status.is_valid:
            what = f"{episode.status} of an episode that the environment ended"
            checks.expect(where, what, False, ended is not None)
            return
        cut = Status.MAX_TURNS if len(episode.turns) >= episode.max_turns else Status.MAX_TOKENS
        checks.expect(where, "status", ended or cut, episode.status)
        checks.expect(where, "success", success, episode.success)

    results = await asyncio.gather(
        *(one(index, *entry) for index, entry in enumerate(chosen)), return_exceptions=True
    )
    for (where, episode), result in zip(chosen, results, strict=True):
        if isinstance(result, EnvError) and not episode.status.is_valid:
            checks.skip("episodes that were left out", "their environment fails again")
        elif isinstance(result, EnvError):
            checks.fail(f"{where}: {result}")
        elif isinstance(result, BaseException):
            raise result
