"""Choosing a server for a session, and host names with several addresses."""

import asyncio
import socket
from contextlib import asynccontextmanager

import pytest

from agentgym.config import EnvConfig
from agentgym.deploy.fleets.addresses import Listing
from agentgym.rollouts import pools
from agentgym.rollouts.env_client import EnvError
from agentgym.rollouts.pools import EnvPools
from agentgym.types import Endpoint, Item
from envs.wire import InfoReply
from tests.agentgym.rollouts.sessions import play, pool_of


async def test_another_server_takes_what_one_refuses(serving):
    with serving(max_sessions=1) as (first, full), serving(max_sessions=64) as (second, _):
        async with pool_of(first, second) as pool:
            async with pool.session(Item("babyai", 0), "a"), pool.session(Item("babyai", 1), "b"):
                assert len(full._by_id) == 1
            played = await asyncio.gather(*(play(pool, f"k{number}") for number in range(12)))
            assert len(played) == 12


def test_sessions_spread_over_the_servers_and_a_dead_one_is_left_out(serving):
    async def main(first, second, dead, counts):
        async with pool_of(first, second, dead) as pool, asyncio.TaskGroup() as group:
            release = asyncio.Event()

            async def hold(number):
                async with pool.session(Item("babyai", number), f"k{number}"):
                    await release.wait()

            for number in range(24):
                group.create_task(hold(number))
            while sum(len(sessions._by_id) for sessions in counts) < 24:
                await asyncio.sleep(0.01)
            assert min(len(sessions._by_id) for sessions in counts) >= 4
            release.set()

    with serving() as (first, sessions_1), serving() as (second, sessions_2):
        asyncio.run(main(first, second, "http://127.0.0.1:9", [sessions_1, sessions_2]))


def resolving(monkeypatch, table):
    """Resolve the names of `table`, which may change; all others as usual."""
    real = asyncio.BaseEventLoop.getaddrinfo

    async def getaddrinfo(loop, host, port, **settings):
        if host not in table:
            return await real(loop, host, port, **settings)
        if table[host] is None:
            raise socket.gaierror("no such name")
        return [
            (socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in table[host]
        ]

    monkeypatch.setattr(asyncio.BaseEventLoop, "getaddrinfo", getaddrinfo)
    monkeypatch.setattr(pools, "RESOLVE_S", 0.0)


@asynccontextmanager
async def server_at(host, port, options=None):
    """Start a BabyAI server on another loopback address, in this loop."""
    import uvicorn

    from envs.babyai import spec
    from envs.server import ServerSettings, make_app

    app = make_app(spec(options or {}), ServerSettings(drain_timeout_s=0.1, hosts=("envs.test",)))
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, access_log=False))
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((host, port))
    running = asyncio.create_task(server.serve(sockets=[listener]))
    while not (server.started and app.state.sessions.ready):
        await asyncio.sleep(0.01)
    try:
        yield listener.getsockname()[1], app.state.sessions
    finally:
        server.should_exit = True
        await running


async def test_a_name_with_several_addresses_is_several_servers_that_come_and_go(monkeypatch):
    table = {"envs.test": ["127.0.0.2", "127.0.0.3"]}
    resolving(monkeypatch, table)
    async with (  # noqa: SIM117
        server_at("127.0.0.2", 0) as (port, first),
        server_at("127.0.0.3", port) as (_, second),
    ):
        async with pool_of(f"http://envs.test:{port}") as pool:
            await pool.check(EnvConfig(options={"view": "compact"}), allow_expert=False)
            assert set(pool.endpoints) == {f"http://127.0.0.2:{port}", f"http://127.0.0.3:{port}"}
            for number in range(12):
                await play(pool, f"key {number}", ["turn left"])
            both = first.metrics.steps._value.get(), second.metrics.steps._value.get()
            assert min(both) > 0
            assert sum(both) == 12
            table["envs.test"] = ["127.0.0.3", "127.0.0.4"]  # one address left, one added
            async with server_at("127.0.0.4", port) as (_, third):
                for number in range(12, 24):
                    await play(pool, f"key {number}", ["turn left"])
                assert first.metrics.steps._value.get() == both[0]
                assert third.metrics.steps._value.get() > 0
                # name resolution fails: the known addresses remain in use
                table["envs.test"] = None
                await play(pool, "last key", ["turn left"])
                assert set(pool.endpoints) == {
                    f"http://127.0.0.3:{port}",
                    f"http://127.0.0.4:{port}",
                }


async def test_a_server_that_comes_later_must_be_like_the_others(monkeypatch):
    table = {"envs.test": ["127.0.0.2", "127.0.0.3"]}
    resolving(monkeypatch, table)
    async with (
        server_at("127.0.0.2", 0) as (port, _),
        server_at("127.0.0.3", port),
        pool_of(f"http://envs.test:{port}") as pool,
    ):
        await pool.check(EnvConfig(), allow_expert=False)
        table["envs.test"] = ["127.0.0.5", "127.0.0.6"]
        async with (
            server_at("127.0.0.5", port, {"view": "agentgym"}),
            server_at("127.0.0.6", port, {"view": "agentgym"}),
        ):
            with pytest.raises(
                EnvError, match=r"a server that came later has options=.*'view': 'agentgym'"
            ):
                await play(pool, "key")
            for endpoint, info in pool.client.known.items():  # as for a server that states none
                pool.client.known[endpoint] = info.model_copy(update={"examples": ()})
        table["envs.test"] = ["127.0.0.7"]
        async with server_at("127.0.0.7", port):
            with pytest.raises(EnvError, match="a server that came later has examples="):
                await play(pool, "another key")


async def test_the_token_of_one_server_is_never_sent_to_another(monkeypatch):
    """Send each token only to its own server: ours, or a configured one, by any name or dialect."""
    monkeypatch.setenv("AGENTGYM_ENV_TOKEN", "of-configured-servers")
    resolving(monkeypatch, {"envs.test": ["127.0.0.2", "127.0.0.3"]})
    sent = {}

    async def listen(host, port=0):
        async def handle(reader, writer):
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            sent.setdefault(host, set()).update(
                line[15:] for line in head.split("\r\n") if line.startswith("Authorization: ")
            )
            writer.write(b"HTTP/1.1 500 x\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
            writer.close()

        server = await asyncio.start_server(handle, host, port)
        return server.sockets[0].getsockname()[1]

    port = await listen("127.0.0.2")
    await listen("127.0.0.3", port)
    own, plain = (
        Endpoint(f"http://127.0.0.4:{await listen('127.0.0.4')}", "own"),
        f"http://127.0.0.5:{await listen('127.0.0.5')}",
    )
    envs = [
        EnvConfig(name="babyai"),
        EnvConfig(name="textcraft", endpoints=(plain,), dialect="agentgym"),
    ]
    for endpoint in (own, plain, f"http://envs.test:{port}"):
        async with pool_of(endpoint) as pool:
            with pytest.raises(EnvError):
                await pool.check(EnvConfig(), allow_expert=False)
    async with EnvPools.of(envs, {"babyai": [own], "textcraft": (plain,)}) as pools:
        for env in envs:
            with pytest.raises(EnvError):
                await pools.check([env], allow_expert=False)
    configured = {"Bearer of-configured-servers"}
    assert sent == {
        "127.0.0.2": configured,
        "127.0.0.3": configured,
        "127.0.0.4": {"Bearer own"},
        "127.0.0.5": configured,
    }


def test_a_listing_says_where_servers_are_while_they_come_and_go(serving, tmp_path, monkeypatch):
    monkeypatch.setattr(pools, "LISTED_S", 0.0)
    listing = Listing(tmp_path / "fleet.json")

    async def main(first, second):
        fleet = Endpoint("http://env-babyai.fleet.svc:8000", "t", str(listing.path))
        listing.say([first])
        async with pool_of(fleet) as pool:
            await pool.check(EnvConfig(options={}), allow_expert=True)
            async with pool.session(Item("babyai", 0), "a") as session:
                assert session.endpoint == first
                listing.say([second])  # the first server leaves, another joins
                async with pool.session(Item("babyai", 0), "b") as other:
                    assert other.endpoint == second
                await session.step("turn left")  # a session stays on its server
            assert pool.client.hosts == {second: "env-babyai.fleet.svc:8000"}
            listing.say([])  # none is ready at the moment
            async with pool.session(Item("babyai", 0), "c") as session:
                assert session.endpoint == second
            listing.say([], "the servers of r1 were taken over")
            with pytest.raises(EnvError, match="fleet: the servers of r1 were taken over"):
                async with pool.session(Item("babyai", 0), "d"):
                    pass

    named = {"hosts": (".svc",)}  # as in the manifests
    with serving(**named) as (first, _), serving(**named) as (second, _):
        asyncio.run(main(first, second))


async def test_a_server_that_left_its_listing_is_not_asked_again(tmp_path):
    listing = Listing(tmp_path / "fleet.json")
    dead, other = "http://127.0.0.1:9", "http://127.0.0.1:10"

    fleet = Endpoint("http://env-babyai.fleet.svc:8000", "t", str(listing.path))
    async with pool_of(fleet, max_retries=2) as pool:
        for addresses, tries in (([dead], 3), ([], 3), ([other], 1)):
            listing.say(addresses)
            with pytest.raises(EnvError, match=rf"unreachable: .*\(tried {tries} times\)"):
                await pool.client.ask(dead, "/info", InfoReply)
