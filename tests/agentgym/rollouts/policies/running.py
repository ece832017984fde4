"""vLLM in this process."""

import asyncio
from dataclasses import replace

import torch

from agentgym.config import RunConfig
from agentgym.models.adapter import is_matrix
from agentgym.models.checkpoint import new_checkpoint
from agentgym.rollouts.engine import LoopThread
from agentgym.rollouts.policies.torch import TorchPolicy
from agentgym.rollouts.policies.vllm import VllmPolicy
from agentgym.types import SampleKey, Sampling

NATS = 1e-4  # between two float32 forwards of a tiny model
PROMPT = list(range(5, 40))


def of_run(**rollout):
    return RunConfig(
        rollout={"engine": "vllm", "max_new_tokens": 6, "observation_tokens": 8, **rollout},
        model={"context_tokens": 256},
    )


class Running:
    """Policy with an event loop, as `open_engine` runs it."""

    def __init__(self, model, tokenizer, cfg, **more):
        """Open the policy; `more` are fields of the checkpoint."""
        self.loop, self.tokenizer = LoopThread(), tokenizer
        checkpoint = replace(new_checkpoint(model, tokenizer), **more)
        self.policy = VllmPolicy.open(cfg, checkpoint, num_slots=16, version=0)

    def run(self, coroutine):
        return self.loop.run(asyncio.wait_for(coroutine, 120))

    def generate(self, *asked):
        """Return the completions of (prompt, sampling) pairs, in order."""

        async def all_of_them():
            return await asyncio.gather(*(self.policy.generate(*each) for each in asked))

        return self.run(all_of_them())

    def close(self):
        self.run(self.policy.close())
        self.loop.close()


def sampling(sample, temperature=1.0, tokens=24):
    return Sampling(SampleKey(0, 1, "babyai_3", sample, 0), temperature, tokens)


def scores(model, sequences, tokenizer):
    policy = TorchPolicy(model, stop_ids=[tokenizer.eos_token_id], num_slots=1, context_tokens=64)
    return torch.cat(asyncio.run(policy.score(sequences)))


def move(learner):
    """Move every matrix by 1e-2, like a step of Adam at that learning rate."""
    with torch.no_grad():
        for name, each in learner.model.named_parameters():
            if is_matrix(name):
                each += 1e-2 * torch.randn_like(each).sign()


def of_vllm(process):
    """Return vLLM's processes below this one."""
    below = process.children(recursive=True)
    return [each for each in below if each.name().startswith("VLLM::")]
