"""A hosted model, played in a served environment."""

import asyncio

from aiohttp import web

from agentgym.rollouts.collect import collect, samples
from agentgym.rollouts.episode import EpisodeSettings
from agentgym.rollouts.policies.hosted import Endpoint, HostedModel
from agentgym.rollouts.pools import EnvPool

ENVS = {
    "babyai": {"levels": ["GoToRedBallNoDists"]},
    "textcraft": {"goals": ["paper", "melon seeds"], "distractors": 0},
    "searchqa": {"topk": 1},
    "sciworld": {"tasks": ["find-non-living-thing"]},
    "webarena": {},
}


def settings_of(**changes):
    given = {"seed": 0, "step": 0, "max_turns": 4, "temperature": 1.0, "max_new_tokens": 64}
    return EpisodeSettings(**{**given, "context_tokens": 100_000, **changes})


class Stub:
    """OpenAI-compatible endpoint. unknown: a field of the request that it refuses.
    trouble: the first responses, in order: a status, the code of an error of status 400, or bytes
    instead of a completion.
    """

    def __init__(
        self, reply="look around", trouble=(), usage=10, finish="stop", wait="0", unknown=""
    ):
        self.reply, self.trouble, self.usage = reply, list(trouble), usage
        self.finish, self.wait, self.asked, self.heads = finish, wait, [], []
        self.unknown = unknown

    async def answer(self, request):
        self.asked.append(await request.json())
        if self.unknown in self.asked[-1]:
            message = f"'{self.unknown}' is not supported. Use 'max_completion_tokens' instead."
            return web.json_response({"error": {"message": message}}, status=400)
        self.heads.append(dict(request.headers))
        if self.trouble:
            now = self.trouble.pop(0)
            if isinstance(now, bytes):
                return web.Response(body=now, content_type="application/json")
            if now == 400 or isinstance(now, str):
                error = {"error": {"code": "context_length_exceeded" if now == 400 else now}}
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


async def _collect(endpoint, items, player_of, **changes):
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


def play(endpoint, items, player_of, **changes):
    """Return an episode of each item; changes: of EpisodeSettings."""
    return asyncio.run(asyncio.wait_for(_collect(endpoint, items, player_of, **changes), 240))


def play_hosted(stub, endpoint, items, key_variable="", max_retries=4, **changes):
    """Return the episodes of `play` with the model that `stub` serves."""

    async def main():
        runner, url = await stub.serve()
        try:
            asked = Endpoint(url, "m", key_variable, timeout_s=5, max_retries=max_retries)
            async with HostedModel(asked) as model:
                return await _collect(endpoint, items, model.player, **changes)
        finally:
            await runner.cleanup()

    return asyncio.run(asyncio.wait_for(main(), 240))
