"""Settings and first weights of an engine, as values that can be sent to another process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

from torch import Tensor

from agentgym.config import RunConfig
from agentgym.models.checkpoint import ARCHITECTURE, SHARD_BYTES, WEIGHTS, Checkpoint
from agentgym.models.model import weights_of
from agentgym.models.tensorfiles import StoredTensors, digest_of, export_tensors
from agentgym.models.transport import layout_of, weights_digest
from agentgym.rollouts.policies.engines import engine_dtype
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

    @classmethod
    def from_json(cls, tree: Mapping[str, Any]) -> Self:
        layout = {name: (dtype, tuple(shape)) for name, (dtype, shape) in tree["layout"].items()}
        return cls(**{**tree, "layout": layout, "stop_ids": tuple(tree["stop_ids"])})

    @property
    def kind(self) -> str:
        """sha256 of all settings but the sizes; equal for engines that can replace each other."""
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
    """Write the files that an engine reads when it starts: the architecture, and for an adapter the
    base weights. Errors: DigestMismatch, BlobMissing.
    """
    (folder / ARCHITECTURE).write_text(checkpoint.architecture, encoding="utf-8")
    if checkpoint.adapter is not None:
        checkpoint.adapter.base.verify()
        export_tensors(checkpoint.adapter.base, folder, SHARD_BYTES)


def first_weights(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """Return the weights that an engine begins with; none for an adapter that is new.
    Errors: DigestMismatch, BlobMissing.
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
