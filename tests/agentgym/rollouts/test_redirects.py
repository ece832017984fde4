"""Redirects of an environment server are refused: neither token nor action is sent on."""

import asyncio
from contextlib import asynccontextmanager
from functools import partial

import pytest

from agentgym.rollouts.agentgym_client import AgentGymPool
from agentgym.rollouts.env_client import EnvError
from agentgym.rollouts.openenv_client import OpenEnvPool
from agentgym.rollouts.pools import EnvPool
from agentgym.types import Item


@asynccontextmanager
async def server(head):
    """Serve one response to all requests. Return (URL, requests)."""
    came = []

    async def handle(reader, writer):
        came.append((await reader.readuntil(b"\r\n\r\n")).decode())
        writer.write(head.encode() + b"Content-Length: 0\r\nConnection: close\r\n\r\n")
        await writer.drain()
        writer.close()

    listening = await asyncio.start_server(handle, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}", came
    finally:
        listening.close()


@pytest.mark.parametrize("status", [302, 307])
@pytest.mark.parametrize("kind", ["native", "agentgym", "openenv"])
async def test_a_redirect_is_not_followed(monkeypatch, status, kind):
    monkeypatch.setenv("AGENTGYM_ENV_TOKEN", "token")

    async with (
        server("HTTP/1.1 200 OK\r\n") as (elsewhere, stolen),
        server(f"HTTP/1.1 {status} Moved\r\nLocation: {elsewhere}/stolen\r\n") as (url, came),
    ):
        settings = {"request_timeout_s": 5.0, "max_retries": 0}
        made = {
            "native": EnvPool,
            "agentgym": partial(AgentGymPool, "babyai"),
            "openenv": OpenEnvPool,
        }
        pool = made[kind]([url], **settings)
        with pytest.raises(EnvError) as caught:
            async with pool, pool.session(Item("babyai", 1), "key"):
                pass
        assert caught.value.kind == "protocol"
        assert f"status {status}" in str(caught.value)
        assert came
        assert stolen == []
