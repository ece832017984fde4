"""An engine's settings, as plain values that can be sent to another process, its first weights, and
the arguments and environment variables that vLLM is started with.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from agentgym.config import RunConfig, VllmConfig
from agentgym.models.architecture import WEIGHTS, digest_of
from agentgym.models.checkpoint import ARCHITECTURE, SHARD_BYTES, Checkpoint
from agentgym.models.model import weights_of
from agentgym.models.tensorfiles import StoredTensors, export_tensors
from agentgym.models.transport import layout_of, weights_digest
from agentgym.rollouts.policies.engines import VLLM_RANKS, engine_dtype
from agentgym.rollouts.policies.vllm_worker import OWNER, WeightReceiver
from agentgym.store.manifest import canonical_json, sha256


@dataclass(frozen=True)
class EngineSettings:
    """Settings of one engine; every value is plain, so that they can be sent as JSON."""

    architecture: str  # config.json
    layout: dict[str, tuple[str, tuple[int, ...]]]  # of what is published, see `layout_of`
    stop_ids: tuple[int, ...]
    dtype: str
    device: str
    publish_timeout_s: float
    vllm: dict[str, Any]  # a `VllmConfig`
    base: str  # digest of the weights below an adapter; empty: there is no adapter
    adapter: dict[str, Any] | None  # settings of peft's LoraConfig
    context_tokens: int
    num_slots: int

    @property
    def kind(self) -> str:
        """sha256 of all settings except context_tokens and num_slots, which `serves` compares."""
        return sha256(canonical_json(asdict(replace(self, context_tokens=0, num_slots=0))))

    def serves(self, other: EngineSettings) -> bool:
        """Return True if an engine with these settings can be used for the other ones."""
        return (
            self.kind == other.kind
            and self.context_tokens >= other.context_tokens
            and self.num_slots >= other.num_slots
        )


def settings_of(cfg: RunConfig, checkpoint: Checkpoint, num_slots: int) -> EngineSettings:
    """Return the settings of an engine for this checkpoint. num_slots: episodes at a time."""
    adapter, weights = checkpoint.adapter, checkpoint.weights
    if adapter is not None:
        layout = layout_of(adapter.shapes(checkpoint.architecture))
    elif isinstance(weights, StoredTensors):
        layout = layout_of(weights.tensors)
    else:
        layout = layout_of(weights_of(weights))
    return EngineSettings(
        architecture=checkpoint.architecture,
        layout=layout,
        stop_ids=tuple(sorted(checkpoint.renderer.stop_ids)),
        dtype=str(engine_dtype(cfg, checkpoint.dtype)).removeprefix("torch."),
        device=cfg.compute_device,
        publish_timeout_s=cfg.rollout.publish_timeout_s,
        vllm=cfg.vllm.model_dump(mode="json"),
        base="" if adapter is None else digest_of(adapter.base.manifest, WEIGHTS),
        adapter=None if adapter is None else adapter.settings,
        context_tokens=cfg.model.context_tokens,
        num_slots=num_slots,
    )


def write_model(folder: Path, checkpoint: Checkpoint) -> None:
    """Write the files that an engine reads when it starts: config.json and, for an adapter, the
    base weights. Errors: DigestMismatch, BlobMissing.
    """
    (folder / ARCHITECTURE).write_text(checkpoint.architecture, encoding="utf-8")
    if checkpoint.adapter is not None:
        checkpoint.adapter.base.verify()
        export_tensors(checkpoint.adapter.base, folder, SHARD_BYTES)


def first_weights(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """Return name -> weight, as sent to a new engine: the adapter's, none if the adapter is new;
    without an adapter the model's. Errors: DigestMismatch, BlobMissing.
    """
    if checkpoint.adapter is not None:
        stored = checkpoint.adapter.stored
        return {} if stored is None else stored.load()
    weights = checkpoint.weights
    return weights.load() if isinstance(weights, StoredTensors) else weights_of(weights)


def first_digest(checkpoint: Checkpoint) -> str:
    """Return the digest of `first_weights`, from the store if possible; empty if there are none."""
    stored = checkpoint.adapter.stored if checkpoint.adapter else checkpoint.weights
    if stored is None:
        return ""
    if type(stored) is StoredTensors and len(stored.files) == 1:
        return stored.manifest.blobs[stored.files[0]].digest
    return weights_digest(first_weights(checkpoint))


MOST_BATCHED = 8192  # tokens of one forward; a longer context raises the limit
# variables for vLLM's processes; a variable that is already set keeps its value
ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",  # send nothing out
    "VLLM_WORKER_MULTIPROCESSING_METHOD": "spawn",  # this process has threads
    # silence messages that users cannot act on
    "VLLM_LOGGING_LEVEL": "ERROR",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "TORCH_LOGS": "-torch._library",
    "PYTHONWARNINGS": "ignore::FutureWarning",
}


@contextmanager
def engine_environment(settings: EngineSettings, folder: Path) -> Iterator[None]:
    """Set the environment variables of vLLM's processes, except those already set by the user;
    after the block, restore all. folder: for the processes' sockets, which vLLM does not remove.
    """
    vllm = VllmConfig(**settings.vllm)
    variables = {
        **ENVIRONMENT,
        OWNER: str(os.getpid()),
        "VLLM_ENGINE_READY_TIMEOUT_S": str(int(vllm.start_timeout_s)),
        "VLLM_CPU_KVCACHE_SPACE": str(vllm.cpu_cache_gib),
        "VLLM_RPC_BASE_PATH": str(folder),
    }
    if vllm.tensor_parallel_size > 1:  # the CPU build would ask for a NUMA node for each
        variables["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    before = dict(os.environ)
    os.environ.update({**variables, **before, OWNER: variables[OWNER]})
    try:
        yield
    finally:  # also remove variables that vLLM sets itself
        os.environ.clear()
        os.environ.update(before)


def engine_arguments(settings: EngineSettings, folder: Path) -> Any:
    """Return vLLM's AsyncEngineArgs. folder: with the files of `write_model`; if it has no weights,
    vLLM starts with random ones.
    """
    from vllm.engine.arg_utils import AsyncEngineArgs

    vllm, context = VllmConfig(**settings.vllm), settings.context_tokens
    on_gpu = settings.device != "cpu"
    optional: dict[str, Any] = {"gpu_memory_utilization": vllm.memory_frac} if on_gpu else {}
    if settings.adapter and (rank := settings.adapter["r"]):
        most = min(size for size in VLLM_RANKS if size >= rank)
        optional |= {"enable_lora": True, "max_lora_rank": most}
    return AsyncEngineArgs(
        model=str(folder),
        load_format="auto" if any(folder.glob("*.safetensors")) else "dummy",
        skip_tokenizer_init=True,  # tokens go in and come out
        dtype=settings.dtype,
        seed=0,  # each request has a seed of its own
        max_model_len=context,
        max_num_seqs=settings.num_slots,
        max_num_batched_tokens=max(MOST_BATCHED, context),
        # the CPU build cannot undo the draw of a prompt that it has read in part
        enable_chunked_prefill=on_gpu,
        enable_prefix_caching=True,
        logprobs_mode="processed_logprobs",  # of the distribution that was sampled from
        generation_config="vllm",  # ignore the model's own top_p
        tensor_parallel_size=vllm.tensor_parallel_size,
        # in a Ray actor vLLM would start actors, for which no room is reserved
        distributed_executor_backend="mp" if vllm.tensor_parallel_size > 1 else None,
        enforce_eager=not (on_gpu and vllm.compile),
        enable_sleep_mode=on_gpu,
        worker_extension_cls=f"{WeightReceiver.__module__}.{WeightReceiver.__name__}",
        disable_log_stats=True,
        use_tqdm_on_load=False,
        trust_remote_code=False,
        **optional,
    )
