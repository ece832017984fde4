"""Request for an evaluation, as commands and flows pass it on; torch-free."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, PositiveFloat, PositiveInt


class EvaluationRequest(BaseModel):
    """Policy, protocol and limits of an evaluation that a user asks for."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    policy: str = Field(
        min_length=1,
        title="Policy",
        description="expert, random, echo:ACTION, RUN:STEP, models:/NAME@ALIAS, the URL of an"
        " OpenAI-compatible endpoint, a folder, or OWNER/NAME of the Hub",
    )
    envs: tuple[str, ...] = Field((), title="Environments", description="empty: the protocol's")
    protocol: str = Field(
        "",
        title="Protocol",
        description="a file, or a name in profiles/eval; empty: that of the run's own evaluations",
    )
    changes: dict[str, Any] = Field(
        {}, title="Changes", description="fields of the protocol, such as max_turns or num_samples"
    )
    kept: tuple[str, ...] = Field(
        (),
        title="Kept",
        description="fields of a run's protocol that hold for models that were not trained here,"
        " too, because the user set them: instructions, max_new_tokens, context_tokens",
    )
    engine: Literal["", "torch", "vllm"] = Field("", description="empty: rollout.engine")
    model: str = Field("", description="of an endpoint; empty: the only one it has")
    key_variable: str = Field("", description="AGENTGYM_SECRET_...: holds the endpoint's key")
    timeout_s: PositiveFloat = Field(60.0, description="seconds of one request to an endpoint")
    max_retries: int = Field(5, ge=0, description="of one request to an endpoint")
    max_concurrency: PositiveInt = Field(64, description="requests in flight to an endpoint")
    max_per_minute: NonNegativeFloat = Field(0.0, description="requests to it; 0: no limit")
    prices: Path | None = Field(None, description="file of what tokens cost, by model")
    max_cost: PositiveFloat | None = Field(None, description="no request begins above it")
