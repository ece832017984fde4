"""SearchQA over HTTP, played by the trainer's own client."""

import asyncio
import time

from agentgym.rollouts.pools import EnvPool
from agentgym.types import Item


async def follow_the_expert(pool, task_id, key):
    async with pool.session(Item("searchqa", task_id), key) as session:
        told, reply = [session.observation], None
        while reply is None or not reply.terminated:
            reply = await session.step(await session.expert())
            told.append(reply.observation)
        media_type, text = await session.render()
        assert (media_type, reply.success, reply.reward) == ("text/plain", True, 1.0)
        assert text.decode().endswith("(right)")
    return told


async def test_many_episodes_at_once_are_told_as_one_alone(serving):
    with serving("searchqa", offer_expert=True) as (endpoint, _):
        async with EnvPool([endpoint], request_timeout_s=20) as pool:
            info = (await pool.info())[0]
            assert (info.env, info.options["mode"], info.options["topk"]) == (
                "searchqa",
                "strict",
                3,
            )
            assert "<search>" in info.instructions
            tasks = [*range(16), *range(51_713, 51_729)]
            together = await asyncio.gather(
                *(follow_the_expert(pool, task_id, f"a{task_id}") for task_id in tasks)
            )
            for task_id, told in zip(tasks[:6], together, strict=False):
                assert await follow_the_expert(pool, task_id, f"b{task_id}") == told
            assert all(
                told[0].startswith("Question: ")
                and told[1].startswith("<information>Doc 1(Title: ")
                for told in together
            )


def test_sessions_of_a_server_share_requests_to_a_remote_retriever(retrieving, serving):
    def slow(handler, asked, number):
        time.sleep(0.05)
        return False

    async def main(endpoint):
        async def search(pool, number):
            async with pool.session(Item("searchqa", number), str(number)) as session:
                return (await session.step("<search>capital of Japan</search>")).observation

        async with EnvPool([endpoint], request_timeout_s=20) as pool:
            return await asyncio.gather(*(search(pool, number) for number in range(12)))

    with (
        retrieving(slow) as (url, log),
        serving("searchqa", {"retriever": url}, offer_expert=True) as (endpoint, _),
    ):
        before = len(log)  # entries of the scripted episode
        observations = asyncio.run(main(endpoint))
        assert len(set(observations)) == 1
        assert "Tokyo" in observations[0]
        assert sum(len(asked["queries"]) for _, asked in log[before:]) == 12
        assert len(log) - before < 12
