"""The built-in engine while its weights change, sleep and wake."""

import asyncio
import time
from dataclasses import replace

import pytest
import torch

from agentgym.models.half import widen_linear_layers
from agentgym.models.model import weights_of
from agentgym.models.transport import InProcess
from agentgym.rollouts.policies.torch import TorchPolicy
from agentgym.types import Sampling
from tests.agentgym.rollouts.policies.asking import key


class Arrived:
    """`Delivery` whose weights have already arrived."""

    def __init__(self, model, version):
        self._model, self.version, self.digest = model, version, ""

    async def weights(self):
        return weights_of(self._model)


async def test_publish_lets_running_actions_end_and_later_ones_see_the_new_weights_alone(
    make_policy, make_model
):
    policy, new = make_policy(num_slots=2), make_policy(seed=1)
    before = await make_policy().generate([5, 6, 7], Sampling(key(), 0.0, 5))
    running = [
        asyncio.create_task(policy.generate([5, 6, 7], Sampling(key(i), 0.0, 5))) for i in range(2)
    ]
    while not policy._active:
        await asyncio.sleep(0)
    publishing = asyncio.create_task(policy.publish(Arrived(make_model(1), 4)))
    while not policy._num_publishing:
        await asyncio.sleep(0)
    assert policy._active
    later = asyncio.create_task(policy.generate([5, 6, 7], Sampling(key(2), 0.0, 5)))
    for completion in await asyncio.gather(*running):
        assert (completion.ids, completion.version) == (before.ids, 0)
    await publishing
    after = await new.generate([5, 6, 7], Sampling(key(), 0.0, 5))
    completion = await later
    assert (completion.ids, completion.version) == (after.ids, 4)
    assert before.ids != after.ids
    # the same episode continues: nothing cached under the old weights may be used
    history = [5, 6, 7, *before.ids, 9]
    continued = await policy.generate(history, Sampling(key(0, turn=1), 0.0, 5))
    fresh = await new.generate(history, Sampling(key(7), 0.0, 5))
    assert continued.ids == fresh.ids
    assert continued.logprobs == pytest.approx(fresh.logprobs, abs=1e-5)


async def test_publish_is_not_kept_waiting_by_an_endless_stream_of_requests(make_policy):
    policy = make_policy(num_slots=2)
    stop = False

    async def stream(number):
        turn = 0
        while not stop:
            turn += 1
            await policy.generate([5, 6, 7], Sampling(key(number, turn), 1.0, 3))

    streams = [asyncio.create_task(stream(number)) for number in range(6)]
    await asyncio.sleep(0.01)
    await asyncio.wait_for(policy.publish(InProcess(weights_of(policy._model), 1)), 5)
    stop = True
    await asyncio.wait_for(asyncio.gather(*streams), 10)


async def test_an_older_version_is_refused(make_policy, make_model):
    policy, weights = make_policy(), weights_of(make_model())
    await policy.publish(InProcess(weights, 0))
    await policy.publish(InProcess(weights, 5))
    for version in (5, 4, 0):
        with pytest.raises(
            ValueError, match=f"weight versions must grow: engine holds 5, got {version}"
        ):
            await policy.publish(InProcess(weights, version))
    assert policy.version == 5


def test_weights_that_arrive_after_newer_ones_are_refused(make_policy, make_model):
    class Late(InProcess):
        async def weights(self):
            await newer
            return await super().weights()

    async def main():
        nonlocal newer
        policy, weights = make_policy(), weights_of(make_model(1))
        newer = asyncio.create_task(policy.publish(InProcess(weights, 5)))
        with pytest.raises(ValueError, match="engine holds 5, got 4"):
            await policy.publish(Late(weights_of(make_model(2)), 4))
        assert policy.version == 5
        assert all(
            torch.equal(each, weights[name]) for name, each in weights_of(policy._model).items()
        )

    newer = None
    asyncio.run(main())


async def test_weights_that_do_not_fit_leave_the_engine_as_it_was(make_policy, make_model):
    policy, other = make_policy(), weights_of(make_model(1))
    before = {name: tensor.clone() for name, tensor in weights_of(policy._model).items()}
    other["model.norm.weight"] = torch.ones(3)  # the last tensor
    with pytest.raises(ValueError, match=r"model.norm.weight is \(3,\), expected \(64,\)"):
        await policy.publish(InProcess(other, 1))
    assert all(
        torch.equal(tensor, before[name]) for name, tensor in weights_of(policy._model).items()
    )
    assert (await policy.generate([5], Sampling(key(), 1.0, 2))).version == 0


async def test_a_sleeping_engine_holds_no_cache_and_answers_when_it_wakes(make_policy, make_model):
    policy, twin = make_policy(), make_policy()
    asked = Sampling(key(), 1.0, 6)
    expected = await twin.generate([5, 6, 7], asked)
    running = asyncio.create_task(policy.generate([5, 6, 7], asked))
    while not policy._active:
        await asyncio.sleep(0)
    await policy.sleep()  # after the running requests
    assert (await asyncio.wait_for(running, 10)).ids == expected.ids
    assert policy._cache.num_bytes == 0
    late = asyncio.create_task(policy.generate([5, 6, 7], asked))
    for _ in range(20):
        await asyncio.sleep(0)
    assert not late.done()
    await policy.publish(InProcess(weights_of(make_model()), 3))
    await policy.wake()
    assert await asyncio.wait_for(late, 10) == replace(expected, version=3)
    scores = await policy.score([[5, 6, 7]])
    assert torch.equal(scores[0], (await twin.score([[5, 6, 7]]))[0])


async def test_a_sleeping_engine_holds_its_weights_once(make_model, tokenizer, monkeypatch):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    model = make_model().bfloat16()
    widen_linear_layers(model)

    def wide():
        return [each for layer in model.modules() for each in vars(layer).get("_kept") or ()]

    policy = TorchPolicy(model, stop_ids=[tokenizer.eos_token_id], num_slots=1, context_tokens=64)
    before = await policy.generate([5, 6, 7], Sampling(key(), 1.0, 6))
    assert wide()
    await policy.sleep()
    assert not wide()
    await policy.wake()
    assert await policy.generate([5, 6, 7], Sampling(key(), 1.0, 6)) == before
    assert wide()


async def test_an_engine_takes_memory_for_the_episodes_it_plays_between_two_publishes(
    make_policy, make_model
):
    """Size the cache by use: a run of few episodes per step still has hundreds of slots."""

    policy = make_policy()
    slots = []
    for version in (1, 2, 3):
        for turn in range(2):
            asked = [Sampling(key(sample, turn), 1.0, 6) for sample in range(3)]
            await asyncio.gather(*(policy.generate([5, 6, 7], each) for each in asked))
        slots.append(policy._cache.size[0])
        await policy.publish(InProcess(weights_of(make_model()), version))
    assert slots == [3, 3, 3]
    assert len(policy._slots) > 3


async def test_who_waits_for_an_engine_that_is_closed_hears_of_it(make_policy):
    policy = make_policy()
    await policy.sleep()
    waiting = asyncio.create_task(policy.generate([5], Sampling(key(), 1.0, 2)))
    await asyncio.sleep(0)
    await policy.close()
    with pytest.raises(RuntimeError, match="the engine was closed"):
        await asyncio.wait_for(waiting, 10)


async def test_requests_that_wait_for_new_weights_are_in_the_queue_and_not_in_work(make_policy):
    policy = make_policy()

    await policy.sleep()
    before = await policy.usage()
    asked = asyncio.create_task(policy.generate([5, 6], Sampling(key(), 1.0, 2)))
    await asyncio.sleep(0.05)
    used = await policy.usage() - before
    await policy.wake()
    await asked
    used = used
    assert (used.busy_s, max(used.depth_s)) == (0.0, 1)
    assert used.mean_depth > 0.5


async def test_a_publish_waits_for_a_forward_whose_actions_were_cancelled(make_policy):
    policy, running = make_policy(), []
    model = policy._model

    def slow(**inputs):
        running.append(True)
        time.sleep(0.3)
        running.pop()
        return model(**inputs)

    policy._model = slow
    asked = asyncio.create_task(policy.generate([5, 6, 7], Sampling(key(), 0.0, 3)))
    while not running:
        await asyncio.sleep(0.005)
    asked.cancel()
    await asyncio.sleep(0.01)
    await policy._idle()
    assert not running
    await policy.close()
