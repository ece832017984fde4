"""The client against real servers on loopback, also over broken connections."""

import asyncio
import os
import signal
import socket
import time

import pytest

from agentgym.config import EnvConfig
from agentgym.deploy.local import local_env
from agentgym.models.chat import ChatRenderer
from agentgym.rollouts import pools
from agentgym.rollouts.collect import collect
from agentgym.rollouts.env_client import EnvError
from agentgym.rollouts.episode import EpisodeSettings, token_players
from agentgym.rollouts.pools import EnvPool, check_endpoints
from agentgym.types import Completion, Item, Status
from tests.agentgym.rollouts.sessions import ACTIONS, cutting_proxy, play, pool_of


async def test_an_episode_is_played_and_its_session_closed(serving):
    with serving(offer_expert=True) as (endpoint, sessions):
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
        assert not sessions._by_id


async def test_a_full_server_is_waited_for(serving, monkeypatch):
    monkeypatch.setattr("envs.refusals.RETRY_AFTER_S", 0.3)

    with serving(max_sessions=1) as (endpoint, _):
        async with pool_of(endpoint) as pool:
            started = time.monotonic()
            played = await asyncio.gather(*(play(pool, f"k{number}") for number in range(3)))
            assert played[0] == played[1] == played[2]
            assert time.monotonic() - started >= 0.3


@pytest.mark.parametrize("patience_s", [0.0, 30.0])
async def test_a_server_that_restarts_is_waited_for(serving, patience_s):
    with serving() as (endpoint, _):
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


@pytest.mark.integration
def test_episodes_of_a_server_that_is_killed_are_played_on_another(tokenizer, tmp_path):
    renderer = ChatRenderer(tokenizer)

    class Turning:
        num_asked = 0
        pool = None

        async def generate(self, prompt_ids, sampling):
            self.num_asked += 1
            if self.num_asked == 40:  # the server with most of the open episodes
                busiest = max(await self.pool.info(), key=lambda each: each.active_sessions)
                os.kill(busiest.pid, signal.SIGKILL)
            await asyncio.sleep(0.01)
            ids = tuple(renderer.action_ids("turn left"))
            return Completion(ids, (-1.0,) * len(ids), "stop", 0)

        async def publish(self, delivery): ...

    async def main(endpoints):
        async with pool_of(*endpoints, patience_s=20.0) as pool:
            policy = Turning()
            policy.pool = pool
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


async def test_characters_no_server_can_read_are_replaced_and_endless_actions_cut(serving):
    with serving() as (endpoint, _):
        async with pool_of(endpoint) as pool, pool.session(Item("babyai", 0), "k") as session:
            for text in ("\ud800", "\x00\x1b[2J", "x" * 100_000):
                assert (await session.step(text)).observation.startswith("invalid action")


async def test_servers_that_are_not_what_was_configured_are_refused(serving, monkeypatch):
    with (
        serving() as (plain, _),
        serving("babyai", {"actions": "high"}) as (other, _),
        serving(offer_expert=True) as (expert, _),
    ):
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
            monkeypatch.setattr(pools, "PROTOCOL_VERSION", 4)
            with pytest.raises(ValueError, match="protocol version 3, this client 4"):
                await check_endpoints(pool, expect_env="babyai", allow_expert=False)
            monkeypatch.undo()
        async with pool_of(expert) as pool:
            with pytest.raises(ValueError, match="offers the expert"):
                await check_endpoints(pool, expect_env="babyai", allow_expert=False)
        async with pool_of(plain, other) as pool:
            with pytest.raises(ValueError, match="make them equal"):
                await check_endpoints(pool, expect_env="babyai", allow_expert=False)


def test_a_pool_without_servers_is_refused():
    with pytest.raises(ValueError, match="at least one endpoint"):
        EnvPool([], request_timeout_s=1)
