"""What an update made of an episode, or why it did not enter the loss, stands in its record."""

import math
import shutil
from dataclasses import replace

import pytest

from agentgym.algorithms.batch import to_batch, why_not
from agentgym.config import load_config
from agentgym.pipeline.run import run_step
from agentgym.pipeline.table import finished, open_store
from agentgym.records import TRAJECTORIES, decode_trajectories, encode_trajectories
from agentgym.training.learned import BYTES_PER_TOKEN, shown, with_reasons
from agentgym.types import Item, Status, Trajectory, Turn


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
        expected = batch.returns  # standardized within groups below, by hand
        for place, each in enumerate(episodes):
            if each.learned is None:
                continue
            count = sum(each.action_mask)
            engine = [x for x, act in zip(each.logprobs, each.action_mask, strict=True) if act]
            group = expected[batch.group_ids == batch.group_ids[place]]
            gain = float((expected[place] - group.mean()) / (group.std() + 1e-6))
            assert each.learned.advantages == pytest.approx([gain] * count, abs=1e-4)
            # the learner's before the update: the engine's, whose weights they are
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
