"""Both grammars, on views built by hand."""

import pytest

from envs.babyai.actions import CHECK, Move, Refusal, available_high, find_path, normalise, plan_high, plan_low
from envs.babyai.views import Seen, View

OPEN_FLOOR = frozenset((ahead, left) for ahead in range(7) for left in range(-3, 4)) - {(0, 0)}


def view_of(*objects, carrying="", walls=frozenset()):
    solid = {seen.cell for seen in objects if seen.state != "open"}
    return View(tuple(objects), OPEN_FLOOR - solid - walls, walls, carrying)


BALL = Seen("ball", "red", "", 2, 0)
FAR_BALL = Seen("ball", "red", "", 5, 0)
CLOSED = Seen("door", "grey", "closed", 1, 0)
LOCKED = Seen("door", "blue", "locked", 3, 1)
OPENED = Seen("door", "green", "open", 2, 0)


def test_a_low_action_is_one_move_however_it_is_spaced_or_capitalised():
    assert plan_low(normalise("  Move   FORWARD. ")) == [Move.FORWARD]
    assert plan_low("pick up") == [Move.PICKUP]


@pytest.mark.parametrize("text", ["", "forward", "turn left turn left", "done", "go to red ball 1"])
def test_text_outside_the_low_grammar_is_unreadable(text):
    plan = plan_low(text)
    assert isinstance(plan, Refusal)
    assert not plan.readable


def test_going_to_an_object_ends_before_it_and_facing_it():
    assert plan_high("go to red ball 1", view_of(BALL)) == [Move.FORWARD]
    assert plan_high("go to red ball", view_of(Seen("ball", "red", "", 0, 2))) == [Move.LEFT, Move.FORWARD]


def test_going_to_what_one_faces_already_still_checks_the_mission():
    assert plan_high("go to grey closed door 1", view_of(CLOSED)) == [Move.DONE]


def test_a_path_leads_around_what_is_in_the_way():
    view = view_of(BALL, FAR_BALL)
    path = find_path(view, FAR_BALL.cell)
    # straight on would be 4 moves; past the ball on the left side it is 1 ahead, 1 left, then 3 ahead, and a turn to face it
    assert path == [Move.LEFT, Move.FORWARD, Move.RIGHT, *[Move.FORWARD] * 5, Move.RIGHT]


@pytest.mark.parametrize("verb", ["pickup", "pick up"])
def test_picking_up_walks_there_first(verb):
    assert plan_high(f"{verb} red ball 1", view_of(BALL)) == [Move.FORWARD, Move.PICKUP]


def test_doors_are_gone_through_according_to_their_state():
    assert plan_high("go through green open door 1", view_of(OPENED)) == [Move.FORWARD, Move.FORWARD, Move.FORWARD]
    assert plan_high("toggle and go through grey closed door 1", view_of(CLOSED)) == [Move.TOGGLE, Move.FORWARD, Move.FORWARD]
    assert isinstance(plan_high("go through grey closed door 1", view_of(CLOSED)), Refusal)
    assert isinstance(plan_high("toggle and go through green open door 1", view_of(OPENED)), Refusal)


@pytest.mark.parametrize(
    "text", ["go to blue ball 1", "go to red ball 2", "go to red ball 0", "pickup grey door 1", "go through red ball 1", "toggle"]
)
def test_what_cannot_be_done_is_refused_with_a_reason(text):
    plan = plan_high(text, view_of(BALL, LOCKED, CLOSED) if "door" in text else view_of(BALL))
    assert isinstance(plan, Refusal)
    assert plan.readable


def test_an_object_behind_walls_has_no_path():
    walls = frozenset({(4, -1), (4, 1), (4, 0), (5, -1), (5, 1), (6, 0), (6, 1), (6, -1)})
    assert plan_high("go to red ball 1", view_of(FAR_BALL, walls=walls)) == Refusal(
        "You cannot go to red ball 1, as there is no path leading to it."
    )


def test_available_actions_are_those_that_lead_somewhere():
    assert available_high(view_of(BALL, LOCKED)) == [
        "turn left", "turn right", "move forward", "go to red ball 1", "pickup red ball 1", "go to blue locked door 1", CHECK,
    ]  # fmt: skip
    with_key = available_high(view_of(LOCKED, carrying="blue key"))
    assert with_key[-3:] == ["toggle and go through blue locked door 1", "drop", CHECK]
