"""Both action grammars, on views built by hand."""

import random
from collections import deque

import pytest

from envs.babyai.actions import (
    CHECK,
    Move,
    Refusal,
    find_paths,
    normalise,
    offer,
    plan_high,
    plan_low,
)
from envs.babyai.views import View, VisibleObject

UP = 3  # in this direction AgentGym's window equals the visible area
BALL = VisibleObject("ball", "red", "", 2, 0)
FAR_BALL = VisibleObject("ball", "red", "", 5, 0)
CLOSED = VisibleObject("door", "grey", "closed", 1, 0)
LOCKED = VisibleObject("door", "blue", "locked", 3, 1)
OPENED = VisibleObject("door", "green", "open", 2, 0)


def view_of(*objects, carrying="", walls=()):
    return View(tuple(objects), frozenset(walls), carrying)


def plan(text, view):
    return plan_high(text, view, offer(view, UP))


def test_a_low_action_is_one_move_however_it_is_spaced_or_capitalised():
    assert plan_low(normalise("  Move   FORWARD. ")) == [Move.FORWARD]
    assert plan_low("pick up") == [Move.PICKUP]


@pytest.mark.parametrize("text", ["", "forward", "turn left turn left", "done", "go to red ball 1"])
def test_text_outside_the_low_grammar_is_unreadable(text):
    refusal = plan_low(text)
    assert isinstance(refusal, Refusal)
    assert not refusal.readable


def test_going_to_an_object_ends_before_it_and_facing_it():
    assert plan("go to red ball 1", view_of(BALL)) == (Move.FORWARD,)
    assert plan("go to red ball", view_of(VisibleObject("ball", "red", "", 0, 2))) == (
        Move.LEFT,
        Move.FORWARD,
    )


def test_going_to_what_one_faces_already_asks_for_nothing():
    assert plan("go to grey closed door 1", view_of(CLOSED)) == ()


def test_a_path_leads_around_what_is_in_the_way():
    # path around the nearer ball: a turn, 1 cell to the side, a turn, 5 cells forward, and a turn
    # to face the farther one
    faced, _ = find_paths(view_of(BALL, FAR_BALL), UP)
    assert faced[FAR_BALL.cell] == (
        Move.LEFT,
        Move.FORWARD,
        Move.RIGHT,
        *[Move.FORWARD] * 5,
        Move.RIGHT,
    )


def test_a_plan_leads_over_cells_nobody_sees_and_through_closed_doors():
    walls = {(1, left) for left in range(-3, 4)} - {(1, 0)}
    faced, _ = find_paths(view_of(CLOSED, FAR_BALL, walls=walls), UP)
    assert faced[FAR_BALL.cell] == (Move.FORWARD,) * 4


@pytest.mark.parametrize(
    ("compass", "row_behind", "column_right"),
    [(0, True, False), (1, True, True), (2, False, True), (3, False, False)],
)
def test_the_window_of_a_plan_depends_on_the_way_the_agent_looks(compass, row_behind, column_right):
    around = {(1, 1), (0, 1), (1, 0), (1, -1)}
    # walls on the left, ahead and at the side: the path leads behind the agent
    behind = VisibleObject("ball", "red", "", 0, -2)
    faced, _ = find_paths(view_of(behind, walls=around | {(0, -1)}), compass)
    assert (behind.cell in faced) == row_behind
    # a wall across the whole view: the path leads around its right end
    barred = VisibleObject("ball", "red", "", 5, 0)
    faced, _ = find_paths(view_of(barred, walls={(3, left) for left in range(-3, 4)}), compass)
    assert (barred.cell in faced) == column_right


def search_plainly(view, compass):
    """Search as AgentGym defines it: a cell is queued again each time it is reached, and its last
    predecessor is kept.
    """
    steps = ((1, 0), (0, -1), (-1, 0), (0, 1))
    rows, columns = (
        range(-1 if compass in (0, 1) else 0, 7),
        range(-4 if compass in (1, 2) else -3, 4),
    )
    solid = view.walls | {seen.cell for seen in view.objects if seen.kind != "door"}
    came, visited, queue, faced, entered = {}, set(), deque([((0, 0), 0)]), {}, {}

    def way_to(state):
        return (*way_to(came[state][0]), came[state][1]) if state in came else ()

    while queue:
        state = cell, turned = queue.popleft()
        visited.add(state)
        front = (cell[0] + steps[turned][0], cell[1] + steps[turned][1])
        faced.setdefault(front, way_to(state))
        entered.setdefault(cell, way_to(state))
        found = (
            [(Move.FORWARD, (front, turned))]
            if front[0] in rows and front[1] in columns and front not in solid
            else []
        )
        for move, following in [
            *found,
            (Move.LEFT, (cell, (turned - 1) % 4)),
            (Move.RIGHT, (cell, (turned + 1) % 4)),
        ]:
            if following not in visited:
                came[following] = (state, move)
                queue.append(following)
    objects = [seen.cell for seen in view.objects]
    doors = [seen.cell for seen in view.objects if seen.state == "open"]
    return {cell: faced[cell] for cell in objects if cell in faced}, {
        cell: entered[cell] for cell in doors if cell in entered
    }


def test_the_layered_search_finds_the_ways_of_the_plain_one():
    chance = random.Random(1)
    cells = [
        (ahead, left) for ahead in range(7) for left in range(-3, 4) if (ahead, left) != (0, 0)
    ]
    kinds = [("ball", "red", ""), ("door", "red", "open"), ("door", "grey", "closed")]
    for _ in range(150):
        chance.shuffle(cells)
        num_objects, num_walls = chance.randint(1, 6), chance.randint(4, 24)
        objects = [VisibleObject(*chance.choice(kinds), *cell) for cell in cells[:num_objects]]
        view = view_of(*objects, walls=cells[num_objects : num_objects + num_walls])
        compass = chance.randrange(4)
        assert find_paths(view, compass) == search_plainly(view, compass)


@pytest.mark.parametrize("verb", ["pickup", "pick up"])
def test_picking_up_walks_there_first(verb):
    assert plan(f"{verb} red ball 1", view_of(BALL)) == (Move.FORWARD, Move.PICKUP)


def test_doors_are_gone_through_according_to_their_state_and_one_stops_in_the_doorway():
    assert plan("go through green open door 1", view_of(OPENED)) == (Move.FORWARD, Move.FORWARD)
    assert plan("toggle and go through grey closed door 1", view_of(CLOSED)) == (
        Move.TOGGLE,
        Move.FORWARD,
    )
    assert plan("toggle and go through grey door", view_of(CLOSED)) == (Move.TOGGLE, Move.FORWARD)
    assert isinstance(plan("go through grey closed door 1", view_of(CLOSED)), Refusal)
    assert isinstance(plan("toggle and go through green open door 1", view_of(OPENED)), Refusal)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("go to blue ball 1", "no such object"),
        ("go to red ball 2", "no such object"),
        ("go to red ball 0", "no such object"),
        ("pickup grey closed door 1", "cannot be carried"),
        ("go through red ball 1", "not a door"),
        ("go through grey door 1", "not open"),
        ("toggle and go through blue locked door 1", "do not carry its key"),
        ("drop", "hands are empty"),
        ("move forward", "a wall stands"),
        ("toggle", "nothing in front"),
    ],
)
def test_what_cannot_be_done_is_refused_with_a_reason(text, reason):
    refusal = plan(
        text, view_of(BALL, LOCKED, VisibleObject("door", "grey", "closed", 0, 3), walls={(1, 0)})
    )
    assert isinstance(refusal, Refusal)
    assert refusal.readable
    assert reason in refusal.reason


def test_full_hands_take_nothing_and_drop_only_where_nothing_lies():
    view = view_of(VisibleObject("ball", "red", "", 1, 0), carrying="blue key")
    assert "hands are full" in plan("pickup red ball 1", view).reason
    assert "is taken" in plan("drop", view).reason
    # AgentGym offers it in front of a door
    assert plan("drop", view_of(CLOSED, carrying="blue key")) == (Move.DROP,)


def test_toggle_is_offered_before_a_door_that_opens_and_understood_before_any_door_or_box():
    for object_, offered, understood in (
        (CLOSED, True, True),
        (VisibleObject("door", "blue", "locked", 1, 0), False, True),
        (VisibleObject("door", "green", "open", 1, 0), False, True),
        (VisibleObject("box", "red", "", 1, 0), False, True),
        (VisibleObject("ball", "red", "", 1, 0), False, False),
    ):
        view = view_of(object_)
        assert ("toggle" in offer(view, UP)) == offered
        assert (plan("toggle", view) == (Move.TOGGLE,)) == understood


def test_an_object_behind_walls_has_no_path():
    walls = frozenset({(4, -1), (4, 1), (4, 0), (5, -1), (5, 1), (6, 0), (6, 1), (6, -1)})
    assert plan("go to red ball 1", view_of(FAR_BALL, walls=walls)) == Refusal(
        "You cannot go to red ball 1, as there is no path leading to it."
    )


def test_what_is_offered_comes_in_agentgyms_order():
    assert list(offer(view_of(BALL, LOCKED, CLOSED), UP)) == [
        "turn left",
        "turn right",
        "move forward",
        "pickup red ball 1",
        "toggle and go through grey closed door 1",
        "toggle",
        "go to red ball 1",
        "go to blue locked door 1",
        "go to grey closed door 1",
        CHECK,
    ]
    assert list(offer(view_of(LOCKED, carrying="blue key"), UP)) == [
        "turn left",
        "turn right",
        "move forward",
        "drop",
        "toggle and go through blue locked door 1",
        "go to blue locked door 1",
        CHECK,
    ]


def test_only_a_wall_or_a_box_right_ahead_bars_the_way():
    assert "move forward" in offer(view_of(VisibleObject("ball", "red", "", 1, 0)), UP)
    assert "move forward" not in offer(view_of(VisibleObject("box", "red", "", 1, 0)), UP)
    assert "move forward" not in offer(view_of(walls={(1, 0)}), UP)


def test_what_cannot_be_reached_is_not_counted_among_its_equals():
    corner = {(5, 2), (6, 2), (5, 3)}
    enclosed, reached = (
        VisibleObject("ball", "red", "", 6, 3),
        VisibleObject("ball", "red", "", 6, -3),
    )
    commands = offer(view_of(enclosed, reached, walls=corner), UP)
    assert commands["go to red ball 1"].target == reached.cell
    assert "go to red ball 2" not in commands
