"""The beginning of an episode: instructions, then worked examples."""

import asyncio

import pytest

from agentgym.config import ConfigError, EnvConfig, RunConfig
from agentgym.rollouts.engine import openings
from agentgym.rollouts.episode import ENDING, INTRODUCTION, Guide
from agentgym.rollouts.pools import EnvPool
from envs.wire import Example, ExampleTurn

SHORT = Example(observation="door", turns=(ExampleTurn(action="open", observation="done"),))
LONG = Example(
    observation="two doors",
    turns=(
        ExampleTurn(action="open", observation="one door"),
        ExampleTurn(action="open", observation="done"),
    ),
)
GUIDE = Guide("The rules.", (SHORT, LONG))


def configured(**rollout):
    return RunConfig.model_validate({"rollout": rollout})


def test_examples_follow_the_instructions_in_order():
    first = "Example 1\nObservation: door\nReply: open\nObservation: done"
    second = (
        "Example 2\nObservation: two doors\nReply: open\nObservation: one door\nReply: open\n"
        "Observation: done"
    )
    assert GUIDE.opening("babyai", 0, "plain") == "The rules."
    assert GUIDE.opening("babyai", 1, "plain") == "\n\n".join(
        ["The rules.", INTRODUCTION, first, ENDING]
    )
    assert GUIDE.opening("babyai", 2, "plain") == "\n\n".join(
        ["The rules.", INTRODUCTION, first, second, ENDING]
    )


def test_a_reply_of_an_example_has_the_runs_action_format():
    assert "\nReply: Action: open\n" in GUIDE.opening("babyai", 1, "react")


@pytest.mark.parametrize(
    ("guide", "num"), [(GUIDE, "2"), (Guide("The rules."), "no"), (Guide(), "no")]
)
def test_too_few_examples_are_an_error_before_anything_is_played(guide, num):
    with pytest.raises(
        ConfigError,
        match=f"textcraft: examples 3, and its servers offer {num} worked examples; lower rollout",
    ):
        guide.opening("textcraft", 3, "plain")


def test_a_run_begins_with_what_it_asks_for():
    guides = {"babyai": GUIDE}
    assert openings(configured(), guides) == {}
    assert openings(configured(instructions=True), guides) == {"babyai": "The rules."}
    asked = configured(instructions=True, examples=2, action_format="react")
    assert openings(asked, guides) == {"babyai": GUIDE.opening("babyai", 2, "react")}


def test_examples_without_instructions_are_refused():
    with pytest.raises(ValueError, match=r"rollout\.examples 2 follow the instructions; set"):
        configured(examples=2)


def test_a_servers_examples_come_with_its_instructions(serving):
    async def main(endpoint, _):
        async with EnvPool([endpoint], request_timeout_s=5.0) as pool:
            guide = await pool.check(EnvConfig(name="textcraft"), allow_expert=False)
        assert guide.instructions.startswith("You are given a list of crafting commands")
        assert [each.turns[-1].action.split(" using ")[0] for each in guide.examples] == [
            "craft 1 wind chime",
            "craft 1 paper kite",
        ]

    with serving("textcraft") as served:
        asyncio.run(main(*served))
