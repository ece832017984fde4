"""A built-in engine that a host process can run, for tests without vLLM."""

import os
import subprocess

import torch

from agentgym.models.model import empty_model, materialize, weights_of
from agentgym.rollouts.policies.torch import TorchPolicy


class HostedTorch(TorchPolicy):
    """Engine that starts with random weights, as vLLM does, and runs a child process."""

    repeats_draws = False
    started = 0  # number of starts in this process

    @classmethod
    def start(cls, settings, folder):
        if (folder / "refuse").exists() or os.environ.get("TEST_ENGINE") == "refuse":
            raise RuntimeError("no memory for an engine")
        HostedTorch.started += 1
        with open(os.environ["TEST_STARTS"], "a", encoding="utf-8") as file:
            print(os.getpid(), file=file)
        model = empty_model(settings.architecture, getattr(torch, settings.dtype))
        materialize(model, torch.device("cpu"))
        for name, tensor in weights_of(model).items():
            torch.nn.init.normal_(tensor, generator=torch.Generator().manual_seed(len(name)))
        policy = cls(
            model,
            stop_ids=settings.stop_ids,
            num_slots=settings.num_slots,
            context_tokens=settings.context_tokens,
        )
        policy.digest, policy.process = "", subprocess.Popen(["sleep", "1000"])
        return policy

    async def begin(self, digest, version, delivery):
        self.version = version if delivery is None else version - 1
        await self.wake()
        if delivery is not None:
            await self.publish(delivery)

    async def publish(self, delivery):
        await super().publish(delivery)
        self.digest = delivery.digest

    async def close(self):
        await super().close()
        self.process.kill()
        self.process.wait()


def checkpoint():
    """Return a tiny model and its tokenizer, for code that cannot use fixtures."""
    from agentgym.config import ModelConfig
    from agentgym.models.checkpoint import new_checkpoint
    from agentgym.models.model import new_model, train_tokenizer

    tokenizer = train_tokenizer(["turn left", "turn right", "move forward"] * 3, 300)
    sizes = {"hidden_size": 64, "num_layers": 2, "num_heads": 2, "num_kv_heads": 1, "mlp_size": 96}
    model = new_model(
        ModelConfig(**sizes, context_tokens=512),
        vocab_size=len(tokenizer),
        eos_id=tokenizer.eos_token_id,
        pad_id=tokenizer.pad_token_id,
        seed=0,
    )
    return new_checkpoint(model, tokenizer)
