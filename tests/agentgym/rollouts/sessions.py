"""A pool of one server, an episode played through it, and a proxy that drops replies."""

import asyncio
from contextlib import asynccontextmanager

from agentgym.rollouts.pools import EnvPool
from agentgym.types import Item

ACTIONS = ["turn left", "move forward", "turn right", "blub", "move forward"]


@asynccontextmanager
async def cutting_proxy(endpoint, cuts, at=0):
    """Forward requests to `endpoint`, but drop replies to a route while cuts[route] > 0."""
    port = int(endpoint.rsplit(":", 1)[1])

    async def handle(reader, writer):
        upstream_reader, upstream_writer = await asyncio.open_connection("127.0.0.1", port)
        asked = b""

        async def forward():
            nonlocal asked
            while data := await reader.read(65536):
                asked = asked + data if not data.startswith((b"POST", b"GET")) else data
                upstream_writer.write(data)

        forwarding = asyncio.create_task(forward())
        while data := await upstream_reader.read(65536):
            route = asked.split(b" ")[1].decode()
            if cuts.get(route, 0) > 0:
                cuts[route] -= 1
                break
            writer.write(data)
        forwarding.cancel()
        upstream_writer.close()
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", at)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


def pool_of(*endpoints, **settings):
    return EnvPool(endpoints, **{"request_timeout_s": 5.0, "patience_s": 0.0, **settings})


async def play(pool, key, actions=ACTIONS, task_id=3):
    async with pool.session(Item("babyai", task_id), key) as session:
        told = [session.observation]
        for turn, action in enumerate(actions, start=1):
            reply = await session.step(action)
            assert (reply.turn, session.turn, session.observation) == (
                turn,
                turn,
                reply.observation,
            )
            told.append(reply.observation)
            if reply.terminated:
                break
    return told
