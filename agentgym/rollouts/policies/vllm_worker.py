"""Code inside vLLM's processes: each takes its part of new weights in two steps, and ends with the
process that owns the engine.

vLLM imports this module there before it builds the model; the variable OWNER marks these processes.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import tempfile
import threading
from pathlib import Path
from typing import Any

import torch

from agentgym.models.adapter import write_adapter
from agentgym.models.transport import (
    Broadcast,
    TransportBroken,
    opened,
    read_weights,
    weights_digest,
)

HOST = torch.device("cpu")
OWNER = "AGENTGYM_VLLM_OWNER"  # variable with the id of the process that samples with this engine


class WeightReceiver:
    """Methods that give new weights to a process of vLLM: one first stages them and returns their
    digest, another then loads them into the model or replaces its adapter.
    vLLM adds them to its worker class; the engine calls them by `collective_rpc`.
    """

    model_runner: Any
    rank: int  # among the engine's processes
    device: torch.device
    staged: tuple[str, dict[str, torch.Tensor]] | None = None  # digest, weights

    def stage_file(self, path: str, like: str) -> str:
        """Stage a safetensors file's weights; return their digest, UNREADABLE for a broken file.
        like: the sender's digest.
        """
        digest, weights = read_weights(Path(path), like)
        self.staged = digest, weights
        return digest

    def stage_shared(self, shared: dict[str, Any], like: str) -> tuple[str, str]:
        """Stage weights that lie on a GPU of this machine, see `shared_of`; do not copy them yet.
        like: the sender's digest. Result: (digest, ""), or ("", the reason) if opening them fails.
        """
        try:
            return self._stage(opened(shared), like), ""
        except RuntimeError as error:
            return "", str(error)

    def stage_broadcast(self, delivery: dict[str, Any]) -> tuple[str, str]:
        """Receive weights by broadcast and stage them.
        delivery: a `Broadcast` with the rank of the engine's first process.
        Result: (their digest, ""), or ("", the reason) if it broke: vLLM passes errors on without
        their class.
        """
        first = Broadcast(**delivery)
        here = first.at(first.rank + self.rank)
        try:
            weights = here.receive(self.device if here.backend == "nccl" else HOST)
        except TransportBroken as error:
            return "", str(error)
        return self._stage(weights, first.digest), ""

    def _stage(self, weights: dict[str, torch.Tensor], like: str) -> str:
        self.staged = weights_digest(weights, like), weights
        return self.staged[0]

    def switch_weights(self, digest: str) -> list[str]:
        """Load the staged weights into the model. No request may run meanwhile.
        digest: of the staged weights. Result: sorted names of parameters that were not among them.
        Errors: RuntimeError unless weights with this digest are staged.
        """
        model, weights = self.model_runner.model, self._taken(digest)
        loaded = model.load_weights(weights.items())
        return sorted({name for name, _ in model.named_parameters()} - set(loaded))

    def switch_adapter(self, digest: str, number: int, settings: dict[str, Any], room: str) -> None:
        """Make the staged adapter the only one, under this number. No request may run meanwhile.
        settings: of the adapter. room: folder for temporary files, from which vLLM reads it.
        digest: of the staged adapter. Errors: RuntimeError unless one with it is staged; those of
        vLLM if it cannot load it.
        """
        from vllm.lora.request import LoRARequest

        matrices, runner = self._taken(digest), self.model_runner
        with tempfile.TemporaryDirectory(dir=room) as folder:
            write_adapter(Path(folder), settings, matrices)
            for old in runner.list_loras():
                runner.remove_lora(old)
            runner.add_lora(LoRARequest(str(number), number, folder))
        if (loaded := set(runner.list_loras())) != {number}:
            raise RuntimeError(f"it holds adapters {sorted(loaded)} instead of {number}")

    def _taken(self, digest: str) -> dict[str, torch.Tensor]:
        """Return the staged weights and forget them. Errors: RuntimeError for another digest."""
        if self.staged is None or self.staged[0] != digest:
            present = self.staged and self.staged[0][:12]
            raise RuntimeError(f"weights {digest[:12]} were not staged, but {present}")
        weights, self.staged = self.staged[1], None
        return weights


def keep_weights_as_they_are() -> None:
    """Keep vLLM's CPU build from packing the weights of linear layers when it loads a model.
    Packing would drop the originals, so that weights loaded later never reach its kernels.
    """
    from vllm.model_executor.layers import utils
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return

    def unpacked(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    utils.dispatch_cpu_unquantized_gemm = unpacked


def end_with(owner: int) -> None:
    """Watch the process `owner` in a thread; end this process and vLLM's engine once it is dead."""
    try:
        handle = os.pidfd_open(owner)
    except ProcessLookupError:
        _end()

    def watch() -> None:
        watched = select.poll()
        watched.register(handle, select.POLLIN)
        watched.poll()
        _end()

    threading.Thread(target=watch, name="owner", daemon=True).start()


def _end() -> None:
    above = os.getppid()  # vLLM's engine, if workers have their own processes
    with contextlib.suppress(OSError):
        if Path(f"/proc/{above}/comm").read_text(encoding="utf-8").startswith("VLLM::"):
            os.kill(above, signal.SIGKILL)
    os._exit(1)


if OWNER in os.environ:
    end_with(int(os.environ[OWNER]))
    keep_weights_as_they_are()
