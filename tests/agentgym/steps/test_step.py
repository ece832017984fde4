"""A step knows what it builds on, and its outcome says what happened."""

import pytest

from agentgym.steps.step import Kind, Outcome, Step


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
