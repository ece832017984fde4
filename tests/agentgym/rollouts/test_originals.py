"""Stand-ins that respond like AgentGym's five servers, route by route, and the client for them."""

import asyncio
import dataclasses
import logging
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from agentgym.config import EnvConfig
from agentgym.rollouts import agentgym_client
from agentgym.rollouts.agentgym_client import AgentGymPool
from agentgym.rollouts.env_client import EnvError
from agentgym.types import Item

TREE = "Tab 0 (current): Shop\n\n[1] RootWebArea 'Shop'"
PAGE = (
    f"OBSERVATION:\n{TREE}\nURL: http://onestopmarket.com\nOBJECTIVE: What does the mug"
    " cost?\nPREVIOUS ACTION: None"
)


def rooms(create, reset, step):
    """TextCraft, BabyAI and SciWorld: FastAPI, JSON everywhere, ids start at 0."""

    return {
        "POST /create": lambda body: create,
        "POST /reset": lambda body: (
            {**reset} if body == {"id": 0, "data_idx": 7} else web.Response(status=422)
        ),
        "POST /step": lambda body: (
            {**step} if body == {"id": 0, "action": "look"} else web.Response(status=422)
        ),
        "POST /close": lambda body: (
            True if body == {"id": 0} else web.Response(status=500, text="Internal Server Error")
        ),
    }


def needs_body(answer):
    return lambda body: answer if body is not None else web.Response(status=422)


SCIENCE = {
    "task_name": "boil",
    "var_num": 7,
    "task_description": "Your task is to boil water.",
    "deleted": False,
}
ORIGINALS = {
    "textcraft": {
        **rooms(
            None,
            {"id": 0, "observation": "Goal: craft stick.", "done": False, "reward": 0},
            {"observation": "Crafted 4 minecraft:stick", "reward": 1, "done": True},
        ),
        "GET /": lambda _: "This is environment TextCraft.",
        "POST /create": needs_body(
            {"id": 0, "observation": "Goal: craft lever.", "done": False, "reward": 0}
        ),
    },
    "babyai": {
        **rooms(
            {"id": 0},
            {
                "observation": "Your goal: go",
                "reward": 0,
                "score": 0,
                "deleted": False,
                "done": False,
            },
            {"observation": "The task is completed.", "reward": 0.9, "score": 0.9, "done": True},
        ),
        "GET /": lambda _: "This is environment BabyAI.",
    },
    "sciworld": {
        **rooms(
            {"id": 0},
            {**SCIENCE, "observation": "A room.", "reward": 0, "score": 0, "done": False},
            {"observation": "It boils.", "reward": 100, "score": 100, "done": True},
        ),
        "GET /": lambda _: "This is environment ScienceWorld.",
    },
    "searchqa": {
        "GET /": lambda _: "ok",
        "POST /create": lambda body: 0 if body == {"id": 7} else web.Response(status=422),
        "POST /reset": lambda body: (
            "Think first.\n\n Question: who?"
            if body == {"env_idx": 0, "id": 7}
            else web.Response(status=500)
        ),
        "POST /step": lambda _: {
            "observation": "Congratulations",
            "reward": 1.0,
            "done": True,
            "info": None,
        },
        "POST /close": lambda body: body == {"env_idx": 0},
    },
    "webarena": {  # Quart: text if a handler returns one
        "GET /": lambda _: web.Response(text="ok", content_type="text/html"),
        "POST /create": lambda _: {"env_idx": 0},
        "POST /reset": lambda body: (
            {"observation": TREE, "sites": ["shopping"], "object": "What does the mug cost?"}
            if body == {"env_idx": 0, "seed": 0, "idx": 7}
            else web.Response(status=500)
        ),
        "GET /observation": lambda _: PAGE,
        "POST /step": lambda _: {
            "observation": "bye",
            "reward": 1.0,
            "terminated": True,
            "truncated": False,
            "info": {},
        },
        "POST /close": lambda _: {"closed": "closed"},
    },
}
FIRST = {
    "textcraft": "Goal: craft stick.",
    "babyai": "Your goal: go",
    "sciworld": "Your task is to boil water.\nA room.",
    "searchqa": "Think first.\n\n Question: who?",
    "webarena": PAGE,
}


@asynccontextmanager
async def standing_in(routes):
    """Start a server on loopback; routes may be coroutine functions. Return (URL, requests)."""
    asked = []

    async def handle(request):
        route = f"{request.method} {request.path}"
        asked.append(f"{route}?{request.query_string}" if request.query_string else route)
        body = await request.json() if await request.text() else None
        answer = routes[route](body)
        answer = await answer if asyncio.iscoroutine(answer) else answer
        return answer if isinstance(answer, web.Response) else web.json_response(answer)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handle)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        yield f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}", asked
    finally:
        await runner.cleanup()


@pytest.mark.parametrize("name", ORIGINALS)
async def test_an_episode_on_a_server_that_answers_as_the_original_does(name, caplog):
    with caplog.at_level(logging.WARNING, agentgym_client.__name__):
        async with (
            standing_in(ORIGINALS[name]) as (url, asked),
            AgentGymPool(name, [url], request_timeout_s=5, max_retries=0) as pool,
        ):
            await pool.check(EnvConfig(name=name), allow_expert=False)
            async with pool.session(Item(name, 7), "key") as session:
                assert session.observation == FIRST[name]
                reply = await session.step("look")
            assert (reply.terminated, reply.success, reply.reward > 0.8) == (True, True, True)
            assert asked[-1] == "POST /close"
            assert ("GET /observation?env_idx=0" in asked) == (name == "webarena")
    assert caplog.messages == []


@pytest.mark.parametrize("answer", [{"closed": "closed"}, web.Response])
async def test_a_browser_gets_the_time_it_takes_to_end(answer, monkeypatch, caplog):
    """Wait longer than the pool's deadlines allow; older servers respond with text."""
    monkeypatch.setattr(agentgym_client, "CLOSE_TIMEOUT_S", 0.2)
    ended = []

    async def close():
        await asyncio.sleep(1)
        ended.append(True)
        return web.Response(text="closed") if answer is web.Response else answer

    with caplog.at_level(logging.WARNING, agentgym_client.__name__):
        routes = {**ORIGINALS["webarena"], "POST /close": lambda _: close()}
        async with (
            standing_in(routes) as (url, _),
            AgentGymPool("webarena", [url], request_timeout_s=0.5, max_retries=0) as pool,
        ):
            async with pool.session(Item("webarena", 7), "key"):
                pass
            assert ended == [True]
    assert caplog.messages == []


async def test_a_close_that_never_ends_is_given_up_and_told(monkeypatch, caplog):
    monkeypatch.setitem(
        agentgym_client.SHAPES,
        "webarena",
        dataclasses.replace(agentgym_client.SHAPES["webarena"], close_timeout_s=0.3),
    )

    with caplog.at_level(logging.WARNING, agentgym_client.__name__):
        routes = {**ORIGINALS["webarena"], "POST /close": lambda _: asyncio.sleep(1)}
        async with (
            standing_in(routes) as (url, _),
            AgentGymPool("webarena", [url], request_timeout_s=5, max_retries=0) as pool,
            pool.session(Item("webarena", 7), "key"),
        ):
            pass
    assert "a session stays open on a server that has no reaper" in caplog.text


@pytest.mark.parametrize("page", ["<html>cookies: ok</html>", "not ok", '{"status": "ok"}'])
async def test_a_page_that_only_contains_ok_is_no_greeting(page):
    routes = {**ORIGINALS["webarena"], "GET /": lambda _: web.Response(text=page)}
    async with (
        standing_in(routes) as (url, _),
        AgentGymPool("webarena", [url], request_timeout_s=5, max_retries=0) as pool,
    ):
        with pytest.raises(ValueError, match="no AgentGym server of webarena"):
            await pool.check(EnvConfig(name="webarena"), allow_expert=False)


def test_a_text_where_a_record_is_due_is_an_environment_error():
    async def main(**routes):
        asked = {
            **ORIGINALS["webarena"],
            **{
                f"{name.replace('_', ' /')}": lambda _, text=text: web.Response(text=text)
                for name, text in routes.items()
            },
        }
        async with (
            standing_in(asked) as (url, _),
            AgentGymPool("webarena", [url], request_timeout_s=5, max_retries=0) as pool,
        ):
            with pytest.raises(EnvError) as caught:
                async with pool.session(Item("webarena", 7), "key") as session:
                    await session.step("look")
            assert caught.value.kind == "protocol"

    for route in ("POST_create", "POST_reset", "POST_step"):
        asyncio.run(main(**{route: "<html>"}))
    asyncio.run(main(GET_observation="[1]"))
