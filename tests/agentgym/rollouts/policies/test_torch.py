"""The built-in engine compared with plain Hugging Face, alone and under load."""

import asyncio
import random
import time

import pytest
import torch

from agentgym.models.attention import PackedSequences
from agentgym.models.fidelity import TORCH
from agentgym.rollouts.policies.torch import Distribution, TorchPolicy, uniforms
from agentgym.types import Sampling
from tests.agentgym.rollouts.policies.asking import key, prompts


@torch.no_grad()
def greedy_alone(twin, prompt, count, stop_id):
    """Return greedy tokens and log-probabilities of Hugging Face, without a cache."""
    ids, logprobs = list(prompt), []
    while len(logprobs) < count:
        logp = torch.log_softmax(twin(torch.tensor([ids])).logits[0, -1], -1)
        ids.append(int(logp.argmax()))
        logprobs.append(float(logp.max()))
        if ids[-1] == stop_id:
            break
    return ids[len(prompt) :], logprobs


def test_requests_of_any_length_at_any_time_equal_row_by_row_hugging_face(
    make_policy, model, plain, tokenizer
):
    twin, asked = plain(model), prompts(15)
    policy = make_policy(num_slots=4)  # more requests than slots

    async def one(index):
        for _ in range(index % 5):  # some arrive while others run
            await asyncio.sleep(0)
        return await policy.generate(asked[index], Sampling(key(index), 0.0, 3 + index % 4))

    async def main():
        return await asyncio.gather(*map(one, range(len(asked))))

    for index, completion in enumerate(asyncio.run(main())):
        ids, logprobs = greedy_alone(twin, asked[index], 3 + index % 4, tokenizer.eos_token_id)
        assert list(completion.ids) == ids
        assert completion.logprobs == pytest.approx(logprobs, abs=1e-5)


def test_logged_probabilities_are_those_of_the_distribution_sampled_from(make_policy, model, plain):
    """Divide the logits by the temperature, 0.7: log-probabilities at 1 would differ."""
    twin, asked = plain(model), prompts(6, seed=1)
    policy = make_policy()

    async def main():
        return await asyncio.gather(
            *(policy.generate(prompt, Sampling(key(i), 0.7, 4)) for i, prompt in enumerate(asked))
        )

    for prompt, completion in zip(asked, asyncio.run(main()), strict=True):
        ids = torch.tensor([prompt + list(completion.ids)])
        with torch.no_grad():
            logits = twin(ids).logits[0, len(prompt) - 1 : -1]
        scores = [
            torch.log_softmax(logits / temperature, -1)
            .gather(1, ids[0, len(prompt) :, None])[:, 0]
            .tolist()
            for temperature in (0.7, 1.0)
        ]
        assert completion.logprobs == pytest.approx(scores[0], abs=1e-5)
        assert completion.logprobs != pytest.approx(scores[1], abs=1e-3)


async def test_a_turn_on_cached_keys_equals_a_fresh_prompt(make_policy):
    policy, fed = make_policy(num_slots=2), []
    step = policy._model.forward
    policy._model.forward = lambda **call: fed.append(call["input_ids"].shape[1]) or step(**call)

    ids = prompts(1, seed=2)[0]
    for turn in range(3):
        cached = await policy.generate(ids, Sampling(key(turn=turn), 1.0, 4))
        # the last sampled token and three of the observation
        assert fed[0] == (len(ids) if turn == 0 else 4)
        fresh = await make_policy().generate(ids, Sampling(key(turn=turn), 1.0, 4))
        assert cached.ids == fresh.ids
        assert cached.logprobs == pytest.approx(fresh.logprobs, abs=1e-5)
        ids = [*ids, *cached.ids, 9, 8, 7]
        fed.clear()


def test_prompts_that_begin_alike_are_computed_once_and_answered_alike(
    make_model, tokenizer, monkeypatch
):
    """Share computation among two items, each played four times, with common instructions."""
    draw = random.Random(3)
    opening = [draw.randrange(4, 250) for _ in range(24)]
    goals = [opening + [draw.randrange(4, 250) for _ in range(20)] for _ in range(2)]
    asked = [[*goal, 10 + sample] for goal in goals for sample in range(4)]
    fed, forward = [], TorchPolicy._forward

    def counted(policy, active, tokens, cached):
        fed.append(sum(map(len, tokens)))
        return forward(policy, active, tokens, cached)

    monkeypatch.setattr(TorchPolicy, "_forward", counted)
    answers = {}
    for share in (False, True):
        fed.clear()
        policy = TorchPolicy(
            make_model(0),
            stop_ids=[tokenizer.eos_token_id],
            num_slots=6,  # fewer than requests
            context_tokens=64,
            share_prefixes=share,
        )

        async def play(policy=policy):
            return await asyncio.gather(
                *(
                    policy.generate(prompt, Sampling(key(number), 1.0, 4))
                    for number, prompt in enumerate(asked)
                )
            )

        answers[share] = asyncio.run(play()), sum(fed)
        asyncio.run(policy.close())
    (alone, num_alone), (shared, num_shared) = answers[False], answers[True]
    assert [each.ids for each in shared] == [each.ids for each in alone]
    for ours, theirs in zip(shared, alone, strict=True):
        assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-4)
    # computed once: the opening, each goal, and the last token of each prompt
    assert num_alone - num_shared == 8 * 45 - (24 + 2 * 20 + 8)


async def test_a_changed_history_is_not_answered_from_the_cache(make_policy):
    policy = make_policy()

    await policy.generate([5, 6, 7, 8], Sampling(key(), 0.0, 2))
    changed = await policy.generate([5, 9, 7, 8, 10, 11, 12], Sampling(key(turn=1), 0.0, 3))
    fresh = await make_policy().generate([5, 9, 7, 8, 10, 11, 12], Sampling(key(turn=1), 0.0, 3))
    assert changed.ids == fresh.ids
    assert changed.logprobs == pytest.approx(fresh.logprobs, abs=1e-5)


async def test_what_is_sampled_depends_on_the_key_alone(make_policy):
    prompt, others = [5, 6, 7, 8, 9], prompts(9, seed=3)

    async def ask(policy, order, alone=False):
        requests = {
            "me": (prompt, key(0)),
            **({} if alone else {i: (other, key(i + 1)) for i, other in enumerate(others)}),
        }
        tasks = {
            name: asyncio.create_task(
                policy.generate(requests[name][0], Sampling(requests[name][1], 1.0, 6))
            )
            for name in order
        }
        return await tasks["me"], [await task for task in tasks.values()]

    alone, _ = await ask(make_policy(), ["me"], alone=True)
    first, _ = await ask(make_policy(num_slots=3), ["me", *range(9)])
    last, _ = await ask(make_policy(num_slots=5), [*reversed(range(9)), "me"])
    assert alone.ids == first.ids == last.ids
    assert alone.logprobs == pytest.approx(first.logprobs, abs=1e-5)
    policy = make_policy()
    draws = {
        (await policy.generate(prompt, Sampling(key(0, turn), 1.0, 6))).ids for turn in range(5)
    }
    assert len(draws) > 1  # another key draws differently


async def test_two_requests_with_one_key_and_one_prompt_are_both_answered(make_policy):
    policy = make_policy(num_slots=2)
    completions = await asyncio.wait_for(
        asyncio.gather(*(policy.generate([5, 6], Sampling(key(), 1.0, 4)) for _ in range(5))), 10
    )
    assert len({completion.ids for completion in completions}) == 1


async def test_an_action_ends_with_the_stop_token_or_at_its_length(make_policy):
    policy = make_policy()
    full = await policy.generate([5, 6, 7], Sampling(key(), 1.0, 6))
    policy._stop_ids = [full.ids[2]]
    stopped = await policy.generate([5, 6, 7], Sampling(key(), 1.0, 6))
    first = full.ids.index(full.ids[2])
    assert stopped.ids == full.ids[: first + 1]
    assert (full.stop_reason, stopped.stop_reason) == ("length", "stop")
    assert len(full.ids) == 6
    policy._stop_ids = [full.ids[5]]
    # also at the very last token
    assert (await policy.generate([5, 6, 7], Sampling(key(), 1.0, 6))).stop_reason == "stop"


async def test_an_action_ends_with_any_of_several_stop_tokens(make_policy):
    policy = make_policy()
    policy._stop_ids = []
    full = (await policy.generate([5, 6, 7], Sampling(key(), 1.0, 12))).ids
    for stops in ([full[3], full[8]], [full[8], full[3]]):  # the first in the text counts
        policy._stop_ids = stops
        said = await policy.generate([5, 6, 7], Sampling(key(), 1.0, 12))
        first = min(map(full.index, stops))
        assert (said.ids, said.stop_reason) == (full[: first + 1], "stop")


async def test_what_cannot_fit_the_context_is_refused(make_policy):
    policy = make_policy(context_tokens=16)
    with pytest.raises(
        ValueError, match=r"prompt of 13 tokens \+ max_new_tokens 4 exceeds the context of 16"
    ):
        await policy.generate([5] * 13, Sampling(key(), 1.0, 4))
    assert len((await policy.generate([5] * 12, Sampling(key(), 0.0, 4))).ids) <= 4
    with pytest.raises(ValueError, match="nothing to sample from 0 prompt tokens"):
        await policy.generate([], Sampling(key(), 1.0, 4))


async def test_few_requests_wait_for_those_that_run_and_as_many_join_them(make_policy):
    policy, sizes = make_policy(num_slots=8), []
    usual = policy._step

    async def counted():
        sizes.append(len(policy._active))
        await usual()

    policy._step = counted

    async def ask(number, tokens):
        await policy.generate([5, 6, 7], Sampling(key(number), 0.0, tokens))

    policy._stop_ids = []  # actions of a known length
    first = [asyncio.create_task(ask(number, 6)) for number in range(3)]
    while len(sizes) < 2:
        await asyncio.sleep(0)
    late = [asyncio.create_task(ask(3, 2))]
    while len(sizes) < 4:
        await asyncio.sleep(0)
    late += [asyncio.create_task(ask(number, 2)) for number in (4, 5)]
    await asyncio.wait_for(asyncio.gather(*first, *late), 10)
    sizes = sizes
    assert sizes[:4] == [3, 3, 3, 3]  # one more is not worth a separate forward
    assert 6 in sizes  # three more are
    assert sum(sizes) == 3 * 6 + 3 * 2


def test_an_engine_failure_reaches_everyone_who_waits_and_the_engine_recovers(make_policy, caplog):
    async def main():
        policy = make_policy(num_slots=2)
        expected = await make_policy().generate([5, 6, 7], Sampling(key(), 0.0, 4))
        forward, calls = policy._model.forward, []

        def failing(**call):
            calls.append(1)
            if len(calls) == 2:
                raise MemoryError("no memory left")
            return forward(**call)

        policy._model.forward = failing
        asked = [policy.generate([5, 6, 7], Sampling(key(i), 0.0, 4)) for i in range(5)]
        answers = await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), 10)
        assert [str(answer) for answer in answers] == [
            "engine failed: MemoryError: no memory left"
        ] * 5
        again = await asyncio.wait_for(
            asyncio.gather(
                *(policy.generate([5, 6, 7], Sampling(key(i), 0.0, 4)) for i in range(5))
            ),
            10,
        )
        assert {completion.ids for completion in again} == {expected.ids}

    asyncio.run(main())
    assert "engine failed with 2 requests running and 3 waiting" in caplog.text
    assert "never retrieved" not in caplog.text


async def test_cancelled_requests_free_their_slots(make_policy):
    policy = make_policy(num_slots=2)
    running = [
        asyncio.create_task(policy.generate([5, 6, 7], Sampling(key(i), 1.0, 40))) for i in range(5)
    ]
    while not policy._active:
        await asyncio.sleep(0)
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    assert not policy._active
    assert not policy._waiting
    assert not any(slot.busy for slot in policy._slots)
    completion = await asyncio.wait_for(policy.generate([5, 6, 7], Sampling(key(0), 0.0, 4)), 10)
    assert completion.ids == (await make_policy().generate([5, 6, 7], Sampling(key(9), 0.0, 4))).ids
    await asyncio.sleep(0)
    assert policy._pump.done()


def test_scores_are_log_probabilities_of_each_next_token(make_policy, plain, model):
    rows = [[5, 6, 7, 8], [9, 10], [11, 12, 13]]
    twin = plain(model)
    for row, scores in zip(rows, asyncio.run(make_policy().score(rows)), strict=True):
        with torch.no_grad():
            logp = torch.log_softmax(twin(torch.tensor([row])).logits[0], -1)
        assert scores.tolist() == pytest.approx(
            [float(logp[i, token]) for i, token in enumerate(row[1:])], abs=1e-5
        )


@pytest.mark.parametrize("dtype", list(TORCH), ids=str)
def test_what_the_engine_drew_in_a_crowd_is_its_draw_in_any_other_forward(
    make_model, tokenizer, dtype
):
    """Reject the draws of another sample."""
    model, asked, count = make_model().to(dtype), prompts(40), 12
    policy = TorchPolicy(model, stop_ids=[tokenizer.eos_token_id], num_slots=16, context_tokens=64)

    async def crowd():
        asks = [Sampling(key(index), float(index % 2), count) for index in range(len(asked))]
        return await asyncio.gather(
            *(policy.generate(prompt, ask) for prompt, ask in zip(asked, asks, strict=True))
        )

    foreign = total = 0
    for index, (prompt, completion) in enumerate(zip(asked, asyncio.run(crowd()), strict=True)):
        ids, num = torch.tensor([*prompt, *completion.ids]), len(completion.ids)
        with torch.inference_mode():
            layout = PackedSequences(torch.tensor([0, len(ids)]))
            logits = (
                model(
                    input_ids=ids[None],
                    position_ids=layout.position[None],
                    use_cache=False,
                    layout=layout,
                )
                .logits[0]
                .float()
            )
        for whose in (index, index + 1):
            own = torch.tensor(uniforms(key(whose), count)[:num])
            temperature = torch.full((num,), float(index % 2))
            outside, below = Distribution(logits[len(prompt) - 1 : -1], temperature).distance(
                own, ids[len(prompt) :]
            )
            off = (outside > TORCH[dtype].mass) | (below > TORCH[dtype].nats)
            if whose == index:
                assert not off.any(), (index, outside.max(), below.max())
            elif index % 2:
                foreign, total = foreign + int(off.any()), total + 1
    assert foreign > 0.9 * total


async def test_its_usage_is_that_of_its_slots_its_queue_and_what_it_found_cached(make_policy):
    policy = make_policy(num_slots=2)
    first = [5, 6, 7, 8, 9, 10]

    opened = await policy.usage()
    said = await policy.generate(first, Sampling(key(0), 1.0, 4))
    # everything sampled is cached except the last token, which was never an input
    await policy.generate([*first, *said.ids, 11, 12], Sampling(key(0, 1), 1.0, 4))
    alone = await policy.usage() - opened
    crowd = [policy.generate([5, 6, each], Sampling(key(each), 1.0, 3)) for each in range(20, 26)]
    await asyncio.gather(*crowd)
    began = time.monotonic()
    worked = await policy.usage()
    await asyncio.sleep(0.05)
    idle = await policy.usage() - worked
    said, alone, crowded, idle, idle_s = (
        said,
        alone,
        worked - opened - alone,
        idle,
        time.monotonic() - began,
    )
    num_said = len(said.ids)
    assert (alone.prompt_tokens, alone.cached_tokens) == (6 + 6 + num_said + 2, 6 + num_said - 1)
    assert max(alone.depth_s) == 0
    assert 0 < alone.busy_s <= alone.total_s
    assert (crowded.prompt_tokens, crowded.cached_tokens) == (18, 0)
    assert max(crowded.depth_s) == 4  # six requests, two with a slot
    assert 0 < crowded.mean_depth < 4
    assert idle.busy_frac < 0.05
    assert 0.05 <= idle.total_s <= idle_s


async def test_the_loop_goes_on_while_a_long_forward_runs(make_policy):
    """Receive an environment's response meanwhile; its time must not include the engine's."""

    policy, waits = make_policy(), []
    model = policy._model

    def slow(**inputs):
        time.sleep(0.5)
        return model(**inputs)

    policy._model, policy._stop_ids = slow, []
    asked = asyncio.create_task(policy.generate([5, 6, 7], Sampling(key(), 0.0, 3)))
    while not asked.done():
        began = time.perf_counter()
        await asyncio.sleep(0.005)
        waits.append(time.perf_counter() - began)
    await policy.close()
    ids, waits = (await asked).ids, waits
    assert len(ids) == 3
    assert len(waits) > 20
    assert max(waits) < 0.5  # no forward blocked the loop
