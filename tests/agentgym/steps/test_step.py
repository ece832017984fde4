"""A step's inputs, and outcomes that report what happened."""

import pytest

from agentgym.config import HorizonConfig
from agentgym.steps.step import HorizonState, Kind, Outcome, Step, advance, max_turns, stages

PUBLISHED = HorizonConfig(max_turns=(10, 20, 30), stage_steps=(100, 100, 100))


@pytest.mark.parametrize(
    ("step", "turns"),
    [(1, 10), (100, 10), (101, 20), (200, 20), (201, 30), (300, 30), (301, 30), (1000, 30)],
)
def test_the_published_schedule(step, turns):
    assert max_turns(PUBLISHED, step) == turns


def test_a_run_resumed_at_any_step_follows_the_uninterrupted_schedule():
    config = HorizonConfig(max_turns=(4, 8, 8, 12), stage_steps=(3, 1, 2, 4))
    whole = [max_turns(config, step) for step in range(1, 15)]
    assert whole == [4, 4, 4, 8, 8, 8, 12, 12, 12, 12, 12, 12, 12, 12]
    for resumed_at in range(1, 15):
        assert [max_turns(config, step) for step in range(resumed_at, 15)] == whole[
            resumed_at - 1 :
        ]


def test_stages_cover_every_step_once_and_agree_with_the_schedule():
    spans = stages(HorizonConfig(max_turns=(4, 8, 12), stage_steps=(3, 1, 2)))
    assert [(span.name, span.first_step, span.last_step, span.max_turns) for span in spans] == [
        ("stage-1", 1, 3, 4),
        ("stage-2", 4, 4, 8),
        ("stage-3", 5, 6, 12),
    ]
    for span in stages(PUBLISHED):
        assert {max_turns(PUBLISHED, step) for step in (span.first_step, span.last_step)} == {
            span.max_turns
        }


def test_a_fixed_horizon_is_one_stage():
    config = HorizonConfig(kind="fixed", max_turns=(7,), stage_steps=(5,))
    assert [max_turns(config, step) for step in (1, 5, 99)] == [7, 7, 7]


def test_steps_count_from_one():
    with pytest.raises(ValueError, match="count from 1, got 0"):
        max_turns(PUBLISHED, 0)


ADAPTIVE = HorizonConfig(
    kind="adaptive", max_turns=(4, 8, 12), stage_steps=(20,), window=2, min_gain=0.05
)


def test_an_adaptive_horizon_grows_when_success_stops_growing():
    state, turns = HorizonState(), []
    # 4 turns, mean success of two windows of 2 steps, gain:
    #   .15 -> .35, .20
    #   .25 -> .40, .15
    #   .35 -> .41, .06
    #   .40 -> .42, .02 (below min_gain): the horizon grows
    for step, success in enumerate(
        [0.1, 0.2, 0.3, 0.4, 0.4, 0.42, 0.42, 0.5, 0.5, 0.5, 0.5, 0.9], 1
    ):
        turns.append(max_turns(ADAPTIVE, step, state))
        state = advance(ADAPTIVE, state, success)
    assert turns == [4] * 7 + [8] * 4 + [12]
    assert state == HorizonState(2, (0.9,))


def test_the_longest_horizon_stays():
    state = HorizonState(2)
    for _ in range(9):
        state = advance(ADAPTIVE, state, 0.5)
    assert state == HorizonState(2, (0.5,) * 4)


def test_an_adaptive_horizon_is_one_stage_and_other_kinds_have_no_state():
    assert [(span.first_step, span.last_step, span.max_turns) for span in stages(ADAPTIVE)] == [
        (1, 20, 12)
    ]
    assert advance(PUBLISHED, HorizonState(), 0.5) == HorizonState()


def step(**names):
    return Step(
        name="x", title="X", kind=Kind.TRAIN, run=lambda _: None, sections=(), modules=(), **names
    )


def test_parents_are_all_a_step_builds_on_each_once_and_in_one_order():
    assert step().parents == ()
    built = step(
        checkpoint="warm-start",
        data="prepare",
        start="warm-start",
        told=("evaluate-a", "evaluate-b"),
        evaluation="evaluate-b",
    )
    assert built.parents == ("prepare", "warm-start", "evaluate-b", "evaluate-a")


@pytest.mark.parametrize(
    ("how", "resumed_at", "told"),
    [("done", None, "done"), ("ran", None, "ran"), ("resumed", 3, "resumed at commit 3")],
)
def test_an_outcome_says_where_it_went_on(how, resumed_at, told):
    assert str(Outcome(step(), None, how, resumed_at)) == told
