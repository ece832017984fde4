"""An episode of a long horizon, cut, equals the episode of a short horizon to the bit."""

import asyncio
from dataclasses import replace

import pytest

from agentgym.evaluation.paired import by_turns, obstacle, within
from agentgym.evaluation.result import Outcome, Slot
from agentgym.models.chat import ChatRenderer
from agentgym.rollouts.collect import collect, samples
from agentgym.rollouts.episode import EpisodeSettings, token_players
from agentgym.rollouts.policies.torch import TorchPolicy
from agentgym.rollouts.pools import EnvPool
from agentgym.types import Item, Status, Trajectory, Turn
from tests.agentgym.evaluation.cut import truncate

LONGEST = 9
WORLDS = {"babyai": {"levels": ["GoToRedBallNoDists"]}, "textcraft": {"max_depth": 1}}


@pytest.fixture(scope="module", params=WORLDS)
def at_horizon(request, serving, make_model, tokenizer):
    """Return a function of h that gives every episode of a deterministic run with horizon h."""
    items = [Item(request.param, task) for task in range(6)]
    renderer = ChatRenderer(tokenizer)

    async def play(endpoint, horizon):
        policy = TorchPolicy(
            make_model(3), stop_ids=renderer.stop_ids, num_slots=4, context_tokens=1024
        )
        settings = EpisodeSettings(
            seed=7,
            step=0,
            max_turns=horizon,
            temperature=1.0,
            max_new_tokens=5,
            context_tokens=1024,
        )
        async with EnvPool([endpoint], request_timeout_s=30) as pool:
            return await collect(
                samples(items, 2),
                pool=pool,
                player_of=token_players(policy, renderer),
                settings=settings,
                concurrency=4,
                episode_timeout_s=120,
                max_attempts=1,
                max_env_error_frac=0.0,
                deterministic=True,
            )

    with serving(request.param, WORLDS[request.param]) as (endpoint, _):
        yield lambda horizon: asyncio.run(play(endpoint, horizon))


@pytest.mark.integration
def test_a_cut_episode_equals_that_of_a_separate_run(at_horizon):
    longest = at_horizon(LONGEST)
    for horizon in (1, 4, LONGEST):
        cut = [truncate(each, horizon) for each in longest]
        for ours, own in zip(cut, at_horizon(horizon), strict=True):
            assert replace(ours, id="") == replace(own, id="")
    assert len({len(each.turns) for each in longest}) > 1 or len(longest[0].turns) == LONGEST


def episode(turns, status):
    played = tuple(Turn("go", "on", 0.25) for _ in range(turns))
    reward = 0.25 * turns if status.is_valid else None
    item = Item("sciworld", 1)
    return Trajectory(item, 1, 0, LONGEST, status, reward, False, "task", played, (), (), ())


def test_a_cut_episode_keeps_the_rewards_of_its_turns_and_no_later_failure():
    for status in (Status.TERMINATED, Status.MAX_TOKENS, Status.ENV_ERROR, Status.TIMEOUT):
        cut = truncate(episode(5, status), 4)
        assert (cut.status, cut.reward, len(cut.turns)) == (Status.MAX_TURNS, 1.0, 4)
    assert truncate(episode(5, Status.MAX_TOKENS), 5).status is Status.MAX_TURNS
    assert truncate(episode(5, Status.TERMINATED), 5).status is Status.TERMINATED
    failed = truncate(episode(5, Status.ENV_ERROR), 6)
    assert (failed.status, failed.reward) == (Status.ENV_ERROR, None)
    with pytest.raises(ValueError, match="does not tell of 10"):
        truncate(episode(5, Status.TERMINATED), 10)


def slot(turns, outcome, success=False, item=0):
    return Slot("babyai", f"babyai_{item}", 1, outcome=outcome, success=success, num_turns=turns)


def test_what_came_after_the_cut_did_not_happen():
    won = slot(3, Outcome.SCORED, success=True, item=0)
    cut = slot(LONGEST, Outcome.TRUNCATED, item=1)
    broken = slot(5, Outcome.ENV_ERROR, item=2)  # it fails in its sixth turn
    curve = by_turns([won, cut, broken], LONGEST, confidence=0.95)
    assert [each.mean for each in curve.success] == pytest.approx(
        [0, 0, 1 / 3, 1 / 3, 1 / 3, 0.5, 0.5, 0.5, 0.5]
    )
    assert [each.num_items for each in curve.success] == [3] * 5 + [2] * 4
    assert curve.cut_otherwise == 0.0
    context = by_turns([won, slot(4, Outcome.TRUNCATED, item=1)], LONGEST, confidence=0.95)
    assert context.cut_otherwise == 0.5


def test_a_curve_within_a_budget_ends_at_the_success_of_the_whole():
    slots = [slot(3, Outcome.SCORED, success=item < 6, item=item) for item in range(10)]
    curve = within(slots, [float(item) for item in range(10)], "tokens", confidence=0.95)
    assert (curve.budgets[0], curve.budgets[-1]) == (0.0, 5.0)
    assert curve.success[-1].mean == pytest.approx(0.6)
    assert within(slots, [None] * 10, "tokens", confidence=0.95) is None


@pytest.mark.parametrize(
    "told",
    [
        "You have 20 turns to craft the goal.",
        "At most 20 interaction rounds.",
        "nothing here\n(3 steps left)",
        "turn 4 of 20",
    ],
)
def test_a_prompt_that_tells_the_horizon_is_an_obstacle(told):
    assert "told its horizon" in obstacle(["Go.", told], 20)


def test_ordinary_prompts_are_none():
    from envs.registry import load_spec

    texts = [load_spec(env, {}).instructions for env in ("babyai", "textcraft", "searchqa")]
    assert obstacle([*texts, "see: red ball 20 ahead 3 left", "Got 20 oak log"], 20) == ""
