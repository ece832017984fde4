"""Lists of episodes, by the query in their address."""

from dataclasses import replace
from urllib.parse import parse_qsl

import pytest

from agentgym.types import Item
from agentgym.viewer.query import BadQuery, Query, match_of
from tests.agentgym.viewer.conftest import KEPT, episode, failed


def query(text):
    return Query.parse(parse_qsl(text))


def items(page):
    return [f"{row['item']}#{row['sample']}" for row in page.rows]


@pytest.fixture
def lists(made, view):
    craft = episode(3, item=Item("textcraft", 3, "test"), first_observation="Goal: craft a chest")
    made.add([episode(0), failed(1, 1), episode(2, 0, learned=KEPT), failed(2, 1)])
    made.add([craft], step="evaluation", key="b", config={"protocol": {"envs": []}})
    return view().lists


def test_an_address_and_a_query_are_each_other(lists):
    text = "env=babyai&env=textcraft&turns=2..8&q=a+b&sort=reward&order=up&after=0.5~3"
    assert query(text).text == text
    assert query("").text == ""
    assert query("unknown=1").text == ""


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("sort=secret", "none of began"),
        ("turns=few", "expected a number or a range"),
        ("turns=..", "expected a number or a range"),
        ("reward=1;drop", "expected a number or a range"),
        ("after=3", "names no row"),
        ("success=maybe", "success 'maybe' is neither yes nor no"),
        (f"q={'a' * 500}", "longer than 400"),
    ],
)
def test_what_cannot_be_asked_is_told(text, said):
    with pytest.raises(BadQuery, match=said):
        query(text)


def test_facets_are_counted_among_what_the_others_leave(lists):
    page = lists.page(query("env=babyai&success=no"))
    assert items(page) == ["babyai_2#1", "babyai_1#1"]
    assert page.total == 2
    facets = {name: {v.name: v.count for v in own} for name, own in page.facets.items()}
    assert facets["env"] == {"babyai": 2}  # no textcraft episode failed
    assert facets["success"] == {"yes": 2, "no": 2}  # babyai episodes only
    assert facets["status"] == {"max_turns": 2}
    assert facets["stage"] == {"stage-1": 2}
    assert facets["run"] == {f"stage-1-{'a' * 12}": 2}


def test_ranges_items_and_words_choose(lists):
    assert items(lists.page(query("reward=1"))) == ["textcraft_3#0", "babyai_2#0", "babyai_0#0"]
    assert items(lists.page(query("reward=..0.5&sample=1.."))) == ["babyai_2#1", "babyai_1#1"]
    assert items(lists.page(query("item=babyai_2&sort=reward&order=up"))) == [
        "babyai_2#1",
        "babyai_2#0",
    ]
    assert items(lists.page(query("q=CHEST"))) == ["textcraft_3#0"]
    assert items(lists.page(query('q="red ball"&tokens_kept=yes'))) == ["babyai_2#0"]
    assert items(lists.page(query('q="ball red"'))) == []
    assert items(lists.page(query("q=che*"))) == ["textcraft_3#0"]
    assert lists.page(query("q=che")).total == 0
    with pytest.raises(BadQuery, match="nothing to search for"):
        lists.page(query("q=..."))


@pytest.mark.parametrize("sort", ["began", "reward", "advantage", "item", "turns"])
@pytest.mark.parametrize("order", ["up", "down"])
def test_pages_follow_each_other_both_ways_without_gaps(lists, sort, order):
    asked = query(f"sort={sort}&order={order}")
    whole = items(lists.page(asked))
    assert len(whole) == 5
    first = lists.page(asked, 2)
    assert first.preceding == ""
    second = lists.page(replace(asked, after=first.following), 2)
    third = lists.page(replace(asked, after=second.following), 2)
    assert items(first) + items(second) + items(third) == whole
    assert third.following == ""
    back = lists.page(replace(asked, before=third.preceding), 2)
    assert items(back) == items(second)
    again = lists.page(replace(asked, before=back.preceding), 2)
    assert items(again) == items(first)
    assert again.preceding == ""


def test_an_episode_knows_its_neighbours_in_a_list(lists):
    asked = query("env=babyai&sort=item&order=up")
    rows = lists.page(asked).rows
    before, after = lists.neighbours(asked, rows[1])
    assert (before["id"], after["id"]) == (rows[0]["id"], rows[2]["id"])
    assert lists.neighbours(asked, rows[0])[0] is None


@pytest.mark.parametrize(
    ("words", "match"),
    [
        ("red ball", '"red" "ball"'),
        ('"red ball" go*', '"red ball" "go"*'),
        ('a OR b NEAR(c) -d text:e "', '"a" "OR" "b" "NEAR(c)" "-d" "text:e"'),
        ('x"y', '"x""y"'),
        ("* ( ) ^", ""),
    ],
)
def test_nothing_of_the_search_language_can_be_said(words, match):
    assert match_of(words) == match
