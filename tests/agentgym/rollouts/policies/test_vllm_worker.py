"""Extensions of vLLM's processes: weights in two steps, and an end with their owner."""

import subprocess
import sys
import time
from types import SimpleNamespace

import psutil
import pytest
import torch
from safetensors.torch import save_file

from agentgym.models.transport import SUMS, weights_digest
from agentgym.rollouts.policies import vllm_worker
from agentgym.rollouts.policies.vllm_worker import OWNER, WeightReceiver


class Model(torch.nn.Linear):
    """Model that loads weights as vLLM's do: it returns the names it loaded."""

    def load_weights(self, weights):
        mine, loaded = dict(self.named_parameters()), set()
        for name, tensor in weights:
            mine[name].data.copy_(tensor)
            loaded.add(name)
        return loaded


@pytest.fixture
def receiver():
    receiver = WeightReceiver()
    receiver.model_runner = SimpleNamespace(model=Model(3, 2))
    return receiver


@pytest.fixture
def published(tmp_path):
    """Return a function of tensors that writes them: (path, sha256)."""

    def write(tensors):
        path = tmp_path / "published.safetensors"
        save_file(tensors, path)
        return str(path), weights_digest(tensors)

    return write


def test_weights_are_read_first_and_change_later(receiver, published):
    model = receiver.model_runner.model
    new = {"weight": torch.ones(2, 3), "bias": torch.zeros(2)}
    before = model.weight.detach().clone()
    path, digest = published(new)
    assert receiver.stage_file(path, digest) == digest
    assert torch.equal(model.weight, before)
    assert receiver.switch_weights(digest) == []
    assert torch.equal(model.weight, new["weight"])
    with pytest.raises(RuntimeError, match="were not staged"):  # only once
        receiver.switch_weights(digest)


def test_other_weights_than_the_staged_ones_and_missing_ones_are_told(receiver, published):
    path, digest = published({"weight": torch.ones(2, 3)})
    receiver.stage_file(path, digest)
    with pytest.raises(RuntimeError, match=rf"weights {'0' * 12} were not staged"):
        receiver.switch_weights("0" * 64)
    receiver.stage_file(path, digest)
    assert receiver.switch_weights(digest) == ["bias"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_what_lies_on_the_gpu_is_opened_and_its_sums_are_compared(receiver, monkeypatch, dtype):
    """Open the handles with a stand-in; real ones need a GPU (test_transport.py)."""
    receiver.model_runner.model.to(dtype)
    sent = {"weight": torch.ones(2, 3, dtype=dtype), "bias": torch.zeros(2, dtype=dtype)}
    digest = weights_digest(sent, SUMS)
    monkeypatch.setattr(vllm_worker, "opened", lambda shared: shared)
    for _ in range(20):
        sent["weight"] += 1
        digest = weights_digest(sent, SUMS)
        assert receiver.stage_shared(sent, digest) == (digest, "")
        assert receiver.switch_weights(digest) == []
    other = {**sent, "weight": sent["weight"].clone()}
    other["weight"].view(torch.uint8)[0, 0] ^= 1
    assert receiver.stage_shared(other, digest) != (digest, "")
    with pytest.raises(RuntimeError, match="were not staged"):
        receiver.switch_weights(digest)

    def refuse(shared):
        raise RuntimeError("peer access is not supported")

    monkeypatch.setattr(vllm_worker, "opened", refuse)
    assert receiver.stage_shared(sent, digest) == ("", "peer access is not supported")


CHILD = """
import subprocess, sys, time
open("/proc/self/comm", "w").write(sys.argv[2])
grandchild = subprocess.Popen([sys.executable, "-c", '''
import sys, time
from agentgym.models.transport import weights_digest
from agentgym.rollouts.policies.vllm_worker import end_with
end_with(int(sys.argv[1]))
print("watches", flush=True)
time.sleep(600)
''', sys.argv[1]], stdout=subprocess.PIPE)
grandchild.stdout.readline()
print(grandchild.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.integration
@pytest.mark.parametrize(
    ("is_gone", "above"),
    [
        pytest.param(False, "VLLM::EngineCore", marks=pytest.mark.slow),
        (True, "VLLM::EngineCore"),
        pytest.param(False, "init", marks=pytest.mark.slow),
    ],
)
def test_it_and_the_engine_above_it_end_with_their_owner(is_gone, above, monkeypatch):
    monkeypatch.delenv(OWNER, raising=False)
    owner = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    if is_gone:  # before the worker watches it
        owner.kill()
        owner.wait()
    engine = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(owner.pid), above], stdout=subprocess.PIPE, text=True
    )
    try:
        if not is_gone:
            worker = psutil.Process(int(engine.stdout.readline()))
            time.sleep(0.1)
            assert worker.is_running()
            owner.kill()
            until = time.monotonic() + 30  # its parent does not reap it
            while worker.is_running() and worker.status() != psutil.STATUS_ZOMBIE:
                assert time.monotonic() < until
                time.sleep(0.05)
        if above == "init":  # init adopts orphans
            assert engine.poll() is None
        else:
            assert engine.wait(60) == -9
    finally:
        for process in (owner, engine):
            process.kill()
            process.wait()
