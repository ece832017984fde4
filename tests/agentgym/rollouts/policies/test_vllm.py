"""vLLM as an engine: sampling, updates of weights, and failed updates."""

import asyncio
import threading
from dataclasses import replace

import psutil
import pytest
import torch

from agentgym.config import LoraConfig, OptimizerConfig, VllmConfig
from agentgym.learner.start import LearnerPlan
from agentgym.models.adapter import Adapter, chosen_modules
from agentgym.models.architecture import ADAPTER
from agentgym.models.checkpoint import new_checkpoint
from agentgym.models.fidelity import VLLM
from agentgym.models.model import weights_of
from agentgym.models.tensorfiles import Snapshot, TensorFile
from agentgym.models.transport import InProcess
from agentgym.rollouts.engine import Canary
from agentgym.rollouts.policies.engine_settings import engine_arguments, settings_of
from agentgym.rollouts.policies.torch import Distribution
from agentgym.types import EngineMismatch
from tests.agentgym.rollouts.policies.running import (
    NATS,
    PROMPT,
    Running,
    move,
    of_run,
    of_vllm,
    sampling,
    scores,
)

pytestmark = [pytest.mark.vllm, pytest.mark.integration]


@pytest.fixture(scope="module")
def running(make_model, tokenizer):
    opened = Running(make_model(0), tokenizer, of_run())
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def adapted(make_model, tokenizer, stored):
    """An engine with a trained, stored adapter: (engine, its processes, learner that resumes)."""
    model, others = make_model(0), of_vllm(psutil.Process())
    modules = chosen_modules(model, LoraConfig(rank=4))
    adapter = Adapter(stored(model), 4, 8, modules, alone=True)
    architecture, draw = model.config.to_json_string(), torch.Generator().manual_seed(1)
    matrices = {
        name: 0.1 * torch.randn(each.shape, generator=draw)
        for name, each in adapter.shapes(architecture).items()
    }
    own = stored(Snapshot({ADAPTER: TensorFile.of(matrices)}))[ADAPTER]
    adapter = replace(adapter, stored=own)
    plan = LearnerPlan(architecture, adapter.policy, OptimizerConfig(), 10, adapter=adapter)
    opened = Running(model, tokenizer, of_run(), weights=adapter.policy, adapter=adapter)
    yield opened, [each for each in of_vllm(psutil.Process()) if each not in others], plan.build()
    opened.close()


@pytest.fixture
def publish(running):
    """Return a function that publishes a model as the next version."""

    def next_one(model):
        running.run(
            running.policy.publish(InProcess(weights_of(model), running.policy.version + 1))
        )

    return next_one


@torch.no_grad()
def ours(twin, prompt, completion, temperature):
    """Return plain Hugging Face's log-probabilities of sampled tokens at that temperature."""
    ids = torch.tensor([[*prompt, *completion.ids]])
    logits = twin(ids).logits[0, len(prompt) - 1 : -1].float()
    heat = torch.full((len(completion.ids),), temperature)
    return Distribution(logits, heat).logprobs(torch.tensor(completion.ids))


def test_probabilities_are_those_of_the_distribution_sampled_from_in_one_mixed_batch(
    running, publish, make_model, plain
):
    publish(make_model(1))
    twin = plain(make_model(1))
    heats = [(1.0, 0.7, 0.0)[each % 3] for each in range(30)]
    asked = [([*PROMPT, each], sampling(each, heat)) for each, heat in enumerate(heats)]
    for (prompt, how), said in zip(asked, running.generate(*asked), strict=True):
        expected = ours(twin, prompt, said, how.temperature)
        assert torch.tensor(said.logprobs) == pytest.approx(expected, abs=NATS)


def test_a_turn_ends_at_any_of_several_stop_tokens(running, tokenizer, monkeypatch):
    asked = [([*PROMPT, each % 200], sampling(each, tokens=60)) for each in range(96)]
    stops = {tokenizer.eos_token_id, 7, 11}
    monkeypatch.setattr(running.policy, "_stop_ids", tuple(stops))
    said = running.generate(*asked)
    assert {each.ids[-1] for each in said if each.stop_reason == "stop"} == stops
    for each in said:
        assert not stops & set(each.ids[:-1])
        assert (each.ids[-1] in stops) == (each.stop_reason == "stop")


def test_a_turn_ends_at_the_stop_token_or_at_its_length(running, tokenizer):
    asked = [([*PROMPT, each % 200], sampling(each, tokens=60)) for each in range(96)]
    said, stop = running.generate(*asked), tokenizer.eos_token_id
    assert {each.stop_reason for each in said} == {"stop", "length"}
    for each in said:
        ended = each.ids[-1] == stop
        assert each.stop_reason == ("stop" if ended else "length")
        assert ended or len(each.ids) == 60
        assert stop not in each.ids[:-1]
        assert len(each.logprobs) == len(each.ids)


def test_a_key_draws_the_same_tokens_again_and_another_key_others(running):
    first, again, other = (
        running.generate((PROMPT, sampling(sample)))[0].ids for sample in (3, 3, 4)
    )
    assert first == again != other
    (bare,) = running.generate((PROMPT, sampling(3)._replace(logprobs=False)))
    assert (bare.ids, bare.logprobs) == (first, ())


def test_scores_are_the_learners_and_a_forgotten_publish_is_found(
    running, publish, make_model, tokenizer
):
    canary = Canary(tokenizer, VLLM[torch.float32].canary)
    for seed in (2, 3, 4):
        model = make_model(seed)
        publish(model)
        told = running.run(running.policy.score(canary.sequences))
        expected = scores(model, canary.sequences, tokenizer)
        assert canary.compare(expected, told, seed).gap < NATS
    moved = make_model(4)
    with torch.no_grad():  # one step of Adam at a learning rate of 1e-3, which never arrives
        for each in moved.parameters():
            each += 1e-3 * torch.randn_like(each).sign()
    with pytest.raises(EngineMismatch, match=r"version 5 did not reach .* \(limit 0.0015\)"):
        canary.compare(scores(moved, canary.sequences, tokenizer), told, 5)


def test_weights_change_between_turns_and_every_turn_is_of_one_version(
    running, publish, make_model, plain
):
    publish(make_model(4))
    policy, before = running.policy, running.policy.version
    twins = {before: plain(make_model(4)), before + 1: plain(make_model(5))}
    asked = [([*PROMPT, each], sampling(each, tokens=40)) for each in range(32)]

    async def both():
        early = [asyncio.ensure_future(policy.generate(*each)) for each in asked[:16]]
        await asyncio.sleep(0.01)
        change = asyncio.ensure_future(
            policy.publish(InProcess(weights_of(make_model(5)), before + 1))
        )
        await asyncio.sleep(0)
        late = [asyncio.ensure_future(policy.generate(*each)) for each in asked[16:]]
        await change
        last = policy.generate(*asked[0])  # its prompt was cached under the old weights
        return await asyncio.gather(*early, *late, last)

    said = running.run(both())
    assert {each.version for each in said[:16]} == {before}
    assert said[-1].version == before + 1
    for (prompt, _), each in zip([*asked, asked[0]], said, strict=True):
        assert torch.tensor(each.logprobs) == pytest.approx(
            ours(twins[each.version], prompt, each, 1.0), abs=NATS
        )


def test_who_sleeps_generates_nothing_until_it_wakes_or_has_new_weights(
    running, publish, make_model
):
    policy = running.policy
    for wake in (policy.wake, None):
        running.run(policy.sleep())
        with pytest.raises(TimeoutError):
            running.run(asyncio.wait_for(policy.generate(PROMPT, sampling(1)), 0.3))
        if wake:
            running.run(wake())
        else:
            publish(make_model(0))
        assert running.generate((PROMPT, sampling(1)))[0].version == policy.version


def test_its_usage_is_that_of_its_slots_its_queue_and_what_it_found_cached(
    running, publish, make_model
):
    publish(make_model(0))  # empties the cache
    before, prompt = running.run(running.policy.usage()), list(range(5, 205))
    for _ in range(2):
        running.generate((prompt, sampling(1)))
    twice = running.run(running.policy.usage()) - before
    assert twice.prompt_tokens == 400
    assert 100 < twice.cached_tokens < 200  # whole blocks of the second request only
    assert max(twice.depth_s) == 0
    assert 0 < twice.busy_s < twice.total_s
    running.generate(*(([*PROMPT, each], sampling(each)) for each in range(24)))
    crowded = running.run(running.policy.usage()) - before - twice
    assert crowded.prompt_tokens == 24 * 36
    assert max(crowded.depth_s) == 8  # 16 of 24 requests have a slot
    running.run(running.policy.sleep())
    before = running.run(running.policy.usage())
    with pytest.raises(TimeoutError):
        running.run(asyncio.wait_for(running.policy.generate(PROMPT, sampling(1)), 0.3))
    asleep = running.run(running.policy.usage()) - before
    assert (asleep.busy_s, max(asleep.depth_s)) == (0.0, 1)
    running.run(running.policy.wake())


def test_weights_that_do_not_fit_or_are_not_new_change_nothing(running, make_model):
    policy, before = running.policy, running.generate((PROMPT, sampling(1)))
    weights = weights_of(make_model(6))
    with pytest.raises(ValueError, match="versions must grow"):
        running.run(policy.publish(InProcess(weights, policy.version)))
    name = "model.norm.weight"
    for odd in (
        {name: weights[name][:-1]},
        {name: weights[name].bfloat16()},
        {"more": torch.ones(1)},
    ):
        with pytest.raises(
            ValueError, match=r"weights version \d+ do not fit: .* (expected|on one side only)"
        ):
            running.run(policy.publish(InProcess({**weights, **odd}, policy.version + 1)))
    assert running.generate((PROMPT, sampling(1))) == before


def test_several_processes_of_an_engine_are_its_own_and_no_actors(
    tmp_path, monkeypatch, make_model, tokenizer
):
    # vLLM checks this when it chooses a backend
    monkeypatch.setattr("ray.is_initialized", lambda: True)
    monkeypatch.setattr("ray.util.get_current_placement_group", lambda: "of a worker")
    from vllm.config import ParallelConfig

    assert ParallelConfig(tensor_parallel_size=2).distributed_executor_backend == "ray"
    for size, executor in ((1, "uni"), (2, "mp")):
        cfg = of_run().model_copy(update={"vllm": VllmConfig(tensor_parallel_size=size)})
        settings = settings_of(cfg, new_checkpoint(make_model(0), tokenizer), 4)
        asked = engine_arguments(settings, tmp_path).distributed_executor_backend
        chosen = ParallelConfig(tensor_parallel_size=size, distributed_executor_backend=asked)
        assert chosen.distributed_executor_backend == executor


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_an_engine_of_two_processes_takes_new_weights_and_scores_as_the_learner(
    make_model, tokenizer
):
    cfg = of_run().model_copy(update={"vllm": VllmConfig(tensor_parallel_size=2)})
    canary = Canary(tokenizer, VLLM[torch.float32].canary)
    opened = Running(make_model(0), tokenizer, cfg)
    try:
        for version in (0, 1):
            if version:
                weights = InProcess(weights_of(make_model(version)), version)
                opened.run(opened.policy.publish(weights))
            told = opened.run(opened.policy.score(canary.sequences))
            expected = scores(make_model(version), canary.sequences, tokenizer)
            assert canary.compare(expected, told, version).gap < NATS
        (said,) = opened.generate((PROMPT, sampling(1, tokens=4)))
        assert said.version == 1
        assert 1 <= len(said.ids) <= 4
    finally:
        opened.close()


def test_its_sockets_lie_in_its_own_folder_and_go_with_it(running):
    assert any(each.is_socket() for each in running.policy._folder.iterdir())


def test_what_cannot_fit_is_refused(running):
    for prompt, how in (([], sampling(0)), (PROMPT, sampling(0, tokens=0))):
        with pytest.raises(ValueError, match="nothing to sample from"):
            running.generate((prompt, how))
    with pytest.raises(ValueError, match="exceeds the context of 256"):
        running.generate((PROMPT, sampling(0, tokens=230)))


@pytest.mark.slow
def test_bfloat16_noise_passes_the_canary_and_one_missed_update_does_not(make_model, tokenizer):
    canary, learner = Canary(tokenizer, VLLM[torch.bfloat16].canary), make_model(0)
    opened = Running(make_model(0), tokenizer, of_run(engine_dtype="bfloat16"))

    def compare(version, before=None):
        told = opened.run(opened.policy.score(canary.sequences))
        ours = scores(learner, canary.sequences, tokenizer)
        return canary.compare(ours, told, version, before=before)

    try:
        seen = compare(0)
        assert 1e-4 < seen.gap < VLLM[torch.bfloat16].canary / 3
        with torch.no_grad():  # one step of Adam at a learning rate of 1e-3
            for each in learner.parameters():
                each += 1e-3 * torch.randn_like(each).sign()
        assert compare(1).gap < VLLM[torch.bfloat16].canary  # within the noise of real models
        with pytest.raises(EngineMismatch, match="as before to the bit, the learner by up to"):
            compare(1, seen)
        opened.run(opened.policy.publish(InProcess(weights_of(learner), 1)))
        assert compare(1, seen).gap < VLLM[torch.bfloat16].canary / 3
    finally:
        opened.close()


def test_an_adapter_is_published_alone_and_takes_the_place_of_the_one_before(
    adapted, make_model, tokenizer
):
    opened, _, learner = adapted
    policy, canary, seen = opened.policy, Canary(tokenizer, VLLM[torch.float32].canary), None
    base = scores(make_model(0), canary.sequences, tokenizer)
    for version in (0, 1, 2):
        if version:
            move(learner)
            with pytest.raises(EngineMismatch, match="version 9 did not reach"):  # nor published
                canary.compare(canary.score(learner), list(seen.theirs.split(1)), 9)
            opened.run(policy.publish(InProcess(learner.weights(), version)))
        told = opened.run(policy.score(canary.sequences))
        seen = canary.compare(canary.score(learner), told, version, before=seen)
        assert seen.gap < NATS
        assert float((base - seen.theirs).abs().max()) > 0.1
        (said,) = opened.generate((PROMPT, sampling(1)))
        again = opened.run(policy.score([[*PROMPT, *said.ids]]))[0][len(PROMPT) - 1 :]
        assert torch.tensor(said.logprobs) == pytest.approx(again, abs=NATS)
        assert said.version == version
        assert list(opened.run(policy._engine.list_loras())) == [version + 1]
    # every process has loaded the file, so it is deleted
    assert not list(policy._folder.rglob("*.safetensors"))
    matrices = learner.weights()
    sizes = [
        sum(each.nbytes for each in held.values()) for held in (matrices, weights_of(make_model(0)))
    ]
    assert sizes[0] < 0.4 * sizes[1]
    for odd in (weights_of(make_model(0)), {**matrices, "more": torch.ones(1)}):
        with pytest.raises(ValueError, match=r"version 3 do not fit: .* on one side only"):
            opened.run(policy.publish(InProcess(odd, 3)))
    with pytest.raises(ValueError, match="versions must grow"):
        opened.run(policy.publish(InProcess(matrices, 2)))
    assert torch.equal(torch.cat(opened.run(policy.score(canary.sequences))), seen.theirs)


def test_a_worker_that_dies_is_heard_of_and_nothing_is_left(adapted):
    opened, processes, _ = adapted
    folder = opened.policy._folder
    engine, worker = sorted(processes, key=lambda each: len(each.parents()))
    assert worker.ppid() == engine.pid
    asked = [([*PROMPT, each], sampling(each, tokens=200)) for each in range(16)]
    threading.Timer(0.2, worker.kill).start()
    with pytest.raises(RuntimeError, match="engine failed"):
        opened.generate(*asked * 20)
    opened.run(opened.policy.close())
    assert not folder.exists()
    assert not psutil.wait_procs(processes, 30)[1]
