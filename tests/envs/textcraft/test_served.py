"""TextCraft over HTTP, as trainers use it."""

import asyncio

from agentgym.rollouts.pools import EnvPool, check_endpoints
from agentgym.types import Item


async def test_many_sessions_at_once_are_solved_by_the_expert_over_http(serving):
    async def episode(pool, task_id, key="together"):
        async with pool.session(Item("textcraft", task_id), f"{key} {task_id}") as session:
            told = [session.observation]
            while True:
                reply = await session.step(await session.expert())
                told.append(reply.observation)
                if reply.terminated or session.turn == 50:
                    return told, reply.reward, reply.success

    with serving("textcraft", {"max_depth": 3}, offer_expert=True) as (endpoint, _):
        async with EnvPool([endpoint], request_timeout_s=10) as pool:
            info = (
                await check_endpoints(
                    pool, expect_env="textcraft", allow_expert=True, expect_options={"max_depth": 3}
                )
            )[0]
            assert len(info.options["digest"]) == 16
            together = await asyncio.gather(
                *(episode(pool, task_id) for task_id in range(0, 536, 16))
            )
            assert [(reward, success) for _, reward, success in together] == [(1.0, True)] * 34
            assert (await episode(pool, 32, "alone"))[0] == together[2][0]


async def test_junk_over_http_is_answered_and_never_paid(serving):
    junk = [
        "",
        "\x00",
        "x" * 16_384,
        "craft",
        "get 99999999999 stick",
        "craft 1 bowl using " + "1 a," * 4000,
        "🪓",
        "inventory",
    ]

    with serving("textcraft", {"goals": ["bowl"]}, offer_expert=True) as (endpoint, _):
        async with (
            EnvPool([endpoint], request_timeout_s=10) as pool,
            pool.session(Item("textcraft", 0), "junk") as session,
        ):
            for action in junk:
                reply = await session.step(action)
                assert (reply.reward, reply.terminated) == (0.0, False)
            assert reply.observation == "Inventory: You are not carrying anything."
            media_type, data = await session.render()
            assert (media_type, data[:10]) == ("text/plain", b"Goal: bowl")
