"""What runs inside vLLM's own processes: each takes its share of new weights from a file, in two
steps, and none outlives the process it works for. vLLM imports this module there before it builds
the model; OWNER tells it from every other process.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import select
import signal
import threading
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

OWNER = "AGENTGYM_VLLM_OWNER"  # variable with the id of the process that samples with this engine


class WeightReceiver:
    """Methods that vLLM's worker gets beside its own; called by `collective_rpc`."""

    model_runner: Any
    staged: tuple[str, str] | None = None  # path, digest

    def stage_weights(self, path: str) -> str:
        """Read them all once. Result: their sha256."""
        with Path(path).open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        self.staged = path, digest
        return digest

    def switch_weights(self, digest: str) -> list[str]:
        """From here on the weights are those that were staged. Nothing may be generated meanwhile.

        Result: parameters that were not in them. Errors: RuntimeError where others were staged.
        """
        if self.staged is None or self.staged[1] != digest:
            raise RuntimeError(f"weights {digest[:12]} were not staged, but {self.staged}")
        path, self.staged = self.staged[0], None
        model = self.model_runner.model
        with safe_open(path, "pt", device="cpu") as file:
            names = tuple(file.keys())
            loaded = model.load_weights((name, file.get_tensor(name)) for name in names)
        return sorted({name for name, _ in model.named_parameters()} - set(loaded))


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
        if Path(f"/proc/{above}/comm").read_text().startswith("VLLM::"):
            os.kill(above, signal.SIGKILL)
    os._exit(1)


if OWNER in os.environ:
    end_with(int(os.environ[OWNER]))
    keep_weights_as_they_are()
