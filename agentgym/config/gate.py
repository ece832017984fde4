"""The settings of `gate`: requirements for a new model before the alias moves to it."""

from __future__ import annotations

from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt

from agentgym.config.section import Section, setting


class GateConfig(Section):
    """The rules of a promotion: see docs/operations.md. Success is a share of the episodes."""

    protocol: str = setting(
        "",
        "protocol of `agentgym evaluate` that judges both models on the gate's items; empty: the"
        " run's own evaluation",
    )
    confidence: float = setting(0.95, "level of every one-sided bound", gt=0.5, lt=1)
    min_gain: float = setting(
        0.0, "success over the champion that the gain's lower bound must exceed", ge=0, lt=1
    )
    worth: float = setting(
        0.05,
        "gain over min_gain that the items must be able to show, at power 0.8; with fewer items"
        " the candidate is held",
        gt=0,
        lt=1,
    )
    margin: float = setting(0.05, "success that one of several environments may lose", ge=0, lt=1)
    margins: dict[str, float] = setting({}, "the same, of single environments")
    family_margin: float = setting(
        0.1, "success that a family of items may be shown to lose", ge=0, lt=1
    )
    min_success: float = setting(
        0.2, "floor of the success's lower bound, of the first champion, too; 0: none", ge=0, lt=1
    )
    min_coverage: float = setting(
        0.95, "share of both models' episodes that must count", ge=0, le=1
    )
    min_items: PositiveInt = setting(50, "items of each environment, at least")
    max_length_ratio: PositiveFloat | None = setting(
        2.0, "tokens generated in an episode, relative to the champion's; null: any"
    )
    max_reference_kl: NonNegativeFloat | None = setting(
        None, "nats per action token from the reference at the end of training; null: any"
    )
    max_looks: PositiveInt = setting(
        20, "candidates that one set of items may judge; after that it is used up"
    )
    require_audit: bool = setting(
        False, "audit the run first, and reject a model whose audit fails"
    )
