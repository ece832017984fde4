"""What an update made of an episode, kept beside it: why it was left out, or numbers of each
token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from agentgym.algorithms.experience import Experience
from agentgym.compute.placement import Learner
from agentgym.config import RunConfig
from agentgym.types import Learned, Trajectory

BYTES_PER_TOKEN = 32  # of four numbers as text, before compression
LEAST_RATIO = 5e-5  # what is recorded as 0 is below this


def with_reasons(
    cfg: RunConfig,
    trajectories: Sequence[Trajectory],
    reasons: Sequence[str],
    experience: Experience | None,
    learner: Learner,
    step: int,
) -> list[Trajectory]:
    """All episodes of a step as they are kept: those that were not learned from with the reason,
    of some of the others what the update made of each token.

    reasons: of each, empty where it is learned from; experience: of those, in their order, or None
    where there was none.
    """
    notes = {place: Learned(excluded=reason) for place, reason in enumerate(reasons) if reason}
    if experience is not None:
        places = [place for place, reason in enumerate(reasons) if not reason]
        drawn = shown(cfg, [sum(trajectories[place].action_mask) for place in places], step)
        for index, numbers in zip(drawn, learned_of(experience, learner, drawn), strict=True):
            notes[places[index]] = numbers
    return [replace(each, learned=notes.get(place)) for place, each in enumerate(trajectories)]


def update_metrics(records: Sequence[Trajectory]) -> dict[str, float]:
    """How far the update moved the policy on the episodes whose tokens' ratios are kept: nats per
    action token, by the k3 estimate, ratio - 1 - log ratio, which is never negative.
    Nothing where there are none.
    """
    kept = [each.learned.ratios for each in records if each.learned is not None]
    ratios = [max(ratio, LEAST_RATIO) for of_episode in kept for ratio in of_episode]
    if not ratios:
        return {}
    moved = sum(ratio - 1 - math.log(ratio) for ratio in ratios)
    return {"actor/update_kl": moved / len(ratios)}


def shown(cfg: RunConfig, num_tokens: Sequence[int], step: int) -> list[int]:
    """Ascending indices of the episodes whose tokens' numbers are kept: a drawn share of them.
    An episode that does not fit in the room that is left is replaced by the next one drawn.

    num_tokens: action tokens by episode.
    """
    settings, count = cfg.rollout, len(num_tokens)
    room = 1024 * settings.token_numbers_kib
    order = np.random.Generator(np.random.Philox(key=[cfg.seed, step + 4_000_000]))
    wanted, drawn = math.ceil(settings.token_numbers_frac * count), list[int]()
    for index in order.permutation(count).tolist():
        needed = num_tokens[index] * BYTES_PER_TOKEN
        if len(drawn) < wanted and needed <= room:
            room -= needed
            drawn.append(index)
    return sorted(drawn)


def learned_of(experience: Experience, learner: Learner, sequences: Sequence[int]) -> list[Learned]:
    """What the update made of these sequences of the batch, token by token."""
    if not sequences:
        return []
    assert experience.advantages is not None
    assert experience.logprobs is not None
    assert experience.entropies is not None
    kept = (experience.logprobs, experience.entropies, experience.advantages)
    part = experience.batch.select(torch.tensor(sequences))
    now = learner.score(part)[part.action_mask.cpu()]
    of_token, of_part = experience.sequence.cpu(), part.sequence[part.action_mask].cpu()
    result = []
    for index, sequence in enumerate(sequences):
        own = of_token == sequence
        before, entropy, gain = (each.cpu()[own] for each in kept)
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
