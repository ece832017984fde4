"""Logged episodes: claimed, rendered, played and scored again."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache

import numpy as np

from agentgym.algorithms.batch import to_batch
from agentgym.algorithms.recipe import RECIPES
from agentgym.audit.lines import Line, draw, load, place
from agentgym.audit.report import Tally
from agentgym.config import RunConfig
from agentgym.data import Splits
from agentgym.rollouts.client import EnvError, EnvPools
from agentgym.rollouts.episode import extract_action
from agentgym.steps import local_environment
from agentgym.store.runstore import RunStore
from agentgym.training.checkpoint import WEIGHTS
from agentgym.training.engine import open_pool
from agentgym.training.learner import Learner
from agentgym.training.rl import resolved
from agentgym.types import Item, Status, Trajectory

LOGPROB_TOLERANCE = 1e-3  # nats; float32 forwards of other shapes agree to 1e-5


def check_episodes(cfg: RunConfig, line: Line, splits: Splits, tally: Tally) -> None:
    """Who was played, for which step, under which horizon and by which version of the weights."""
    stage = line.stage(cfg)
    first = 0
    for commit in line.commits:
        episodes = line.episodes.get(commit.seq)
        if episodes is None or line.name == "initialise":
            continue
        where = line.at(commit)
        expected: list[tuple[int, Item, int, int, int, float]]  # version, item, sample, step, max_turns, temperature
        if stage is not None:
            step, rollout = int(commit.state["global_step"]), cfg.rollout
            by_id = {item.item_id: item for item in splits.train}
            items = [by_id[item_id] for item_id in commit.state["consumed"] if item_id in by_id]
            turns = int(commit.state["max_turns"])  # lineage checks it
            played = step if RECIPES[cfg.algorithm.recipe].loop == "rl" else stage.first_step  # the step its train episodes are for
            expected = [
                (played - 1, item, sample, played, turns, rollout.temperature) for item in items for sample in range(rollout.group_size)
            ]
            if cfg.validation.every and step % cfg.validation.every == 0 and step >= played:
                fixed = (0, step, cfg.validation.max_turns, cfg.validation.temperature)
                expected += [(step, item, *fixed) for item in splits.validation[: cfg.validation.num_items]]
        else:
            chunk = getattr(splits, cfg.evaluation.split)[: cfg.evaluation.num_items][first : int(commit.state["num_items"])]
            first = int(commit.state["num_items"])
            version = int(line.checkpoint.state["global_step"]) if line.checkpoint else -1
            rest, samples = (0, cfg.evaluation.max_turns), range(1, 1 + cfg.evaluation.num_samples)
            expected = [(version, item, 0, *rest, 0.0) for item in chunk]
            expected += [(version, item, sample, *rest, cfg.evaluation.temperature) for item in chunk for sample in samples]
        tally.expect(where, "number of episodes", len(expected), len(episodes))
        for (version, *wanted), episode in zip(expected, episodes, strict=False):
            lag = cfg.rollout.max_staleness if episode.item.split == "train" else 0
            versions = [turn.version for turn in episode.turns]
            got = [episode.item, episode.sample, episode.step, episode.max_turns, episode.temperature]
            tally.expect(place(where, episode), "[item, sample, step, max_turns, temperature]", wanted, got)
            fit = versions == sorted(versions) and all(version - lag <= each <= version for each in versions)
            tally.expect(
                place(where, episode),
                "versions of the weights",
                [version] * len(versions),
                versions if not fit else [version] * len(versions),
            )
            outcome = sum(turn.reward for turn in episode.turns) if episode.status.is_valid else None
            tally.expect(place(where, episode), "reward as the sum of its turns'", outcome, episode.reward)


def check_tokens(cfg: RunConfig, store: RunStore, line: Line, manuals: Mapping[str, str], tally: Tally) -> None:
    """Ids outside the policy's spans are what the renderer makes of the logged observations; inside, of the logged actions."""
    checkpoint = load(store, line.final if line.name == "initialise" else line.checkpoint)
    if checkpoint is None or not line.episodes:
        return
    renderer, reads_last = checkpoint.renderer, line.stage(cfg) is not None and resolved(cfg).truncated == "bootstrap"
    start, bridge, text = cache(renderer.start), cache(renderer.bridge), cache(renderer.text)
    for commit in line.commits:
        for episode in line.episodes.get(commit.seq, ()):
            where = place(line.at(commit), episode)
            if not episode.status.is_valid:
                tally.skipped += 1
                continue
            rebuilt = list(start(episode.first_observation, manuals.get(episode.item.env, "")))
            mask = [False] * len(rebuilt)
            for number, turn in enumerate(episode.turns, 1):
                ids = episode.input_ids[turn.start : turn.end]
                tally.expect(f"{where} turn {number}", "start of its action", len(rebuilt), turn.start)
                tally.expect(f"{where} turn {number}", "action", extract_action(text(ids), cfg.rollout.action_format), turn.action)
                rebuilt += ids
                mask += [True] * len(ids)
                answer = bridge(turn.observation, stopped=bool(ids) and ids[-1] == renderer.stop_id)
                if number < len(episode.turns):
                    rebuilt += answer
                    mask += [False] * len(answer)
                elif reads_last and episode.status is Status.MAX_TURNS and episode.item.split == "train":
                    if len(rebuilt) + len(answer) <= cfg.model.context_tokens:
                        rebuilt += answer
                        mask += [False] * len(answer)
                elif episode.status is Status.MAX_TOKENS:
                    full = len(rebuilt) + len(answer) + cfg.rollout.max_new_tokens > cfg.model.context_tokens
                    tally.expect(where, "context used up", True, full)
            tally.expect(where, "token ids as rendered", tuple(rebuilt), episode.input_ids)
            tally.expect(where, "action mask", tuple(mask), episode.action_mask)
            outside = [value for value, sampled in zip(episode.logprobs, mask, strict=False) if not sampled]
            tally.expect(where, "log-probabilities, one per token", len(episode.input_ids), len(episode.logprobs))
            tally.expect(where, "log-probabilities outside actions other than 0", [], [value for value in outside if value])


def check_replay(cfg: RunConfig, lines: Sequence[Line], num_episodes: int, tally: Tally) -> dict[str, str]:
    """Result: the task manuals episodes begin with, by environment."""
    chosen: list[tuple[str, Trajectory]] = []
    for line in lines:
        logged = [commit for commit in line.commits if line.episodes.get(commit.seq)]
        for commit in logged:
            episodes = draw(line.episodes[commit.seq], max(1, num_episodes // len(logged)), cfg.seed, line.name, commit.seq)
            chosen += [(place(line.at(commit), episode), episode) for episode in episodes]
    tally.skipped += sum(not episode.status.is_valid for _, episode in chosen)
    chosen = [(where, episode) for where, episode in chosen if episode.status.is_valid]
    if not chosen:
        return {}
    with local_environment(cfg, False) as endpoints, open_pool(cfg, endpoints, allow_expert=False) as (pool, loop, manuals):
        loop.run(_replay(pool, chosen, cfg.rollout.concurrency, tally))
        return manuals


async def _replay(pool: EnvPools, chosen: Sequence[tuple[str, Trajectory]], concurrency: int, tally: Tally) -> None:
    slots, nonce = asyncio.Semaphore(concurrency), uuid.uuid4().hex

    async def one(index: int, where: str, episode: Trajectory) -> None:
        ended = success = False
        async with slots, pool.session(episode.item, f"{nonce}-{index}") as session:
            if not tally.expect(where, "first observation", session.observation, episode.first_observation):
                return
            for number, turn in enumerate(episode.turns, 1):
                if ended:
                    tally.fail(f"{where} turn {number}: the environment had ended the task at turn {number - 1}")
                    return
                reply = await session.step(turn.action)
                ended = reply.terminated or reply.truncated
                success = ended and reply.success
                answer = (reply.observation, reply.reward)
                if not tally.expect(f"{where} turn {number}", "(observation, reward)", answer, (turn.observation, turn.reward)):
                    return
        cut = Status.MAX_TURNS if len(episode.turns) >= episode.max_turns else Status.MAX_TOKENS
        tally.expect(where, "status", Status.TERMINATED if ended else cut, episode.status)
        tally.expect(where, "success", success, episode.success)

    results = await asyncio.gather(*(one(index, *each) for index, each in enumerate(chosen)), return_exceptions=True)
    for (where, _), result in zip(chosen, results, strict=True):
        if isinstance(result, EnvError):
            tally.fail(f"{where}: {result}")
        elif isinstance(result, BaseException):
            raise result


def check_logprobs(cfg: RunConfig, store: RunStore, line: Line, num_episodes: int, tally: Tally) -> None:
    """Every turn is scored under the weights it names; the episodes check says whether those are the right ones."""
    if line.checkpoint is None:
        return
    versions = {int(line.checkpoint.state["global_step"]): (-1, line.checkpoint)}  # of the weights: (seq, where they lie)
    if line.stage(cfg) is not None:
        versions |= {int(commit.state["global_step"]): (commit.seq, commit) for commit in line.commits if WEIGHTS in commit.blobs}
    groups: dict[int, list[tuple[str, Trajectory]]] = {}
    for commit in line.commits:
        for episode in line.episodes.get(commit.seq, ()):
            if not any(episode.action_mask) or not episode.status.is_valid:
                tally.skipped += 1
                continue
            for version in sorted({turn.version for turn in episode.turns} & versions.keys()):
                groups.setdefault(version, []).append((place(line.at(commit), episode), episode))
    for version, episodes in groups.items():
        seq, source = versions[version]
        checkpoint = load(store, source)
        if checkpoint is None:
            tally.skipped += len(episodes)
            continue
        learner = Learner(checkpoint.model.eval(), cfg.optimiser, total_steps=1)
        for where, episode in draw(episodes, num_episodes, cfg.seed, line.name, seq):
            _check_one(learner, where, episode, version, tally)


def _check_one(learner: Learner, where: str, episode: Trajectory, version: int, tally: Tally) -> None:
    """The turns that version sampled. Greedy actions were logged with their probabilities at temperature 1."""
    vocabulary = learner.model.get_input_embeddings().num_embeddings
    if not all(0 <= token < vocabulary for token in episode.input_ids):
        tally.fail(f"{where}: token ids outside 0 .. {vocabulary - 1}")
        return
    batch = to_batch([replace(episode, temperature=episode.temperature or 1.0)])
    scores = learner.score(batch).tolist()
    for number, turn in enumerate(episode.turns, 1):
        if turn.version != version:
            continue
        gaps = [abs(a - b) for a, b in zip(scores[turn.start : turn.end], episode.logprobs[turn.start : turn.end], strict=True)]
        if not gaps:
            tally.fail(f"{where} turn {number}: an action of no token")
            continue
        worst = int(np.argmax(gaps))
        tally.counted += 1
        if not gaps[worst] <= LOGPROB_TOLERANCE:
            token = turn.start + worst
            tally.fail(
                f"{where} turn {number} token {token} (id {episode.input_ids[token]}): log-probability: "
                f"expected {scores[token]:.6f}, got {episode.logprobs[token]:.6f}"
            )
