"""Drawings of environments, as pages show them."""

import json
import struct
import zlib

import pytest

from agentgym.viewer.drawing import NOTHING, Node, accessibility, drawing_of
from agentgym.viewer.replay import Shot
from envs.registry import load_spec


def shot(media_type, data):
    return Shot(1, media_type, data if isinstance(data, bytes) else data.encode(), "")


def rendered(env, task=0, actions=()):
    world = load_spec(env, {}).make()
    world.reset(task)
    for action in actions:
        world.step(action)
    try:
        return drawing_of(shot(*world.render()))
    finally:
        world.close()


def png(text):
    def chunk(kind, content):
        return (
            struct.pack(">I", len(content))
            + kind
            + content
            + struct.pack(">I", zlib.crc32(kind + content))
        )

    return b"\x89PNG\r\n\x1a\n" + chunk(b"tEXt", b"grid\0" + text.encode())


def test_babyai_is_a_grid_with_its_agent_and_things():
    drawing = rendered("babyai")
    assert (drawing.kind, drawing.width, drawing.height) == ("grid", 8, 8)
    assert drawing.title == "go to the green key"
    assert "green key" in [each.name for each in drawing.things]
    x, y, direction = drawing.agent
    assert drawing.summary.startswith(f"agent at {x}, {y} looking")
    assert "green key at" in drawing.summary
    assert "wall" not in drawing.summary
    assert rendered("babyai", 0, ["turn left"]).agent == (x, y, (direction - 1) % 4)


def test_textcraft_is_an_inventory_and_a_tree_of_recipes():
    drawing = rendered("textcraft", 0)
    assert (drawing.kind, drawing.held) == ("craft", ())
    assert drawing.title.startswith("Goal: ")
    (goal,) = drawing.trees
    assert goal.note.startswith("craft ")
    assert goal.children
    world = load_spec("textcraft", {}).make()
    world.reset(0)
    action = world.expert().next_action()
    assert action.startswith("get ")
    number, item = action.removeprefix("get ").split(" ", 1)
    assert rendered("textcraft", 0, [action]).held == ((item, int(number)),)


def test_searchqa_is_a_question_with_its_searches_and_answers():
    world = load_spec("searchqa", {}).make()
    world.reset(0)
    text = world.question.text
    drawing = rendered("searchqa", 0, [f"<search>{text}</search>", "<answer>x</answer>"])
    assert drawing.kind == "search"
    assert text in drawing.title
    search, answer = drawing.trees
    assert (search.text, search.note) == (text, "Search 1")
    assert search.children
    assert answer.text == "Answer: x (wrong)"


def test_sciworld_is_rooms_with_things_in_things():
    told = {
        "task": "boil",
        "description": "Boil water.",
        "score": 3,
        "moves": 2,
        "room": "kitchen",
        "inventory": [{"name": "thermometer", "contents": []}],
        "rooms": [
            {
                "name": "kitchen",
                "objects": [
                    {
                        "name": "sink",
                        "contents": [{"name": "water", "state": "liquid", "temperature_c": 20.0}],
                    }
                ],
            },
            {"name": "hall", "objects": []},
        ],
    }
    drawing = drawing_of(shot("application/json", json.dumps(told)))
    assert drawing.kind == "rooms"
    assert drawing.title == "boil: Boil water. (score 3, 2 moves)"
    assert drawing.held == (("thermometer", 1),)
    water = Node("water", "liquid, 20.0 °C")
    assert drawing.trees == (
        Node("kitchen", "the agent is here", (Node("sink", "", (water,)),)),
        Node("hall"),
    )


@pytest.mark.parametrize(
    ("media_type", "data", "kind"),
    [
        ("image/png", b"\x89PNG\r\n\x1a\n rest", "image"),
        ("image/png", b"<svg onload=alert(1)>", "none"),
        ("image/png", png('{"width": 9999, "height": 2}'), "image"),
        ("image/png", png("not json"), "image"),
        ("application/json", "[1, 2]", "text"),
        ("application/json", "{", "text"),
        ("text/plain", "anything", "text"),
        ("text/html", "<b>", "text"),
        ("text/plain", "Goal: x", "craft"),
        ("text/plain", "Question (a): b", "search"),
        ("", b"", "none"),
    ],
)
def test_what_is_not_what_it_should_be_is_text_or_nothing(media_type, data, kind):
    assert drawing_of(shot(media_type, data)).kind == kind


def test_a_tree_without_end_is_cut():
    deep = {"name": "box", "contents": []}
    for _ in range(400):
        deep = {"name": "box", "contents": [deep]}
    told = {"task": "", "description": "", "score": 0, "moves": 0, "room": "", "inventory": []}
    told["rooms"] = [{"name": "hall", "objects": [deep]}]
    drawing = drawing_of(shot("application/json", json.dumps(told)))
    depth, node = 0, drawing.trees[0]
    while node.children:
        depth, node = depth + 1, node.children[0]
    assert depth == 12
    assert drawing_of(None) == NOTHING


def test_indentation_makes_the_tree_of_a_page():
    text = "Tab 0 (current): Shop\n\n[1] RootWebArea 'Shop'\n\t[22] link 'Cart' url: /cart"
    assert accessibility(text) == [
        (0, "", "", "Tab 0 (current): Shop"),
        (0, "", "", ""),
        (0, "1", "RootWebArea", "'Shop'"),
        (1, "22", "link", "'Cart' url: /cart"),
    ]
