"""Both texts of minigrid's view, on views built by hand."""

import numpy as np
import pytest

from envs.babyai.views import agentgym, compact, decode, number

EMPTY, WALL, DOOR, KEY, BALL, BOX = 1, 2, 4, 5, 6, 7
RED, GREEN = 0, 1


def image_of(*cells, default=EMPTY):
    """Image with (ahead, left, kind, color, state) cells; the agent is at column 3, last row."""
    image = np.zeros((7, 7, 3), dtype=np.uint8)
    image[:, :, 0] = default
    for ahead, left, kind, colour, state in cells:
        image[3 - left, 6 - ahead] = (kind, colour, state)
    return image


def test_compact_names_the_nearest_object_first_and_the_wall_last():
    view = decode(image_of((5, 0, WALL, 5, 0), (4, -2, KEY, GREEN, 0), (3, 1, BALL, RED, 0)))
    assert compact(view) == "see: red ball 3 ahead 1 left, green key 4 ahead 2 right, wall 5 ahead"


def test_compact_shows_goal_note_and_carried_object_only_when_there_are_any():
    view = decode(image_of((0, 0, KEY, RED, 0), (0, 1, BALL, GREEN, 0)))
    assert (
        compact(view, goal="go to the red ball", note="invalid action")
        == "invalid action\ngoal: go to the red ball\nsee: green ball 1 left\ncarry: red key"
    )
    assert compact(decode(image_of())) == "see: nothing"


def test_unseen_cells_and_doors_are_told_apart():
    view = decode(image_of((2, 0, DOOR, RED, 2), (1, 0, DOOR, RED, 0), default=0))
    assert compact(view) == "see: open red door 1 ahead, locked red door 2 ahead"
    assert view.blocked == frozenset()


def test_agentgym_numbers_equal_objects_by_distance():
    view = decode(
        image_of(
            (6, 0, WALL, 5, 0), (4, -3, BALL, RED, 0), (2, 0, BALL, RED, 0), (0, 2, DOOR, GREEN, 1)
        )
    )
    assert (
        agentgym(view, goal="go to a red ball", actions=("turn left",))
        == "Your goal: go to a red ball\nIn front of you in this room, you can see several objects:"
        " There is a red ball 1 right in front of you 2 steps away. There is a green closed door"
        " 1 0 steps in front of you and 2 steps to your left. There is a red ball 2 4 steps in"
        " front of you and 3 steps to your right. The room has walls around you. You are facing"
        ' a wall 6 steps away. You are not carrying anything.\nAvailable actions: ["turn left"]'
    )


def test_equally_near_objects_come_farthest_ahead_first_and_then_from_the_left():
    view = decode(
        image_of(
            (0, -3, BALL, RED, 0),
            (1, 2, BALL, RED, 0),
            (1, -2, BALL, RED, 0),
            (3, 0, BALL, RED, 0),
            (0, 3, BALL, RED, 0),
        )
    )
    assert [(seen.cell, count) for seen, count in number(view.objects)] == [
        ((3, 0), 1),
        ((1, 2), 2),
        ((1, -2), 3),
        ((0, 3), 4),
        ((0, -3), 5),
    ]


@pytest.mark.parametrize(
    ("cells", "faced"),
    [
        ([(6, 0, WALL, 5, 0), (2, 0, KEY, RED, 0)], ("wall", 6)),
        ([(6, 0, WALL, 5, 0), (4, 0, BOX, RED, 0)], ("box", 4)),
        ([(3, 1, WALL, 5, 0), (4, 2, BOX, RED, 0), (2, 0, DOOR, RED, 1)], None),
    ],
)
def test_agentgym_faces_walls_and_boxes_only(cells, faced):
    view = decode(image_of(*cells))
    assert view.barrier == faced
    assert ("You are facing a" in agentgym(view)) == (faced is not None)


def test_agentgym_tells_the_end_after_the_view_and_before_the_actions():
    view = decode(image_of((0, 0, KEY, RED, 0)))
    assert (
        agentgym(view, closing="Done.", actions=())
        == "You are carrying a red key.\nDone.\nAvailable actions: []"
    )
