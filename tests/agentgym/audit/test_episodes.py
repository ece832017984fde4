"""A forged episode contradicts itself, its token ids or a replay in its environment."""

import asyncio
from dataclasses import replace

import pytest

from agentgym.audit.episodes import _replay
from agentgym.audit.findings import Checks
from agentgym.config import EnvConfig
from agentgym.rollouts.collect import rollout_metrics
from agentgym.rollouts.pools import EnvPools
from agentgym.types import Item, Status, Trajectory, Turn
from envs.wire import FAMILY, INVALID


def played(forger, step="stage-1", seq=0, status=Status.MAX_TURNS):
    """Return (index, episode) of an episode that failed at its horizon."""
    return next(
        (i, e)
        for i, e in enumerate(forger.episodes(step, seq))
        if e.status is status and len(e.turns) > 2
    )


def test_a_forged_reward_contradicts_the_metrics_and_the_environment(forger):
    index, episode = played(forger)
    turns = (*episode.turns[:-1], replace(episode.turns[-1], reward=1.0))
    where = forger.edit("stage-1", 0, index, turns=turns, reward=1.0, success=True)
    said = forger.caught("numbers", "replay", "episodes")
    assert f"{where} turn {len(turns)}: (observation, reward)" in said["replay"]
    assert "stage-1 commit 0: rollout/reward_mean" in said["numbers"]


@pytest.mark.slow
def test_a_forged_reward_with_forged_metrics_everywhere_contradicts_the_environment(forger):
    index, episode = played(forger)
    turns = (*episode.turns[:-1], replace(episode.turns[-1], reward=1.0))
    where = forger.edit("stage-1", 0, index, turns=turns, reward=1.0, success=True)
    forger.metric(
        "stage-1",
        0,
        **rollout_metrics([e for e in forger.episodes("stage-1", 0) if e.item.split == "train"]),
    )
    assert where in forger.caught("replay", "episodes")["replay"]


def test_a_forged_token_alone_is_not_its_action(forger):
    index, episode = played(forger, "evaluate-stage-1", 1)
    ids = list(episode.input_ids)
    ids[episode.turns[0].start] = 90 if ids[episode.turns[0].start] != 90 else 91
    where = forger.edit("evaluate-stage-1", 1, index, input_ids=tuple(ids))
    assert f"{where} turn 1: action" in forger.caught("tokens", "rescore", "sampling")["tokens"]


@pytest.mark.slow
def test_a_forged_observation_is_neither_what_was_read_nor_what_was_answered(forger):
    index, episode = played(forger)
    turns = (replace(episode.turns[0], observation="you win"), *episode.turns[1:])
    where = forger.edit("stage-1", 0, index, turns=turns)
    said = forger.caught("tokens", "replay")
    assert f"{where} turn 1: (observation, reward)" in said["replay"]
    assert f"{where}: token ids as rendered" in said["tokens"]


@pytest.mark.slow
def test_a_forged_last_observation_that_nobody_read_contradicts_the_environment(forger):
    index, episode = played(forger, "evaluate-stage-2", 1)
    turns = (*episode.turns[:-1], replace(episode.turns[-1], observation="you win"))
    where = forger.edit("evaluate-stage-2", 1, index, turns=turns)
    assert where in forger.caught("replay")["replay"]


def test_a_forged_family_or_a_hidden_invalid_action_contradicts_the_environment(serving, gold):
    first, turns = gold("babyai", 3)
    told = [Turn(action, its.observation, its.reward, info=its.info) for action, its in turns]
    family = told[0].info[FAMILY]
    lost = replace(told[0], info={})
    other = replace(told[0], info={FAMILY: "another"})
    hidden = replace(told[0], info={**told[0].info, INVALID: True})
    old = [replace(turn, info={}) for turn in told]

    def said(turns, *, id="e1"):
        success = any(its.success for _, its in gold("babyai", 3)[1])
        episode = Trajectory(
            *(Item("babyai", 3), 1, 1, 40, Status.TERMINATED, 1.0, success, first, tuple(turns)),
            *((), (), ()),
            id=id,
        )
        checks = Checks("replay")

        async def play():
            env = EnvConfig(name="babyai")
            async with EnvPools.of([env], {"babyai": [endpoint]}) as pools:
                await _replay(pools, [("here", episode)], 1, checks)

        asyncio.run(play())
        return checks.check().failures

    with serving("babyai") as (endpoint, _):
        assert said(told) == ()
        for forged in (lost, other, hidden):
            (failure,) = said([forged, *told[1:]])
            assert "here turn 1: info that results are made of" in failure
            assert family in failure
        assert said(old, id="") == ()  # records of this version have no id
