"""One loop for an expert, a script, random actions and a hosted model, in all five environments."""

import pytest

from agentgym.rollouts.episode import PlayerReply
from agentgym.rollouts.players import ExpertPlayer, RandomPlayer, ScriptedPlayer
from agentgym.types import Item, Status
from tests.agentgym.rollouts.endpoint import ENVS, Stub, play, play_hosted

NEEDS = {"sciworld": "java", "webarena": "chromium"}


@pytest.mark.integration
@pytest.mark.parametrize("env", ENVS)
def test_expert_script_chance_and_a_hosted_model_play_every_environment(serving, env, request):
    if env in NEEDS:
        request.getfixturevalue(NEEDS[env])
    items = [Item(env, 0), Item(env, 1)]
    with serving(env, ENVS[env], offer_expert=True, max_sessions=2) as (endpoint, sessions):
        shown = play(endpoint, items, lambda *_: ExpertPlayer(), max_turns=60)
        assert all(each.success and each.status is Status.TERMINATED for each in shown)
        script = {
            each.item: [PlayerReply(turn.action, turn.action) for turn in each.turns]
            for each in shown
        }
        again = play(endpoint, items, lambda item, _: ScriptedPlayer(script[item]), max_turns=60)
        assert [[t.observation for t in each.turns] for each in again] == [
            [t.observation for t in each.turns] for each in shown
        ]
        assert [(each.reward, each.success) for each in again] == [
            (each.reward, each.success) for each in shown
        ]
        one, other = (play(endpoint, items, lambda *_: RandomPlayer()) for _ in range(2))
        assert [[turn.action for turn in each.turns] for each in one] == [
            [turn.action for turn in each.turns] for each in other
        ]
        assert all(each.turns for each in one)
        stub = Stub()
        hosted = play_hosted(stub, endpoint, items, instructions={env: "rules"})
        for each in (*shown, *again, *one, *hosted):
            assert (each.input_ids, each.action_mask, each.logprobs) == ((), (), ())
            assert all(turn.env_s > 0 for turn in each.turns)
            assert each.timing["wall_s"] > 0
        assert len({each.id for each in (*shown, *one)}) == 4
        # the whole conversation is sent, from the instructions on
        first = min(stub.asked, key=lambda body: len(body["messages"]))["messages"]
        assert [message["role"] for message in first] == ["system", "user"]
        assert first[0]["content"] == "rules"
        assert not sessions._by_id


def test_an_expert_that_gives_up_and_a_script_that_ends_are_cut_not_failed(serving):
    with serving("babyai", ENVS["babyai"]) as (endpoint, _):
        (cut,) = play(
            endpoint, [Item("babyai", 0)], lambda *_: ScriptedPlayer([PlayerReply("turn left")])
        )
        assert (cut.status, len(cut.turns), cut.success) == (Status.MAX_TURNS, 1, False)
        with pytest.raises(RuntimeError, match="1 of 1 episodes failed"):
            play(endpoint, [Item("babyai", 0)], lambda *_: ExpertPlayer())  # no expert offered


def test_an_environment_that_tells_no_actions_says_so(serving):
    from dataclasses import replace

    from envs.registry import load_spec

    silent = replace(load_spec("babyai", {}), offers_hints=False)
    with serving(silent) as (endpoint, _), pytest.raises(RuntimeError, match="hints"):
        play(endpoint, [Item("babyai", 0)], lambda *_: RandomPlayer())
