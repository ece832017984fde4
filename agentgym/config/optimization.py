"""The sections `optimizer`, `lora` and `learner` of params.yaml: how weights are updated."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import NonNegativeInt, PositiveFloat, PositiveInt

from agentgym.config.section import Section, operational, setting

USUAL_TOKENS, USUAL_CHUNK = 16_384, 4_096


class OptimizerConfig(Section):
    lr: PositiveFloat = setting(
        5e-4, "AdamW's learning rate after the warm-up; lower it if training is unstable"
    )
    warmup_steps: NonNegativeInt = setting(
        10, "optimizer steps in which the learning rate grows linearly from 0 to lr"
    )
    schedule: Literal["constant", "cosine", "linear"] = setting(
        "constant", "shape of the learning rate after the warm-up"
    )
    final_lr_fraction: float = setting(
        0.1, "learning rate of the last step as a fraction of lr (cosine, linear)", ge=0, le=1
    )
    # Where few groups still differ, gradients are small: an average that soon forgets large ones
    # makes full steps of them, and clipping keeps one large gradient from being most of an average.
    betas: tuple[float, float] = setting(
        (0.9, 0.99), "AdamW's decay rates of the running averages of the gradient and of its square"
    )
    weight_decay: float = setting(0.0, "AdamW's weight decay", ge=0)
    grad_clip: PositiveFloat = setting(
        0.3, "gradients with a larger global norm are scaled down to this norm"
    )


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


class LoraConfig(Section):
    """Low-rank matrices trained in addition to frozen weights (LoRA, arXiv:2106.09685).
    The warm start of a tiny model, which stands in for pretraining, trains all weights anyway.
    """

    rank: NonNegativeInt = setting(
        0, "rank of the matrices trained for each frozen weight; 0: all weights are trained"
    )
    alpha: PositiveInt = setting(32, "the product of the matrices counts alpha / rank")
    dropout: float = setting(0.0, "0: the engine samples without")
    target_modules: tuple[str, ...] = setting(
        (), "linear layers of the blocks; empty: all of them", examples=[["q_proj", "v_proj"]]
    )

    def problems(self) -> Iterator[str]:
        if self.dropout:
            yield (
                f"lora.dropout {self.dropout:g}: the engine samples without dropout, and ratios"
                " would be of two policies; leave it at 0"
            )
        if len(set(self.target_modules)) < len(self.target_modules):
            yield (
                f"lora.target_modules {list(self.target_modules)} names a layer twice; remove one"
            )
        if self.target_modules and not self.rank:
            yield (
                f"lora.target_modules {list(self.target_modules)} with lora.rank 0 trains no"
                " adapter; give a rank, for example 16"
            )
