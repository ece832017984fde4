"""Excluded episodes are few, are replayed, and do not depend on their outcome."""

from dataclasses import replace

import pytest

from agentgym.audit import audit
from agentgym.audit.excluded import _check_chance
from agentgym.audit.findings import Checks
from agentgym.types import Item, Status, Trajectory, Turn

LAST = "evaluate-stage-2"


def named(seq, episode):
    return f"{LAST} commit {seq} {episode.item.item_id} sample {episode.sample}"


def failures(forger, step=LAST):
    return [each for each in forger.evaluation(step) if not each[2].success]


def failures_relabelled_as_crashes(forger):
    """Turn all failures of the last evaluation into crashes during the last action."""

    def crashed(e):
        told = "http://127.0.0.1:1/step session 01234567: unreachable: connection refused"
        end = e.turns[-1].end
        cut = {name: getattr(e, name)[:end] for name in ("input_ids", "action_mask", "logprobs")}
        attempts = forger.cfg.rollout.max_attempts
        return replace(
            e,
            turns=e.turns[:-1],
            status=Status.ENV_ERROR,
            reward=None,
            num_attempts=attempts,
            error=told,
            **cut,
        )

    changed = {(seq, i): crashed(e) for seq, i, e in failures(forger)}
    forger.reevaluate(LAST, changed)
    return LAST


def test_failures_relabelled_as_crashes_are_found(forger):
    failures_relabelled_as_crashes(forger)
    assert LAST in forger.caught("excluded", seed=1)["excluded"]


@pytest.mark.slow
def test_what_was_left_out_is_held_to_the_limit_and_played_to_its_real_end(forger):
    failures_relabelled_as_crashes(forger)
    report = audit(forger.cfg, num_episodes=1)
    excluded = next(check for check in report.checks if check.name == "excluded")
    assert any(
        f"{LAST} commit" in each and "rollout.max_env_error_frac is 0.1" in each
        for each in excluded.failures
    )
    num = sum(not e.status.is_valid for _, _, e in forger.evaluation(LAST))
    assert f"{num} env_error, 0 timeout of " in excluded.note
    assert (
        f"{LAST}: of {num} left out, played again 0 succeed, {num} do not, 0 fail again, 0"
        " cannot be" in excluded.note
    )
    assert "100.0% of what counts" in excluded.note
    assert f"{num} env_error replayed to their end" in next(
        check.note for check in report.checks if check.name == "replay"
    )


@pytest.mark.slow
def test_a_crash_after_the_environment_had_ended_the_task_is_none(forger):
    """Reject a failure labeled as a crash if its episode had already ended."""
    seq, index, episode = next(
        each for each in forger.evaluation(LAST) if each[2].status is Status.TERMINATED
    )
    attempts = forger.cfg.rollout.max_attempts
    crashed = replace(
        episode,
        status=Status.ENV_ERROR,
        reward=None,
        success=False,
        num_attempts=attempts,
        error="unreachable",
    )
    forger.reevaluate(LAST, {(seq, index): crashed})
    said = {
        check.name: " | ".join(check.failures)
        for check in audit(forger.cfg, num_episodes=1).checks
        if not check.ok
    }
    assert (
        f"{named(seq, episode)}: env_error of an episode that the environment ended"
        in said["replay"]
    )


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"num_attempts": 1}, "attempts, all of rollout.max_attempts: expected 3, got 1"),
        ({"error": None}, "an error that names what failed"),
        ({"success": True}, "success of an episode that is left out"),
    ],
)
def test_a_crash_that_no_collection_would_have_recorded_is_none(forger, changes, told):
    seq, index, episode = failures(forger)[0]
    crash = {
        "status": Status.ENV_ERROR,
        "reward": None,
        "num_attempts": 3,
        "error": "unreachable",
        "turns": episode.turns[:-1],
    }
    where = forger.edit(LAST, seq, index, **{**crash, **changes})
    said = {
        check.name: " | ".join(check.failures)
        for check in audit(forger.cfg, num_episodes=1).checks
        if not check.ok
    }
    assert f"{where}: {told}" in said["episodes"]


def an_episode(task, status, success, num_turns):
    turns = tuple(Turn("left", "", 0.0, 1, 2, 0) for _ in range(num_turns))
    item, reward = Item("babyai", task, "test"), 1.0 if success else 0.0
    return Trajectory(item, 1, 0, 12, status, reward, success, "", turns, (), (), ())


def failures_of(status, outcomes, left_out, valid):
    """Return the check's failures. outcomes: of the first items, which were played again."""
    checks, by_item = Checks("excluded"), {f"babyai_{n}": o for n, o in enumerate(outcomes)}
    _check_chance(LAST, status, by_item, left_out, valid, checks)
    return checks.failures


def test_crashes_that_fall_on_failures_alone_are_somebodys_choice():
    """Exclude failures only: in a forged run 301 of 2,560 made 100 % success of 91.6 %."""
    valid = [an_episode(task, Status.TERMINATED, True, 6) for task in range(500)]
    left_out = [an_episode(task, Status.ENV_ERROR, False, 11) for task in range(60)]
    (failure,) = failures_of(Status.ENV_ERROR, [[False]] * 60, left_out, valid)
    assert "env_error on 60 items, of which played again 0 would have succeeded" in failure


def test_crashes_that_fall_as_chance_has_it_are_none():
    """Crash all samples of a few items, failed or not, as a dying server does."""
    valid = [
        an_episode(task, Status.TERMINATED, task % 3 > 0, 4 if task % 3 else 12)
        for task in range(300)
    ]
    left_out = [an_episode(task, Status.ENV_ERROR, False, 5) for task in range(8)]
    for outcomes in ([False] * 4, [True] * 4, [True, False, True, True]):
        assert failures_of(Status.ENV_ERROR, [outcomes] * 8, left_out, valid) == []


def test_deadlines_pass_in_long_episodes_which_fail():
    short = [an_episode(task, Status.TERMINATED, True, 3) for task in range(400)]
    long = [an_episode(task, Status.MAX_TURNS, False, 12) for task in range(40)]
    left_out = [an_episode(task, Status.TIMEOUT, False, 11) for task in range(30)]
    assert failures_of(Status.TIMEOUT, [[False]] * 30, left_out, [*short, *long]) == []


@pytest.mark.parametrize(
    ("num_items", "num_hits", "rarity"),
    [
        (19, 0, None),  # 2**-19
        (20, 0, "once in 1e+06"),
        (24, 1, None),  # 25 * 2**-24 is above the limit, 26 * 2**-25 below it
        (25, 1, "once in 1e+06"),
        (1_500, 740, None),  # a sum of 741 terms, with factors beyond the largest float
        (2_000, 0, "less than once in 1e+300"),  # 2**-2000 is 0 in floating point
    ],
)
def test_the_chance_of_few_hits_is_that_of_a_binomial(num_items, num_hits, rarity):
    """Play half of all turns in successful episodes, so that any item succeeds half the time."""
    valid = [an_episode(task, Status.TERMINATED, task < 50, 6) for task in range(100)]
    left_out = [an_episode(task, Status.ENV_ERROR, False, 6) for task in range(num_items)]
    outcomes = [[task < num_hits] for task in range(num_items)]
    failures = failures_of(Status.ENV_ERROR, outcomes, left_out, valid)
    assert len(failures) == (rarity is not None)
    assert all(f"come by chance {rarity} runs" in failure for failure in failures)
