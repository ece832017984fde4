"""The update's record of an episode: the reason why it was left out, or numbers of each token."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from agentgym.algorithms.batch import Experience
from agentgym.compute.placement import Learner
from agentgym.config import RunConfig
from agentgym.types import Learned, Trajectory

BYTES_PER_TOKEN = 32  # for four numbers as text, before compression
LEAST_RATIO = 5e-5  # ratios below this are recorded as 0


def with_reasons(
    cfg: RunConfig,
    trajectories: Sequence[Trajectory],
    reasons: Sequence[str],
    experience: Experience | None,
    learner: Learner,
    step: int,
) -> list[Trajectory]:
    """Return all episodes of a step for storage.

    Episodes that were left out get the reason; a share of the others gets the update's numbers of
    each token.
    reasons: by episode, empty if it is learned from; experience: of the episodes learned from, in
    their order, or None if there are none.
    """
    notes = {index: Learned(excluded=reason) for index, reason in enumerate(reasons) if reason}
    if experience is not None:
        kept = [index for index, reason in enumerate(reasons) if not reason]
        drawn = shown(cfg, [sum(trajectories[index].action_mask) for index in kept], step)
        for index, numbers in zip(drawn, learned_of(experience, learner, drawn), strict=True):
            notes[kept[index]] = numbers
    return [
        replace(episode, learned=notes.get(index)) for index, episode in enumerate(trajectories)
    ]


def update_metrics(records: Sequence[Trajectory]) -> dict[str, float]:
    """Return `actor/update_kl`: how far the update moved the policy, from recorded ratios.

    In nats per action token, by the k3 estimate, ratio - 1 - log ratio, which is never negative.
    Empty without recorded ratios.
    """
    by_episode = [record.learned.ratios for record in records if record.learned is not None]
    ratios = [max(ratio, LEAST_RATIO) for of_episode in by_episode for ratio in of_episode]
    if not ratios:
        return {}
    moved = sum(ratio - 1 - math.log(ratio) for ratio in ratios)
    return {"actor/update_kl": moved / len(ratios)}


def shown(cfg: RunConfig, num_tokens: Sequence[int], step: int) -> list[int]:
    """Draw the episodes whose token numbers are recorded. Result: ascending indices.

    An episode that does not fit into the remaining bytes is replaced by the next one drawn.
    num_tokens: action tokens by episode.
    """
    settings, count = cfg.rollout, len(num_tokens)
    bytes_left = 1024 * settings.token_numbers_kib
    order = np.random.Generator(np.random.Philox(key=[cfg.seed, step + 4_000_000]))
    num_wanted, drawn = math.ceil(settings.token_numbers_frac * count), list[int]()
    for index in order.permutation(count).tolist():
        needed = num_tokens[index] * BYTES_PER_TOKEN
        if len(drawn) < num_wanted and needed <= bytes_left:
            bytes_left -= needed
            drawn.append(index)
    return sorted(drawn)


def learned_of(experience: Experience, learner: Learner, sequences: Sequence[int]) -> list[Learned]:
    """Return the update's numbers for these sequences of the batch, token by token.
    The learner, after its update, scores these sequences again for the ratios.
    """
    if not sequences:
        return []
    assert experience.advantages is not None
    assert experience.logprobs is not None
    assert experience.entropies is not None
    numbers = (experience.logprobs, experience.entropies, experience.advantages)
    part = experience.batch.select(torch.tensor(sequences))
    now = learner.score(part)[part.action_mask.cpu()]
    of_token, of_part = experience.sequence.cpu(), part.sequence[part.action_mask].cpu()
    result = []
    for index, sequence in enumerate(sequences):
        is_own = of_token == sequence
        before, entropy, gain = (tensor.cpu()[is_own] for tensor in numbers)
        ratio = (now[of_part == index] - before).exp()
        result.append(
            Learned(
                logprobs=_rounded(before),
                advantages=_rounded(gain),
                ratios=_rounded(ratio),
                entropies=_rounded(entropy),
            )
        )
    return result


def _rounded(numbers: Tensor) -> tuple[float, ...]:
    return tuple(round(number, 4) for number in numbers.tolist())
