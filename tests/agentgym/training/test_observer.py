"""An episode's record has its numbers from the update, or the reason for leaving it out."""

import itertools
import math
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from agentgym.algorithms.batch import to_batch, why_not
from agentgym.compute.placement import num_accelerators
from agentgym.config import RunConfig, load_config
from agentgym.pipeline.run import run_step
from agentgym.pipeline.table import finished, open_store
from agentgym.records import TRAJECTORIES, decode_trajectories, encode_trajectories
from agentgym.steps.context import METRICS
from agentgym.tracking.points import decode_points
from agentgym.training.observer import (
    BYTES_PER_TOKEN,
    StepClock,
    rollout_speed,
    shown,
    with_reasons,
)
from agentgym.types import EngineUsage, Item, Status, Trajectory, Turn


def played(task, reward, status=Status.TERMINATED, mask=(False, True)):
    turn = Turn("go", "you see", reward or 0.0, 1, 2)
    return Trajectory(
        *(Item("babyai", task), 0, 1, 6, status, reward, bool(reward), "task", (turn,)),
        *((1, 2), mask, (0.0, -0.5)),
    )


def test_each_reason_is_told_and_what_was_learned_from_has_none():
    told = [
        (played(1, 1.0), ""),
        (played(1, 0.0), ""),
        (played(2, 0.0), "its group had equal rewards"),
        (played(1, None, Status.ENV_ERROR), "the environment failed: env_error"),
        (played(1, None, Status.TIMEOUT), "the environment failed: timeout"),
        (played(1, 0.0, mask=(False, False)), "no action"),
        (played(1, 0.0, Status.MAX_TURNS), "cut: max_turns"),
    ]
    episodes = [each for each, _ in told]
    reasons = why_not(episodes, truncated="mask", signal=True)
    cfg = load_config(overrides=["rollout.token_numbers_frac=0"])
    marked = with_reasons(cfg, episodes, reasons, None, None, 1)
    reasons = [each.learned.excluded if each.learned else "" for each in marked]
    assert reasons == [reason for _, reason in told]
    assert [replace(each, learned=None) for each in marked] == episodes
    assert decode_trajectories(encode_trajectories(marked)) == marked


@pytest.mark.integration
def test_of_a_drawn_share_of_the_episodes_each_tokens_numbers_are_kept(
    started, tiny_params, tmp_path
):
    shutil.copytree(started, tmp_path, dirs_exist_ok=True)
    cfg = load_config(tiny_params(tmp_path), ["rollout.token_numbers_frac=0.5"])
    for name in ("prepare", "demonstrate", "initialize", "warm-start", "stage-1"):
        run_step(name, cfg)
    store = open_store(cfg)
    commits = store.history("stage-1", finished(cfg, store)["stage-1"].key)
    for commit in commits:
        episodes = [
            each
            for each in decode_trajectories(store.read(commit, TRAJECTORIES))
            if each.item.split == "train"
        ]
        told = [each for each in episodes if each.learned is not None]
        assert len(told) == len(episodes) / 2
        batch = to_batch([replace(each, learned=None) for each in episodes])
        expected = batch.returns  # standardized within groups by hand below
        for place, each in enumerate(episodes):
            if each.learned is None:
                continue
            count = sum(each.action_mask)
            engine = [x for x, act in zip(each.logprobs, each.action_mask, strict=True) if act]
            group = expected[batch.group_ids == batch.group_ids[place]]
            gain = float((expected[place] - group.mean()) / (group.std() + 1e-6))
            assert each.learned.advantages == pytest.approx([gain] * count, abs=1e-4)
            # log-probabilities before the update equal the engine's, which has the same weights
            assert each.learned.logprobs == pytest.approx(engine, abs=1e-3)
            assert len(each.learned.ratios) == len(each.learned.entropies) == count
            assert all(0 < entropy <= math.log(512) for entropy in each.learned.entropies)
        if any(x for each in told for x in each.learned.advantages):
            assert any(abs(x - 1) > 1e-3 for each in told for x in each.learned.ratios)


def test_the_room_for_tokens_numbers_is_bounded():
    counts = [100] * 64
    room = {"rollout.token_numbers_frac": 1.0, "rollout.token_numbers_kib": 24}

    def drawn(**changes):
        overrides = [f"{key}={value}" for key, value in (room | changes).items()]
        return shown(load_config(overrides=overrides), counts, 3)

    assert len(drawn()) == 24 * 1024 // (100 * BYTES_PER_TOKEN) == 7
    assert drawn() == sorted(set(drawn())) != drawn(seed=1)
    assert len(drawn(**{"rollout.token_numbers_kib": 1024})) == 64
    assert len(drawn(**{"rollout.token_numbers_frac": 0.05})) == 4
    assert drawn(**{"rollout.token_numbers_frac": 0}) == []


def test_an_episode_that_does_not_fit_is_replaced_by_one_that_does():
    counts = [2000, 2000, 2000, 10, 2000, 2000, 2000, 2000]
    overrides = ["rollout.token_numbers_frac=0.05", "rollout.token_numbers_kib=32"]
    for seed in range(8):
        assert shown(load_config(overrides=[*overrides, f"seed={seed}"]), counts, 1) == [3]


SPLIT = ("commit", "generate", "wait", "update", "publish", "validate", "other")


class Hand:
    """Clock that is set by hand."""

    def __init__(self, s=100.0):
        self.s = s

    def __call__(self):
        return self.s


def episode(num_sampled, num_read):
    mask = (True,) * num_sampled + (False,) * num_read
    ids, logprobs = (1,) * len(mask), (0.0,) * len(mask)
    first = (Item("babyai", 1), 0, 1, 5, Status.TERMINATED, 1.0, True, "hello", ())
    return Trajectory(*first, ids, mask, logprobs)


def parts_of(metrics):
    return sum(metrics.get(f"time/{part}_s", 0.0) for part in SPLIT)


def test_the_parts_of_steps_leave_nothing_out_and_count_nothing_twice():
    hand = Hand()
    clock = StepClock(hand)
    hand.s += 1.0
    clock.lap("commit")
    hand.s += 8.0  # two engines worked 12 of 16 s in total
    clock.lap_rollouts(EngineUsage(busy_s=12.0, depth_s={0: 10.0, 3: 6.0}))
    hand.s += 0.5
    clock.lap("other")
    hand.s += 4.0
    clock.lap("update")
    hand.s += 0.25
    clock.lap("publish")
    hand.s += 2.0
    clock.lap("validate")
    hand.s += 0.25
    assert clock.step(600, {}) == {
        "time/commit_s": 1.0,
        "time/generate_s": 6.0,
        "time/wait_s": 2.0,
        "time/update_s": 4.0,
        "time/publish_s": 0.25,
        "time/validate_s": 2.0,
        "time/other_s": 0.75,
        "time/step_s": 16.0,
        "perf/trained_tokens_per_s": 150.0,
        "perf/learner_idle_frac": 0.5,
    }
    hand.s += 3.0  # time between steps counts for the next one
    clock.lap("commit")
    assert clock.step(0, {}) == {
        "time/commit_s": 3.0,
        "time/other_s": 0.0,
        "time/step_s": 3.0,
        "perf/trained_tokens_per_s": 0.0,
    }


@pytest.mark.parametrize(
    ("usage", "generating"),
    [
        (EngineUsage(), 2.0),  # no usage measured
        (EngineUsage(busy_s=-1.0, depth_s={0: 4.0}), 0.0),  # a worker was lost meanwhile
        (EngineUsage(busy_s=5.0, depth_s={0: 4.0}), 2.0),
    ],
)
def test_no_usage_makes_a_part_negative_or_longer_than_the_wait(usage, generating):
    hand = Hand()
    clock = StepClock(hand)
    hand.s += 2.0
    clock.lap_rollouts(usage)
    metrics = clock.step(0, {})
    assert (metrics["time/generate_s"], metrics["time/wait_s"]) == (generating, 2.0 - generating)


def test_rollouts_are_as_fast_as_their_tokens_and_the_engines_counters_say():
    usage = EngineUsage(400, 100, busy_s=6.0, depth_s={0: 5.0, 1: 1.0, 4: 2.0})
    assert rollout_speed([episode(30, 70), episode(10, 5)], 8.0, usage) == {
        "time/rollouts_s": 8.0,
        "perf/generated_tokens_per_s": 5.0,
        "perf/prompt_tokens_per_s": 50.0,
        "perf/prefix_cache_hit_frac": 0.25,
        "perf/engine_idle_frac": 0.25,
        "perf/queue_depth_mean": (1 * 1.0 + 4 * 2.0) / 8,
        "perf/queue_depth_max": 4.0,
    }
    assert rollout_speed([episode(30, 70)], 2.0, EngineUsage()) == {
        "time/rollouts_s": 2.0,
        "perf/generated_tokens_per_s": 15.0,
    }


@pytest.mark.integration
@pytest.mark.parametrize("max_staleness", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_every_step_of_a_run_says_where_its_time_went(
    tiny_params, tiny_endpoint, tmp_path, max_staleness
):
    cfg = load_config(
        tiny_params(tmp_path, endpoint=tiny_endpoint),
        [f"rollout.max_staleness={max_staleness}", "compute_peak_tflops=0.5"],
    )
    for name in ("prepare", "demonstrate", "initialize", "warm-start", "stage-1"):
        run_step(name, cfg)
    store = open_store(cfg)
    done = finished(cfg, store)
    rows = {
        name: [
            point.metrics
            for commit in store.history(name, done[name].key)
            if METRICS in commit.records
            for point in decode_points(store.read(commit, METRICS))
        ]
        for name in ("warm-start", "stage-1")
    }
    assert len(rows["stage-1"]) == 2
    for metrics in itertools.chain.from_iterable(rows.values()):
        times = {name: value for name, value in metrics.items() if name.startswith("time/")}
        assert min(times.values()) >= 0
        assert parts_of(metrics) == pytest.approx(metrics["time/step_s"], rel=1e-9)
        assert metrics["time/update_s"] > 0
        assert metrics["perf/trained_tokens_per_s"] > 0
        used = metrics["perf/update_tflop"] / metrics["time/update_s"]
        assert metrics["perf/mfu"] == pytest.approx(used / 0.5)
        assert 0 < metrics["perf/mfu"] < 1
    page = (Path(__file__).parents[3] / "docs/reference/metrics-time.md").read_text()
    told = set(re.findall(r"`((?:time|perf)/\w+)`", page))
    for metrics in rows["stage-1"]:
        assert {name for name in metrics if name.startswith(("time/", "perf/"))} == told
        assert {f"time/{part}_s" for part in SPLIT} <= metrics.keys()
        assert metrics["time/publish_s"] > 0
        assert metrics["perf/generated_tokens_per_s"] > 0
        assert metrics["perf/prompt_tokens_per_s"] > metrics["perf/generated_tokens_per_s"]
        # all turns but the first reuse the previous one
        assert 0.3 < metrics["perf/prefix_cache_hit_frac"] < 1
        assert 0 < metrics["perf/engine_idle_frac"] < 1
        assert 0 < metrics["perf/learner_idle_frac"] < 1
        assert 0 <= metrics["perf/queue_depth_mean"] <= metrics["perf/queue_depth_max"]
    if not max_staleness:
        for metrics in rows["stage-1"]:
            waited = metrics["time/generate_s"] + metrics["time/wait_s"]
            assert waited >= metrics["time/rollouts_s"]
            idle = metrics["time/wait_s"] / waited
            assert idle == pytest.approx(metrics["perf/engine_idle_frac"], abs=0.05)
    # the second step reports the first commit's time
    assert rows["stage-1"][1]["time/commit_s"] > 0


def test_utilization_is_of_the_updates_time_and_of_all_devices():
    hand = Hand()
    clock = StepClock(hand, peak_tflops=50.0)
    hand.s += 3.0
    clock.lap("other")
    hand.s += 4.0
    clock.lap("update")
    assert clock.step(600, {"perf/update_tflop": 80.0})["perf/mfu"] == 80 / 4 / 50
    hand.s += 1.0
    clock.lap("update")
    assert clock.step(0, {})["perf/mfu"] == 0.0  # nothing was learned


@pytest.mark.parametrize(
    ("settings", "held"),
    [
        ({}, 0.0),
        ({"compute_device": "cuda"}, 1.0),
        ({"compute_device": "cuda", "ray": {"num_ranks": 4, "rank_gpus": 1.0}}, 1.0),
        (
            {
                "compute_device": "cuda",
                "compute": "ray",
                "ray": {"num_ranks": 4, "rank_gpus": 1.0, "num_workers": 8, "worker_gpus": 0.5},
            },
            8.0,
        ),
    ],
)
def test_a_run_says_how_many_accelerators_it_holds(settings, held):
    assert num_accelerators(RunConfig.model_validate(settings)) == held
    clock = StepClock(Hand(), accelerators=held)
    assert clock.step(0, {})["perf/accelerators"] == held
