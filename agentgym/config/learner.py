"""The section `learner` of params.yaml."""

from __future__ import annotations

from typing import Literal

from pydantic import PositiveInt

from agentgym.config.section import Section, operational, setting

USUAL_TOKENS, USUAL_CHUNK = 16_384, 4_096


class LearnerConfig(Section):
    """Memory and speed of an update.
    The weights' dtype is model.dtype; master weights are float32.
    """

    micro_batch_tokens: Literal["auto"] | PositiveInt = setting(
        USUAL_TOKENS,
        "tokens of one forward and backward, but where one sequence is longer; on a CPU, where"
        " attention pads, each sequence counts as the longest of its batch; tokens that a sequence"
        " shares with the one before it count once. auto: as many as fit the GPU's memory, by what"
        " updates took; 16384 on a CPU",
    )
    share_prefixes: bool = operational(
        True,
        "compute what neighboring sequences begin with once: the prompt of a group, instructions;"
        " sums are rounded in another order, so not with deterministic",
    )
    threads: PositiveInt = operational(
        2,
        "threads of an update on a CPU, at most one per core; 1 with deterministic, with"
        " rollout.max_staleness and on Ray",
    )
    head_chunk_tokens: Literal["auto"] | PositiveInt = setting(
        USUAL_CHUNK,
        "action tokens whose logits exist at one time; more of them are computed again in the"
        " backward. auto: as many as a tenth of the GPU's memory holds; 4096 on a CPU",
    )
    compile: Literal["none", "inductor", "aot_eager"] = setting(
        "none", "compile each block; aot_eager: traced, but without kernels of its own"
    )
    activation_checkpointing: bool = operational(
        False, "keep each block's input alone, and compute its inside again in the backward"
    )
    offload_optimizer: bool = operational(
        False, "moments and master weights wait in host memory while no update needs them"
    )

    @property
    def usual_sizes(self) -> tuple[int, int]:
        """(tokens of a micro-batch, action tokens of a chunk); auto gives the defaults."""
        tokens, chunk = self.micro_batch_tokens, self.head_chunk_tokens
        return (
            USUAL_TOKENS if tokens == "auto" else tokens,
            USUAL_CHUNK if chunk == "auto" else chunk,
        )
