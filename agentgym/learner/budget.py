"""Sizes of a forward and backward that fit the memory of the device."""

from __future__ import annotations

import torch

from agentgym.config import LearnerConfig
from agentgym.learner.process_group import ProcessGroup

FIRST_TOKENS = 4_096  # in the micro-batch whose memory is measured
FILLED_FRAC = 0.8  # of the free memory, since memory per token varies with sequence length
LOGITS_FRAC = 0.1  # of the device's memory
LOGITS_COPIES = 3  # float32 logits, their log-softmax and its gradient exist at the same time


def head_chunk_tokens(settings: LearnerConfig, device: torch.device, vocab_size: int) -> int:
    """Return the number of action tokens whose logits exist at the same time.

    auto: as many as a tenth of a GPU's memory holds, because the backward recomputes the logits of
    several chunks; at least the default. On a CPU: the default.
    """
    _, usual = settings.usual_sizes
    if settings.head_chunk_tokens != "auto" or device.type != "cuda":
        return usual
    memory = torch.cuda.get_device_properties(device).total_memory
    return max(usual, int(LOGITS_FRAC * memory) // (LOGITS_COPIES * 4 * vocab_size))


class TokenBudget:
    """Maximum number of tokens in a micro-batch; equal on all ranks.

    auto on a GPU: `FIRST_TOKENS` at first, then as many as fit by the memory that updates took.
    auto on a CPU: the default.
    """

    def __init__(self, settings: LearnerConfig, ranks: ProcessGroup) -> None:
        self._ranks, self._device = ranks, ranks.device
        self._measures = settings.micro_batch_tokens == "auto" and self._device.type == "cuda"
        usual, _ = settings.usual_sizes
        self.tokens = FIRST_TOKENS if self._measures else usual

    def begin(self) -> None:
        """Start to measure a forward and backward."""
        if self._measures:
            torch.cuda.reset_peak_memory_stats(self._device)
            self._before = torch.cuda.memory_allocated(self._device)

    def end(self, largest: int) -> None:
        """Set the budget, if auto on a GPU, from the memory measured since `begin`.

        largest: tokens of the largest micro-batch since then. All ranks call it, or none.
        """
        if not self._measures:
            return
        taken = torch.cuda.max_memory_allocated(self._device) - self._before
        free, _ = torch.cuda.mem_get_info(self._device)
        # the allocator keeps freed blocks for the next update
        free += torch.cuda.memory_reserved(self._device) - self._before
        fitting = int(FILLED_FRAC * free / max(taken / max(largest, 1), 1.0))
        if self._ranks.size > 1:
            of_ranks = torch.zeros(self._ranks.size, dtype=torch.float64, device=self._device)
            of_ranks[self._ranks.rank] = fitting
            fitting = int(self._ranks.all_sum(of_ranks).min())
        self.tokens = max(FIRST_TOKENS, fitting)
