"""The client of AgentGym's protocol against servers that implement it."""

import asyncio
from contextlib import asynccontextmanager

import pytest

from agentgym.config import ConfigError, EnvConfig, RunConfig
from agentgym.rollouts.agentgym_client import AgentGymPool
from agentgym.rollouts.env_client import EnvError
from agentgym.rollouts.episode import Guide
from agentgym.rollouts.pools import EnvPools
from agentgym.types import Item
from envs.sciworld.gold import solution
from envs.sciworld.tasks import Task


def pool_of(endpoint, env="babyai", **settings):
    return AgentGymPool(env, [endpoint], **{"request_timeout_s": 5.0, "max_retries": 1, **settings})


async def test_an_episode_is_played_in_agentgyms_protocol_and_closed(serving):
    with serving("babyai", {"view": "compact"}) as (endpoint, sessions):
        env = EnvConfig(name="babyai", dialect="agentgym", endpoints=(f"{endpoint}/agentgym",))
        async with EnvPools.of([env], {"babyai": env.endpoints}) as pools:
            assert await pools.check([env], allow_expert=False) == {"babyai": Guide()}
            async with pools.session(Item("babyai", 0), "key") as session:
                assert session.observation.startswith("Your goal: go to the red ball")
                reply = await session.step("turn left")
                assert (reply.turn, reply.reward, reply.terminated) == (1, 0.0, False)
                await session.step("turn right")
                reply = await session.step("go to red ball 1")
                assert (reply.terminated, reply.success) == (True, True)
                # the reward is this turn's gain; the server sends the sum
                assert 0.5 < reply.reward < 1
                assert sessions.info().active_sessions == 1
        assert sessions.info().active_sessions == 0


@pytest.mark.parametrize(
    ("name", "task", "actions"),
    [
        ("textcraft", 36, ["get 9 emerald", "craft 1 emerald block using 9 emerald"]),
        ("searchqa", 0, ["<search>a lake</search>", "<answer>nonsense</answer>"]),
        pytest.param(
            *("webarena", 0, ["scroll [down]", "stop [$12.50]"]), marks=pytest.mark.integration
        ),
    ],
)
async def test_the_other_servers_are_driven_too(serving, name, task, actions, request):
    if name == "webarena":
        request.getfixturevalue("chromium")

    with serving(name) as (endpoint, sessions):
        async with AgentGymPool(name, [f"{endpoint}/agentgym"], request_timeout_s=60) as pool:
            await pool.check(EnvConfig(name=name), allow_expert=False)
            async with pool.session(Item(name, task), "key") as session:
                assert session.observation
                replies = [await session.step(action) for action in actions]
            won = name != "searchqa"
            assert [(r.reward, r.terminated, r.success) for r in replies] == [
                (0.0, False, False),
                (1.0 if won else 0.0, won, won),
            ]
        assert sessions.info().active_sessions == 0


@pytest.mark.usefixtures("java")
async def test_part_credit_is_scaled_and_neither_ends_nor_wins_an_episode(serving):
    with serving("sciworld", max_sessions=2) as (endpoint, _):
        async with AgentGymPool("sciworld", [f"{endpoint}/agentgym"], request_timeout_s=60) as pool:
            await pool.check(EnvConfig(name="sciworld"), allow_expert=False)
            async with pool.session(Item("sciworld", 2939), "won") as session:
                assert session.observation.startswith("Your task is to find a(n) living thing.")
                assert "\nThis outside location" in session.observation
                replies = [
                    await session.step(action) for action in solution(Task("find-living-thing", 3))
                ]
                assert [reply.terminated for reply in replies] == [
                    reply.success for reply in replies
                ]
                assert replies[1].reward == 0.5
                assert not replies[1].success
                assert replies[-1].success
                assert sum(reply.reward for reply in replies) == pytest.approx(1.0)
            async with pool.session(Item("sciworld", 2939), "failed") as session:
                replies = [
                    await session.step(action)
                    for action in ("open door to kitchen", "focus on agent")
                ]
                assert replies[0].reward > 0
                assert (
                    replies[1].terminated,
                    replies[1].success,
                    sum(reply.reward for reply in replies),
                ) == (True, False, 0.0)


def test_other_servers_are_refused_by_what_they_say(serving):
    async def main(endpoint):
        async with pool_of(f"{endpoint}/agentgym", env="textcraft") as pool:
            with pytest.raises(
                ValueError,
                match=(
                    r"answers 'This is environment BabyAI.', which no AgentGym server of textcraft"
                    r" does"
                ),
            ):
                await pool.check(EnvConfig(name="textcraft"), allow_expert=False)

    with serving() as (endpoint, _):
        asyncio.run(main(endpoint))


@asynccontextmanager
async def answering(*bodies):
    """Serve these answers in order: (status, text), or None to close the connection."""
    left, asked = list(bodies), []

    async def handle(reader, writer):
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        asked.append(head.split(" ")[1])
        answer = left.pop(0) if left else (200, "true")
        if answer is not None:
            status, text = answer
            writer.write(
                f"HTTP/1.1 {status} X\r\nContent-Length: {len(text)}\r\nConnection:"
                f" close\r\n\r\n{text}".encode()
            )
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", asked
    finally:
        server.close()


OPENED = ((200, '{"id": 5}'), (200, '{"observation": "a room"}'))


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (None, "unreachable"),
        ((200, '{"error": "The id 5 is not valid."}'), "env_crashed"),
        ((500, '"boom"'), "env_crashed"),
        ((200, "<html>"), "protocol"),
        ((200, '{"observation": "x", "score": 0.0}'), "protocol"),
        ((200, '{"observation": "x", "score": NaN, "reward": NaN, "done": false}'), "protocol"),
        ((200, '{"observation": "x", "score": "0.5", "done": false}'), "protocol"),
        ((200, '{"observation": "x", "score": 0.0, "done": "false"}'), "protocol"),
        ((200, '{"observation": "x", "score": 0.0, "done": null}'), "protocol"),
        ((200, '{"observation": null, "score": 0.0, "done": false}'), "protocol"),
        ((200, '{"observation": [{"text": "x"}], "score": 0.0, "done": false}'), "protocol"),
        ((503, "full"), "full"),
    ],
)
async def test_a_step_that_fails_is_an_environment_error_and_never_sent_twice(answer, kind):
    async with answering(*OPENED, answer) as (endpoint, asked), pool_of(endpoint) as pool:
        async with pool.session(Item("babyai", 1), "key") as session:
            with pytest.raises(EnvError) as caught:
                await session.step("turn left")
        assert caught.value.kind == kind
        assert asked == ["/create", "/reset", "/step", "/close"]


async def test_half_an_emoji_of_a_server_is_replaced_wherever_it_stands():
    half = r"wall \ud83d"
    opened = (OPENED[0], (200, f'{{"observation": "{half}"}}'))
    steps = (
        (200, f'{{"observation": "{half}", "score": 0.0, "done": false}}'),
        (200, f'{{"error": "{half}"}}'),
        (503, "x"),
    )

    async with answering(*opened, *steps) as (endpoint, _), pool_of(endpoint) as pool:
        async with pool.session(Item("babyai", 1), "key") as session:
            assert session.observation == "wall \ufffd"
            assert (await session.step("turn left")).observation == "wall \ufffd"
            with pytest.raises(EnvError) as caught:
                await session.step("turn left")
        assert str(caught.value).encode()


async def test_opening_and_resetting_are_tried_again():
    async with (
        answering(None, OPENED[0], (503, "full"), OPENED[1]) as (endpoint, asked),
        pool_of(endpoint) as pool,
    ):
        async with pool.session(Item("babyai", 1), "key") as session:
            assert session.observation == "a room"
        assert asked == ["/create", "/create", "/reset", "/reset", "/close"]


WEB_OPENED = (
    (200, '{"env_idx": 5}'),
    (200, '{"observation": "a page", "sites": ["reddit"], "object": "look"}'),
    (200, '"a page"'),
)


async def test_a_webarena_task_that_cannot_be_opened_is_an_env_error_and_rewards_count_at_the_end():
    failed = (200, '{"observation": "TimeoutError", "sites": "Error", "object": "Error"}')
    step = '{"observation": "x", "reward": 1.0, "terminated": %s, "truncated": false, "info": {}}'

    async with (
        answering(WEB_OPENED[0], failed) as (endpoint, asked),
        pool_of(endpoint, env="webarena") as pool,
    ):
        with pytest.raises(EnvError, match="unexpected answer"):
            async with pool.session(Item("webarena", 1), "k"):
                pass
        assert asked == ["/create", "/reset", "/close"]
    answers = (*WEB_OPENED, (200, step % "false"), (200, step % "true"))
    async with answering(*answers) as (endpoint, _), pool_of(endpoint, env="webarena") as pool:
        async with pool.session(Item("webarena", 1), "k") as session:
            replies = [await session.step("click [1]"), await session.step("stop []")]
        assert [(r.reward, r.terminated) for r in replies] == [(0.0, False), (1.0, True)]


async def test_webarenas_server_alone_tells_its_limit_from_the_end_of_the_task():
    step = '{"observation": "x", "reward": 0, "terminated": %s, "truncated": %s, "info": {}}'
    done = (200, '{"observation": "x", "reward": 0.0, "score": 0.0, "done": true}')

    async def ended(env, *answers):
        async with (
            answering(*answers) as (endpoint, _),
            pool_of(endpoint, env=env) as pool,
            pool.session(Item(env, 1), "k") as session,
        ):
            reply = await session.step("stop []")
            return reply.terminated, reply.truncated

    assert await ended("webarena", *WEB_OPENED, (200, step % ("false", "true"))) == (False, True)
    assert await ended("webarena", *WEB_OPENED, (200, step % ("true", "true"))) == (True, False)
    assert await ended("babyai", *OPENED, done) == (True, False)  # one flag for both


async def test_a_late_reward_ends_the_episode_although_their_server_goes_on():
    late = (200, '{"observation": "completed", "reward": 0.3, "score": 0.3, "done": false}')
    async with (
        answering(*OPENED, late) as (endpoint, _),
        pool_of(endpoint) as pool,
        pool.session(Item("babyai", 1), "k") as session,
    ):
        reply = await session.step("go to red ball 1")
        assert (reply.reward, reply.terminated, reply.success) == (0.3, True, True)


def test_what_the_dialect_cannot_do_is_said_before_anything_starts():
    with pytest.raises(
        ConfigError,
        match="known for babyai, sciworld, searchqa, textcraft, webarena, not for 'maze'",
    ):
        AgentGymPool("maze", ["http://127.0.0.1:1"], request_timeout_s=1)
    with pytest.raises(ValueError, match=r"needs env\.endpoints"):
        RunConfig.model_validate({"env": {"dialect": "agentgym"}})
    with pytest.raises(ValueError, match="has none"):
        RunConfig.model_validate(
            {
                "env": {"dialect": "agentgym", "endpoints": ["http://a:1"]},
                "rollout": {"instructions": True},
            }
        )
