"""The section `lora` of params.yaml."""

from __future__ import annotations

from typing import Self

from pydantic import NonNegativeInt, PositiveInt, model_validator

from agentgym.config.section import Section, setting


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
        (), "linear layers of the blocks, for example q_proj; empty: all of them"
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.dropout:
            raise ValueError(
                f"lora.dropout {self.dropout:g}: the engine samples without dropout, and ratios"
                " would be of two policies; leave it at 0"
            )
        if len(set(self.target_modules)) < len(self.target_modules):
            raise ValueError(
                f"lora.target_modules {list(self.target_modules)} names a layer twice; remove one"
            )
        if self.target_modules and not self.rank:
            raise ValueError(
                f"lora.target_modules {list(self.target_modules)} with lora.rank 0 trains no"
                " adapter; give a rank, for example 16"
            )
        return self
