"""Policy names are parsed offline; models trained elsewhere get the rules and longer contexts."""

import pytest

from agentgym.config import ConfigError, RunConfig
from agentgym.evaluation.policies import (
    REACT,
    PolicyKind,
    PolicyName,
    adaptations,
    adapted_lines,
    endpoint_contender,
    instructions_of,
    plain_contender,
    prompts_digest,
    recorded_contender,
    with_room,
)
from agentgym.evaluation.protocol import protocol_of_run
from agentgym.rollouts.policies.hosted import Endpoint
from agentgym.types import Item


def parsed(text):
    found = PolicyName.parse(text)
    return found.who, found.name, found.of


def test_each_kind_of_policy_is_known_by_its_name(tmp_path):
    assert parsed("expert") == (PolicyKind.EXPERT, "", "")
    assert parsed("random") == (PolicyKind.RANDOM, "", "")
    assert parsed("echo:go to: the door") == (PolicyKind.ECHO, "go to: the door", "")
    assert parsed("echo:") == (PolicyKind.ECHO, "", "")
    assert parsed("r3d1c27a5b9e0:stage-3") == (PolicyKind.RUN, "stage-3", "r3d1c27a5b9e0")
    assert parsed(":stage-3") == (PolicyKind.RUN, "stage-3", "")
    assert parsed("models:/agentgym-babyai@champion") == (
        PolicyKind.REGISTRY,
        "agentgym-babyai",
        "@champion",
    )
    assert parsed("models:/agentgym-babyai/12") == (PolicyKind.REGISTRY, "agentgym-babyai", "12")
    assert parsed("https://host/v1") == (PolicyKind.ENDPOINT, "https://host/v1", "")
    assert parsed("Qwen/Qwen2.5-7B-Instruct") == (PolicyKind.MODEL, "Qwen/Qwen2.5-7B-Instruct", "")
    assert parsed("Qwen/Qwen3-4B@main") == (PolicyKind.MODEL, "Qwen/Qwen3-4B", "main")
    assert parsed(str(tmp_path)) == (PolicyKind.MODEL, str(tmp_path), "")


@pytest.mark.parametrize(
    "text", ["", "nobody", "models:/x", "models:champion", "stage-3", "../x/y/z", "run:Stage"]
)
def test_what_is_no_policy_is_refused_with_what_could_be_meant(text):
    with pytest.raises(ConfigError, match="expected"):
        PolicyName.parse(text)


def test_an_endpoint_is_its_address_and_model_and_never_its_key_price_or_patience(monkeypatch):
    monkeypatch.setenv("AGENTGYM_SECRET_X", "hush")
    plain = endpoint_contender(Endpoint("http://127.0.0.1:1/v1/", "m"))
    other = endpoint_contender(
        Endpoint("http://127.0.0.1:1/v1", "m", "AGENTGYM_SECRET_X", timeout_s=1.0, max_retries=9)
    )
    assert plain.identity == other.identity
    assert plain.identity["url"] == "http://127.0.0.1:1/v1"
    assert "hush" not in repr(other)


def test_policies_that_are_no_models_have_their_names_as_identity():
    one, two = (plain_contender(PolicyName.parse(f"echo:{action}")) for action in "ab")
    assert one.identity != two.identity
    assert plain_contender(PolicyName.parse("expert")).needs_expert
    assert not plain_contender(PolicyName.parse("random")).needs_expert
    assert prompts_digest("") == ""
    assert prompts_digest("a") != prompts_digest("b")
    again = recorded_contender("ab", "cd", {("babyai_1", 0): ("left",)}, "chance")
    assert again.identity == {"kind": "recorded", "of": "ab", "records": "cd"}
    assert again.player_of(Item("babyai", 1), 0) is not again.player_of(Item("babyai", 1), 0)


CFG = RunConfig()  # 6 tokens a reply, 512 an episode, no instructions
RULES = {"babyai": "Turn, or move."}


def asked(*kept, window=None, **changes):
    protocol = protocol_of_run(CFG, ("babyai",), {"max_turns": 3, **changes})
    return protocol, with_room(protocol, CFG, {*kept, *changes}, window)


def budget(*kept, **given):
    (each,) = asked(*kept, **given)[1].envs
    return each.max_new_tokens, each.context_tokens, each.instructions


def test_every_turn_has_room_for_a_reply_and_an_observation():
    assert budget() == (512, 1024 + 3 * (512 + 512), True)
    assert budget(max_turns=20) == (512, 1024 + 20 * 1024, True)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"instructions": False}, (512, 4096, False)),
        ({"instructions": True, "examples": 2}, (512, 4096 + 2 * 1024, True)),
        ({"max_new_tokens": 40}, (40, 1024 + 3 * (40 + 512), True)),
        ({"max_new_tokens": 500}, (500, 1024 + 3 * (500 + 512), True)),
        ({"context_tokens": 600}, (300, 600, True)),  # the reply is shortened
        ({"context_tokens": 600, "max_new_tokens": 500}, (500, 600, True)),
    ],
)
def test_what_somebody_chose_holds(given, expected):
    assert budget(**given) == expected


def test_a_setting_of_the_run_holds_where_somebody_gave_it_with_the_command():
    assert budget("max_new_tokens") == (6, 1024 + 3 * (6 + 512), True)
    assert budget("instructions", "context_tokens") == (256, 512, False)


def test_the_window_of_a_model_is_not_exceeded_and_a_run_that_allows_more_is_not_lowered():
    assert budget(window=2048) == (512, 2048, True)
    assert budget(window=800) == (400, 800, True)
    assert budget(window=100) == (256, 512, True)  # the run's own values
    cfg = CFG.model_copy(
        update={
            "rollout": CFG.rollout.model_copy(update={"max_new_tokens": 2000}),
            "model": CFG.model.model_copy(update={"context_tokens": 32768}),
        }
    )
    (each,) = with_room(protocol_of_run(cfg, ("babyai",)), cfg, (), None).envs
    assert (each.max_new_tokens, each.context_tokens) == (2000, 32768)


def test_the_react_format_stands_in_the_instructions_and_alone_where_there_are_none():
    _, plain = asked()
    _, react = asked(action_format="react")
    assert instructions_of(plain, RULES) == RULES
    assert instructions_of(react, RULES) == {"babyai": f"{RULES['babyai']}\n\n{REACT}"}
    assert instructions_of(react, {"babyai": ""}) == {"babyai": REACT}
    assert instructions_of(asked(instructions=False)[1], RULES) == {}


def test_only_what_the_protocol_does_not_say_is_of_the_policys_identity():
    protocol, own = asked()
    (found,) = adaptations(protocol, own, RULES, instructions_of(own, RULES)).values()
    assert (found["max_new_tokens"], found["context_tokens"]) == (512, 4096)
    # if the protocol sets these values, no policy is adapted
    assert adaptations(own, own, RULES, RULES) == {}
    _, react = asked(action_format="react")
    told = instructions_of(react, RULES)
    assert adaptations(react, react, RULES, told)["babyai"]["instructions"]


def test_a_person_reads_how_it_is_asked_and_what_changes_that():
    _, own = asked()
    (line,) = adapted_lines(own, RULES)
    assert "It gets 14 characters of instructions, at most 512 tokens a reply and 4096" in line
    assert "--max-new-tokens" in line
    (line,) = adapted_lines(own, {"babyai": ""})
    assert "no instructions (its servers have none)" in line
    (line,) = adapted_lines(asked(instructions=False)[1], {})
    assert "no instructions, at most" in line
