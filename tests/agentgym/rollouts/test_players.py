"""One loop for whoever plays: an expert, a script, chance, and a model behind an endpoint, in all
five environments.
"""

import asyncio

import pytest
from aiohttp import web

from agentgym.rollouts.collect import collect, samples
from agentgym.rollouts.episode import EpisodeSettings, Said
from agentgym.rollouts.players import ExpertPlayer, RandomPlayer, ScriptedPlayer
from agentgym.rollouts.policies.hosted import Endpoint, HostedModel
from agentgym.rollouts.pools import EnvPool
from agentgym.types import Item, Status

ENVS = {
    "babyai": {"levels": ["GoToRedBallNoDists"]},
    "textcraft": {"goals": ["paper", "melon seeds"], "distractors": 0},
    "searchqa": {"topk": 1},
    "sciworld": {"tasks": ["find-non-living-thing"]},
    "webarena": {},
}
NEEDS = {"sciworld": "java", "webarena": "chromium"}


def settings_of(**changes):
    given = {"seed": 0, "step": 0, "max_turns": 4, "temperature": 1.0, "max_new_tokens": 64}
    return EpisodeSettings(**{**given, "context_tokens": 100_000, **changes})


def play(endpoint, items, player_of, **changes):
    async def main():
        async with EnvPool([endpoint], request_timeout_s=60) as pool:
            return await collect(
                samples(items, 1),
                pool=pool,
                player_of=player_of,
                settings=settings_of(**changes),
                concurrency=2,
                episode_timeout_s=120,
                max_attempts=2,
                max_env_error_frac=0.0,
            )

    return asyncio.run(asyncio.wait_for(main(), 240))


class Stub:
    """An OpenAI-compatible endpoint. trouble: what it answers first, call by call: a status, or
    bytes in place of a completion.
    """

    def __init__(self, reply="look around", trouble=(), usage=10, finish="stop", wait="0"):
        self.reply, self.trouble, self.usage = reply, list(trouble), usage
        self.finish, self.wait, self.asked, self.heads = finish, wait, [], []

    async def answer(self, request):
        self.asked.append(await request.json())
        self.heads.append(dict(request.headers))
        if self.trouble:
            now = self.trouble.pop(0)
            if isinstance(now, bytes):
                return web.Response(body=now, content_type="application/json")
            if now == 400:
                error = {"error": {"code": "context_length_exceeded"}}
                return web.json_response(error, status=400)
            if now == 302:
                return web.Response(status=302, headers={"Location": "http://127.0.0.1:9/"})
            return web.Response(status=now, headers={"Retry-After": self.wait})
        choice = {
            "message": {"role": "assistant", "content": self.reply},
            "finish_reason": self.finish,
        }
        return web.json_response({"choices": [choice], "usage": {"total_tokens": self.usage}})

    async def serve(self):
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self.answer)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        return runner, f"http://127.0.0.1:{port}/v1"


def play_hosted(stub, endpoint, items, key_variable="", max_retries=4, **changes):
    async def main():
        runner, url = await stub.serve()
        try:
            asked = Endpoint(url, "m", key_variable, timeout_s=5, max_retries=max_retries)
            async with (
                HostedModel(asked) as model,
                EnvPool([endpoint], request_timeout_s=60) as pool,
            ):
                return await collect(
                    samples(items, 1),
                    pool=pool,
                    player_of=model.player,
                    settings=settings_of(**changes),
                    concurrency=2,
                    episode_timeout_s=120,
                    max_attempts=2,
                    max_env_error_frac=0.0,
                )
        finally:
            await runner.cleanup()

    return asyncio.run(asyncio.wait_for(main(), 240))


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
            each.item: [Said(turn.action, turn.action) for turn in each.turns] for each in shown
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
        # the whole conversation goes along, from the instructions on
        first = min(stub.asked, key=lambda body: len(body["messages"]))["messages"]
        assert [message["role"] for message in first] == ["system", "user"]
        assert first[0]["content"] == "rules"
        assert not sessions._by_id


def test_an_expert_that_gives_up_and_a_script_that_ends_are_cut_not_failed(serving):
    with serving("babyai", ENVS["babyai"]) as (endpoint, _):
        (cut,) = play(endpoint, [Item("babyai", 0)], lambda *_: ScriptedPlayer([Said("turn left")]))
        assert (cut.status, len(cut.turns), cut.success) == (Status.MAX_TURNS, 1, False)
        with pytest.raises(RuntimeError, match="1 of 1 episodes failed"):
            play(endpoint, [Item("babyai", 0)], lambda *_: ExpertPlayer())  # it offers none


def test_an_environment_that_tells_no_actions_says_so(serving):
    from dataclasses import replace

    from envs.registry import load_spec

    silent = replace(load_spec("babyai", {}), offers_hints=False)
    with serving(silent) as (endpoint, _), pytest.raises(RuntimeError, match="hints"):
        play(endpoint, [Item("babyai", 0)], lambda *_: RandomPlayer())
