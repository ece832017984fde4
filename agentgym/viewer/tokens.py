"""The recorded tokens of an episode with what is known of each, as a page shows them: nothing is
rendered again, so what is shown is what was sampled.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from agentgym.types import Trajectory

OVERLAYS = {
    "mask": "which tokens the policy sampled",
    "engine": "log-probability, of the engine that sampled it",
    "learner": "log-probability, of the learner before the update",
    "entropy": "entropy, of the learner before the update",
    "ratio": "new to old probability, after the update",
    "advantage": "advantage",
    "version": "version of the weights that sampled it",
}
LEVELS = 8  # of a color, beside none
NATS_PER_LEVEL = 0.5  # of log-probabilities
ENTROPY_PER_LEVEL = 0.25  # nats
RATIO_PER_LEVEL = 0.05  # of the logarithm of a ratio; beyond four of them it is clipped as a rule

Decode = Callable[[int], str]  # a token's text


@dataclass(frozen=True, slots=True)
class Token:
    """One token."""

    text: str
    id: int
    sampled: bool
    shade: str  # class of its color; empty: none
    told: str  # all that is known of it, a line


@dataclass(frozen=True, slots=True)
class Numbers:
    """What is known of a sampled token; None: it was not kept."""

    engine: float
    learner: float | None
    entropy: float | None
    advantage: float | None
    ratio: float | None
    version: int


def numbers_of(episode: Trajectory) -> dict[int, Numbers]:
    """By position, of the tokens that the policy sampled."""
    learned, places = episode.learned, [i for i, own in enumerate(episode.action_mask) if own]
    versions = {
        place: turn.version for turn in episode.turns for place in range(turn.start, turn.end)
    }
    newest = max(versions.values(), default=0)

    def kept(numbers: Sequence[float], number: int) -> float | None:
        return numbers[number] if number < len(numbers) else None

    return {
        place: Numbers(
            episode.logprobs[place],
            kept(learned.logprobs, number) if learned else None,
            kept(learned.entropies, number) if learned else None,
            kept(learned.advantages, number) if learned else None,
            kept(learned.ratios, number) if learned else None,
            versions.get(place, newest),
        )
        for number, place in enumerate(places)
    }


def available(episode: Trajectory) -> list[str]:
    """Overlays whose numbers are on record."""
    found = ["mask"] if episode.input_ids else []
    if any(episode.action_mask):
        found += ["engine", "version"]
    learned = episode.learned
    if learned is not None:
        kept = {
            "learner": learned.logprobs,
            "entropy": learned.entropies,
            "ratio": learned.ratios,
            "advantage": learned.advantages,
        }
        found += [name for name, numbers in kept.items() if numbers]
    return [name for name in OVERLAYS if name in found]


def why_not_kept(episode: Trajectory) -> str:
    """Why the update's numbers are not there; empty: they are."""
    learned = episode.learned
    if not episode.input_ids:
        return "this player has no tokens"
    if learned is not None and learned.excluded:
        return f"not in the loss: {learned.excluded}"
    if learned is None or not learned.logprobs:
        return (
            "the update's numbers are kept for a share of the episodes that are learned from"
            " (rollout.token_numbers_frac), and this is none of them"
        )
    return ""


def spans(episode: Trajectory) -> list[tuple[int, int]]:
    """(begin, end) of the tokens that lead to each turn's action, its own included; then of those
    behind the last.
    """
    ends = [turn.end for turn in episode.turns]
    if not episode.input_ids:
        return [(0, 0)] * (len(ends) + 1)
    # a turn without tokens ends where the one before it did
    bounds = [0, *accumulate(ends, max), len(episode.input_ids)]
    return list(pairwise(bounds))


class Shown:
    """The tokens of an episode, colored by an overlay."""

    def __init__(self, episode: Trajectory, overlay: str, decode: Decode) -> None:
        self._ids, self._overlay, self._decode = episode.input_ids, overlay, decode
        self._numbers = numbers = numbers_of(episode)
        self._largest = max((abs(each.advantage or 0.0) for each in numbers.values()), default=0.0)
        self._oldest = min((each.version for each in numbers.values()), default=0)

    def span(self, begin: int, end: int) -> list[Token]:
        """Those of a span, in order."""
        found = []
        for place in range(begin, end):
            own, token = self._numbers.get(place), self._ids[place]
            shade = shade_of(self._overlay, own, self._largest, self._oldest)
            text, line = self._decode(token), told(place, token, own)
            found.append(Token(text, token, own is not None, shade, line))
        return found


def told(place: int, token: int, numbers: Numbers | None) -> str:
    """For a person who points at it."""
    pieces = [f"token {place}, id {token}"]
    if numbers is None:
        return f"{pieces[0]}, read and not sampled: not in the loss"
    pieces.append(f"engine {numbers.engine:.4f} nats (p {math.exp(min(numbers.engine, 0)):.3f})")
    if numbers.learner is not None:
        gap = numbers.learner - numbers.engine
        pieces.append(f"learner {numbers.learner:.4f}, {gap:+.4f} of it")
    if numbers.entropy is not None:
        pieces.append(f"entropy {numbers.entropy:.4f}")
    if numbers.ratio is not None:
        pieces.append(f"ratio {numbers.ratio:.4f}")
    if numbers.advantage is not None:
        pieces.append(f"advantage {numbers.advantage:+.4f}")
    pieces.append(f"weights {numbers.version}")
    return ", ".join(pieces)


def shade_of(overlay: str, numbers: Numbers | None, largest: float, oldest: int) -> str:
    """Class of a token's color: s1 to s8 the more unlikely, n and p with 1 to 8 below and above
    the neutral, v0 to v7 the version. largest: advantage of the episode; oldest: version in it.
    """
    if numbers is None:
        return ""
    if overlay in ("engine", "learner"):
        value = numbers.engine if overlay == "engine" else numbers.learner
        return "" if value is None else _level("s", -value / NATS_PER_LEVEL)
    if overlay == "entropy" and numbers.entropy is not None:
        return _level("s", numbers.entropy / ENTROPY_PER_LEVEL)
    if overlay == "ratio" and numbers.ratio is not None:
        return _signed(math.log(max(numbers.ratio, 1e-9)) / RATIO_PER_LEVEL * 2)
    if overlay == "advantage" and numbers.advantage is not None and largest:
        return _signed(numbers.advantage / largest * LEVELS)
    if overlay == "version":
        return f"v{(numbers.version - oldest) % LEVELS}"
    return "m" if overlay == "mask" else ""


def _signed(value: float) -> str:
    return _level("p" if value > 0 else "n", abs(value))


def _level(kind: str, value: float) -> str:
    level = min(LEVELS, math.ceil(value))
    return f"{kind}{level}" if level > 0 else ""
