"""Many episodes in slow and failing environments: none is lost, none hangs, and order is kept."""

import asyncio
import time
from contextlib import asynccontextmanager

import pytest

from agentgym.models.chat import ChatRenderer
from agentgym.rollouts.collect import RolloutError, collect, samples
from agentgym.rollouts.env_client import EnvError
from agentgym.rollouts.episode import EngineStalled, EpisodeSettings, token_players
from agentgym.types import Completion, Item, SampleKey, Status
from tests.agentgym.rollouts.test_episode import Reply

SETTINGS = EpisodeSettings(
    seed=0, step=1, max_turns=3, temperature=1.0, max_new_tokens=6, context_tokens=256
)


class Pool:
    """In-process sessions. `behave(item, attempt, turn)` sleeps, raises or returns a Reply."""

    def __init__(self, behave):
        self.behave, self.keys, self.attempts = behave, [], {}
        self.open = self.most_open = 0

    @asynccontextmanager
    async def session(self, item, request_key):
        self.keys.append(request_key)
        sample = request_key.rsplit("-", 2)[1]
        attempt = self.attempts[item, sample] = self.attempts.get((item, sample), 0) + 1
        self.open += 1
        self.most_open = max(self.open, self.most_open)
        try:
            yield Session(self, item, attempt)
        finally:
            self.open -= 1


class Session:
    observation = "task: go"

    def __init__(self, pool, item, attempt):
        self.pool, self.item, self.attempt, self.turn = pool, item, attempt, 0

    async def step(self, action):
        self.turn += 1
        return await self.pool.behave(self.item, self.attempt, self.turn)


class Scripted:
    """Policy that answers "turn left" and records keys in order of arrival."""

    def __init__(self, renderer, fails_at=None):
        self.ids = tuple(renderer.action_ids("turn left"))
        self.keys, self.fails_at, self.running, self.most_running = [], fails_at, 0, 0

    async def generate(self, prompt_ids, sampling):
        self.keys.append(sampling.key)
        if len(self.keys) == self.fails_at:
            raise RuntimeError("engine failed: out of memory")
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        await asyncio.sleep(0)
        self.running -= 1
        return Completion(self.ids, (-0.5,) * len(self.ids), "stop", 3)

    async def publish(self, delivery): ...


@pytest.fixture(scope="module")
def renderer(tokenizer):
    return ChatRenderer(tokenizer)


def gather(renderer, behave, items=8, policy=None, limit_s=20, **options):
    """Return (trajectories, pool, policy). Fail if the collection does not end."""
    pool, policy = Pool(behave), policy or Scripted(renderer)
    defaults = {
        "concurrency": 64,
        "episode_timeout_s": 5.0,
        "max_attempts": 3,
        "max_env_error_frac": 0.1,
    }
    num_samples = options.pop("num_samples", 1)
    call = collect(
        samples([Item("babyai", task) for task in range(items)], num_samples),
        pool=pool,
        player_of=token_players(policy, renderer),
        settings=SETTINGS,
        **(defaults | options),
    )
    trajectories = asyncio.run(asyncio.wait_for(call, limit_s))
    assert pool.open == 0
    return trajectories, pool, policy


async def at_once(item, attempt, turn):
    return Reply(terminated=turn == 2)


def broken(message="server lost"):
    return EnvError("http://env-7:8000", "/step", "", "unreachable", message)


@pytest.mark.parametrize("deterministic", [False, True])
def test_admission_order_is_kept_when_episodes_finish_in_reverse(renderer, deterministic):
    finished = []

    async def behave(item, attempt, turn):
        await asyncio.sleep(0.01 * (8 - item.task_id))
        finished.append(item.task_id)
        return Reply(terminated=True)

    trajectories, _, _ = gather(renderer, behave, deterministic=deterministic)
    assert finished == [7, 6, 5, 4, 3, 2, 1, 0]
    assert [trajectory.item.task_id for trajectory in trajectories] == list(range(8))


def test_samples_of_an_item_stand_together(renderer):
    seen = []
    trajectories, pool, policy = gather(
        renderer, at_once, items=2, num_samples=3, progress=seen.append
    )
    assert [(t.item.task_id, t.sample) for t in trajectories] == [
        (0, 0),
        (0, 1),
        (0, 2),
        (1, 0),
        (1, 1),
        (1, 2),
    ]
    assert seen == [1] * 6
    assert len(set(pool.keys)) == 6
    assert {(key.step, key.seed) for key in policy.keys} == {(1, 0)}


@pytest.mark.parametrize("deterministic", [False, True])
def test_latency_that_grows_with_reward_does_not_bias_the_batch(renderer, deterministic):
    """Make the successful half slow: the first episodes to finish would all be failures."""

    async def behave(item, attempt, turn):
        won = item.task_id % 2 == 1
        await asyncio.sleep(0.1 if won else 0)
        return Reply(reward=float(won), terminated=True, success=won)

    trajectories, _, _ = gather(
        renderer, behave, items=20, concurrency=6, deterministic=deterministic
    )
    assert sum(trajectory.reward for trajectory in trajectories) / 20 == 0.5


def test_no_more_episodes_are_open_than_allowed(renderer):
    async def behave(item, attempt, turn):
        await asyncio.sleep(0.005)
        return Reply(terminated=True)

    _, pool, _ = gather(renderer, behave, items=20, concurrency=4)
    assert pool.most_open == 4


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_failure_that_passes_is_tried_again(renderer, deterministic):
    async def behave(item, attempt, turn):
        if item.task_id == 3 and attempt < 3:
            raise broken()
        return Reply(reward=1.0, terminated=True, success=True)

    trajectories, pool, _ = gather(renderer, behave, deterministic=deterministic)
    assert [(t.status, t.num_attempts, t.reward, t.error) for t in trajectories] == [
        (Status.TERMINATED, 3 if task == 3 else 1, 1.0, None) for task in range(8)
    ]
    assert len(set(pool.keys)) == 10  # one session per attempt


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_lasting_failure_is_no_reward_of_zero(renderer, deterministic):
    async def behave(item, attempt, turn):
        if item.task_id == 3:
            raise broken()
        return Reply(reward=1.0, terminated=True, success=True)

    trajectories, pool, _ = gather(renderer, behave, items=10, deterministic=deterministic)
    failed = trajectories[3]
    assert (failed.status, failed.reward, failed.success, failed.num_attempts) == (
        Status.ENV_ERROR,
        None,
        False,
        3,
    )
    assert "http://env-7:8000/step: unreachable: server lost" in failed.error
    assert [t.reward for t in trajectories if t is not failed] == [1.0] * 9
    assert len(pool.keys) == 12


def test_too_many_failures_stop_the_run_and_name_the_culprit(renderer):
    async def behave(item, attempt, turn):
        if item.task_id in (3, 6):
            raise broken()
        return Reply(terminated=True)

    with pytest.raises(
        RolloutError,
        match=(
            r"2 of 10 episodes failed after 3 attempts each \(limit 10%\); last, babyai_6:"
            r" http://env-7:8000/step.*server lost"
        ),
    ):
        gather(renderer, behave, items=10)


def test_a_server_that_is_gone_is_said_once_and_not_for_every_episode(renderer, caplog):
    async def behave(item, attempt, turn):
        if attempt == 1:
            raise broken()
        return Reply(terminated=True)

    with caplog.at_level("WARNING", logger="agentgym.rollouts.collect"):
        gather(renderer, behave, items=20)
    first, last = caplog.messages
    assert (
        first
        == "episode babyai_0 sample 0 attempt 1/3: http://env-7:8000/step: unreachable: server lost"
    )
    assert last.startswith("20 attempts at 20 episodes failed, 0 episodes for good; last: ")


@pytest.mark.parametrize("deterministic", [False, True])
def test_an_episode_that_hangs_times_out_alone(renderer, deterministic):
    async def behave(item, attempt, turn):
        if item.task_id == 3 and turn == 2:
            await asyncio.sleep(3600)
        return Reply(reward=1.0, terminated=turn == 3)

    began = time.monotonic()
    trajectories, _, _ = gather(
        renderer,
        behave,
        items=10,
        episode_timeout_s=1.0,
        max_attempts=2,
        deterministic=deterministic,
    )
    assert time.monotonic() - began < 60
    assert [t.status for t in trajectories] == [
        Status.TIMEOUT if task == 3 else Status.TERMINATED for task in range(10)
    ]
    assert (trajectories[3].reward, trajectories[3].error) == (
        None,
        "its environment took more than 1 s",
    )


class Slow(Scripted):
    """Policy that takes `reply_s` for each reply."""

    def __init__(self, renderer, reply_s):
        super().__init__(renderer)
        self.reply_s = reply_s

    async def generate(self, prompt_ids, sampling):
        await asyncio.sleep(self.reply_s)
        return await super().generate(prompt_ids, sampling)


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_slow_engine_is_no_broken_environment(renderer, deterministic):
    trajectories, _, _ = gather(
        renderer,
        at_once,
        policy=Slow(renderer, 0.4),
        episode_timeout_s=0.3,
        deterministic=deterministic,
    )
    assert [(t.status, t.num_attempts) for t in trajectories] == [(Status.TERMINATED, 1)] * 8
    assert all(t.timing["generate_s"] > 0.3 for t in trajectories)


def test_an_engine_without_any_answer_ends_the_collection_and_is_named(renderer, monkeypatch):
    monkeypatch.setattr("agentgym.rollouts.episode.REPLY_S", 0.2)
    with pytest.raises(EngineStalled, match=r"no reply to \d+ tokens within 0\.2 s; nothing"):
        gather(renderer, at_once, policy=Slow(renderer, 3600))


def test_an_environment_that_hangs_beside_a_slow_engine_times_out(renderer):
    async def behave(item, attempt, turn):
        await asyncio.sleep(3600 if item.task_id == 3 and turn == 2 else 0)
        return Reply(reward=1.0, terminated=turn == 3)

    trajectories, _, _ = gather(
        renderer,
        behave,
        policy=Slow(renderer, 0.4),
        episode_timeout_s=0.3,
        max_attempts=1,
        max_env_error_frac=0.2,
    )
    assert [t.status for t in trajectories] == [
        Status.TIMEOUT if task == 3 else Status.TERMINATED for task in range(8)
    ]


def test_an_episode_that_has_ended_keeps_its_outcome_however_long_its_session_takes_to_close(
    renderer,
):
    """Keep it: dropping such episodes would bias every number."""

    class Lingering(Pool):
        @asynccontextmanager
        async def session(self, item, request_key):
            async with super().session(item, request_key) as session:
                yield session
                await asyncio.sleep(3600)

    async def behave(item, attempt, turn):
        return Reply(reward=1.0, terminated=turn == 2, success=True)

    collection = collect(
        [(Item("babyai", 0), 0)],
        pool=Lingering(behave),
        player_of=token_players(Scripted(renderer), renderer),
        settings=SETTINGS,
        concurrency=1,
        episode_timeout_s=1.0,
        max_attempts=2,
        max_env_error_frac=0.0,
    )
    (ended,) = asyncio.run(asyncio.wait_for(collection, 20))
    assert (ended.status, ended.reward, ended.success, ended.error, ended.num_attempts) == (
        Status.TERMINATED,
        2.0,
        True,
        None,
        1,
    )


def test_statuses_of_horizon_and_end(renderer):
    async def behave(item, attempt, turn):
        return Reply(reward=0.25, terminated=item.task_id == 1 and turn == 2, success=True)

    never, ends = gather(renderer, behave, items=2)[0]
    assert (never.status, len(never.turns), never.reward, never.success) == (
        Status.MAX_TURNS,
        3,
        0.75,
        False,
    )
    assert (ends.status, len(ends.turns), ends.reward, ends.success) == (
        Status.TERMINATED,
        2,
        0.5,
        True,
    )
    assert {turn.version for turn in (*never.turns, *ends.turns)} == {3}


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_failed_engine_ends_the_collection_as_itself(renderer, deterministic):
    with pytest.raises(RuntimeError, match="engine failed: out of memory"):
        gather(
            renderer, at_once, policy=Scripted(renderer, fails_at=5), deterministic=deterministic
        )


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_cancelled_collection_closes_its_sessions(renderer, deterministic):
    async def forever(item, attempt, turn):
        await asyncio.sleep(3600)

    async def main():
        pool, before = Pool(forever), asyncio.all_tasks()
        task = asyncio.create_task(
            collect(
                [(Item("babyai", i), 0) for i in range(5)],
                pool=pool,
                player_of=token_players(Scripted(renderer), renderer),
                settings=SETTINGS,
                concurrency=3,
                episode_timeout_s=60,
                max_attempts=3,
                max_env_error_frac=0.1,
                deterministic=deterministic,
            )
        )
        await asyncio.sleep(0.05)
        assert pool.open == 3
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert pool.open == 0
        assert asyncio.all_tasks() == before

    asyncio.run(asyncio.wait_for(main(), 10))


def test_lockstep_asks_in_one_order_whatever_the_environments_latency(renderer):
    def order(delay):
        async def behave(item, attempt, turn):
            await asyncio.sleep(delay(item.task_id, turn))
            # one ends early, one fails on its first attempt: neither may delay the others
            if item.task_id == 2 and attempt == 1:
                raise broken()
            return Reply(terminated=turn == 1 + item.task_id % 3)

        _, _, policy = gather(renderer, behave, items=6, concurrency=4, deterministic=True)
        return policy

    forward = order(lambda task, turn: 0.002 * task)
    backward = order(lambda task, turn: 0.002 * (6 - task))
    assert forward.keys == backward.keys
    assert forward.keys[:4] == [SampleKey(0, 1, f"babyai_{task}", 0, 0) for task in range(4)]
    assert forward.most_running == 4  # each wave is one batch for the engine
    free = []
    for sign in (1, -1):  # negative control: without lock-step the order follows the latency

        async def behave(item, attempt, turn, sign=sign):
            await asyncio.sleep(0.005 * (10 + sign * item.task_id))
            return Reply(terminated=turn == 2)

        free.append(gather(renderer, behave, items=6)[2].keys)
    assert free[0] != free[1]
