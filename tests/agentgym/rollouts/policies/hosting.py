"""An engine in a host process, its sessions, and errors in their weights."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from agentgym.config import RunConfig
from agentgym.models.model import weights_of
from agentgym.models.transport import InProcess
from agentgym.rollouts.policies import hosts
from agentgym.rollouts.policies.torch import TorchPolicy
from agentgym.types import SampleKey, Sampling

ROOT = Path(__file__).parents[4]
PROMPT = list(range(5, 40))
ENGINE = "tests.engines:HostedTorch"


def config(folder, **rollout):
    return RunConfig(
        rollout={
            "engine": "vllm",
            "max_new_tokens": 6,
            "observation_tokens": 8,
            "concurrency": 8,
            "publish_timeout_s": 20.0,
            **rollout,
        },
        model={"context_tokens": 256},
        store={"path": folder / ".agentgym/store"},
    )


class Session:
    def __init__(self, policy, loop):
        self.policy, self._loop = policy, loop

    def run(self, coroutine):
        return self._loop.run(asyncio.wait_for(coroutine, 60))

    def generate(self, *samples):
        async def all_of_them():
            calls = (self.policy.generate(PROMPT, sampling(sample)) for sample in samples)
            return await asyncio.gather(*calls)

        return self.run(all_of_them())

    def publish(self, model, version):
        self.run(self.policy.publish(InProcess(weights_of(model), version)))


def sampling(sample):
    return Sampling(SampleKey(0, 1, "babyai_3", sample, 0), 1.0, 6)


def host():
    """Return the host process and all processes below it."""
    (process,) = filter(is_host, psutil.Process().children())
    return [process, *process.children(recursive=True)]


def is_host(process):
    try:
        return "agentgym.rollouts.policies.host" in process.cmdline()
    except psutil.NoSuchProcess:
        return False


def left_in(folder):
    return [*folder.glob(f"{hosts.PREFIX}*")]


def expected(model, tokenizer, version, *samples):
    policy = TorchPolicy(model, stop_ids=[tokenizer.eos_token_id], num_slots=8, context_tokens=256)
    policy.version = version

    async def all_of_them():
        return await asyncio.gather(
            *(policy.generate(PROMPT, sampling(sample)) for sample in samples)
        )

    return asyncio.run(all_of_them())


def same(answers, others):
    """Return True if tokens are equal and log-probabilities differ by rounding at most."""
    return all(
        (one.ids, one.stop_reason, one.version) == (two.ids, two.stop_reason, two.version)
        and one.logprobs == pytest.approx(two.logprobs, abs=1e-4)
        for one, two in zip(answers, others, strict=True)
    )


def flip(path):
    with open(path, "r+b") as file:
        file.seek(-5, os.SEEK_END)
        (byte,) = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))


def halve(path):
    os.truncate(path, os.stat(path).st_size // 2)


OWNER = """
import asyncio, os, sys, tempfile, time
from agentgym.deploy.owned import owned_process, tail
from agentgym.models.checkpoint import new_checkpoint
from agentgym.rollouts.policies import engines
from agentgym.rollouts.policies.hosts import one_engine
from agentgym.rollouts.engine import open_policy
from tests.agentgym.rollouts.policies.hosting import ENGINE, PROMPT, config, sampling
from tests.engines import checkpoint
from pathlib import Path

engines.BUILT_IN["vllm"] = ENGINE
tempfile.tempdir = sys.argv[1]
cfg = config(Path(sys.argv[1]))
with one_engine(cfg):
    policy = open_policy(cfg, checkpoint(), num_slots=8, version=0)

    async def play():
        await policy.generate(PROMPT, sampling(1))
        print("playing", flush=True)
        if sys.argv[2:]:
            await asyncio.sleep(100)
        await policy.close()

    asyncio.run(play())
"""


def owner(folder, *arguments):
    return subprocess.Popen(
        [sys.executable, "-c", OWNER, str(folder), *arguments],
        stdout=subprocess.PIPE,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        text=True,
    )
