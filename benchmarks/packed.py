"""Packed against padded sequences on episodes of realistic length: `python benchmarks/packed.py`.

An expert plays tasks of SciWorld and of WebArena; the token counts of its episodes, under a
tokenizer trained on them, are the distribution. Padded, a batch is a rectangle: all rows are as
long as its longest. For comparison, each micro-batch is also padded to its own longest.

A network then runs forward and backward passes of the same micro-batches packed, as the learner
does, and of the rectangle's rows with Hugging Face's own attention, in turns; their losses must
agree. For that all lengths are divided by one number, so that the longest has TIMED_TOKENS. Both
apply the head to action tokens only. `--lengths FILE` uses the distributions of an earlier result.
Writes docs/results/packed.json; fails below the limit.
"""

from __future__ import annotations

import copy
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from harness import ROOT, parser_of, read, write
from torch import Tensor
from torch.nn.functional import pad
from transformers import AutoModelForCausalLM

from agentgym.algorithms.batch import Batch
from agentgym.config import ModelConfig, load_config
from agentgym.data.check import load_data
from agentgym.deploy.environment import environment_servers
from agentgym.models.model import load_weights, new_model, set_threads, weights_of
from agentgym.models.networks import PolicyNet
from agentgym.rollouts.players import ExpertPlayer
from agentgym.training.demonstrations import demonstrate, expert_items, tokenized
from agentgym.training.initial import first_checkpoint

ENVIRONMENTS = ("sciworld", "webarena")
EPISODES = 64
MICRO_BATCH = 16  # sequences of one forward and backward
ROUNDS = 3
CONTEXT = 32_768  # tokens, the most that an episode can have
TIMED_TOKENS = 1_024
LIMIT = 2.0  # tokens computed, padded to packed
VOCABULARY, ACTION_FRAC, AGREEMENT = 512, 0.1, 1e-3
MODEL = ModelConfig(
    hidden_size=128, num_layers=2, num_heads=4, num_kv_heads=2, mlp_size=384, context_tokens=CONTEXT
)


def main() -> int:
    parser = parser_of(__doc__, "packed.json")
    parser.add_argument("--lengths", type=Path, help="an earlier result whose lengths are used")
    chosen = parser.parse_args()
    set_threads()
    known = read(chosen.lengths)["environments"] if chosen.lengths else {}
    results = {}
    for env in ENVIRONMENTS:
        lengths = known[env]["lengths"] if known else played(env)
        results[env] = {**compared(lengths), "lengths": lengths}
        sys.stdout.write(f"{env}: {json.dumps(results[env])}\n")
    sizes = {"context_tokens": CONTEXT, "tokens_of_the_longest_when_timed": TIMED_TOKENS}
    write(chosen.out, {**sizes, "sequences_of_a_micro_batch": MICRO_BATCH, "environments": results})
    return int(any(env_result["tokens_ratio"] < LIMIT for env_result in results.values()))


def played(env: str) -> list[int]:
    """Return the tokens of each episode of an expert on train items."""
    with tempfile.TemporaryDirectory() as folder:
        settings = (
            *(f"env={{name: {env}}}", f"store.path={folder}/store"),
            *(f"warm_start.num_demos={EPISODES}", f"model.context_tokens={CONTEXT}"),
            *("model.vocab_size=8192", "rollout.concurrency=4", "rollout.instructions=true"),
            *("rollout.items_per_step=1", "evaluation.num_items=1", "validation.num_items=1"),
        )
        cfg = load_config(ROOT / "params.yaml", settings)
        samples = [(item, 0) for item in expert_items(cfg, load_data(cfg))]
        with environment_servers(cfg, True) as endpoints:
            episodes, settings = demonstrate(
                cfg, endpoints, samples, lambda *_: ExpertPlayer(), allow_expert=True
            )
    renderer = first_checkpoint(cfg, episodes).renderer
    return [len(tokenized(trajectory, renderer, settings).input_ids) for trajectory in episodes]


def compared(lengths: Sequence[int]) -> dict[str, Any]:
    seconds = timed(shortened(in_order(lengths)))
    median = {name: statistics.median(rounds) for name, rounds in seconds.items()}
    return {
        **counted(lengths),
        "seconds": {name: [round(s, 2) for s in rounds] for name, rounds in seconds.items()},
        "seconds_ratio": round(median["padded"] / median["packed"], 2),
    }


def in_order(lengths: Sequence[int]) -> list[int]:
    """Shuffle the lengths as in a batch, and cut them to the context."""
    cut_lengths = [min(length, CONTEXT) for length in lengths]
    return random.Random(0).sample(cut_lengths, len(cut_lengths))  # noqa: S311


def shortened(lengths: Sequence[int]) -> list[int]:
    return [max(2, length * TIMED_TOKENS // max(lengths)) for length in lengths]


def counted(lengths: Sequence[int]) -> dict[str, Any]:
    """Return the tokens that go through the linear layers, both ways."""
    order = in_order(lengths)
    longest, total = max(order), sum(order)
    by_micro_batch = sum(len(part) * max(part) for part in parts_of(order))
    return {
        "episodes": len(order),
        "tokens_packed": total,
        "tokens_padded": len(order) * longest,
        "tokens_padded_by_micro_batch": by_micro_batch,
        "tokens_ratio": round(len(order) * longest / total, 2),
        "tokens_ratio_by_micro_batch": round(by_micro_batch / total, 2),
    }


def parts_of(lengths: Sequence[int]) -> list[Sequence[int]]:
    return [lengths[first : first + MICRO_BATCH] for first in range(0, len(lengths), MICRO_BATCH)]


def timed(lengths: Sequence[int]) -> dict[str, list[float]]:
    """Return the seconds of each round, by way. Errors: AssertionError if the losses disagree."""
    batches = [batch_of(part, seed) for seed, part in enumerate(parts_of(lengths))]
    model = new_model(MODEL, vocab_size=VOCABULARY, eos_id=1, pad_id=0, seed=0)
    twin = twin_of(model)
    ways: dict[str, Callable[[Batch], float]] = {
        "packed": lambda batch: packed(model, batch),
        "padded": lambda batch: padded(twin, batch, max(lengths)),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(ROUNDS):
        losses: dict[str, list[float]] = {}
        for name, way in ways.items():
            began = time.perf_counter()
            losses[name] = [way(batch) for batch in batches]
            seconds[name].append(time.perf_counter() - began)
        for one, other in zip(losses["packed"], losses["padded"], strict=True):
            assert abs(one - other) <= AGREEMENT * abs(one), (one, other)
    return seconds


def twin_of(model: Any) -> Any:
    """Return a model with the same weights and Hugging Face's standard attention."""
    config = copy.deepcopy(model.config)  # a copy, because from_config sets the attention in it
    way = {"attn_implementation": "sdpa", "dtype": model.dtype}
    twin = AutoModelForCausalLM.from_config(config, **way).eval()
    load_weights(twin, weights_of(model))
    return twin.to(model.device)


def batch_of(
    lengths: Sequence[int],
    seed: int,
    vocabulary: int = VOCABULARY,
    action_frac: float = ACTION_FRAC,
) -> Batch:
    """Random tokens; the first token of a sequence is never an action, the last one always."""
    random_of = torch.Generator().manual_seed(seed)
    starts = torch.cumsum(torch.tensor([0, *lengths]), 0)
    count = int(starts[-1])
    mask = torch.rand(count, generator=random_of) < action_frac
    mask[starts[:-1]], mask[starts[1:] - 1] = False, True
    ids = torch.randint(vocabulary, (count,), generator=random_of)
    none = torch.zeros(count)
    groups = torch.arange(len(lengths))
    return Batch(ids, starts, mask, none, none, groups, groups < 0, 1.0)


def packed(model: Any, batch: Batch) -> float:
    return learned(model, PolicyNet(model)(batch)[0])


def padded(model: Any, batch: Batch, width: int) -> float:
    """Return the loss of one forward and backward pass over rows of `width` tokens."""
    lengths = batch.starts.diff().tolist()

    def filled(values: Tensor) -> Tensor:
        rows = (pad(row, (0, width - len(row))) for row in values.split(lengths))
        return torch.stack(list(rows))

    ids, acted = filled(batch.input_ids), filled(batch.action_mask)
    attention_mask = filled(torch.ones_like(batch.input_ids))
    states = model.get_decoder()(
        input_ids=ids, attention_mask=attention_mask, use_cache=False
    ).last_hidden_state
    logits = model.get_output_embeddings()(states[:, :-1][acted[:, 1:]])
    logprobs = torch.log_softmax(logits.float(), -1).gather(1, ids[acted][:, None])[:, 0]
    return learned(model, logprobs)


def learned(model: Any, logprobs: Tensor) -> float:
    loss = -logprobs.mean()
    loss.backward()
    model.zero_grad()
    return loss.item()


if __name__ == "__main__":
    sys.exit(main())
