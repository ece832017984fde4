"""Hosted models under a protocol: failed requests are counted, and not against the model."""

import json

import pytest

from agentgym.commands.evaluate import INVALID, code_of
from agentgym.evaluation.paired import align
from agentgym.evaluation.record import read_episodes
from agentgym.evaluation.result import Outcome
from agentgym.pipeline.policy_evaluation import evaluate_policy, show
from tests.agentgym.pipeline.vendor import MAX_TURNS, Endpoint, ask

pytestmark = pytest.mark.integration
KEY = "sk-nobody-may-ever-write-this"


def test_an_endpoint_in_trouble_loses_nothing_and_every_token_is_counted(
    cfg, tmp_path, monkeypatch, capfd, caplog
):
    monkeypatch.setenv("AGENTGYM_SECRET_STUB", KEY)
    prices = tmp_path / "prices.yaml"
    prices.write_text("models: {stub: {input: 2.0, cached: 1.0, output: 10.0}}")
    trouble = {2: 429, 3: 500, 5: "slow", 8: "cut", 11: "empty", 14: 429, 15: 503}
    with Endpoint(trouble, retry_after="1") as stub:
        ran = evaluate_policy(
            cfg,
            ask(
                stub.url,
                key_variable="AGENTGYM_SECRET_STUB",
                timeout_s=1.0,
                max_retries=4,
                prices=prices,
            ),
        )
        assert {head["Authorization"] for head in stub.heads} == {f"Bearer {KEY}"}
    result, usage = ran.result, ran.result.usage
    assert (code_of(ran), result.coverage, result.is_complete) == (0, 1.0, True)
    assert all(slot.failed == () for slot in result.slots)
    assert usage.num_calls == stub.num
    assert [usage.input_tokens, usage.cached_tokens, usage.output_tokens] == stub.told
    assert (usage.num_untold, usage.num_failed) == (stub.untold, stub.untold + stub.refused)
    assert stub.untold == 3
    assert usage.known == {"input": None, "cached": None, "output": None}
    fresh, cached, output = stub.told[0] - stub.told[1], stub.told[1], stub.told[2]
    assert result.about["cost"]["amount"] == pytest.approx((2 * fresh + cached + 10 * output) / 1e6)
    assert result.about["cost"]["exact"] is False
    written = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert len(written) > 5
    said = capfd.readouterr()
    assert not any(KEY.encode() in each for each in written)
    assert KEY not in said.out + said.err + caplog.text


def test_a_hosted_model_is_told_the_rules_and_has_room_to_answer(cfg):
    lines = []
    with Endpoint() as stub:
        alone = {"num_samples": 1, "max_turns": 2, "items": {"num": 1}}
        found = evaluate_policy(cfg, ask(stub.url, changes=alone), tell=lines.append)
        system, user = stub.asked[0]["messages"]
        assert (system["role"], user["role"]) == ("system", "user")
        assert "turn left, turn right - turn a quarter on the spot" in system["content"]
        assert stub.asked[0]["max_tokens"] == 512
        (line,) = lines
        assert "characters of instructions, at most 512 tokens a reply and 3072 an episode" in line
        assert line in found.result.about["notes"]
        assert found.result.about["instructions"] == {"babyai": system["content"]}

        formed = evaluate_policy(cfg, ask(stub.url, changes={**alone, "action_format": "react"}))
        told = stub.asked[-1]["messages"][0]["content"]
        assert told.startswith(system["content"])
        assert "Action: your action" in told

        shown = {"instructions": True, "examples": 1}
        worked = evaluate_policy(cfg, ask(stub.url, changes={**alone, **shown}))
        told = stub.asked[-1]["messages"][0]["content"]
        assert told.startswith(system["content"])
        assert "Example 1\nObservation: goal: go to the yellow key\n" in told
        assert "Example 2" not in told

        # explicit settings win
        chosen = {"instructions": False, "max_new_tokens": 9, "context_tokens": 300}
        bare = evaluate_policy(cfg, ask(stub.url, changes={**alone, **chosen}))
        assert stub.asked[-1]["messages"][0]["role"] == "user"
        assert stub.asked[-1]["max_tokens"] == 9
        kept = evaluate_policy(cfg, ask(stub.url, changes=alone, kept=["max_new_tokens"]))
        assert stub.asked[-1]["max_tokens"] == cfg.rollout.max_new_tokens
        long = evaluate_policy(cfg, ask(stub.url, changes={**alone, "max_new_tokens": 700}))
        assert stub.asked[-1]["max_tokens"] == 700  # more than the run's whole context
        again = evaluate_policy(cfg, ask(stub.url, changes=alone))
        assert (again.how, again.result.digest) == ("done", found.result.digest)
    asked = [each.result for each in (found, formed, worked, bare, kept, long)]
    assert len({each.digest for each in asked}) == 6
    # instructions are part of the policy, so results of one protocol compare
    chance = evaluate_policy(cfg, ask("random", changes=alone))
    assert set(align(chance.result, found.result)) == {"babyai"}


def test_what_cannot_be_answered_is_kept_as_such_and_played_again_when_it_can(cfg):
    with Endpoint() as stub:
        first = evaluate_policy(cfg, ask(stub.url, changes={"items": {"num": 1}})).result
        goal = next(read_episodes(show(cfg, "").folder / "episodes.parquet"))["first_observation"]
    assert first.coverage == 1.0
    with Endpoint(refusing=json.dumps(goal)[1:-1]) as stub:
        asked = ask(stub.url, max_retries=0, model="stub", changes={"max_attempts": 2})
        ran = evaluate_policy(cfg, asked)
        failed = [slot for slot in ran.result.slots if not slot.counts]
        assert failed
        assert all(slot.outcome is Outcome.INTERRUPTED for slot in failed)
        assert [len(slot.failed) for slot in failed] == [2] * len(failed)
        assert all(slot.reward is None for slot in failed)
        assert code_of(ran) == INVALID
        numbers = ran.result.numbers["babyai"]
        assert numbers["coverage"] == pytest.approx(1 - len(failed) / 12)
        assert ran.result.usage.num_failed == 2 * len(failed)
        stub.refusing = None
        before = stub.num
        mended = evaluate_policy(cfg, asked)
    assert (mended.how, code_of(mended)) == ("resumed", 0)
    assert stub.num - before <= MAX_TURNS * len(failed)
    assert {slot.item_id for slot in mended.result.slots if slot.failed} == {
        slot.item_id for slot in failed
    }
    retried = mended.result.numbers["babyai"]["retried"]
    assert retried["num"] == len(failed)
    assert [slot for slot in mended.result.slots if not slot.failed] == [
        slot for slot in ran.result.slots if not slot.failed
    ]
    assert len(list(read_episodes(mended.folder / "episodes.parquet"))) == 12 + 2 * len(failed)


@pytest.mark.parametrize("limit", [True, 1, 0.1])
def test_it_stops_at_failures_beyond_the_limit_and_goes_on_from_there(cfg, limit):
    with Endpoint(dict.fromkeys(range(9, 40), 500)) as stub:
        asked = ask(
            stub.url,
            max_retries=0,
            model="stub",
            changes={"max_attempts": 1, "fail_on_error": limit, "concurrency": 1},
        )
        stopped = evaluate_policy(cfg, asked)
        assert "failed for good" in stopped.stopped
        assert code_of(stopped) == 1
        assert stopped.result.outcomes["interrupted"] == (1 if limit is True else 2)
        assert stopped.result.outcomes["not_played"] > 0
        stub.trouble = {}
        assert code_of(evaluate_policy(cfg, asked)) == 0


def test_a_limit_of_cost_stops_cleanly_and_counts_over_restarts(cfg, tmp_path):
    prices = tmp_path / "prices.yaml"
    prices.write_text("currency: EUR\nmodels: {stub: {input: 1000000.0}}")  # 1 per token
    with Endpoint() as stub:
        asked = ask(stub.url, prices=prices, max_cost=100.0, changes={"concurrency": 1})
        stopped = evaluate_policy(cfg, asked)
        assert "limit of cost is reached: " in stopped.stopped
        assert stopped.result.about["cost"]["amount"] == stub.told[0] >= 100
        assert stub.told[0] < 100 + 20 * 8  # plus the request in flight
        spent = stub.num
        assert "limit of cost" in evaluate_policy(cfg, asked).stopped
        assert stub.num == spent  # no request was sent
        more = asked.model_copy(update={"max_cost": 1e6})
        done = evaluate_policy(cfg, more)
        assert (done.how, code_of(done)) == ("resumed", 0)
        assert done.result.usage.input_tokens == stub.told[0]
        assert done.result.about["cost"] == {
            "amount": stub.told[0],
            "currency": "EUR",
            "exact": True,
        }


def test_an_endpoint_that_refuses_the_key_ends_the_evaluation_at_once(cfg, tmp_path, monkeypatch):
    monkeypatch.setenv("AGENTGYM_SECRET_STUB", KEY)
    with Endpoint(dict.fromkeys(range(1, 100), 401)) as stub:
        asked = ask(stub.url, key_variable="AGENTGYM_SECRET_STUB", changes={"concurrency": 2})
        stopped = evaluate_policy(cfg, asked)
        assert "status 401" in stopped.stopped
        assert "not with Bearer ***" in stopped.stopped  # the stub's error repeats the key
        assert stub.num <= 2
    written = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert not any(KEY.encode() in each for each in written)
