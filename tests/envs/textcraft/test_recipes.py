"""Recipes are read in AgentGym's layout; the order of the files on disk does not matter."""

import json
import random
from collections import Counter
from pathlib import Path

import pytest

from envs.textcraft import solution, spec
from envs.textcraft.invented import Draft
from envs.textcraft.recipes import Book, _draft, item_id, load_book, plain

FOLDER = {
    "acacia_planks": {
        "type": "minecraft:crafting_shapeless",
        "group": "planks",
        "ingredients": [{"tag": "minecraft:acacia_logs"}],
    },
    "oak_planks": {
        "type": "minecraft:crafting_shapeless",
        "group": "planks",
        "ingredients": [{"item": "minecraft:oak_log"}],
    },
    "stick": {
        "type": "minecraft:crafting_shaped",
        "group": "sticks",
        "pattern": ["#", "#"],
        "key": {"#": {"tag": "minecraft:planks"}},
    },
    "torch": {
        "type": "minecraft:crafting_shaped",
        "pattern": ["X", "#"],
        "key": {
            "#": {"item": "minecraft:stick"},
            "X": [{"item": "minecraft:coal"}, {"item": "minecraft:charcoal"}],
        },
    },
    "coal": {
        "type": "minecraft:crafting_shapeless",
        "ingredients": [{"item": "minecraft:coal_block"}],
    },
    "coal_block": {
        "type": "minecraft:crafting_shaped",
        "pattern": ["###", "###", "###"],
        "key": {"#": {"item": "minecraft:coal"}},
    },
    "iron_ingot_from_nuggets": {
        "type": "minecraft:crafting_shaped",
        "group": "iron_ingot",
        "pattern": ["###", "###", "###"],
        "key": {"#": {"item": "minecraft:iron_nugget"}},
        "result": {"item": "minecraft:iron_ingot"},
    },
    "iron_nugget": {
        "type": "minecraft:crafting_shapeless",
        "ingredients": [{"item": "minecraft:iron_ingot"}],
    },
    "book": {
        "type": "minecraft:crafting_shapeless",
        "ingredients": [
            {"item": "minecraft:paper"},
            {"item": "minecraft:leather"},
            {"item": "minecraft:paper"},
            {"item": "minecraft:paper"},
        ],
        "result": "minecraft:book",
    },
    "stone": {
        "type": "minecraft:smelting",
        "ingredient": {"item": "minecraft:cobblestone"},
        "result": "minecraft:stone",
    },
    "armor_dye": {"type": "minecraft:crafting_special_armordye"},
}
COUNTS = {"acacia_planks": 4, "oak_planks": 4, "stick": 4, "torch": 4, "coal": 9, "iron_nugget": 9}


def write(folder, order=None, rename=lambda name: name):
    folder.mkdir()
    for name in order or FOLDER:
        content = FOLDER[name]
        if content["type"].startswith("minecraft:crafting_sha"):
            content = {
                "result": {"item": f"minecraft:{name}", "count": COUNTS.get(name, 1)},
                **content,
            }
        (folder / f"{rename(name)}.json").write_text(json.dumps(content))
    return folder


def test_a_folder_of_recipe_files_becomes_goals(tmp_path):
    book = load_book(str(write(tmp_path / "recipes")))
    assert [recipe.text for recipe in book.recipes] == [
        "craft 4 acacia planks using 1 acacia logs",  # a tag that no recipe crafts is an item
        "craft 1 book using 3 paper, 1 leather",
        "craft 1 coal block using 9 coal",  # no recipe makes coal from the block
        # no recipe makes nuggets from the ingot, which would close a cycle
        "craft 1 iron ingot using 9 iron nugget",
        "craft 4 oak planks using 1 oak log",
        "craft 4 stick using 2 planks",
        "craft 4 torch using 1 stick, 1 coal",  # coal comes before charcoal
    ]
    assert book.members == {"planks": frozenset({"acacia planks", "oak planks"})}
    assert book.raw == {"acacia logs", "paper", "leather", "coal", "iron nugget", "oak log"}
    assert [(goal, book.depth[goal]) for goal in book.goals] == [
        ("acacia planks", 1),
        ("book", 1),
        ("coal block", 1),
        ("iron ingot", 1),
        ("oak planks", 1),
        ("stick", 2),
        ("torch", 3),
    ]


@pytest.mark.parametrize("where", ["", "recipes"])
def test_an_episode_is_played_on_such_a_folder(tmp_path, where):
    write(tmp_path / "recipes")
    made = spec({"recipes": str(tmp_path / where), "min_depth": 3})
    world = made.make()
    assert world.reset(0).endswith("Goal: craft torch.")
    for action in (
        "get 1 acacia logs",
        "craft acacia planks using 1 acacia logs",
        "craft stick using 2 acacia planks",
        "get 1 coal",
    ):
        assert world.step(action).observation.startswith(("Got", "Crafted"))
    assert world.step("craft torch using 1 stick, 1 coal").success
    assert made.options["digest"] not in ("", spec({}).options["digest"])


def test_the_order_of_creation_and_listing_changes_nothing(tmp_path, monkeypatch):
    sorted_folder = write(tmp_path / "a", sorted(FOLDER))
    shuffled = list(FOLDER)
    random.Random(3).shuffle(shuffled)
    other = write(tmp_path / "b", shuffled)
    listed = Path.glob
    monkeypatch.setattr(
        Path, "glob", lambda self, pattern: sorted(listed(self, pattern), reverse=True)
    )
    books = load_book(str(sorted_folder)), load_book(str(other))
    assert books[0] is not books[1]
    assert books[0].goals == books[1].goals
    assert books[0].digest == books[1].digest
    worlds = [spec({"recipes": str(folder)}).make() for folder in (sorted_folder, other)]
    for task_id in range(30):
        assert worlds[0].reset(task_id) == worlds[1].reset(task_id)


def test_a_cycle_is_broken_where_the_last_file_name_closes_it(tmp_path):
    book = load_book(
        str(
            write(tmp_path / "r", rename=lambda name: "0" + name if name == "iron_nugget" else name)
        )
    )
    assert [recipe.text for recipe in book.recipes if "iron" in recipe.text] == [
        "craft 9 iron nugget using 1 iron ingot"
    ]


def test_a_cycle_through_a_kind_or_through_several_recipes_is_broken_too():
    through_a_kind = [
        Draft("ash_planks", 4, (("box", 1),), "planks"),
        Draft("yew_planks", 4, (("yew", 1),), "planks"),
    ]
    through_a_kind.append(Draft("box", 1, (("#planks", 8),)))
    assert [recipe.output for recipe in Book(through_a_kind, "test").recipes] == [
        "ash planks",
        "yew planks",
    ]
    around = [
        Draft("a", 1, (("b", 1),)),
        Draft("b", 1, (("c", 1),)),
        Draft("c", 1, (("d", 1), ("a", 1))),
        Draft("c", 1, (("d", 2),)),
    ]
    assert [recipe.text for recipe in Book(around, "test").recipes] == [
        "craft 1 a using 1 b",
        "craft 1 b using 1 c",
        "craft 1 c using 2 d",
    ]
    assert Book(around, "test").depth == {"d": 0, "c": 1, "b": 2, "a": 3}


def test_depth_counts_the_shallowest_way():
    drafts = [
        Draft("deep", 1, (("mid", 1),)),
        Draft("mid", 1, (("low", 1),)),
        Draft("low", 1, (("raw", 1),)),
        Draft("deep", 1, (("raw", 3),)),
    ]
    assert Book(drafts, "test").depth == {"raw": 0, "low": 1, "mid": 2, "deep": 1}


def test_items_that_fit_two_kinds_are_given_to_the_one_that_needs_them():
    drafts = [
        Draft(name, 1, (("raw", 1),), kind) for name, kind in (("a", "x"), ("b", "x"), ("b2", "y"))
    ]
    drafts += [
        Draft("b", 1, (("other", 1),), "y"),
        Draft("goal", 1, (("#x", 2), ("#y", 2), ("b", 1))),
    ]
    book = Book(drafts, "test")
    assert book.members == {"x": {"a", "b"}, "y": {"b", "b2"}}
    assert book.find("goal", Counter(a=2, b=3))
    assert book.find("goal", Counter(a=1, b=3, b2=1))
    assert book.find("goal", Counter(b=5))
    assert not book.find("goal", Counter(a=3, b=2))
    assert not book.find("goal", Counter(a=2, b2=3))
    assert not book.find("goal", Counter(a=2, b=2))
    assert not book.find("goal", Counter(a=2, b=4))


def test_a_kind_named_like_an_item_takes_that_item_and_is_told_apart_from_it():
    drafts = [
        Draft("red_sand", 1, (("dye", 1), ("sand", 1)), "sand"),
        Draft("tnt", 1, (("#sand", 4),)),
        Draft("map", 1, (("#ink", 1),)),
    ]
    book = Book(drafts, "test")
    assert [recipe.text for recipe in book.recipes] == [
        "craft 1 red sand using 1 dye, 1 sand",
        "craft 1 tnt using 4 any sand",
        "craft 1 map using 1 ink",
    ]
    assert book.members == {"any sand": {"sand", "red sand"}}
    assert book.raw == {"dye", "sand", "ink"}
    assert book.depth == {
        "dye": 0,
        "sand": 0,
        "any sand": 0,
        "ink": 0,
        "red sand": 1,
        "tnt": 1,
        "map": 1,
    }
    assert book.find("tnt", Counter({"sand": 3, "red sand": 1}))
    assert not book.find("red sand", Counter({"dye": 1, "red sand": 1}))
    assert solution(book, "tnt") == ["get 4 sand", "craft 1 tnt using 4 sand"]


def test_files_of_newer_versions_are_understood():
    newer = {
        "type": "minecraft:crafting_shaped",
        "key": {"#": "#minecraft:planks", "X": "minecraft:stick"},
        "pattern": ["#X", " #"],
        "result": {"id": "minecraft:thing", "count": 2},
    }
    assert _draft(newer) == Draft("thing", 2, (("#planks", 2), ("stick", 1)))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "cannot read"),
        ("[]", "is no recipe"),
        ('{"no": "type"}', "is no recipe"),
        (
            '{"type": "crafting_shapeless", "ingredients": [{"fluid": "x"}], "result": "y"}',
            "KeyError 'tag'",
        ),
        ('{"type": "crafting_shapeless", "ingredients": [], "result": "y"}', "no crafting recipe"),
        (
            '{"type": "crafting_shapeless", "ingredients": [{"item": "a, b"}], "result": "y"}',
            "is no name of an item",
        ),
        (
            (
                '{"type": "crafting_shapeless", "ingredients": [{"item": "a"}], "result": {"item":'
                ' "y", "count": -1}}'
            ),
            "-1 y",
        ),
        ('{"type": "crafting_shapeless", "ingredients": "abcdefghij", "result": "y"}', "grid of 9"),
    ],
)
def test_files_that_are_no_recipes_are_named(tmp_path, content, message):
    (tmp_path / "broken.json").write_text(content)
    with pytest.raises(ValueError, match=message):
        load_book(str(tmp_path))
    if "no crafting" not in message:
        with pytest.raises(ValueError, match=r"broken\.json"):
            load_book(str(tmp_path))


@pytest.mark.parametrize(
    "content",
    [
        "{}",
        "[1]",
        '{"kinds": {}, "recipes": [["a", 1]]}',
        '{"kinds": {}, "recipes": [["a", 1, {"b": 0}]]}',
    ],
)
def test_a_file_that_is_no_recipe_file_is_named(tmp_path, content):
    (tmp_path / "mine.json").write_text(content)
    with pytest.raises(ValueError, match=r"mine\.json is no recipe file"):
        load_book(str(tmp_path / "mine.json"))


def test_an_empty_folder_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no crafting recipe"):
        spec({"recipes": str(tmp_path)})


def test_a_file_of_ones_own_is_played(tmp_path):
    mine = tmp_path / "mine.json"
    mine.write_text(
        '{"kinds": {"tool": ["axe"]}, "recipes": [["axe", 1, {"wood": 1}], ["raft", 1, {"#tool": 1,'
        ' "rope": 2}]]}'
    )
    world = spec({"recipes": str(mine)}).make()
    assert (
        world.reset(1)
        == "Crafting commands:\ncraft 1 raft using 1 tool, 2 rope\ncraft 1 axe using 1"
        " wood\n\nGoal: craft raft."
    )


def test_names_are_written_with_blanks_and_without_the_games_own_namespace():
    for identifier, name in (("minecraft:oak_log", "oak log"), ("mod:big_gear", "mod:big gear")):
        assert plain(identifier) == name
        assert item_id(name) == identifier
