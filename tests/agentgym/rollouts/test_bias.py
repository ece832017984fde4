"""Batches stay unbiased although successful episodes are slow and fail more often here."""

import asyncio
import hashlib
import math
import time
from types import SimpleNamespace

import pytest
import torch

from agentgym.config import load_config
from agentgym.data.items import ItemStream
from agentgym.models.chat import ChatRenderer
from agentgym.rollouts.engine import LocalEngine, LoopThread
from agentgym.rollouts.pools import EnvPool
from agentgym.steps.step import HorizonState
from agentgym.training.ahead import Ahead, Rollouts, generation
from agentgym.types import Completion, EngineUsage, Item
from envs.env import EnvSpec, StepResult

pytestmark = pytest.mark.integration

# rewards 0, 0.25, 0.5, 0.75, 1, equally likely
# mean 0.5
# variance (0 + 1 + 4 + 9 + 16) / 16 / 5 - 0.25 = 0.125
LEVELS = 5
MEAN, VARIANCE = 0.5, 0.125
BATCH, NUM_BATCHES, CONCURRENCY = 24, 20, 8
# four standard errors of the mean over all batches: 0.065
BOUND = 4 * math.sqrt(VARIANCE / (BATCH * NUM_BATCHES))


def level_of(step, item_id):
    """Return the policy's draw for this item and step: uniform on 0 .. LEVELS - 1."""
    return int.from_bytes(hashlib.sha256(f"{step} {item_id}".encode()).digest()[:8]) % LEVELS


def reward_of(item, level):
    """Return the reward, which depends on both the task and the action."""
    return ((item.task_id + level) % LEVELS) / (LEVELS - 1)


class Gambler:
    """Policy that names its level, the same one in every turn."""

    def __init__(self, renderer):
        self.renderer, self.version = renderer, 0

    async def generate(self, prompt_ids, sampling):
        await asyncio.sleep(0.001)
        ids = tuple(
            self.renderer.action_ids(str(level_of(sampling.key.step, sampling.key.item_id)))
        )
        return Completion(ids, (-1.0,) * len(ids), "stop", self.version)

    async def usage(self):
        return EngineUsage()

    async def wake(self):
        pass

    async def sleep(self):
        pass


class House:
    """Environment of two turns with the reward in the second.
    Better episodes take longer; with `breaks`, the best ones fail once.
    """

    broken: set[int]
    breaks = False

    def reset(self, task_id):
        self.item, self.turn = Item("house", task_id), 0
        return "task: wait"

    def step(self, action):
        reward = reward_of(self.item, int(action))
        time.sleep(0.04 * reward)
        self.turn += 1
        if (
            reward == 1.0
            and self.turn == 2
            and self.breaks
            and self.item.task_id not in self.broken
        ):
            self.broken.add(self.item.task_id)
            raise RuntimeError("the house fell down")
        return StepResult(
            "you see a red ball", reward if self.turn == 2 else 0.0, terminated=self.turn == 2
        )

    def render(self):
        return "text/plain", b""

    def expert(self):
        raise NotImplementedError

    def close(self): ...


@pytest.mark.parametrize(
    ("breaks", "max_staleness"), [(False, 0), (True, 0), (True, 4)], ids=["slow", "fragile", "far"]
)
def test_latency_and_faults_that_grow_with_reward_leave_the_mean_of_batches_unbiased(
    tokenizer, serving, loop, breaks, max_staleness
):
    """Run `far` with rollouts four updates ahead of a learner that is slow every other step."""
    house = type("Haunted", (House,), {"broken": set(), "breaks": breaks})
    spec = EnvSpec("house", "", house, {}, (), blocking=True)
    items = [Item("house", task) for task in range(BATCH * NUM_BATCHES)]
    cfg = load_config(
        overrides=[
            f"rollout.max_staleness={max_staleness}",
            f"rollout.items_per_step={BATCH}",
            "rollout.group_size=1",
            f"rollout.concurrency={CONCURRENCY}",  # a third of the batch: slots are reused
            "rollout.max_env_error_frac=0",
            "algorithm.recipe=ppo",  # recipe without groups
            "horizon.kind=fixed",
            "horizon.max_turns=[2]",
            f"horizon.stage_steps=[{NUM_BATCHES}]",
        ]
    )
    renderer = ChatRenderer(tokenizer)
    policy, batches = Gambler(renderer), []
    with serving(spec) as (endpoint, _), Ahead(max_staleness) as ahead:
        pool = EnvPool([endpoint], request_timeout_s=30)
        loop.run(pool.__aenter__())
        checkpoint = SimpleNamespace(renderer=renderer, tokenizer=tokenizer, dtype=torch.float32)
        engine = LocalEngine(cfg, checkpoint, policy, pool, loop, {})
        stream = ItemStream(items, seed=5)
        ahead.begin(
            (Rollouts(step) for step in range(1, NUM_BATCHES + 1)),
            generation(cfg, engine, stream, HorizonState()),
        )
        for step in range(1, NUM_BATCHES + 1):
            rollouts = ahead.take()
            assert rollouts.staleness(most=max_staleness) <= max_staleness
            batches.append(rollouts.trajectories)
            time.sleep(0.2 * (step % 2) if max_staleness else 0)
            policy.version = step
            ahead.admit()
        loop.run(pool.__aexit__(None, None, None))

    admitted = ItemStream(items, seed=5)
    quickest = []
    for step, batch in enumerate(batches, start=1):
        assert [each.item for each in batch] == admitted.next(BATCH)
        for each in batch:  # no episode got another's reward
            assert each.step == step
            assert each.reward == reward_of(each.item, level_of(step, each.item.item_id))
        # a house's latency is proportional to its reward
        quickest.append(sorted(batch, key=lambda each: each.reward)[: BATCH // 3])
    assert sum(each.num_attempts == 2 for batch in batches for each in batch) == len(house.broken)
    assert bool(house.broken) == breaks
    versions = {turn.version for batch in batches for each in batch for turn in each.turns}
    assert versions == set(range(NUM_BATCHES)) or max_staleness
    assert abs(mean_reward(batches) - MEAN) < BOUND
    # negative control: the third of each batch with the least latency. The actual order of
    # completion would also depend on the load of the machine.
    assert mean_reward(quickest) < MEAN - BOUND
    spans = sum(len(each.versions) > 1 for batch in batches for each in batch)
    assert bool(spans) == bool(max_staleness)


@pytest.fixture
def loop():
    thread = LoopThread()
    yield thread
    thread.close()


def mean_reward(batches):
    rewards = [trajectory.reward for batch in batches for trajectory in batch]
    return sum(rewards) / len(rewards)
