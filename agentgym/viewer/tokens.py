"""The recorded tokens of an episode with their numbers; nothing is tokenized again."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate, pairwise

from agentgym.types import Learned, Trajectory

OVERLAYS = {
    "mask": "which tokens the policy sampled",
    "engine": "log-probability, of the engine that sampled it",
    "learner": "log-probability, of the learner before the update",
    "entropy": "entropy, of the learner before the update",
    "ratio": "new to old probability, after the update",
    "advantage": "advantage",
    "version": "version of the weights that sampled it",
}
LEVELS = 8  # of a color, in addition to none
NATS_PER_LEVEL = 0.5  # for log-probabilities
ENTROPY_PER_LEVEL = 0.25  # nats
RATIO_PER_LEVEL = 0.05  # of a ratio's logarithm; usual clipping begins at four levels

Decode = Callable[[int], str]  # a token's text


@dataclass(frozen=True, slots=True)
class Token:
    """One token of an episode, as a page shows it."""

    text: str
    id: int
    sampled: bool
    shade: str  # CSS class of its color; empty: none
    told: str  # its numbers, in one line


@dataclass(frozen=True, slots=True)
class Numbers:
    """The recorded numbers of a sampled token; None: not recorded."""

    engine: float | None
    version: int
    learner: float | None
    entropy: float | None
    advantage: float | None
    ratio: float | None


def numbers_of(episode: Trajectory) -> dict[int, Numbers]:
    """Return position -> numbers, for the tokens that the policy sampled."""
    learned = episode.learned or Learned()
    columns = (learned.logprobs, learned.entropies, learned.advantages, learned.ratios)
    sampled = [i for i, flag in enumerate(episode.action_mask) if flag]
    versions = {at: turn.version for turn in episode.turns for at in range(turn.start, turn.end)}
    newest = max(versions.values(), default=0)
    engine = episode.engine_logprobs
    return {
        position: Numbers(
            engine[position],
            versions.get(position, newest),
            *(column[number] if number < len(column) else None for column in columns),
        )
        for number, position in enumerate(sampled)
    }


def available(episode: Trajectory) -> list[str]:
    """Return the names of the overlays whose numbers the episode has, in the order of OVERLAYS."""
    tokens = numbers_of(episode).values()
    return [
        name
        for name in OVERLAYS
        if (name == "mask" and episode.input_ids)
        or any(getattr(token, name, None) is not None for token in tokens)
    ]


def why_not_kept(episode: Trajectory) -> str:
    """Return why the episode lacks the update's numbers; empty if it has them."""
    learned = episode.learned or Learned()
    if not episode.input_ids:
        return "this player has no tokens"
    if learned.excluded:
        return f"not in the loss: {learned.excluded}"
    if not learned.logprobs:
        return (
            "the update's numbers are kept for a share of the episodes that are learned from"
            " (rollout.token_numbers_frac), and this is none of them"
        )
    return ""


def spans(episode: Trajectory) -> list[tuple[int, int]]:
    """Return the span (begin, end) of each turn's tokens (prompt, action), then that of the rest.
    All are (0, 0) if the episode has no tokens.
    """
    ends = [turn.end for turn in episode.turns]
    if not episode.input_ids:
        return [(0, 0)] * (len(ends) + 1)
    # a turn without tokens ends where the one before it did
    bounds = [0, *accumulate(ends, max), len(episode.input_ids)]
    return list(pairwise(bounds))


class TokenView:
    """The tokens of an episode, colored by an overlay of OVERLAYS, with texts from `decode`."""

    def __init__(self, episode: Trajectory, overlay: str, decode: Decode) -> None:
        self._ids, self._overlay, self._decode = episode.input_ids, overlay, decode
        self._numbers = numbers = numbers_of(episode)
        self._largest = max((abs(t.advantage or 0.0) for t in numbers.values()), default=0.0)
        self._oldest = min((token.version for token in numbers.values()), default=0)

    def span(self, begin: int, end: int) -> list[Token]:
        """Return the tokens at the positions from `begin` to before `end`."""
        tokens = []
        for position in range(begin, end):
            numbers, token = self._numbers.get(position), self._ids[position]
            shade = shade_of(self._overlay, numbers, self._largest, self._oldest)
            text, line = self._decode(token), told(position, token, numbers)
            tokens.append(Token(text, token, numbers is not None, shade, line))
        return tokens


def told(position: int, token: int, numbers: Numbers | None) -> str:
    """Return a token's tooltip: its position, its id and its recorded numbers."""
    pieces = [f"token {position}, id {token}"]
    if numbers is None:
        return f"{pieces[0]}, read and not sampled: not in the loss"
    engine, learner = numbers.engine, numbers.learner
    if engine is not None:
        pieces.append(f"engine {engine:.4f} nats (p {math.exp(min(engine, 0)):.3f})")
    if learner is not None:
        apart = "" if engine is None else f", {learner - engine:+.4f} of it"
        pieces.append(f"learner {learner:.4f}{apart}")
    for name, form in (("entropy", ".4f"), ("ratio", ".4f"), ("advantage", "+.4f")):
        if (value := getattr(numbers, name)) is not None:
            pieces.append(f"{name} {value:{form}}")
    return ", ".join([*pieces, f"weights {numbers.version}"])


def shade_of(overlay: str, numbers: Numbers | None, largest: float, oldest: int) -> str:
    """Return the CSS class of a token's color; empty for none.
    s1 to s8: less and less likely, or of higher and higher entropy.
    n1 to n8, p1 to p8: below, above the neutral value: ratio 1, advantage 0.
    v0 to v7: the version, counted from `oldest`, modulo 8. m: sampled.
    largest: largest absolute advantage in the episode; oldest: oldest version in it.
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
