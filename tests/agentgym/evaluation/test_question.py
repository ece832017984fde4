"""Tests for the question that models were judged on, and for models that are not comparable."""

from dataclasses import replace

import pytest

from agentgym.data.items import Splits
from agentgym.evaluation.question import Question, other_question, question_asked
from agentgym.types import Item

CONFIG = {
    "env": {
        "name": "babyai",
        "options": {"levels": ["GoToObj"]},
        "weight": 1.0,
        "dialect": "native",
    },
    "mix": [{"name": "textcraft", "options": {}, "weight": 2.0, "dialect": "native"}],
    "model.context_tokens": 512,
    "rollout.max_new_tokens": 6,
    "rollout.instructions": False,
    "rollout.examples": 0,
    "rollout.action_format": "plain",
    "rollout.engine": "torch",
    "evaluation": {"max_turns": 12, "split": "test", "temperature": 1.0, "num_items": 2, "seed": 1},
}


def splits(*test):
    items = tuple(Item(env, number, "test") for env, number in test)
    return Splits((), (), items, "", ())


LISTS = splits(("babyai", 1), ("textcraft", 7), ("babyai", 2))
QUESTION = question_asked(CONFIG, LISTS)


def test_a_setting_that_an_older_evaluation_lacks_differs_from_nothing():
    older = question_asked(
        {name: value for name, value in CONFIG.items() if name != "rollout.examples"}, LISTS
    )
    assert other_question(QUESTION, older) == ""
    assert other_question(older, QUESTION) == ""


def test_more_items_more_samples_another_engine_or_weight_are_the_same_question():
    config = {
        **CONFIG,
        "rollout.engine": "vllm",
        "mix": [{**CONFIG["mix"][0], "weight": 1.0}],
        "evaluation": {**CONFIG["evaluation"], "num_items": 3, "num_samples": 16, "seed": 2},
    }
    assert question_asked(config, LISTS) == QUESTION
    assert other_question(question_asked(config, LISTS), QUESTION) == ""


@pytest.mark.parametrize(
    ("theirs", "said"),
    [
        (
            {"envs": {"counting": {"options": {}}}},
            "its environments are babyai + textcraft, the champion's counting; give it a name",
        ),
        (
            {"envs": {**QUESTION.envs, "babyai": {"options": {"levels": ["Unlock"]}}}},
            (
                'babyai: options is {"levels": ["GoToObj"]}, the champion\'s {"levels":'
                ' ["Unlock"]}; judge both by one protocol (gate.protocol), or'
            ),
        ),
        (
            {"items": question_asked(CONFIG, splits(("babyai", 1), ("textcraft", 7))).items},
            "its items of babyai are of another list; judge both",
        ),
        (
            {"protocol": {**QUESTION.protocol, "evaluation.max_turns": 6}},
            "evaluation.max_turns is 12, the champion's 6; judge both",
        ),
        (
            {"protocol": {**QUESTION.protocol, "rollout.action_format": "react"}},
            'rollout.action_format is "plain", the champion\'s "react"; judge both',
        ),
    ],
    ids=["environments", "options", "items", "turns", "format"],
)
def test_what_differs_is_named_with_both_values(theirs, said):
    assert other_question(QUESTION, replace(QUESTION, **theirs)).startswith(said)


def test_a_protocol_of_the_gates_own_needs_the_same_environments_alone():
    longer = replace(QUESTION, protocol={"evaluation.max_turns": 20})
    assert other_question(QUESTION, longer, envs_only=True) == ""
    assert other_question(QUESTION, Question({"babyai": {}}), envs_only=True)


def test_what_is_not_known_of_a_champion_differs_from_nothing():
    """Know only the environments of a champion, as for one of an earlier version."""
    assert other_question(QUESTION, Question({"babyai": {}, "textcraft": {}})) == ""


def test_a_question_comes_back_from_the_tag_it_was_written_into():
    assert Question.from_json(QUESTION.to_json()) == QUESTION
