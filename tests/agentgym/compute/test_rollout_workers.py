"""Tests for workers that are lost while they receive weights."""

import asyncio
from copy import deepcopy
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from agentgym.compute.rollout_workers import RayEngine, WorkersLost
from agentgym.config import OptimizerConfig, RunConfig
from agentgym.learner.learner import LocalLearner
from agentgym.models.checkpoint import new_checkpoint
from agentgym.models.transport import TransportBroken
from agentgym.rollouts.engine import LoopThread, RolloutRequest
from agentgym.rollouts.policies.torch import TorchPolicy
from agentgym.types import EngineMismatch, EngineUsage, Item, Status, Trajectory

ray = pytest.importorskip("ray")


FIRST = (Item("babyai", 1), 0, 1, 5, Status.TERMINATED, 1.0, True, "hello", ())
EPISODE = Trajectory(*FIRST, (), (), ())


class Call:
    """Remote method that returns or raises at once."""

    def __init__(self, answer):
        self._answer = answer

    def remote(self, *arguments):
        async def answered():
            await asyncio.sleep(0)
            return self._answer(*arguments)

        return answered()


class Actor:
    """Rollout worker in this process; `publish` handles a delivery."""

    def __init__(self, publish):
        self.start = Call(lambda plan: ("here", {}))
        self.publish = Call(publish)
        self.score = Call(lambda sequences: [torch.zeros(len(each) - 1) for each in sequences])
        self.usage = Call(lambda: EngineUsage(prompt_tokens=3))
        self.close = Call(lambda: None)
        self.did = []
        self.wake, self.sleep = (Call(partial(self.did.append, each)) for each in ("wake", "sleep"))
        self.play = Call(lambda *episode: (self.did.append("play") or EPISODE, []))


class Learner:
    """Learner that sends nothing and returns the actors' scores."""

    def __init__(self):
        self.sendings = []

    def score(self, batch):
        return torch.zeros(len(batch.input_ids))

    def export(self, version, transport, timeout_s):
        self.version, self.digest = version, str(version)
        return self

    def open(self, num_receivers):
        self.sendings.append(len(num_receivers))
        return [SimpleNamespace(version=self.version) for _ in num_receivers], None


@pytest.fixture
def engine_of(make_model, tokenizer):
    """Return a function that starts an engine from its workers' publish functions, in order."""
    loop, engines = LoopThread(), []

    def start(*publishes, num_workers=1, **settings):
        usual = {"ray": {"max_lost_workers": 2}, "rollout": {"publish_timeout_s": 2.0}}
        cfg = RunConfig.model_validate({**usual, **settings})
        waiting = list(publishes)
        spawn = lambda index: Actor(waiting.pop(0))  # noqa: E731
        plan = SimpleNamespace(cfg=cfg, version=0)
        checkpoint = new_checkpoint(make_model(), tokenizer)
        engines.append(RayEngine(plan, checkpoint, spawn, num_workers, loop))
        engines[-1].start()
        return engines[-1]

    yield start
    for each in engines:
        each.close()
    loop.close()


def taken(delivery):
    return None


def died(delivery):
    raise ray.exceptions.ActorDiedError


def broken(delivery):
    raise ray.exceptions.RayTaskError("publish", "", TransportBroken("on the way"))


@pytest.mark.timeout(60)
def test_workers_that_die_while_they_take_weights_are_counted_and_replaced(engine_of):
    engine = engine_of(died, died, taken)
    assert engine.publish(Learner(), 7) == 0.0
    assert [worker.version for worker in engine.workers] == [7]


@pytest.mark.timeout(60)
def test_no_more_of_them_than_may_be_replaced(engine_of):
    engine = engine_of(died, died, died, died)
    with pytest.raises(WorkersLost, match="3 rollout workers were lost"):
        engine.publish(Learner(), 7)


@pytest.mark.timeout(60)
def test_weights_that_did_not_get_to_all_are_sent_to_each_alone(engine_of):
    answers = [broken, taken]
    learner = Learner()
    engine = engine_of(lambda delivery: answers.pop(0)(delivery), taken, num_workers=2)
    engine.publish(learner, 7)
    assert learner.sendings == [2, 1]
    assert [worker.version for worker in engine.workers] == [7, 7]
    assert engine.usage().prompt_tokens == 6


@pytest.mark.timeout(60)
def test_weights_that_do_not_arrive_alone_either_end_it(engine_of):
    engine = engine_of(broken)
    with pytest.raises(TransportBroken, match="on the way"):
        engine.publish(Learner(), 7)


REQUEST = RolloutRequest(
    [Item("babyai", 1)], num_samples=1, step=1, max_turns=5, temperature=1.0, seed=0
)
SHARED = {"compute_device": "cuda", "compute": "ray"}


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("settings", "did"),
    [
        ({**SHARED, "ray": {"rank_gpus": 0.5, "worker_gpus": 0.5}}, ["wake", "play", "sleep"]),
        ({**SHARED, "ray": {"rank_gpus": 1.0, "worker_gpus": 0.5}}, ["play"]),
        (
            {
                **SHARED,
                "ray": {"rank_gpus": 0.5, "worker_gpus": 0.5},
                "rollout": {"max_staleness": 1},
            },
            ["play"],
        ),
        ({"compute": "ray"}, ["play"]),
    ],
)
def test_workers_that_may_share_a_gpu_with_a_rank_sleep_between_rollouts(engine_of, settings, did):
    engine = engine_of(taken, **settings)
    assert engine.collect(REQUEST) == [EPISODE]
    assert engine.workers[0].actor.did == did


@pytest.mark.timeout(60)
def test_a_worker_lost_before_it_wakes_is_replaced_and_the_episode_is_played(engine_of):
    engine = engine_of(
        taken, taken, **SHARED, ray={"rank_gpus": 0.5, "worker_gpus": 0.5, "max_lost_workers": 1}
    )
    engine.workers[0].actor.wake = Call(died)
    engine.workers[0].actor.wake.remote = lambda: Call(died).remote(None)
    assert engine.collect(REQUEST) == [EPISODE]
    assert engine.workers[0].actor.did == ["play", "sleep"]


@pytest.mark.timeout(60)
def test_in_bfloat16_noise_passes_and_the_worker_that_missed_an_update_is_named(
    engine_of, make_model
):
    """Run two workers' engines in bfloat16 and the ranks in float32, as their master weights."""
    model = make_model()
    rollout = {"engine": "vllm", "engine_dtype": "bfloat16"}  # its limit allows for bfloat16 noise
    engine = engine_of(taken, taken, num_workers=2, rollout=rollout)
    first, second = (worker.actor for worker in engine.workers)

    def holds(actor):
        weights = deepcopy(model).bfloat16()
        policy = TorchPolicy(weights, stop_ids=[0], num_slots=1, context_tokens=64)
        told = asyncio.run(policy.score(engine._canary.sequences))
        actor.score = Call(lambda sequences: told)

    class Ranks(Learner):
        def score(self, batch):
            return LocalLearner(model, OptimizerConfig(), total_steps=1).score(batch)

    holds(first)
    holds(second)
    gap = engine.publish(Ranks(), 7)
    assert 1e-4 < gap < engine._canary._limit / 3
    with torch.no_grad():  # one step of Adam at a learning rate of 1e-3
        for each in model.parameters():
            each += 1e-3 * torch.randn_like(each).sign()
    holds(first)
    with pytest.raises(EngineMismatch, match=r"version 8 .* rollout worker 1 .*to the bit"):
        engine.publish(Ranks(), 8)
