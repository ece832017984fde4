"""Pages that compare episodes."""

import pytest

from agentgym.types import Item, Status
from agentgym.viewer.query import Query
from agentgym.viewer.study_page import attempts_of, beside, group_of, parting, results, versus
from tests.agentgym.viewer.conftest import episode, failed

RESULT = {"protocol": {"envs": [{"env": {"name": "babyai", "options": {}}}]}}


@pytest.mark.parametrize(
    ("first", "other", "turn"),
    [("abc", "abc", None), ("abc", "abd", 3), ("abc", "ab", 3), ("", "a", 1), ("abc", "xbc", 1)],
)
def test_lists_of_actions_part_at_the_first_that_differs(first, other, turn):
    assert parting(first, other) == turn


def test_a_group_says_where_its_samples_part_and_whether_it_teaches(made, view):
    same = ("turn left", "move forward")
    made.add(
        [
            episode(0, 0, actions=same),
            episode(0, 1, actions=("turn left", "turn left")),
            episode(0, 2, actions=("turn left",)),
            episode(1, 0),
            failed(2, 0),
            episode(2, 1, status=Status.ENV_ERROR, reward=None, success=False),
        ]
    )
    viewer = view()
    reader = viewer.index.reader

    def group(item):
        (row, *_) = viewer.lists.page(Query(item=item)).rows
        return beside(list(viewer.bodies.read(group_of(reader, row))))

    told = group("babyai_0")
    assert [column.parts for column in told.columns] == [None, 2, 2]
    assert (told.common, told.same_outcome, told.excluded) == (1, True, 0)
    assert [each.found.row["sample"] for each in told.columns] == [0, 1, 2]
    assert len(group("babyai_1").columns) == 1
    assert not group("babyai_1").same_outcome
    assert not group("babyai_2").same_outcome  # a single outcome has no variance


def test_an_item_is_followed_through_steps_and_policies(made, view):
    made.add([failed(7, 0, step=1), failed(7, 1, step=1)])
    made.add([episode(7, 0, step=2), failed(7, 1, step=2)])
    made.add([episode(7, step=0, temperature=0.0)], step="evaluation", key="b", config=RESULT)
    viewer = view()
    found = attempts_of(viewer.index.reader, viewer.bodies.steps(), "babyai_7", 100)
    assert [(each.step["name"], each.at, each.success) for each in found] == [
        ("stage-1", 1, 0.0),
        ("stage-1", 2, 0.5),
        ("evaluation", 4, 1.0),
    ]


def test_two_results_show_their_flipped_items_and_what_they_decide(made, view):
    test = [Item("babyai", n, "test") for n in range(12)]

    def play(won):
        # neither count includes a slot whose environment failed
        broken = episode(99, item=Item("babyai", 99, "test"), step=0, reward=None, success=False)
        own = [(episode if n in won else failed)(n, item=test[n], step=0) for n in range(12)]
        return [*own, broken]

    made.add(play({0, 11}), step="evaluation", key="b", config=RESULT)
    made.add(play(set(range(1, 12))), step="evaluation", key="c", config=RESULT)
    viewer = view()
    newer, older = results(viewer.bodies.steps())
    told = versus(viewer.index.reader, older, newer)
    assert (told.both, len(told.won), len(told.lost)) == (12, 10, 1)
    assert [flip.item for flip in told.lost] == ["babyai_0"]
    assert told.won[0].after == f"evaluation-{'c' * 16}.0.t1"
    decision = told.decisions["babyai"]
    assert (decision.before, decision.after, decision.num_items) == (2 / 12, 11 / 12, 12)
    # McNemar: 10 against 1 of 11, two-sided: 2 * (11 + 1) / 2**11
    assert decision.p_value == pytest.approx(24 / 2048)
    assert decision.verdict == "better"
    assert told.families == [("babyai", "go", 12, 2 / 12, 11 / 12)]


def test_results_without_a_common_item_decide_nothing(made, view):
    made.add([episode(1, step=0)], step="evaluation", key="b", config=RESULT)
    made.add([episode(2, step=0)], step="evaluation", key="c", config=RESULT)
    viewer = view()
    newer, older = results(viewer.bodies.steps())
    told = versus(viewer.index.reader, older, newer)
    assert told.decisions == {}
    assert "no item and sample in common" in told.why_not
