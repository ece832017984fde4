"""The client against real servers on loopback, also over connections that break."""

import asyncio
import os
import signal
import socket
import time
from contextlib import asynccontextmanager

import pytest

from agentgym.config import EnvConfig
from agentgym.deploy.local import local_env
from agentgym.models.chat import ChatRenderer
from agentgym.rollouts import balancing, pools
from agentgym.rollouts.client import EnvError
from agentgym.rollouts.collect import collect
from agentgym.rollouts.episode import EpisodeSettings
from agentgym.rollouts.players import token_players
from agentgym.rollouts.pools import EnvPool, EnvPools, check_endpoints
from agentgym.types import Completion, Endpoint, Item, Status

BABYAI = EnvConfig(name="babyai")
ACTIONS = ["turn left", "move forward", "turn right", "blub", "move forward"]


@asynccontextmanager
async def cutting_proxy(endpoint, cuts, at=0):
    """Forwards to endpoint; while cuts[route] > 0 the reply to that route is thrown away and
    the connection closed.
    """
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


def test_an_episode_is_played_and_its_session_closed(serving):
    async def main(endpoint):
        async with pool_of(endpoint) as pool:
            assert (
                await check_endpoints(
                    pool, expect_env="babyai", allow_expert=True, expect_options={"view": "compact"}
                )
            )[0].env == "babyai"
            async with pool.session(Item("babyai", 0), "one") as session:
                assert session.observation.startswith("goal: ")
                assert (await session.render())[1].startswith(b"\x89PNG")
                while True:
                    reply = await session.step(await session.expert())
                    if reply.terminated:
                        break
                assert reply.success
                assert reply.reward == 1.0
            assert len(await play(pool, "two")) == 6

    with serving(offer_expert=True) as (endpoint, sessions):
        asyncio.run(main(endpoint))
        assert not sessions._by_id


def test_a_reply_lost_on_the_way_does_not_act_twice(serving):
    async def main(endpoint, sessions):
        async with pool_of(endpoint) as direct:
            expected = await play(direct, "direct")
        cuts = {"/create": 1, "/step": 2}
        steps_before = sessions.metrics.steps._value.get()
        async with cutting_proxy(endpoint, cuts) as proxy, pool_of(proxy) as pool:
            assert await play(pool, "through the proxy") == expected
        assert cuts == {"/create": 0, "/step": 0}
        assert sessions.metrics.steps._value.get() - steps_before == len(ACTIONS)
        assert sessions.metrics.created._value.get() == 2

    with serving() as (endpoint, sessions):
        asyncio.run(main(endpoint, sessions))
        assert not sessions._by_id


async def play_many(pool, count, name):
    """As many episodes at once, each on a task of its own."""
    return await asyncio.gather(
        *(play(pool, f"{name}-{task}", task_id=task) for task in range(count))
    )


def test_requests_of_one_moment_go_together_and_are_answered_as_alone(serving):
    async def main(endpoint, sessions):
        async with pool_of(endpoint) as pool:
            alone = await play_many(pool, 20, "alone")  # not checked: nothing is known of it
        asked = []
        async with pool_of(endpoint) as pool:
            await pool.check(BABYAI, allow_expert=True)
            usual = pool.client._post

            async def counted(endpoint, route, *rest):
                asked.append(route)
                return await usual(endpoint, route, *rest)

            pool.client._post = counted
            assert await play_many(pool, 20, "together") == alone
        assert set(asked) == {"/batch"}
        assert len(asked) < 20  # of 140 requests

    with serving(offer_expert=True) as (endpoint, sessions):
        asyncio.run(main(endpoint, sessions))
        assert not sessions._by_id


def test_an_answer_to_many_that_is_lost_acts_once_for_each(serving):
    async def main(endpoint, sessions):
        async with pool_of(endpoint) as direct:
            expected = await play_many(direct, 8, "direct")
        steps_before = sessions.metrics.steps._value.get()
        cuts = {"/batch": 3}
        async with cutting_proxy(endpoint, cuts) as proxy, pool_of(proxy) as pool:
            await pool.check(BABYAI, allow_expert=True)
            assert await play_many(pool, 8, "through the proxy") == expected
        assert cuts == {"/batch": 0}
        assert sessions.metrics.steps._value.get() - steps_before == sum(
            len(told) - 1 for told in expected
        )

    with serving(offer_expert=True) as (endpoint, sessions):
        asyncio.run(main(endpoint, sessions))


def test_one_refused_among_many_fails_alone(serving):
    async def main(endpoint, sessions):
        async with pool_of(endpoint) as pool:
            await pool.check(BABYAI, allow_expert=True)

            async def lost():
                async with pool.session(Item("babyai", 0), "lost") as session:
                    session._id = "never opened"
                    with pytest.raises(EnvError, match="unknown_session"):
                        await session.step("turn left")

            told = await asyncio.gather(lost(), *(play(pool, f"{n}", task_id=n) for n in range(4)))
            assert all(len(each) > 1 for each in told[1:])

    with serving(offer_expert=True) as (endpoint, sessions):
        asyncio.run(main(endpoint, sessions))


def test_a_batch_is_no_longer_than_a_server_reads(serving):
    async def main(endpoint, sessions):
        async with pool_of(endpoint) as pool:
            await pool.check(BABYAI, allow_expert=True)
            longest = "\x01" * 20_000  # six bytes of JSON each
            told = await asyncio.gather(*(play(pool, f"{n}", [longest]) for n in range(40)))
            assert all("invalid action" in each[1] for each in told)

    with serving(offer_expert=True) as (endpoint, sessions):
        asyncio.run(main(endpoint, sessions))


def test_a_server_out_of_reach_is_an_error_that_names_it():
    async def main():
        with socket.socket() as unused:
            unused.bind(("127.0.0.1", 0))
            endpoint = f"http://127.0.0.1:{unused.getsockname()[1]}"
            async with pool_of(endpoint, max_retries=2) as pool:
                with pytest.raises(
                    EnvError, match=rf"{endpoint}/create: unreachable: .*\(tried 3 times\)"
                ):
                    await play(pool, "k")

    asyncio.run(main())


def test_a_server_that_does_not_answer_in_time_is_an_error():
    async def main():
        silent = await asyncio.start_server(lambda reader, writer: asyncio.sleep(5), "127.0.0.1", 0)
        async with pool_of(
            f"http://127.0.0.1:{silent.sockets[0].getsockname()[1]}",
            request_timeout_s=0.2,
            max_retries=1,
        ) as pool:
            started = time.monotonic()
            with pytest.raises(EnvError, match=r"unreachable: .*Timeout"):
                await pool.info()
            assert time.monotonic() - started < 2

    asyncio.run(main())


def test_a_lost_session_is_an_error_at_once(serving):
    async def main(endpoint, sessions):
        async with pool_of(endpoint) as pool, pool.session(Item("babyai", 0), "k") as session:
            await session.close()
            started = time.monotonic()
            with pytest.raises(EnvError, match=r"/step session .*: session_gone") as raised:
                await session.step("turn left")
            assert raised.value.kind == "session_gone"
            assert session._id not in str(raised.value)
            assert time.monotonic() - started < 0.5

    with serving() as (endpoint, sessions):
        asyncio.run(main(endpoint, sessions))


def test_a_full_server_is_waited_for(serving, monkeypatch):
    monkeypatch.setattr("envs.sessions.RETRY_AFTER_S", 0.3)

    async def main(endpoint):
        async with pool_of(endpoint) as pool:
            started = time.monotonic()
            played = await asyncio.gather(*(play(pool, f"k{number}") for number in range(3)))
            assert played[0] == played[1] == played[2]
            assert time.monotonic() - started >= 0.3

    with serving(max_sessions=1) as (endpoint, _):
        asyncio.run(main(endpoint))


def test_another_server_takes_what_one_refuses(serving):
    async def main(first, second, full):
        async with pool_of(first, second) as pool:
            async with pool.session(Item("babyai", 0), "a"), pool.session(Item("babyai", 1), "b"):
                assert len(full._by_id) == 1
            played = await asyncio.gather(*(play(pool, f"k{number}") for number in range(12)))
            assert len(played) == 12

    with serving(max_sessions=1) as (first, full), serving(max_sessions=64) as (second, _):
        asyncio.run(main(first, second, full))


@pytest.mark.parametrize("patience_s", [0.0, 30.0])
def test_a_server_that_restarts_is_waited_for(serving, patience_s):
    async def main(endpoint):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        async with pool_of(
            f"http://127.0.0.1:{port}", max_retries=0, patience_s=patience_s
        ) as pool:
            playing = asyncio.create_task(play(pool, "k"))
            await asyncio.sleep(1)
            async with cutting_proxy(endpoint, {}, at=port):
                if patience_s:
                    assert len(await asyncio.wait_for(playing, 30)) == len(ACTIONS) + 1
                else:
                    with pytest.raises(
                        EnvError, match=r"/create: unreachable: .*\(tried 1 times\)"
                    ):
                        await playing

    with serving() as (endpoint, _):
        asyncio.run(main(endpoint))


def test_episodes_of_a_server_that_is_killed_are_played_on_another(tokenizer, tmp_path):
    renderer = ChatRenderer(tokenizer)

    class Turning:
        num_asked = 0
        victim = 0

        async def generate(self, prompt_ids, sampling):
            self.num_asked += 1
            if self.num_asked == 40:
                os.kill(self.victim, signal.SIGKILL)
            await asyncio.sleep(0.01)
            ids = tuple(renderer.action_ids("turn left"))
            return Completion(ids, (-1.0,) * len(ids), "stop", 0)

        async def publish(self, weights, version): ...

    async def main(endpoints):
        async with pool_of(*endpoints, patience_s=20.0) as pool:
            policy = Turning()
            policy.victim = (await pool.info())[0].pid
            return await collect(
                [(Item("babyai", task), 0) for task in range(24)],
                pool=pool,
                player_of=token_players(policy, renderer),
                settings=EpisodeSettings(
                    seed=0,
                    step=1,
                    max_turns=6,
                    temperature=1.0,
                    max_new_tokens=6,
                    context_tokens=512,
                ),
                concurrency=12,
                episode_timeout_s=60,
                max_attempts=3,
                max_env_error_frac=0.0,
            )

    env = EnvConfig(options={"levels": ["GoToObj"]})
    with (
        local_env(env, expert=False, log_path=tmp_path / "a.log") as first,
        local_env(env, expert=False, log_path=tmp_path / "b.log") as other,
    ):
        began = time.monotonic()
        trajectories = asyncio.run(main([*first, *other]))
    assert time.monotonic() - began < 60
    assert [trajectory.item.task_id for trajectory in trajectories] == list(range(24))
    assert {trajectory.status for trajectory in trajectories} <= {
        Status.MAX_TURNS,
        Status.TERMINATED,
    }
    assert {trajectory.num_attempts for trajectory in trajectories} == {1, 2}


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


def test_characters_no_server_can_read_are_replaced_and_endless_actions_cut(serving):
    async def main(endpoint):
        async with pool_of(endpoint) as pool, pool.session(Item("babyai", 0), "k") as session:
            for text in ("\ud800", "\x00\x1b[2J", "x" * 100_000):
                assert (await session.step(text)).observation.startswith("invalid action")

    with serving() as (endpoint, _):
        asyncio.run(main(endpoint))


def test_servers_that_are_not_what_was_configured_are_refused(serving, monkeypatch):
    async def main(plain, other, expert):
        async with pool_of(plain) as pool:
            with pytest.raises(
                ValueError, match=f"{plain} serves 'babyai', but env.name is 'textcraft'"
            ):
                await check_endpoints(pool, expect_env="textcraft", allow_expert=False)
            with pytest.raises(
                ValueError, match=r"actions='low', but env.options.actions is 'high'"
            ):
                await check_endpoints(
                    pool,
                    expect_env="babyai",
                    allow_expert=False,
                    expect_options={"actions": "high"},
                )
            monkeypatch.setattr(pools, "PROTOCOL_VERSION", 3)
            with pytest.raises(ValueError, match="protocol version 2, this client 3"):
                await check_endpoints(pool, expect_env="babyai", allow_expert=False)
            monkeypatch.undo()
        async with pool_of(expert) as pool:
            with pytest.raises(ValueError, match="offers the expert"):
                await check_endpoints(pool, expect_env="babyai", allow_expert=False)
        async with pool_of(plain, other) as pool:
            with pytest.raises(ValueError, match="make them equal"):
                await check_endpoints(pool, expect_env="babyai", allow_expert=False)

    with (
        serving() as (plain, _),
        serving("babyai", {"actions": "high"}) as (other, _),
        serving(offer_expert=True) as (expert, _),
    ):
        asyncio.run(main(plain, other, expert))


def test_a_pool_without_servers_is_refused():
    with pytest.raises(ValueError, match="at least one endpoint"):
        EnvPool([], request_timeout_s=1)


def resolving(monkeypatch, table):
    """Names of `table` have its addresses, which may change; all others are real."""
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
    monkeypatch.setattr(balancing, "RESOLVE_S", 0.0)


@asynccontextmanager
async def server_at(host, port, options=None):
    """A BabyAI server on another loopback address, in this loop."""
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


def test_a_name_with_several_addresses_is_several_servers_that_come_and_go(monkeypatch):
    async def main():
        table = {"envs.test": ["127.0.0.2", "127.0.0.3"]}
        resolving(monkeypatch, table)
        async with (  # noqa: SIM117
            server_at("127.0.0.2", 0) as (port, first),
            server_at("127.0.0.3", port) as (_, second),
        ):
            async with pool_of(f"http://envs.test:{port}") as pool:
                await pool.check(EnvConfig(options={"view": "compact"}), allow_expert=False)
                assert set(pool.endpoints) == {
                    f"http://127.0.0.2:{port}",
                    f"http://127.0.0.3:{port}",
                }
                for number in range(12):
                    await play(pool, f"key {number}", ["turn left"])
                both = first.metrics.steps._value.get(), second.metrics.steps._value.get()
                assert min(both) > 0
                assert sum(both) == 12
                table["envs.test"] = ["127.0.0.3", "127.0.0.4"]  # one left, one came
                async with server_at("127.0.0.4", port) as (_, third):
                    for number in range(12, 24):
                        await play(pool, f"key {number}", ["turn left"])
                    assert first.metrics.steps._value.get() == both[0]
                    assert third.metrics.steps._value.get() > 0
                    # the name service is away: the addresses known so far serve on
                    table["envs.test"] = None
                    await play(pool, "last key", ["turn left"])
                    assert set(pool.endpoints) == {
                        f"http://127.0.0.3:{port}",
                        f"http://127.0.0.4:{port}",
                    }

    asyncio.run(main())


def test_a_server_that_comes_later_must_be_like_the_others(monkeypatch):
    async def main():
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

    asyncio.run(main())


def test_the_token_of_one_server_is_never_sent_to_another(monkeypatch):
    """Ours goes to ours, that of the environment to configured servers, each by whatever name
    or dialect it is asked.
    """
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

    async def main():
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

    asyncio.run(main())
    configured = {"Bearer of-configured-servers"}
    assert sent == {
        "127.0.0.2": configured,
        "127.0.0.3": configured,
        "127.0.0.4": {"Bearer own"},
        "127.0.0.5": configured,
    }


def test_the_token_of_the_environment_is_sent(serving, monkeypatch):
    async def main(endpoint):
        async with pool_of(endpoint) as pool:
            with pytest.raises(
                EnvError,
                match="unauthorized: this server asks for a bearer token; set AGENTGYM_ENV_TOKEN",
            ):
                await pool.info()
        monkeypatch.setenv("AGENTGYM_ENV_TOKEN", "secret")
        async with pool_of(endpoint) as pool:
            assert len(await play(pool, "key")) == 6

    with serving(token="secret") as (endpoint, _):
        asyncio.run(main(endpoint))
