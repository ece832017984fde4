"""What runs inside vLLM's own processes: each takes its share of new weights in two steps, and none
outlives the process it works for. vLLM imports this module there before it builds the model; OWNER
tells it from every other process.
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
    """Methods that vLLM's worker gets beside its own; called by `collective_rpc`."""

    model_runner: Any
    rank: int  # among the engine's processes
    device: torch.device
    staged: tuple[str, dict[str, torch.Tensor]] | None = None  # digest, weights

    def stage_file(self, path: str, like: str) -> str:
        """Take the weights in a safetensors file. like: their digest. Result: what it is here."""
        digest, weights = read_weights(Path(path), like)
        self.staged = digest, weights
        return digest

    def stage_shared(self, shared: dict[str, Any], like: str) -> tuple[str, str]:
        """Take weights that lie on a GPU of this machine, see `shared_of`; they are copied when
        they are switched to. Result: (their digest, why they cannot be opened).
        """
        try:
            return self._stage(opened(shared), like), ""
        except RuntimeError as error:
            return "", str(error)

    def stage_broadcast(self, told: dict[str, Any]) -> tuple[str, str]:
        """told: a `Broadcast`, with the place of the engine's first process.
        Result: (their digest, what broke it); vLLM would forget an error's kind.
        """
        first = Broadcast(**told)
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
        """From here on the weights are those that were staged. Nothing may be generated meanwhile.

        Result: parameters that were not in them. Errors: RuntimeError where others were staged.
        """
        model, weights = self.model_runner.model, self._taken(digest)
        loaded = model.load_weights(weights.items())
        return sorted({name for name, _ in model.named_parameters()} - set(loaded))

    def switch_adapter(self, digest: str, number: int, settings: dict[str, Any], room: str) -> None:
        """From here on the one adapter is that which was staged, under this number: whoever asks
        for another finds none. Nothing may be generated meanwhile.

        settings: an adapter's. room: a folder to write in, for vLLM reads it from files.
        Errors: RuntimeError where another was staged; what vLLM raises where it cannot take it.
        """
        from vllm.lora.request import LoRARequest

        matrices, runner = self._taken(digest), self.model_runner
        with tempfile.TemporaryDirectory(dir=room) as folder:
            write_adapter(Path(folder), settings, matrices)
            for old in runner.list_loras():
                runner.remove_lora(old)
            runner.add_lora(LoRARequest(str(number), number, folder))
        if (held := set(runner.list_loras())) != {number}:
            raise RuntimeError(f"it holds adapters {sorted(held)} instead of {number}")

    def _taken(self, digest: str) -> dict[str, torch.Tensor]:
        """What was staged, once."""
        if self.staged is None or self.staged[0] != digest:
            held = self.staged and self.staged[0][:12]
            raise RuntimeError(f"weights {digest[:12]} were not staged, but {held}")
        weights, self.staged = self.staged[1], None
        return weights


def keep_weights_as_they_are() -> None:
    """vLLM's CPU build packs the weights of linear layers when a model is loaded, and drops the
    originals: whatever is loaded later never reaches its kernels.
    """
    from vllm.model_executor.layers import utils
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return

    def unpacked(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    utils.dispatch_cpu_unquantized_gemm = unpacked


def end_with(owner: int) -> None:
    """However that process dies, vLLM's end too: of themselves they go on for ever."""
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
    above = os.getppid()  # vLLM's engine, where its workers are processes of their own
    with contextlib.suppress(OSError):
        if Path(f"/proc/{above}/comm").read_text(encoding="utf-8").startswith("VLLM::"):
            os.kill(above, signal.SIGKILL)
    os._exit(1)


if OWNER in os.environ:
    end_with(int(os.environ[OWNER]))
    keep_weights_as_they_are()
