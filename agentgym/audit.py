"""Is a run what it says it is: content, lineage, episodes, log-probabilities, numbers and ledger, checked against each other.

Nothing here trusts a digest to prove more than that bytes did not change. Episodes are played again, tokens are scored
again, numbers are computed again. What only training again could show (losses, gradient norms) is not claimed.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from agentgym.algorithms.batch import to_batch
from agentgym.config import ConfigError, RunConfig
from agentgym.context import METRICS, TRAJECTORIES, NoProgress, Progress, decode_trajectories
from agentgym.data import ItemStream, Splits, load_splits, splits_from_json
from agentgym.evaluation.evaluate import OUTCOMES, Array, evaluation_metrics, outcomes, paired, score
from agentgym.ledger import tracker_of
from agentgym.rollouts.client import EnvError, EnvPool
from agentgym.rollouts.episode import extract_action
from agentgym.rollouts.horizon import Stage, max_turns, stages
from agentgym.rollouts.metrics import rollout_metrics
from agentgym.steps import Step, key_of, local_environment, open_store, run_key, semantic_of, steps_of
from agentgym.store.manifest import Manifest, ManifestError
from agentgym.store.posix import BlobMissing, DigestMismatch, RunStore
from agentgym.tracking import Point, Tracker, decode_points
from agentgym.training.checkpoint import WEIGHTS, Checkpoint, load_checkpoint
from agentgym.training.engine import open_pool
from agentgym.training.learner import Learner, learning_rate
from agentgym.training.model import set_threads
from agentgym.training.sft import DEMOS
from agentgym.types import Item, Status, Trajectory

MAX_FAILURES = 10  # named per check; all are counted
LOGPROB_TOLERANCE = 1e-3  # nats; float32 forwards of other shapes agree to 1e-5
CHECKS = {
    "content": "every blob and record that must still be there has its digest",
    "lineage": "keys, parents, commits, optimiser steps, stream positions and horizons follow from one another",
    "episodes": "each commit logs the episodes it claims, sampled by the version it claims",
    "tokens": "masks, spans, actions and observations say the same as the token ids",
    "replay": "logged actions played again on a new server meet the same observations and rewards",
    "rescore": "logged ids have the logged log-probabilities under the weights that sampled them",
    "numbers": "reported numbers follow from the stored episodes",
    "ledger": "MLflow holds each committed point once and nothing else",
    "registry": "the registered model is the checkpoint",
}


@dataclass(frozen=True)
class Check:
    """One question and its answer."""

    name: str
    counted: int  # comparisons made
    skipped: int  # what could not be compared: weights that were pruned, environments that had failed
    failures: tuple[str, ...]  # the first MAX_FAILURES, each naming step, commit, item, ...
    num_failures: int

    @property
    def ok(self) -> bool:
        return not self.num_failures


@dataclass(frozen=True)
class AuditReport:
    """What an audit found."""

    run_key: str
    steps: tuple[str, ...]  # audited; a step without a commit has nothing to audit
    checks: tuple[Check, ...]

    @property
    def ok(self) -> bool:
        return all(check.ok for check in self.checks)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {**asdict(self), "ok": self.ok, "checks": [{**asdict(check), "ok": check.ok} for check in self.checks]}


@dataclass
class _Tally:
    """A check while it is made."""

    name: str
    counted: int = 0
    skipped: int = 0
    failures: list[str] = field(default_factory=list)
    num_failures: int = 0

    def expect(self, where: str, what: str, expected: object, got: object) -> bool:
        """One comparison; NaN never equals."""
        self.counted += 1
        if expected == got:
            return True
        self.fail(f"{where}: {what}: expected {_short(expected)}, got {_short(got)}")
        return False

    def fail(self, message: str) -> None:
        self.num_failures += 1
        if len(self.failures) < MAX_FAILURES:
            self.failures.append(message)

    def check(self) -> Check:
        return Check(self.name, self.counted, self.skipped, tuple(self.failures), self.num_failures)


@dataclass
class _Line:
    """One step as it was found: its commits and their logs."""

    step: Step
    key: str
    parents: dict[str, Manifest]
    commits: list[Manifest]
    points: dict[int, list[Point]] = field(default_factory=dict)  # by seq
    episodes: dict[int, list[Trajectory]] = field(default_factory=dict)  # by seq

    @property
    def name(self) -> str:
        return self.step.name

    @property
    def final(self) -> Manifest | None:
        return self.commits[-1] if self.commits[-1].done else None

    @property
    def checkpoint(self) -> Manifest | None:
        """The parent a training step starts from or an evaluation plays."""
        wanted = self.name.removeprefix("evaluate-") if self.name.startswith("evaluate-") else None
        found = [
            m for name, m in self.parents.items() if (name == wanted if wanted else name != "prepare" and not name.startswith("evaluate-"))
        ]
        return found[0] if found else None

    def at(self, commit: Manifest) -> str:
        return f"{self.name} commit {commit.seq}"


def audit(cfg: RunConfig, *, run: str | None = None, num_episodes: int = 32, progress: Progress | None = None) -> AuditReport:
    """Check the run of this configuration as far as it went; nothing is written, all checks run even where one fails.

    run: prefix of a run key, to make sure that it is the run you mean. num_episodes: of each step, how many are played
    again (at least one of every commit), and of each commit how many are scored again.
    Errors: ConfigError where `run` is another run, or where nothing of this configuration was ever committed.
    """
    set_threads()
    store, key, show = open_store(cfg), run_key(cfg), progress or NoProgress()
    if run is not None and not key.startswith(run.removeprefix("r")):
        raise ConfigError(f"run {run} is not the run of this configuration and source, r{key[:12]}; {_existing(cfg)}")
    tallies = {name: _Tally(name) for name in CHECKS}
    lines = _read(cfg, store, tallies["content"], tallies["lineage"])
    if not lines and not tallies["content"].num_failures:
        raise ConfigError(f"nothing to audit: no step of run r{key[:12]} was committed in {store.root}; {_existing(cfg)}")
    show.start("audit", 2 * len(lines) + 3)
    splits = _splits(cfg, store, lines, tallies["numbers"])
    tables: dict[str, tuple[Array, Array]] = {}
    for line in lines:
        _check_lineage(cfg, line, splits, tallies["lineage"])
        if splits is not None:
            _check_episodes(cfg, line, splits, tallies["episodes"])
            _check_numbers(cfg, store, line, lines, splits, tables, tallies["numbers"])
        show.advance(1, f"{line.name}: numbers")
    system = _check_replay(cfg, store, lines, num_episodes, tallies["replay"])
    show.advance(1, "replay")
    for line in lines:
        _check_tokens(cfg, store, line, system, tallies["tokens"])
        _check_logprobs(cfg, store, line, num_episodes, tallies["rescore"])
        show.advance(1, f"{line.name}: tokens")
    _check_ledger(cfg, key, lines, tallies["ledger"])
    show.advance(1, "ledger")
    _check_registry(cfg, store, key, lines, tallies["registry"])
    show.advance(1, "registry")
    return AuditReport(key, tuple(line.name for line in lines), tuple(tally.check() for tally in tallies.values()))


# content and lineage


def _read(cfg: RunConfig, store: RunStore, content: _Tally, lineage: _Tally) -> list[_Line]:
    """Every step of the run that has a commit, in order, with its logs decoded."""
    finals: dict[str, Manifest] = {}
    lines: list[_Line] = []
    for name, step in steps_of(cfg).items():
        if any(parent not in finals for parent in step.parents):
            continue
        key = key_of(step, cfg, finals)
        try:
            commits = store.history(name, key)
        except (ManifestError, OSError) as error:
            content.counted += 1
            content.fail(f"{name}: {error}")
            continue
        if not commits:
            continue
        line = _Line(step, key, {parent: finals[parent] for parent in step.parents}, commits)
        for commit in commits:
            _check_content(store, line, commit, content)
        lines.append(line)
        if commits[-1].done:
            finals[name] = commits[-1]
        for commit in commits:
            lineage.expect(line.at(commit), "recomputed key", key, commit.key)
    return lines


def _check_content(store: RunStore, line: _Line, commit: Manifest, tally: _Tally) -> None:
    head = line.commits[-1]
    for name in (*commit.blobs, *commit.records):
        tally.counted += 1
        try:
            data = store.read(commit, name)
        except BlobMissing as error:
            if name in commit.blobs and commit.seq < head.seq:
                tally.counted, tally.skipped = tally.counted - 1, tally.skipped + 1  # pruned, as it should be
            else:
                tally.fail(str(error))
            continue
        except DigestMismatch as error:
            tally.fail(str(error))
            continue
        try:
            if name == METRICS:
                line.points[commit.seq] = decode_points(data)
            elif name in (TRAJECTORIES, DEMOS):
                line.episodes[commit.seq] = decode_trajectories(data)
        except (ValueError, KeyError, TypeError, OSError, EOFError) as error:
            tally.fail(f"{line.at(commit)}: {name} cannot be read: {type(error).__name__}: {error}")


def _check_lineage(cfg: RunConfig, line: _Line, splits: Splits | None, tally: _Tally) -> None:
    parents = {name: manifest.digest for name, manifest in line.parents.items()}
    stage = _stage(cfg, line)
    for index, commit in enumerate(line.commits):
        where = line.at(commit)
        tally.expect(where, "commit number", index, commit.seq)
        tally.expect(where, "done", index + 1 == len(line.commits) and line.final is not None, commit.done)
        tally.expect(where, "digests of its parents", parents, commit.parents)
        tally.expect(where, "configuration", semantic_of(line.step, cfg), commit.config)
        if stage is None or splits is None:
            continue
        step = stage.first_step + index
        stream = ItemStream(splits.train, seed=cfg.seed, position=(step - 1) * cfg.rollout.items_per_step)
        items = [item.item_id for item in stream.next(cfg.rollout.items_per_step)]
        expected = {"global_step": step, "stream_position": stream.position, "consumed": items, "max_turns": max_turns(cfg.horizon, step)}
        for name, value in expected.items():
            tally.expect(where, name, value, commit.state.get(name))
        tally.expect(where, "done at the stage's last step", step == stage.last_step, commit.done)
    if stage is not None and line.checkpoint is not None:
        start = int(line.checkpoint.state["global_step"])
        tally.expect(line.name, "first step, after its parent's last", start + 1, stage.first_step)


# episodes


def _check_episodes(cfg: RunConfig, line: _Line, splits: Splits, tally: _Tally) -> None:
    """Who was played, for which step, under which horizon and by which version of the weights."""
    stage = _stage(cfg, line)
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
            turns = max_turns(cfg.horizon, step)
            expected = [
                (step - 1, item, sample, step, turns, rollout.temperature) for item in items for sample in range(rollout.group_size)
            ]
            if cfg.validation.every and step % cfg.validation.every == 0:
                fixed = (0, step, cfg.validation.max_turns, cfg.validation.temperature)
                expected += [(step, item, *fixed) for item in splits.validation[: cfg.validation.num_items]]
        else:
            chunk = splits.test[: cfg.evaluation.num_items][first : int(commit.state["num_items"])]
            first = int(commit.state["num_items"])
            version = int(line.checkpoint.state["global_step"]) if line.checkpoint else -1
            rest, samples = (0, cfg.evaluation.max_turns), range(1, 1 + cfg.evaluation.num_samples)
            expected = [(version, item, 0, *rest, 0.0) for item in chunk]
            expected += [(version, item, sample, *rest, cfg.evaluation.temperature) for item in chunk for sample in samples]
        tally.expect(where, "number of episodes", len(expected), len(episodes))
        for (version, *wanted), episode in zip(expected, episodes, strict=False):
            versions = sorted({turn.version for turn in episode.turns} or {version})
            got = [episode.item, episode.sample, episode.step, episode.max_turns, episode.temperature]
            tally.expect(_place(where, episode), "[item, sample, step, max_turns, temperature]", wanted, got)
            tally.expect(_place(where, episode), "versions of the weights", [version], versions)
            outcome = sum(turn.reward for turn in episode.turns) if episode.status.is_valid else None
            tally.expect(_place(where, episode), "reward as the sum of its turns'", outcome, episode.reward)


def _check_tokens(cfg: RunConfig, store: RunStore, line: _Line, system: str, tally: _Tally) -> None:
    """Ids outside the policy's spans are what the renderer makes of the logged observations; inside, of the logged actions."""
    checkpoint = _load(store, line.final if line.name == "initialise" else line.checkpoint)
    if checkpoint is None or not line.episodes:
        return
    renderer = checkpoint.renderer
    start, bridge, text = cache(renderer.start), cache(renderer.bridge), cache(renderer.text)
    for commit in line.commits:
        for episode in line.episodes.get(commit.seq, ()):
            where = _place(line.at(commit), episode)
            if not episode.status.is_valid:
                tally.skipped += 1
                continue
            rebuilt = list(start(episode.first_observation, system))
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
                elif episode.status is Status.MAX_TOKENS:
                    full = len(rebuilt) + len(answer) + cfg.rollout.max_new_tokens > cfg.model.context_tokens
                    tally.expect(where, "context used up", True, full)
            tally.expect(where, "token ids as rendered", tuple(rebuilt), episode.input_ids)
            tally.expect(where, "action mask", tuple(mask), episode.action_mask)
            outside = [value for value, sampled in zip(episode.logprobs, mask, strict=False) if not sampled]
            tally.expect(where, "log-probabilities, one per token", len(episode.input_ids), len(episode.logprobs))
            tally.expect(where, "log-probabilities outside actions other than 0", [], [value for value in outside if value])


def _check_replay(cfg: RunConfig, store: RunStore, lines: Sequence[_Line], num_episodes: int, tally: _Tally) -> str:
    """Result: the environment's instructions, where episodes begin with them."""
    chosen: list[tuple[str, Trajectory]] = []
    for line in lines:
        logged = [commit for commit in line.commits if line.episodes.get(commit.seq)]
        for commit in logged:
            episodes = _sample(line.episodes[commit.seq], max(1, num_episodes // len(logged)), cfg.seed, line.name, commit.seq)
            chosen += [(_place(line.at(commit), episode), episode) for episode in episodes]
    tally.skipped += sum(not episode.status.is_valid for _, episode in chosen)
    chosen = [(where, episode) for where, episode in chosen if episode.status.is_valid]
    if not chosen:
        return ""
    with local_environment(cfg, False) as endpoints, open_pool(cfg, endpoints, allow_expert=False) as (pool, runner):
        runner.run(_replay(pool, chosen, cfg.rollout.concurrency, tally))
        return runner.run(pool.info())[0].instructions if cfg.rollout.system_prompt else ""


async def _replay(pool: EnvPool, chosen: Sequence[tuple[str, Trajectory]], concurrency: int, tally: _Tally) -> None:
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


def _check_logprobs(cfg: RunConfig, store: RunStore, line: _Line, num_episodes: int, tally: _Tally) -> None:
    """Train episodes were sampled by the commit before theirs, validation episodes by their own, evaluations by the checkpoint."""
    if line.checkpoint is None:
        return
    groups: dict[int, tuple[Manifest, list[tuple[str, Trajectory]]]] = {}  # by the seq that sampled them; -1 is the parent
    before = (-1, line.checkpoint)
    for commit in line.commits:
        for episode in line.episodes.get(commit.seq, ()):
            own = episode.item.split == "validation" and _stage(cfg, line) is not None
            seq, source = (commit.seq, commit) if own else before
            if any(episode.action_mask) and episode.status.is_valid:
                groups.setdefault(seq, (source, []))[1].append((_place(line.at(commit), episode), episode))
            else:
                tally.skipped += 1
        if _stage(cfg, line) is not None:
            before = (commit.seq, commit)
    for seq, (source, episodes) in groups.items():
        checkpoint = _load(store, source)
        if checkpoint is None:
            tally.skipped += len(episodes)
            continue
        learner = Learner(checkpoint.model.eval(), cfg.optimiser, total_steps=1)
        for where, episode in _sample(episodes, num_episodes, cfg.seed, line.name, seq):
            _check_one(learner, where, episode, tally)


def _check_one(learner: Learner, where: str, episode: Trajectory, tally: _Tally) -> None:
    """Greedy actions were logged with their probabilities at temperature 1."""
    vocabulary = learner.model.get_input_embeddings().num_embeddings
    if not all(0 <= token < vocabulary for token in episode.input_ids):
        tally.fail(f"{where}: token ids outside 0 .. {vocabulary - 1}")
        return
    batch = to_batch([replace(episode, temperature=episode.temperature or 1.0)], truncated="zero")
    scores = learner.score(batch).tolist()
    for number, turn in enumerate(episode.turns, 1):
        gaps = [abs(a - b) for a, b in zip(scores[turn.start : turn.end], episode.logprobs[turn.start : turn.end], strict=True)]
        worst = int(np.argmax(gaps))
        tally.counted += 1
        if not gaps[worst] <= LOGPROB_TOLERANCE:
            token = turn.start + worst
            tally.fail(
                f"{where} turn {number} token {token} (id {episode.input_ids[token]}): log-probability: "
                f"expected {scores[token]:.6f}, got {episode.logprobs[token]:.6f}"
            )


# numbers


def _splits(cfg: RunConfig, store: RunStore, lines: Sequence[_Line], tally: _Tally) -> Splits | None:
    """As the run recorded them, compared with the data it says it read."""
    prepare = next((line.final for line in lines if line.name == "prepare"), None)
    if prepare is None:
        return None
    try:
        recorded = splits_from_json(store.read(prepare, "splits.json"))
    except (LookupError, ValueError):
        return None  # content has said so
    loaded = load_splits(cfg.data.path, cfg.env.name, validation_fraction=cfg.data.validation_fraction, seed=cfg.seed)
    for name in ("train", "validation", "test"):
        tally.expect("prepare commit 0", f"{name} items", getattr(loaded, name), getattr(recorded, name))
        tally.expect("prepare commit 0", f"number of {name} items", len(getattr(loaded, name)), prepare.results.get(name))
    return recorded


def _check_numbers(
    cfg: RunConfig,
    store: RunStore,
    line: _Line,
    lines: Sequence[_Line],
    splits: Splits,
    tables: dict[str, tuple[Array, Array]],
    tally: _Tally,
) -> None:
    """tables: outcomes of the evaluations so far, recomputed; the baseline of a later one is among them."""
    if line.name == "initialise":
        episodes = line.episodes.get(0, [])
        tally.expect(line.at(line.commits[0]), "num_demos", len(episodes), line.commits[0].results["num_demos"])
    elif line.name == "warm-start":
        _check_warm_start(cfg, line, tally)
    elif _stage(cfg, line) is not None:
        for commit in line.commits:
            _check_training(cfg, line, commit, tally)
    elif line.name.startswith("evaluate-") and line.final is not None:
        _check_evaluation(cfg, store, line, splits, tables, tally)
    elif line.name == "report" and line.final is not None:
        known = [other.final.results for other in lines if other.name.startswith("evaluate-") and other.final]
        for side in ("before", "after"):
            tally.expect(line.at(line.final), f"results {side}, as one of the evaluations'", True, line.final.results[side] in known)


def _check_warm_start(cfg: RunConfig, line: _Line, tally: _Tally) -> None:
    settings, step = cfg.warm_start, 0
    for commit in line.commits:
        for point in line.points.get(commit.seq, ()):
            step += 1
            tally.expect(line.at(commit), "step of a point", step, point.step)
            rate = learning_rate(settings.optimiser, step, settings.steps)
            tally.expect(f"{line.at(commit)} step {step}", "sft/lr", rate, point.metrics.get("sft/lr"))
        tally.expect(line.at(commit), "steps so far", step, commit.state["sft_step"])
        last = line.points[commit.seq][-1].metrics.get("sft/loss") if line.points.get(commit.seq) else None
        tally.expect(line.at(commit), "loss", last, commit.results["loss"])


def _check_training(cfg: RunConfig, line: _Line, commit: Manifest, tally: _Tally) -> None:
    points, episodes = line.points.get(commit.seq), line.episodes.get(commit.seq)
    step, where = int(commit.state["global_step"]), line.at(commit)
    if not points or not episodes:
        tally.fail(f"{where}: it has no {METRICS if not points else TRAJECTORIES} to compare")
        return
    tally.expect(where, "steps of its points", [step], [point.step for point in points])
    logged = points[0].metrics
    expected = rollout_metrics([episode for episode in episodes if episode.item.split == "train"])
    expected["actor/lr"] = learning_rate(cfg.optimiser, step, sum(cfg.horizon.stage_steps))
    validation = [episode for episode in episodes if episode.item.split == "validation"]
    if validation:
        expected["validation/success"] = rollout_metrics(validation)["rollout/success"]
    own = {name for name in logged if name.startswith(("rollout/", "validation/"))}
    for name in sorted(expected.keys() | own):
        tally.expect(where, name, expected.get(name), logged.get(name))


def _check_evaluation(
    cfg: RunConfig, store: RunStore, line: _Line, splits: Splits, tables: dict[str, tuple[Array, Array]], tally: _Tally
) -> None:
    final, settings = line.commits[-1], cfg.evaluation
    where, items = line.at(final), splits.test[: settings.num_items]
    episodes = [episode for commit in line.commits for episode in line.episodes.get(commit.seq, ())]
    foreign = {e.item.item_id for e in episodes} - {item.item_id for item in items}
    if foreign or not episodes or max(e.sample for e in episodes) > settings.num_samples:
        tally.fail(f"{where}: its episodes are not those of the test items (foreign: {sorted(foreign)[:3]}); nothing to recompute from")
        return
    greedy, samples = tables[line.name] = outcomes(episodes, items, settings.num_samples)
    try:
        expected: dict[str, Any] = json.loads(json.dumps(score(greedy, samples, settings)))
    except ValueError as error:
        tally.fail(f"{where}: {error}")
        return
    if "paired" in final.results:
        baseline = str(final.results["paired"]["baseline"])
        base = dict(zip(("greedy", "samples"), tables.get(baseline, (greedy[:0], samples[:0])), strict=True))
        expected["paired"] = {"baseline": baseline, **json.loads(json.dumps(paired(base, greedy, samples, settings)))}
    for name in ("summary", "paired"):
        for key, value in expected.get(name, {}).items():
            tally.expect(where, f"results {name} {key}", value, final.results[name].get(key))
    expected |= {
        "checkpoint": line.name.removeprefix("evaluate-"),
        "num_items": len(items),
        "max_turns": settings.max_turns,
        "global_step": final.state["global_step"],
    }
    for name in sorted((expected.keys() | final.results.keys()) - {"summary", "paired"}):
        tally.expect(where, f"results {name}", expected.get(name), final.results.get(name))
    tally.expect(where, "names of results", sorted(expected), sorted(final.results))
    try:
        stored = json.loads(store.read(final, OUTCOMES))
    except (LookupError, ValueError):
        return  # content has said so
    for name, table in (("greedy", greedy), ("samples", samples)):
        same = np.array_equal(table, np.array(stored.get(name), dtype=float), equal_nan=True)
        tally.expect(where, f"{OUTCOMES} {name} as the episodes'", True, same)
    metrics = [point.metrics for point in line.points.get(final.seq, ())]
    tally.expect(where, "metrics", [evaluation_metrics(expected, episodes)], metrics)


# ledger


def _check_ledger(cfg: RunConfig, key: str, lines: Sequence[_Line], tally: _Tally) -> None:
    """The parent run has the points of headline steps, each child those of its step; there are no other children."""
    tracker = _existing_ledger(cfg)
    parent = _one_run(tracker, {"run_key": key, "kind": "pipeline"}, f"the run's {key[:12]}", tally) if tracker else None
    if tracker is None or parent is None:
        if tracker is None:
            tally.fail(f"no ledger with experiment {cfg.tracking.experiment!r} at {cfg.tracking_uri}")
        return
    tracked = [line for line in lines if line.points or line.final is not None]
    headline = [line for line in tracked if line.step.headline]
    _check_points(tracker, parent.info.run_id, "parent run", headline, tally)
    for line in tracked:
        identity = {"mlflow.parentRunId": parent.info.run_id, "step_key": line.key, "kind": "step"}
        run = _one_run(tracker, identity, line.name, tally)
        if run is not None:
            _check_points(tracker, run.info.run_id, f"run of {line.name}", [line], tally)
            if line.final is not None:
                tally.expect(f"run of {line.name}", "tag manifest", line.final.digest, run.data.tags.get("manifest"))
    known = {line.key for line in lines}
    for run in _runs(tracker, {"mlflow.parentRunId": parent.info.run_id, "kind": "step"}):
        if run.data.tags.get("step_key") not in known:
            tally.fail(f"MLflow run {run.info.run_id} ({run.data.tags.get('step')}) belongs to no commit of this run")


def _check_points(tracker: Tracker, run_id: str, where: str, lines: Sequence[_Line], tally: _Tally) -> None:
    """Point by point; counted, so that one delivered twice is one too many."""
    expected = Counter(
        (name, point.step, point.time_ms, value)
        for line in lines
        for points in line.points.values()
        for point in points
        for name, value in point.metrics.items()
    )
    got = Counter(tracker.points(run_id))
    tally.counted += expected.total()
    for what, extra in (("missing", expected - got), ("not of any commit, or more than once", got - expected)):
        for name, step, time_ms, value in sorted(extra.elements()):
            tally.fail(f"{where}: {name} at step {step}: {value!r} (stamped {time_ms}) is {what}")


def _check_registry(cfg: RunConfig, store: RunStore, key: str, lines: Sequence[_Line], tally: _Tally) -> None:
    line = next((line for line in lines if line.name == "register"), None)
    tracker = _existing_ledger(cfg)
    if line is None or line.final is None or tracker is None or line.checkpoint is None:
        return
    from mlflow.exceptions import MlflowException

    registered, checkpoint = line.final.results, line.checkpoint
    name, number = str(registered["model"]), str(registered["version"])
    where = f"{name} version {number}"
    try:
        version = tracker.client.get_model_version(name, number)
    except MlflowException as error:
        tally.fail(f"{where}: {error.message}")
        return
    wanted = {"step_key": checkpoint.digest, "run_key": key, "weights.sha256": checkpoint.blobs[WEIGHTS].digest}
    wanted |= {"evaluation": manifest.digest for parent, manifest in line.parents.items() if parent.startswith("evaluate-")}
    for tag, value in wanted.items():
        tally.expect(where, f"tag {tag}", value, version.tags.get(tag))
    _check_registered_weights(tracker, store, version, checkpoint, where, tally)
    try:
        champion = tracker.client.get_model_version_by_alias(name, str(registered["alias"]))
    except MlflowException as error:
        tally.fail(f"{where}: alias {registered['alias']}: {error.message}")
        return
    if champion.tags.get("run_key") in (key, None):
        tally.expect(where, f"version under alias {registered['alias']}", number, str(champion.version))
    else:
        tally.skipped += 1  # the alias has moved on to another run's model


def _check_registered_weights(tracker: Tracker, store: RunStore, version: Any, checkpoint: Manifest, where: str, tally: _Tally) -> None:
    """The model people load, not what its tags say of it."""
    from safetensors.torch import load

    location = tracker.client.get_logged_model(version.model_id).artifact_location if version.model_id else version.source
    path = Path(str(location).removeprefix("file://")) / "model" / "model.safetensors"
    if not str(location).startswith(("file://", "/")):
        tally.skipped += 1  # on a remote artifact store
        return
    try:
        ours, theirs = load(store.read(checkpoint, WEIGHTS)), load(path.read_bytes())
    except (LookupError, ValueError, OSError) as error:
        tally.fail(f"{where}: weights cannot be compared: {error}")
        return
    for tensor in sorted(ours):
        same = tensor in theirs and bool((ours[tensor] == theirs[tensor]).all())
        tally.expect(where, f"{tensor} as in {checkpoint.step} commit {checkpoint.seq}", True, same)


def _existing_ledger(cfg: RunConfig) -> Tracker | None:
    """Without creating one."""
    if cfg.tracking_uri.startswith("sqlite:") and not Path(cfg.tracking_uri.removeprefix("sqlite:///")).is_file():
        return None
    tracker = tracker_of(cfg)
    return tracker if tracker.client.get_experiment_by_name(cfg.tracking.experiment) is not None else None


def _runs(tracker: Tracker, tags: dict[str, str]) -> Iterator[Any]:
    query, page = " and ".join(f"tags.`{name}` = '{value}'" for name, value in tags.items()), None
    while True:
        found = tracker.client.search_runs([tracker.experiment_id], filter_string=query, page_token=page)
        yield from found
        page = found.token
        if not page:
            return


def _one_run(tracker: Tracker, tags: dict[str, str], what: str, tally: _Tally) -> Any:
    runs = list(_runs(tracker, tags))
    tally.expect(f"MLflow run of {what}", "how many there are", 1, len(runs))
    return runs[0] if runs else None


# helpers


def _stage(cfg: RunConfig, line: _Line) -> Stage | None:
    return next((stage for stage in stages(cfg.horizon) if stage.name == line.name), None)


def _sample(episodes: Sequence[Any], count: int, seed: int, step: str, seq: int) -> list[Any]:
    """`count` of them, in their order; the same ones in every audit of a run."""
    salt = int.from_bytes(step.encode(), "little") % 2**63 + seq + 1
    drawn = np.random.Generator(np.random.Philox(key=[seed, salt])).permutation(len(episodes))[:count]
    return [episodes[index] for index in sorted(drawn)]


def _load(store: RunStore, manifest: Manifest | None) -> Checkpoint | None:
    """None where its blobs were pruned or are damaged; the content check tells which."""
    if manifest is None:
        return None
    try:
        return load_checkpoint(store, manifest)
    except (LookupError, ValueError):
        return None


def _place(where: str, episode: Trajectory) -> str:
    return f"{where} {episode.item.item_id} sample {episode.sample}"


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."


def _existing(cfg: RunConfig) -> str:
    runs = sorted({f"r{path.name[:12]}" for path in (cfg.state_dir / "delivered").glob("*") if path.is_dir()})
    return f"known under {cfg.state_dir}: {', '.join(runs) or 'no run'}"
