"""Why an episode did not enter the loss stands in its record."""

from dataclasses import replace

from agentgym.algorithms.batch import groups_with_signal, learnable
from agentgym.records import decode_trajectories, encode_trajectories
from agentgym.training.rl import Rollouts, with_reasons
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
    wanted = groups_with_signal(episodes)
    marked = with_reasons(
        Rollouts([], episodes, wanted, 0, 0.0), learnable(wanted, truncated="mask")
    )
    reasons = [each.learned.excluded if each.learned else "" for each in marked]
    assert reasons == [reason for _, reason in told]
    assert [replace(each, learned=None) for each in marked] == episodes
    assert decode_trajectories(encode_trajectories(marked)) == marked
