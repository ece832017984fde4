"""Slow and fragile episodes are the successful ones here: a batch must hold its share of them
all the same.
"""

import asyncio
import hashlib
import math
import time

import pytest

from agentgym.data.items import ItemStream
from agentgym.models.chat import ChatRenderer
from agentgym.rollouts.collect import collect, samples
from agentgym.rollouts.episode import EpisodeSettings
from agentgym.rollouts.players import token_players
from agentgym.rollouts.pools import EnvPool
from agentgym.types import Completion, Item
from envs.env import EnvSpec, StepResult

# rewards 0, 0.25, 0.5, 0.75 and 1, equally likely: mean 0.5, variance (0 + 1 + 4 + 9 + 16) / 16 / 5
# - 0.25 = 0.125
LEVELS = 5
MEAN, VARIANCE = 0.5, 0.125
BATCH, NUM_BATCHES, CONCURRENCY = 24, 20, 8
# four standard errors of the mean over all batches: 0.065
BOUND = 4 * math.sqrt(VARIANCE / (BATCH * NUM_BATCHES))


def level_of(step, item_id):
    """What the policy draws for this item at this step: uniform on 0 .. LEVELS - 1."""
    return int.from_bytes(hashlib.sha256(f"{step} {item_id}".encode()).digest()[:8]) % LEVELS


def reward_of(item, level):
    """The outcome is the task's and the action's doing."""
    return ((item.task_id + level) % LEVELS) / (LEVELS - 1)


class Gambler:
    """A policy that names the level it drew, and says the same in every turn."""

    def __init__(self, renderer):
        self.renderer = renderer

    async def generate(self, prompt_ids, sampling):
        await asyncio.sleep(0.001)
        ids = tuple(
            self.renderer.action_ids(str(level_of(sampling.key.step, sampling.key.item_id)))
        )
        return Completion(ids, (-1.0,) * len(ids), "stop", 0)

    async def publish(self, delivery): ...


class House:
    """Two turns; the reward comes with the second.
    Better episodes take longer, and where asked for, the best break once.
    """

    ended: list[int]  # task ids, in the order in which their episodes ended
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
        if self.turn == 2:
            self.ended.append(self.item.task_id)
        return StepResult(
            "you see a red ball", reward if self.turn == 2 else 0.0, terminated=self.turn == 2
        )

    def render(self):
        return "text/plain", b""

    def expert(self):
        raise NotImplementedError

    def close(self): ...


@pytest.mark.parametrize("breaks", [False, True])
def test_latency_and_faults_that_grow_with_reward_leave_the_mean_of_batches_unbiased(
    tokenizer, serving, breaks
):
    renderer = ChatRenderer(tokenizer)
    house = type("Haunted", (House,), {"ended": [], "broken": set(), "breaks": breaks})
    spec = EnvSpec("house", "", house, {}, (), blocking=True)
    items = ItemStream([Item("house", task) for task in range(BATCH * NUM_BATCHES)], seed=5)
    batches, first_to_finish = [], []

    async def main(endpoint):
        async with EnvPool([endpoint], request_timeout_s=30) as pool:
            for step in range(1, NUM_BATCHES + 1):
                house.ended.clear()
                trajectories = await collect(
                    samples(items.next(BATCH), 1),
                    pool=pool,
                    player_of=token_players(Gambler(renderer), renderer),
                    settings=EpisodeSettings(
                        seed=0,
                        step=step,
                        max_turns=2,
                        temperature=1.0,
                        max_new_tokens=6,
                        context_tokens=256,
                    ),
                    concurrency=CONCURRENCY,  # a third of the batch: every slot is refilled
                    episode_timeout_s=60,
                    max_attempts=3,
                    max_env_error_frac=0.0,
                )
                batches.append(trajectories)
                by_task = {trajectory.item.task_id: trajectory for trajectory in trajectories}
                first_to_finish.append([by_task[task] for task in house.ended[: BATCH // 3]])

    with serving(spec) as (endpoint, _):
        asyncio.run(main(endpoint))

    for step, batch in enumerate(batches, start=1):
        for each in batch:  # nobody got another's reward on the way
            assert each.reward == reward_of(each.item, level_of(step, each.item.item_id))
    assert sum(each.num_attempts == 2 for batch in batches for each in batch) == len(house.broken)
    assert bool(house.broken) == breaks
    assert abs(mean_reward(batches) - MEAN) < BOUND
    # negative control: of the same episodes, the third of each batch that was ready first
    assert mean_reward(first_to_finish) < MEAN - BOUND


def mean_reward(batches):
    rewards = [trajectory.reward for batch in batches for trajectory in batch]
    return sum(rewards) / len(rewards)
