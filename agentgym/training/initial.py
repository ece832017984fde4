"""The model before any training, with its tokenizer."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from agentgym.config import RunConfig
from agentgym.models.checkpoint import Checkpoint, new_checkpoint
from agentgym.models.model import load_hub, new_model, set_threads, train_tokenizer
from agentgym.records import DEMOS, decode_trajectories
from agentgym.steps.context import StepContext
from agentgym.store.manifest import Manifest
from agentgym.types import Trajectory

logger = logging.getLogger(__name__)


def initialize(ctx: StepContext) -> Manifest:
    """Make or load the model before any training and commit it as the run's first checkpoint."""
    set_threads(ctx.cfg.learner_settings.threads)
    demos = ctx.read(ctx.demonstrations, DEMOS) if ctx.step.demonstrations else None
    checkpoint = first_checkpoint(ctx.cfg, decode_trajectories(demos) if demos else [])
    notes = checkpoint.renderer.notes
    for note in notes:
        logger.warning("%s", note)
    return ctx.commit(
        done=True,
        state={"global_step": 0},
        blobs=checkpoint.files(),
        snapshot=checkpoint.snapshot(),
        results={
            "vocab_size": len(checkpoint.tokenizer),
            "num_parameters": sum(parameter.numel() for parameter in checkpoint.model.parameters()),
            **({"conversation": list(notes)} if notes else {}),
        },
    )


def first_checkpoint(cfg: RunConfig, played: Sequence[Trajectory]) -> Checkpoint:
    """Return the model before any training, with its tokenizer.

    A hub model has both; a tiny model is new and its tokenizer is trained on the episodes `played`.
    Errors: ValueError for a tiny model without such episodes.
    """
    if cfg.model.source == "hub":
        return new_checkpoint(*load_hub(cfg.model), cfg.model.chat)
    if not played:
        raise ValueError(
            "model.source tiny trains its tokenizer on demonstrations; set warm_start.enabled"
            " or use model.source hub"
        )
    # repeated texts count repeatedly, so that frequent words become single tokens
    words = (text for episode in played for text in texts_of(episode))
    tokenizer = train_tokenizer(words, cfg.model.vocab_size)
    model = new_model(
        cfg.model,
        vocab_size=len(tokenizer),
        eos_id=tokenizer.eos_token_id,
        pad_id=tokenizer.pad_token_id,
        seed=cfg.seed,
    )
    return new_checkpoint(model, tokenizer, cfg.model.chat)


def texts_of(played: Trajectory) -> list[str]:
    """Return all text of an episode: observations and replies."""
    return [
        played.first_observation,
        *(text for turn in played.turns for text in (turn.reply or turn.action, turn.observation)),
    ]
