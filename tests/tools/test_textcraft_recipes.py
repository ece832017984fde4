"""The script that makes the included recipes."""

import json

import pytest

from envs.textcraft.recipes import SHIPPED, load_book
from tools.textcraft_recipes import condense, dump, factor, main, read

NAMES = dict(
    enumerate(
        [
            "oak_log",
            "oak_wood",
            "oak_planks",
            "yew_planks",
            "stick",
            "bamboo",
            "coal",
            "charcoal",
            "torch",
            "lamp",
            "dye",
            "rose",
        ]
    )
)
ID = {name: number for number, name in NAMES.items()} | {"tulip": 12}
NAMES[12] = "tulip"


def shaped(output, count, *rows):
    return {
        "inShape": [[ID.get(cell) for cell in row] for row in rows],
        "result": {"id": ID[output], "count": count},
    }


def shapeless(output, count, *names):
    return {
        "ingredients": [ID[name] for name in names],
        "result": {"id": ID[output], "count": count},
    }


def condensed(*variants):
    return condense(
        read({str(number): [variant] for number, variant in enumerate(variants)}, NAMES)
    )


def test_variants_of_one_ingredient_become_a_kind_a_plain_item_or_recipes_of_their_own():
    planks = [
        shapeless(f"{wood}_planks", 4, log)
        for wood, log in (("oak", "oak_log"), ("oak", "oak_wood"), ("yew", "rose"))
    ]
    sticks = [
        shaped("stick", 4, [plank], [plank]) for plank in ("oak_planks", "yew_planks", "bamboo")
    ]
    lit = [shaped("torch", 4, [fuel], ["stick"]) for fuel in ("coal", "charcoal")]
    lamps = [
        shaped("lamp", 1, [fuel, fuel, None], [plank, None, None])
        for fuel in ("coal", "charcoal")
        for plank in ("oak_planks", "yew_planks")
    ]
    wood = [
        shapeless("oak_wood", 3, "oak_log"),
        *(shapeless("bamboo", 1, plank) for plank in ("oak_planks", "yew_planks")),
    ]
    kinds, recipes = condensed(
        *planks,
        *sticks,
        *lit,
        *lamps,
        *wood,
        shapeless("dye", 1, "rose"),
        shapeless("dye", 1, "tulip"),
    )
    assert kinds == {"planks": ["oak_planks", "yew_planks"]}
    assert recipes == [
        ("bamboo", 1, {"#planks": 1}),
        ("dye", 1, {"rose": 1}),
        ("dye", 1, {"tulip": 1}),
        ("lamp", 1, {"#planks": 1, "coal": 2}),
        ("oak_planks", 4, {"oak_log": 1}),  # only one recipe takes either, but see below
        ("oak_planks", 4, {"oak_wood": 1}),
        ("oak_wood", 3, {"oak_log": 1}),
        ("stick", 4, {"#planks": 2}),
        ("stick", 4, {"bamboo": 2}),
        ("torch", 4, {"coal": 1, "stick": 1}),
        ("yew_planks", 4, {"rose": 1}),
    ]


def test_variants_that_are_no_product_are_refused():
    with pytest.raises(ValueError, match="no product"):
        factor([("a", "b"), ("c", "d")])
    assert factor([("a", "b", "a"), ("c", "b", "c")]) == (frozenset("ac"), frozenset("b"))


def test_what_the_script_writes_can_be_read(tmp_path):
    (tmp_path / "out.json").write_text(
        dump("test", {"k": ["a"]}, [("a", 2, {"b": 1}), ("c", 1, {"#k": 3})])
    )
    assert [recipe.text for recipe in load_book(str(tmp_path / "out.json")).recipes] == [
        "craft 2 a using 1 b",
        "craft 1 c using 3 k",
    ]


def test_the_file_that_ships_names_its_source():
    assert json.loads(SHIPPED.read_text())["source"].startswith(
        "Minecraft 1.16.2, PyPI minecraft-data"
    )


def test_the_file_that_ships_is_what_the_script_makes(tmp_path, monkeypatch):
    pytest.importorskip(
        "minecraft_data", reason="the script's own tool: pip install minecraft-data==3.20.0"
    )
    monkeypatch.setattr(
        "sys.argv", ["textcraft_recipes", "--target", str(tmp_path / "recipes.json")]
    )
    assert main() == 0
    assert (tmp_path / "recipes.json").read_text() == SHIPPED.read_text()


def test_without_its_tool_the_script_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(__import__("sys").modules, "minecraft_data", None)
    monkeypatch.setattr("sys.argv", ["textcraft_recipes"])
    assert main() == 2
    assert "pip install minecraft-data==3.20.0" in capsys.readouterr().err
