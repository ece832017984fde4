"""Parsing of replies, and the text of documents."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envs.searchqa.grammar import information, last_answer, parse, without_thoughts
from envs.searchqa.retrievers import Document


@pytest.mark.parametrize(
    ("reply", "kind", "text"),
    [
        ("<search>river Trav</search>", "search", "river Trav"),
        ("so: <answer>1867</answer> done", "answer", "1867"),
        ("<search>two\nlines</search>", "search", "two\nlines"),
        ("<search>a</search><answer>b</answer>", "search", "a"),
        ("<answer>b</answer><search>a</search>", "answer", "b"),
        ("<search>a</search><search>b</search>", "search", "a"),
        ("<search>a <answer>b</answer> c</search>", "search", "a <answer>b</answer> c"),
        ("<answer>a <search>b</search> c</answer>", "answer", "a <search>b</search> c"),
        ("<search>a <answer>b</answer>", "answer", "b"),  # a tag that is never closed is text
        ("<answer>a <search>b</search>", "search", "b"),
        ("<search>a<search>b</search>", "search", "a<search>b"),
        ("</search><search>a</search>", "search", "a"),
        ("<search></search>", "search", ""),
        ("<think><search>a</search></think><answer>b</answer>", "answer", "b"),
        ("<think>x</think><think>\n<answer>a</answer></think><search>b</search>", "search", "b"),
        # the chat template opened the thought
        ("<answer>a</answer> hm </think><search>b</search>", "search", "b"),
        # a thought that is never closed hides nothing
        ("<think>a <search>b</search>", "search", "b"),
        ("<search>a<think>b</think>c</search>", "search", "ac"),
    ],
)
def test_the_first_complete_pair_outside_of_thoughts_acts(reply, kind, text):
    action = parse(reply)
    assert (action.kind, action.text) == (kind, text)


@pytest.mark.parametrize(
    "reply",
    [
        "",
        "river",
        "<search>a",
        "a</search>",
        "<Search>a</Search>",
        "<search >a</search>",
        "<think><answer>a</answer></think>",
        "<answer>a</search>",
    ],
)
def test_anything_else_does_nothing(reply):
    assert parse(reply) is None


def test_the_last_answer_of_a_reply():
    assert last_answer("<answer>a</answer> no, <answer>b</answer> or <answer>c") == "b"
    assert last_answer("<think><answer>a</answer></think>") == ""


@pytest.mark.parametrize(
    "reply",
    ["<search>" * 2000, "<think>" * 2000, "<answer>a</answer>" * 900, "</think><think>" * 1000],
)
def test_replies_made_to_be_slow_are_read_in_linear_time(reply):
    parse(reply)
    last_answer(reply)
    if reply.startswith("<answer>"):
        assert parse(reply).text == last_answer(reply) == "a"


@settings(max_examples=400, deadline=None)
@given(
    st.lists(
        st.sampled_from(
            [
                "<search>",
                "</search>",
                "<answer>",
                "</answer>",
                "<think>",
                "</think>",
                "a",
                "\n",
                "<",
            ]
        ),
        max_size=12,
    )
)
def test_any_mixture_of_tags_is_read_as_the_pattern_says(parts):
    reply = "".join(parts)
    # a thought that the chat template opened
    said = re.sub(r"\A((?!<think>).)*?</think>", "", reply, flags=re.DOTALL)
    said = re.sub(r"<think>.*?</think>", "", said, flags=re.DOTALL)
    assert without_thoughts(reply) == said
    expected = re.search(r"<(search|answer)>(.*?)</\1>", said, re.DOTALL)
    action = parse(reply)
    assert (action and (action.kind, action.text)) == (expected and expected.groups())
    assert (
        last_answer(reply) == (re.findall(r"<answer>(.*?)</answer>", said, re.DOTALL) or [""])[-1]
    )


def test_documents_are_numbered_and_titled():
    documents = [
        Document("Lake Deil", "A lake."),
        Document("River Trav", "It rises on Mount Brand."),
    ]
    assert (
        information(documents)
        == '<information>Doc 1(Title: "Lake Deil") A lake.\nDoc 2(Title: "River Trav") It rises on'
        " Mount Brand.</information>"
    )
    assert information([]) == "<information>No document matches.</information>"


@pytest.mark.parametrize(
    ("limit", "text"),
    [
        (0, "It rises on Mount Brand."),
        (24, "It rises on Mount Brand."),
        (23, "It rises on Mount ..."),
        (8, "It rises ..."),
        (1, "I ..."),
    ],
)
def test_a_limit_cuts_a_text_between_words(limit, text):
    assert (
        information([Document("T", "It rises on Mount Brand.")], limit)
        == f'<information>Doc 1(Title: "T") {text}</information>'
    )
