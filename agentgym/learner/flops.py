"""Operations of an update and peak rate of a device, for model FLOPs utilization."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn

# Dense bfloat16 TFLOP/s from the makers' data sheets (rates with sparsity are twice as high). The
# first row whose words are all in the device's name applies.
PEAK_TFLOPS = (
    ("H100 NVL", 835.0),
    ("H100 PCIe", 756.0),
    ("H100", 989.0),
    ("H200 NVL", 836.0),
    ("H200", 989.0),
    ("GH200", 989.0),
    ("H20", 148.0),
    ("GB200", 2500.0),
    ("B200", 2250.0),
    ("A100", 312.0),
    ("A10", 125.0),
    ("L40S", 362.0),
    ("L40", 181.0),
    ("L4", 121.0),
    ("MI300X", 1307.0),
)


def peak_tflops(device_name: str) -> float | None:
    """Return the peak of a device, dense bfloat16 TFLOP/s.

    device_name: from `torch.cuda.get_device_name`.
    Result: None for an unknown device and for a slice of one (MIG).
    """
    words_of_name = set(re.split("[ -]", device_name))
    if "MIG" in words_of_name:
        return None
    return next((peak for words, peak in PEAK_TFLOPS if set(words.split()) <= words_of_name), None)


def device_peak_tflops(device: torch.device) -> float | None:
    """Return the peak of a device as `peak_tflops`; None for a CPU and for an unknown device."""
    return peak_tflops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None


@dataclass(frozen=True, slots=True)
class TrainingFlops:
    """Operations of a forward and a backward of one network, without recomputation.

    Per token 6 for each weight of blocks and head, and 6 x layers x width x sequence length for
    attention, half of which is masked.
    """

    weights: int  # of blocks and head
    attention: int  # layers x width

    @classmethod
    def of(cls, network: nn.Module, model: Any) -> Self:
        """Count a network's weights, before it is sharded over ranks.

        network: the trained network; model: the causal language model or decoder inside it.
        """
        embedding = model.get_input_embeddings().weight
        head = getattr(model, "get_output_embeddings", lambda: None)()
        is_head = head is not None and head.weight is embedding
        config = model.config.get_text_config(decoder=True)
        heads = config.num_attention_heads
        head_size = getattr(config, "head_dim", None) or config.hidden_size // heads
        return cls(
            sum(parameter.numel() for parameter in network.parameters())
            - (0 if is_head else embedding.numel()),
            config.num_hidden_layers * heads * head_size,
        )

    def tflop(self, lengths: Tensor, shared: Tensor | None = None) -> float:
        """Return the number of operations, in 1e12, for sequences of these lengths, [R] int64.

        shared: [R] int64, leading tokens of each sequence that another one computes.
        """
        prefix = torch.zeros_like(lengths) if shared is None else shared
        tokens, pairs = (
            int((lengths - prefix).sum()),
            int((lengths**2 - prefix**2).sum()),
        )
        return 6e-12 * (self.weights * tokens + self.attention * pairs)
