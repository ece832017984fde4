"""Hosted models: bounded retries, replies cut by tokens, and a key that never appears in output."""

import asyncio
import json
import time

import pytest

from agentgym.records import encode_line
from agentgym.rollouts.collect import RolloutError
from agentgym.rollouts.policies.hosted import Endpoint, HostedError, HostedModel, only_model
from agentgym.rollouts.policies.prices import Price, Tariff
from agentgym.types import Item, SampleKey, Sampling, Status, Usage
from tests.agentgym.rollouts.endpoint import ENVS, Stub, play_hosted
from tests.answering import Handler, http_server


def test_an_endpoint_in_trouble_is_asked_again_within_bounds(serving):
    with serving("babyai", ENVS["babyai"]) as (endpoint, _):
        stub = Stub(trouble=[429, 500, b"no json", b"{}", 503], reply="turn left")
        (episode,) = play_hosted(stub, endpoint, [Item("babyai", 0)], max_retries=8, max_turns=2)
        assert [turn.action for turn in episode.turns] == ["turn left", "turn left"]
        assert len(stub.asked) == 7
        # a repeated request keeps its key, a new one has another
        keys = [head["Idempotency-Key"] for head in stub.heads]
        assert keys[:6] == [keys[0]] * 6
        assert keys[6] != keys[0]
        stub = Stub(trouble=[500] * 6)  # for two attempts
        with pytest.raises(RolloutError, match=r"model m at http://127.0.0.1.*status 500"):
            play_hosted(stub, endpoint, [Item("babyai", 0)], max_retries=2)
        assert len(stub.asked) == 6
        stub = Stub(trouble=[401])  # retrying cannot help
        with pytest.raises(RolloutError, match="status 401"):
            play_hosted(stub, endpoint, [Item("babyai", 0)])
        assert len(stub.asked) == 1
        stub = Stub(trouble=[302])
        with pytest.raises(RolloutError, match="status 302"):
            play_hosted(stub, endpoint, [Item("babyai", 0)])


def test_the_wait_an_endpoint_asks_for_is_kept(serving):
    with serving("babyai", ENVS["babyai"]) as (endpoint, _):
        stub = Stub(trouble=[429], wait="1", reply="turn left")
        (episode,) = play_hosted(stub, endpoint, [Item("babyai", 0)], max_turns=1)
        assert episode.turns[0].generate_s >= 1


def test_a_context_that_is_full_cuts_the_episode_as_it_does_for_tokens(serving):
    with serving("babyai", ENVS["babyai"]) as (endpoint, _):
        item = [Item("babyai", 0)]
        (told,) = play_hosted(Stub(reply="turn left", trouble=[400]), endpoint, item)
        assert (told.status, told.turns) == (Status.MAX_TOKENS, ())
        (counted,) = play_hosted(
            Stub(reply="turn left", usage=90), endpoint, item, context_tokens=150
        )
        assert (counted.status, len(counted.turns)) == (Status.MAX_TOKENS, 1)


def test_a_reply_that_was_cut_off_is_played_as_it_is(serving):
    with serving("babyai", ENVS["babyai"]) as (endpoint, _):
        stub = Stub(reply="Thought: the ball is\nAction: turn le", finish="length")
        (episode,) = play_hosted(
            stub, endpoint, [Item("babyai", 0)], max_turns=1, action_format="react"
        )
        (turn,) = episode.turns
        assert (turn.action, turn.reply) == ("turn le", stub.reply)


def test_a_content_in_parts_is_the_text_of_its_text_parts(serving):
    thought = {"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]}
    parts = [thought, {"type": "text", "text": "turn "}, {"type": "text", "text": "left"}]
    with serving("babyai", ENVS["babyai"]) as (endpoint, _):
        stub = Stub(reply=parts)
        (episode,) = play_hosted(stub, endpoint, [Item("babyai", 0)], max_turns=2)
        assert [turn.action for turn in episode.turns] == ["turn left"] * 2
        assert stub.asked[1]["messages"][1]["content"] == "turn left"
        stub = Stub(reply={"text": "turn left"})
        with pytest.raises(RolloutError, match="content is dict; expected text or a list of parts"):
            play_hosted(stub, endpoint, [Item("babyai", 0)], max_retries=0)


@pytest.mark.parametrize(
    ("finish", "counts"), [("length", (2, 0)), ("content_filter", (0, 2)), ("stop", (0, 0))]
)
def test_replies_that_were_cut_or_filtered_are_played_and_counted(serving, finish, counts):
    with serving("babyai", ENVS["babyai"]) as (endpoint, _):
        stub = Stub(reply=None, finish=finish)
        (episode,) = play_hosted(stub, endpoint, [Item("babyai", 0)], max_turns=2)
        assert [turn.action for turn in episode.turns] == ["", ""]
        assert (episode.usage.num_cut, episode.usage.num_filtered) == counts


def test_a_prompt_that_a_filter_refuses_is_counted_and_ends_no_evaluation(serving):
    with serving("babyai", ENVS["babyai"]) as (endpoint, _):
        stub = Stub(trouble=["content_filter"], reply="turn left")
        (episode,) = play_hosted(stub, endpoint, [Item("babyai", 0)], max_turns=2)
        assert [turn.action for turn in episode.turns] == ["", "turn left"]
        assert (episode.usage.num_filtered, episode.usage.num_failed) == (1, 0)
        assert len(stub.asked) == 2


def test_an_endpoint_that_wants_the_new_name_of_the_limit_is_asked_by_it_from_then_on(serving):
    with serving("babyai", ENVS["babyai"]) as (endpoint, _):
        stub = Stub(reply="turn left", unknown="max_tokens")
        (episode,) = play_hosted(
            stub, endpoint, [Item("babyai", 0)], max_retries=0, max_turns=3, max_new_tokens=77
        )
        assert len(episode.turns) == 3
        limits = [
            {name: value for name, value in asked.items() if name.startswith("max_")}
            for asked in stub.asked
        ]
        assert limits == [{"max_tokens": 77}] + [{"max_completion_tokens": 77}] * 3
        assert episode.usage.num_failed == 1
        stub = Stub(unknown="seed")  # one further request without `seed`, then an error
        with pytest.raises(RolloutError, match="'seed' is not supported"):
            play_hosted(stub, endpoint, [Item("babyai", 0)])
        assert len(stub.asked) == 2


def test_an_error_in_a_reply_of_status_200_is_quoted_in_one_line(serving):
    def error(**fields):
        return json.dumps({"error": {"message": "not offered\nto you", **fields}}).encode()

    with serving("babyai", ENVS["babyai"]) as (endpoint, _):
        stub = Stub(trouble=[error(code=404)] * 9)  # a status for which a retry cannot help
        with pytest.raises(RolloutError, match="error 404 with status 200: not offered to you"):
            play_hosted(stub, endpoint, [Item("babyai", 0)])
        assert len(stub.asked) == 1
        stub = Stub(trouble=[error(code=429), error(), error(code="busy")], reply="turn left")
        (episode,) = play_hosted(stub, endpoint, [Item("babyai", 0)], max_turns=1)
        assert (len(stub.asked), episode.turns[0].action) == (4, "turn left")
        stub = Stub(trouble=[error(code="context_length_exceeded")])
        (episode,) = play_hosted(stub, endpoint, [Item("babyai", 0)])
        assert episode.status is Status.MAX_TOKENS


def test_half_an_emoji_in_a_reply_is_replaced(serving):
    with serving("babyai", ENVS["babyai"]) as (endpoint, _):
        stub = Stub(reply="turn left \ud83d")
        (episode,) = play_hosted(stub, endpoint, [Item("babyai", 0)], max_turns=2)
        assert episode.turns[0].action == "turn left \ufffd"


def completion(usage, content=b'"turn left"'):
    return b'{"choices": [{"message": {"content": %s}}], "usage": %s}' % (content, usage)


DEEP = b"[" * 100_000 + b"]" * 100_000
NO_COUNTS = [
    b'{"prompt_tokens": 1e999, "completion_tokens": 1}',
    b'{"prompt_tokens": -1000000, "completion_tokens": 1}',
    b'{"prompt_tokens": 1, "completion_tokens": "x", "total_tokens": 1e999}',
    b'{"prompt_tokens": 1, "completion_tokens": %s}' % (b"9" * 4000),
    b"[[1]]",
    b'"x"',
]


def test_counts_that_are_none_end_no_evaluation_and_switch_no_limit_of_cost_off(serving):
    with serving("babyai", ENVS["babyai"]) as (endpoint, _):
        stub = Stub(trouble=[*map(completion, NO_COUNTS)], reply="turn left")
        turns = len(NO_COUNTS)
        (episode,) = play_hosted(stub, endpoint, [Item("babyai", 0)], max_turns=turns)
        assert [turn.action for turn in episode.turns] == ["turn left"] * turns
        assert episode.usage == Usage(num_calls=turns, num_untold=turns)

    async def asked_until_it_costs_too_much(usage):
        runner, url = await Stub(trouble=[completion(usage)] * 9).serve()
        a_token_each = Tariff(Price(input=1e6, output=1e6), "EUR")
        priced = Endpoint(url, "m", tariff=a_token_each, max_cost=30.0)
        sampling = Sampling(SampleKey(0, 0, "babyai_0", 1), max_new_tokens=8)
        try:
            async with HostedModel(priced) as model:
                for number in range(9):
                    try:
                        await model.chat([{"role": "user", "content": "go on"}], sampling)
                    except HostedError as error:
                        return number, str(error)
        finally:
            await runner.cleanup()

    for usage in NO_COUNTS:  # 5 bytes asked, 8 tokens in a reply
        number, said = asyncio.run(asked_until_it_costs_too_much(usage))
        assert number == 3
        assert said.startswith(
            "the limit of cost is reached: 0.0000 of 30.0000 EUR, and at most 39"
        )


def test_answers_made_to_break_their_reader_are_asked_again_and_named(serving):
    nested = b"[" * 960 + b"]" * 960  # json reads this depth and writes less
    broken = [
        DEEP,
        completion(DEEP),
        b'{"error": {"message": %s}}' % nested,
        b'{"error": {"code": "%s"}}' % (b"9" * 5000),
        b'{"error": {"code": %s}}' % nested,
        completion(b"{}", nested),
    ]
    with serving("babyai", ENVS["babyai"]) as (endpoint, _):
        for some in (broken[:3], broken[3:]):  # the pause doubles with each
            stub = Stub(trouble=some, reply="turn left")
            (episode,) = play_hosted(stub, endpoint, [Item("babyai", 0)], max_turns=1)
            assert [turn.action for turn in episode.turns] == ["turn left"]
            assert len(stub.asked) == len(some) + 1


def test_a_key_that_a_model_repeats_is_in_no_episode(serving, monkeypatch):
    monkeypatch.setenv("AGENTGYM_SECRET_TEST", "k-123")
    with serving("babyai", ENVS["babyai"]) as (endpoint, _):
        stub = Stub(reply="say k-123")
        (episode,) = play_hosted(
            stub, endpoint, [Item("babyai", 0)], "AGENTGYM_SECRET_TEST", max_turns=2
        )
    assert episode.turns[0].action == "say ***"
    assert b"k-123" not in encode_line(episode)
    assert "k-123" not in json.dumps(stub.asked)


def test_a_key_comes_from_the_environment_alone_and_only_from_variables_meant_for_it(
    serving, monkeypatch
):
    with pytest.raises(ValueError, match="begin with AGENTGYM_SECRET_"):
        Endpoint("http://127.0.0.1/v1", "m", "AWS_SECRET_ACCESS_KEY")
    with pytest.raises(ValueError, match="is not set"):
        Endpoint("http://127.0.0.1/v1", "m", "AGENTGYM_SECRET_NOBODY")
    with pytest.raises(ValueError, match="is no endpoint"):
        Endpoint("file:///etc/passwd", "m")
    monkeypatch.setenv("AGENTGYM_SECRET_TEST", "k-123")
    with serving("babyai", ENVS["babyai"]) as (endpoint, _):
        stub = Stub(reply="turn left")
        play_hosted(stub, endpoint, [Item("babyai", 0)], "AGENTGYM_SECRET_TEST", max_turns=1)
        assert stub.heads[0]["Authorization"] == "Bearer k-123"
        assert "k-123" not in json.dumps(stub.asked)


def test_a_list_of_models_that_arrives_in_pieces_is_read_whole():
    listing = json.dumps({"data": [{"id": "the only one", "about": "x" * 200_000}]}).encode()

    class InPieces(Handler):
        def do_GET(self):
            self.send_response(200)
            self.send_header("Content-Length", str(len(listing)))
            self.end_headers()
            for start in range(0, len(listing), 50_000):
                self.wfile.write(listing[start : start + 50_000])
                self.wfile.flush()
                time.sleep(0.05)

    with http_server(InPieces) as url:
        assert asyncio.run(only_model(url)) == "the only one"
