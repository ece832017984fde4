"""Shorten episodes of a long horizon to a shorter one."""

from dataclasses import replace

from agentgym.types import Status

# the environment ended the episode: a longer horizon changes nothing
ENDED = (Status.TERMINATED, Status.ENV_LIMIT)


def truncate(trajectory, max_turns):
    """Return the episode as a run with this horizon would have recorded it, except id and times.

    Failures after that many turns are dropped. The last observation of a cut episode is not among
    its tokens, as in recorded evaluations.
    Errors: ValueError if the episode was played with a shorter horizon.
    """
    if max_turns > trajectory.max_turns or max_turns < 1:
        raise ValueError(
            f"an episode of at most {trajectory.max_turns} turns does not tell of {max_turns};"
            " evaluate with a horizon as long as the longest one asked for"
        )
    turns, status = trajectory.turns, trajectory.status
    if len(turns) < max_turns or (len(turns) == max_turns and status in ENDED):
        return replace(trajectory, max_turns=max_turns)
    first_turns = turns[:max_turns]
    end = first_turns[-1].end
    return replace(
        trajectory,
        max_turns=max_turns,
        status=Status.MAX_TURNS,
        reward=sum(turn.reward for turn in first_turns),
        success=False,
        turns=first_turns,
        input_ids=trajectory.input_ids[:end],
        action_mask=trajectory.action_mask[:end],
        logprobs=trajectory.logprobs[:end],
        error=None,
    )
