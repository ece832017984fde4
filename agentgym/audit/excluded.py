"""Check the episodes that are left out of all numbers because their environment failed: they must
be few, and not chosen by their outcome.

A share above `rollout.max_env_error_frac` would have stopped the run. Below it, each episode whose
weights are still in the store is played again to its end, with the same random numbers. Real
failures of an environment hit good and bad episodes alike; forged failures do not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from scipy.special import bdtr  # binomial probability of at most k hits in n tries

from agentgym.audit.findings import Checks
from agentgym.audit.sampling import weights_of_versions
from agentgym.audit.stored_steps import StepRecord, load
from agentgym.config import RunConfig
from agentgym.deploy.environment import environment_servers
from agentgym.models.checkpoint import Checkpoint
from agentgym.rollouts.collect import collect
from agentgym.rollouts.engine import episode_settings, open_engine
from agentgym.rollouts.episode import token_players
from agentgym.rollouts.policies.engines import engine_class
from agentgym.store.manifest import Manifest
from agentgym.types import Status, Trajectory

MAX_CHANCE = 1e-6  # probability of the outcomes left out; below it they were probably chosen
LEAST_CHANCE = 1e-300  # the least that a failure states: smaller ones underflow to 0


def check_excluded(cfg: RunConfig, steps: Sequence[StepRecord], checks: Checks) -> None:
    """Check the share of failed episodes by commit, split and temperature. Play these again to
    their end; outcomes less likely than MAX_CHANCE are a failure.
    Episodes are not played again if their weights were pruned or they span two versions; none are
    if the engine does not repeat its draws, which a note records.
    """
    counts: Counter[Status] = Counter()
    limit = cfg.rollout.max_env_error_frac
    for record in steps:
        for commit in record.commits if record.checkpoint is not None else ():
            totals: Counter[str] = Counter()
            left_out: Counter[str] = Counter()
            for episode in record.episodes.get(commit.seq, ()):
                what = f"{episode.item.split} episodes at temperature {episode.temperature:g}"
                totals[what] += 1
                left_out[what] += not episode.status.is_valid
                counts[episode.status] += 1
            checks.counted += len(totals)
            for what, num in totals.items():
                if left_out[what] > limit * num:
                    checks.fail(
                        f"{record.at(commit)} {what}: {left_out[what]} of {num} are left out,"
                        f" rollout.max_env_error_frac is {limit:g}"
                    )
    kinds = [Status.ENV_ERROR, Status.TIMEOUT]
    kinds += [kind for kind in Status if not kind.is_valid and kind not in kinds and counts[kind]]
    failed_note = ", ".join(f"{counts[status]} {status}" for status in kinds)
    checks.notes.append(f"{failed_note} of {counts.total()} episodes")
    for record in steps:
        all_valid = all(episode.status.is_valid for _, episode in record.logged)
        if record.checkpoint is not None and not all_valid:
            if not engine_class(cfg.rollout.engine).repeats_draws:
                checks.notes.append(
                    f"{record.name}: not played again, engine {cfg.rollout.engine} does not repeat"
                    " its draws"
                )
            else:
                _play_again(record, record.checkpoint, checks)


def _play_again(record: StepRecord, checkpoint: Manifest, checks: Checks) -> None:
    sources, is_stage = weights_of_versions(record, checkpoint), record.stage is not None
    cfg, store = record.cfg, record.store
    valid = [episode for _, episode in record.logged if episode.status.is_valid]
    left_out = [episode for _, episode in record.logged if not episode.status.is_valid]
    by_version: dict[int, list[Trajectory]] = {}
    for episode in left_out:
        version = int(checkpoint.state["global_step"])
        if is_stage:
            version = episode.step - (episode.item.split == "train")
        versions = {turn.version for turn in episode.turns} | {version}
        if len(versions) == 1:  # an episode that spans an update has two sets of weights
            by_version.setdefault(version, []).append(episode)
    num_pruned = len(left_out) - sum(map(len, by_version.values()))
    # logged status -> item -> success of each episode when played again
    outcomes_of: dict[Status, dict[str, list[bool]]] = {}
    results: list[bool] = []
    num_failed_again = 0
    for version, episodes in by_version.items():
        weights = load(store, sources[version]) if version in sources else None
        if weights is None:
            num_pruned += len(episodes)
            continue
        seed = cfg.seed if is_stage else cfg.evaluation.seed
        for was, now in _played(cfg, weights, version, seed, episodes):
            if not now.status.is_valid:
                num_failed_again += 1
                continue
            results.append(now.success)
            by_item = outcomes_of.setdefault(was.status, {})
            by_item.setdefault(was.item.item_id, []).append(now.success)
    for status, outcomes in outcomes_of.items():
        alike = [episode for episode in left_out if episode.status is status]
        _check_chance(record.name, status, outcomes, alike, valid, checks)
    checks.skip(
        f"real end of episodes of {record.name} that were left out",
        "their weights were pruned (store.keep_checkpoints)",
        num_pruned,
    )
    checks.notes.append(
        f"{record.name}: of {len(left_out)} left out, played again {sum(results)} succeed,"
        f" {len(results) - sum(results)} do not, {num_failed_again} fail again, {num_pruned}"
        f" cannot be (weights pruned); {_bounds(valid, left_out)}"
    )


def _played(
    cfg: RunConfig, checkpoint: Checkpoint, version: int, seed: int, episodes: Sequence[Trajectory]
) -> list[tuple[Trajectory, Trajectory]]:
    """Play episodes once more on new servers, with the same weights and the same random numbers.

    checkpoint, version: the weights and their number. seed: of the random numbers.
    Result: pairs (logged episode, episode as it ends now).
    """
    pairs = []
    with (
        environment_servers(cfg, False) as endpoints,
        open_engine(cfg, checkpoint, endpoints, version=version) as engine,
    ):
        for episode in episodes:
            settings = episode_settings(
                cfg,
                instructions=engine.instructions,
                seed=seed,
                step=episode.step,
                max_turns=episode.max_turns,
                temperature=episode.temperature,
            )
            played = collect(
                [(episode.item, episode.sample)],
                pool=engine.pool,
                player_of=token_players(engine.policy, checkpoint.renderer),
                settings=settings,
                concurrency=1,
                episode_timeout_s=cfg.rollout.episode_timeout_s,
                max_attempts=1,
                max_env_error_frac=1.0,
            )
            pairs.append((episode, engine.loop.run(played)[0]))
    return pairs


def _check_chance(
    name: str,
    status: Status,
    outcomes: Mapping[str, Sequence[bool]],
    left_out: Sequence[Trajectory],
    valid: Sequence[Trajectory],
    checks: Checks,
) -> None:
    """Record a failure if replayed episodes succeed, or fail, less often than chance explains.

    An item counts once, because its samples fail together.
    outcomes: item id -> success of each replayed episode; left_out: the failed episodes of this
    `status`; valid: the episodes that the expected rate is computed from.
    """
    # a request can fail at any turn, but only long episodes reach a deadline
    shortest = min(len(episode.turns) for episode in left_out) if status is Status.TIMEOUT else 0
    alike = [episode for episode in valid if len(episode.turns) >= shortest]
    turns = sum(1 + len(episode.turns) for episode in alike)
    share = (1 + sum(1 + len(episode.turns) for episode in alike if episode.success)) / (2 + turns)
    checks.counted += 1
    for what, num_hits, rate in (
        ("would have succeeded", sum(map(any, outcomes.values())), share),
        ("would have failed", sum(not all(some) for some in outcomes.values()), 1 - share),
    ):
        chance = bdtr(num_hits, len(outcomes), rate)
        if chance < MAX_CHANCE:
            less = "less than " if chance < LEAST_CHANCE else ""
            checks.fail(
                f"{name}: {status} on {len(outcomes)} items, of which played again {num_hits}"
                f" {what}; from the episodes that count {rate * len(outcomes):.1f} are expected,"
                f" and so few come by chance {less}once in {1 / max(chance, LEAST_CHANCE):.0e} runs"
            )


def _bounds(valid: Sequence[Trajectory], left_out: Sequence[Trajectory]) -> str:
    total, num_successes = len(valid) + len(left_out), sum(episode.success for episode in valid)
    low, high = num_successes / total, (num_successes + len(left_out)) / total
    now = num_successes / len(valid) if valid else float("nan")
    return f"success {now:.1%} of what counts, {low:.1%} to {high:.1%} whatever they were"
