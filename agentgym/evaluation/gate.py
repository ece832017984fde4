"""Gate for a candidate against the champion: PROMOTE, HOLD or REJECT, with a reason per rule.

`judge` is a pure function of recorded evidence. Both models answered the same question item by
item, so the gain is a paired difference, and its lower one-sided bound must exceed `gate.min_gain`.
HOLD means that no decision is possible yet: the set is too small to show a gain that would be worth
it (the reason names the number of items that would do), environments fail, the questions differ, or
the items were used too often. REJECT means that the evidence is against the candidate.
A first champion only needs to reach its floor.

`benchmarks/gate.py` measures how often the gate promotes a model that is no better.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, Self, TypedDict

import numpy as np
from scipy.special import stdtrit

from agentgym.config import GateConfig
from agentgym.evaluation.history import MADE_IN
from agentgym.evaluation.intervals import (
    FloatArray,
    Moments,
    clustered_interval,
    family_codes,
    moments,
)
from agentgym.evaluation.numbers import item_means
from agentgym.evaluation.paired import POWER, Pair, gains_by_family, mcnemar_exact, means_in_both
from agentgym.store.manifest import canonical_json, sha256

Verdict = Literal["PROMOTE", "HOLD", "REJECT"]
AuditState = Literal["none", "passed", "failed"]


class Audited(TypedDict):
    """Fields of `Evidence` about the candidate's audit."""

    audit: AuditState
    audit_note: str


SPEAK_FOR = ("first", "gain")  # rules that support a promotion; the others only forbid one


@dataclass(frozen=True)
class Evidence:
    """Evidence about a candidate and the champion; `to_json` keeps all of it."""

    pairs: Mapping[str, Pair]  # before: the champion, all NaN if there is none
    has_champion: bool
    # share of the episodes that count, of the candidate and of the champion
    coverage: tuple[float, float] = (1.0, 1.0)
    questions: tuple[str, str] = ("", "")  # digests of the candidate's and champion's evaluation
    tokens: tuple[float | None, float | None] = (None, None)  # generated per episode, in that order
    reference_kl: float | None = None  # nats per action token, at the end of training
    obstacle: str = ""  # why the two cannot be compared
    drift: str = ""  # message that the alias was moved by hand; empty: it was not
    num_seen: int = 0  # number of items that the candidate was trained or chosen on
    num_looks: int = 0  # number of candidates that these items have judged before
    audit: AuditState = "none"
    audit_note: str = ""

    @property
    def item_set(self) -> str:
        """One sha256 of the item lists of all environments."""
        return sha256(canonical_json({env: list(pair.items) for env, pair in self.pairs.items()}))

    def to_json(self) -> dict[str, Any]:
        """Return the evidence as plain JSON types, which `from_json` reads."""
        pairs = {env: _pair_json(pair) for env, pair in self.pairs.items()}
        tree = {**vars(self), "pairs": pairs}
        return {name: list(v) if isinstance(v, tuple) else v for name, v in tree.items()}

    @classmethod
    def from_json(cls, tree: Mapping[str, Any]) -> Self:
        """Read `to_json`'s tree.
        Errors: ValueError, KeyError, TypeError or AttributeError if it is not one.
        """
        pairs = {env: _pair_of(row) for env, row in tree["pairs"].items()}
        rest: dict[str, Any] = {n: tuple(v) if isinstance(v, list) else v for n, v in tree.items()}
        return cls(**{**rest, "pairs": pairs})


@dataclass(frozen=True, slots=True)
class Ruling:
    """Verdict that one rule alone would give, with its reason and numbers."""

    rule: str
    verdict: Verdict
    why: str
    env: str = ""
    numbers: Mapping[str, float | int | None] = field(default_factory=dict)
    needed_items: int | None = None  # number of items with which the rule could decide


@dataclass(frozen=True, slots=True)
class Judgement:
    """A verdict and the rulings behind it."""

    verdict: Verdict
    rulings: tuple[Ruling, ...]

    @property
    def why(self) -> str:
        """Reasons of the rulings with this verdict, in one line; for PROMOTE only of the rules in
        SPEAK_FOR.
        """
        decisive = [ruling for ruling in self.rulings if ruling.verdict == self.verdict]
        if self.verdict == "PROMOTE":
            decisive = [ruling for ruling in decisive if ruling.rule in SPEAK_FOR]
        return "; ".join(ruling.why for ruling in decisive)

    @property
    def needed_items(self) -> int | None:
        """Items per environment with which all rules could decide; None if no rule needs more."""
        return max((r.needed_items for r in self.rulings if r.needed_items), default=None)

    def to_json(self) -> dict[str, Any]:
        return {
            "verdict": self.verdict,
            "why": self.why,
            "needed_items": self.needed_items,
            "rules": [asdict(ruling) for ruling in self.rulings],
        }


def decision_json(rules: GateConfig, evidence: Evidence, judgement: Judgement) -> dict[str, Any]:
    """Return the judgement as JSON types, with the gate's `settings`, `evidence` and `item_set`."""
    return {
        **judgement.to_json(),
        "item_set": evidence.item_set,
        "settings": json.loads(json.dumps(rules.model_dump(mode="json"))),
        "evidence": evidence.to_json(),
    }


def judged_again(decision: Mapping[str, Any]) -> dict[str, Any]:
    """Return a recorded decision, judged again from its settings and evidence.
    Errors: ValueError, KeyError, TypeError or AttributeError if it is no decision.
    """
    rules = GateConfig.model_validate(decision["settings"])
    evidence = Evidence.from_json(decision["evidence"])
    location = {MADE_IN: decision[MADE_IN]} if MADE_IN in decision else {}
    return {**decision_json(rules, evidence, judge(rules, evidence)), **location}


def judge(rules: GateConfig, evidence: Evidence) -> Judgement:
    """Return REJECT if a rule rejects, else HOLD if one holds, else PROMOTE; with all rulings."""
    rulings = [*_of_the_candidate(rules, evidence)]
    if evidence.has_champion:
        rulings += _of_both(rules, evidence)
    elif all(ruling.verdict == "PROMOTE" for ruling in rulings):
        rulings.insert(0, Ruling("first", "PROMOTE", "the first model of this name"))
    verdicts = [ruling.verdict for ruling in rulings]
    verdict: Verdict = next((v for v in ("REJECT", "HOLD") if v in verdicts), "PROMOTE")
    return Judgement(verdict, tuple(rulings))


def _of_the_candidate(rules: GateConfig, evidence: Evidence) -> Iterator[Ruling]:
    if evidence.audit == "failed":
        yield Ruling("audit", "REJECT", f"its audit failed: {evidence.audit_note}")
    elif evidence.audit == "none" and rules.require_audit:
        yield Ruling("audit", "HOLD", "its run is not known, so it cannot be audited")
    else:
        yield Ruling("audit", "PROMOTE", f"audit: {evidence.audit}")
    shares = zip(("candidate", "champion"), evidence.coverage, strict=True)
    for model, share in list(shares)[: 1 + evidence.has_champion]:
        low = share < rules.min_coverage - 1e-9
        yield Ruling(
            "coverage",
            "HOLD" if low else "PROMOTE",
            f"{share:.1%} of the {model}'s episodes count"
            + (f", below gate.min_coverage {rules.min_coverage:.1%}" if low else ""),
            numbers={"coverage": share, "least": rules.min_coverage},
        )
    for env, pair in evidence.pairs.items():
        if rules.min_success:
            yield _floor(rules, env, pair)


def _floor(rules: GateConfig, env: str, pair: Pair) -> Ruling:
    """Return the ruling on gate.min_success: PROMOTE if the lower bound of success reaches it,
    REJECT if the mean is below it, else HOLD; HOLD also if no episode counts.
    """
    means = item_means(pair.after)
    if np.isnan(means).all():
        return Ruling("floor", "HOLD", f"{env}: no episode counts", env)
    codes = family_codes(pair.families)
    known = pair.families if codes is not None else None
    interval = clustered_interval(means, known, kind="share", confidence=2 * rules.confidence - 1)
    numbers = {"success": interval.mean, "low": interval.low, "least": rules.min_success}
    text = f"{env}: success {interval.mean:.1%} (at least {interval.low:.1%})"
    floor = f"gate.min_success {rules.min_success:.1%}"
    if interval.low >= rules.min_success:
        return Ruling("floor", "PROMOTE", f"{text}, above {floor}", env, numbers)
    if interval.mean < rules.min_success:
        return Ruling("floor", "REJECT", f"{text}, below {floor}", env, numbers)
    half, room = interval.mean - interval.low, interval.mean - rules.min_success
    needed = _needed(interval.num_items, half, room) if room > 0 else None
    return Ruling("floor", "HOLD", f"{text}, too few items for {floor}", env, numbers, needed)


def _of_both(rules: GateConfig, evidence: Evidence) -> Iterator[Ruling]:
    if evidence.drift:
        yield Ruling("alias", "HOLD", evidence.drift)
    if evidence.obstacle:
        yield Ruling("same question", "HOLD", f"they cannot be compared: {evidence.obstacle}")
        return
    yield Ruling("same question", "PROMOTE", "both answered the same question")
    if evidence.num_seen:
        yield Ruling(
            "unseen items",
            "HOLD",
            f"{evidence.num_seen} of the gate's items are among those it was trained or chosen on;"
            " set gate.protocol or evaluation.split",
            numbers={"seen": evidence.num_seen},
        )
    used_up = evidence.num_looks >= rules.max_looks
    yield Ruling(
        "looks",
        "HOLD" if used_up else "PROMOTE",
        f"these items have judged {evidence.num_looks} candidates before"
        + (f", gate.max_looks is {rules.max_looks}: give the gate new ones" if used_up else ""),
        numbers={"looks": evidence.num_looks, "most": rules.max_looks},
    )
    yield from _guard_rails(rules, evidence)
    if few := list(_few(rules, evidence)):
        yield from few
        return
    gains = {
        env: moments(_gained(pair)[None], family_codes(pair.families), kind="difference")
        for env, pair in evidence.pairs.items()
    }
    yield _superior(rules, gains, evidence.pairs)
    for env, gain in gains.items():
        if len(gains) > 1:
            yield _not_inferior(rules, env, gain)
        yield from _families(rules, env, evidence.pairs[env])


def _few(rules: GateConfig, evidence: Evidence) -> Iterator[Ruling]:
    least = rules.min_items
    for env, pair in evidence.pairs.items():
        valid = int((~np.isnan(_gained(pair))).sum())
        if valid < least:
            text = f"{env}: {valid} items are too few, gate.min_items is {least}"
            yield Ruling("enough", "HOLD", text, env, {"items": valid, "least": least}, least)


def _gained(pair: Pair) -> FloatArray:
    """Gain of each item's mean success, [I], over the samples that count in both; NaN if none."""
    before, after, _ = means_in_both(pair)
    return after - before


def _bounds(gain: Moments, confidence: float) -> tuple[float, float, float, float]:
    """Return (mean, one-sided lower bound, one-sided upper bound, gain detectable with POWER)."""
    error = float(np.sqrt(gain.variance).item())
    quantile, power = (float(stdtrit(gain.freedom, p).item()) for p in (confidence, POWER))
    mean = gain.mean.item()
    return mean, mean - quantile * error, mean + quantile * error, (quantile + power) * error


def _together(gains: Mapping[str, Moments]) -> Moments:
    """Moments of the mean over environments, with equal weights (Welch and Satterthwaite)."""
    several = list(gains.values())
    parts = np.array([gain.variance.item() for gain in several]) / len(several) ** 2
    freedom = np.array([gain.freedom.item() for gain in several])
    spread = (parts**2 / freedom).sum()
    return Moments(
        np.array(np.mean([gain.mean.item() for gain in several])),
        np.array(parts.sum()),
        np.array(parts.sum() ** 2 / spread if spread else freedom.min()),
        np.array(sum(int(gain.num_items.item()) for gain in several)),
    )


def _superior(rules: GateConfig, gains: Mapping[str, Moments], pairs: Mapping[str, Pair]) -> Ruling:
    overall = _together(gains)
    mean, low, high, detectable = _bounds(overall, rules.confidence)
    p_exact = _exact_p(pairs)
    items = max(int(gain.num_items.item()) for gain in gains.values())
    numbers = {"gain": mean, "low": low, "high": high, "detectable": detectable, "p": p_exact}
    text = f"{100 * mean:+.1f} points [{100 * low:+.1f}, {100 * high:+.1f}]"
    shown = p_exact is None or p_exact <= 1 - rules.confidence
    worth = f"{100 * rules.worth:.1f}"
    verdict: Verdict = "REJECT"
    needed = None
    if low > rules.min_gain and shown:
        verdict, why = "PROMOTE", " over the champion"
    elif high < rules.min_gain and mean < 0:
        why = ": it is worse"
    elif detectable > rules.worth:
        needed = _needed(items, detectable, rules.worth)
        verdict = "HOLD"
        why = f": too few items to tell; {needed} would show a gain of {worth} points"
    else:
        why = f": no gain, and one of {worth} points would have been shown"
    return Ruling("gain", verdict, f"{text}{why}", "", numbers, needed)


def _exact_p(pairs: Mapping[str, Pair]) -> float | None:
    """One-sided McNemar p-value; None if items have several episodes or families are clusters."""
    if any(p.after.shape[1] > 1 or family_codes(p.families) is not None for p in pairs.values()):
        return None
    return mcnemar_exact(np.concatenate([_gained(pair) for pair in pairs.values()]), "greater")


def _not_inferior(rules: GateConfig, env: str, gain: Moments) -> Ruling:
    margin = rules.margins.get(env, rules.margin)
    mean, low, high, detectable = _bounds(gain, rules.confidence)
    numbers = {"gain": mean, "low": low, "high": high, "margin": margin}
    text = f"{env}: {100 * mean:+.1f} points [{100 * low:+.1f}, {100 * high:+.1f}]"
    allowed = f"it may lose {100 * margin:.1f}"
    if low >= -margin:
        return Ruling("not worse", "PROMOTE", f"{text}; {allowed}", env, numbers)
    if high < -margin:
        return Ruling("not worse", "REJECT", f"{text}; {allowed} at most", env, numbers)
    items = int(gain.num_items.item())
    needed = _needed(items, detectable, margin) if margin else None
    return Ruling("not worse", "HOLD", f"{text}: too few items; {allowed}", env, numbers, needed)


def _families(rules: GateConfig, env: str, pair: Pair) -> Iterator[Ruling]:
    """Yield REJECT for each family (kind of task) of 2 items or more with a significant loss
    (Bonferroni over families) whose mean exceeds gate.family_margin. Never HOLD: some family is too
    small in any set of items.
    """
    by_family = gains_by_family(pair.families, _gained(pair))
    for family, gains in by_family.items():
        if len(gains) < 2:
            continue
        level = 1 - (1 - rules.confidence) / len(by_family)
        mean, _, high, _ = _bounds(moments(gains[None], kind="difference"), level)
        if high < 0 and mean < -rules.family_margin:
            yield Ruling(
                "family",
                "REJECT",
                f"{env}, {family}: {100 * mean:+.1f} points, it may lose"
                f" {100 * rules.family_margin:.1f}",
                env,
                {"gain": mean, "high": high, "margin": rules.family_margin},
            )


def _guard_rails(rules: GateConfig, evidence: Evidence) -> Iterator[Ruling]:
    ours, theirs = evidence.tokens
    if rules.max_length_ratio is not None and ours is not None and theirs:
        ratio = ours / theirs
        yield Ruling(
            "length",
            "REJECT" if ratio > rules.max_length_ratio else "PROMOTE",
            f"it samples {ratio:.2f} times the champion's tokens, at most"
            f" {rules.max_length_ratio:g} are allowed",
            numbers={"ratio": ratio, "most": rules.max_length_ratio},
        )
    if rules.max_reference_kl is not None:
        kl = evidence.reference_kl
        if kl is None:
            why = "its distance from the reference was not measured (algorithm.kl_coef)"
            yield Ruling("reference KL", "HOLD", why)
            return
        yield Ruling(
            "reference KL",
            "REJECT" if kl > rules.max_reference_kl else "PROMOTE",
            f"{kl:.4f} nats from the reference, {rules.max_reference_kl:g} at most",
            numbers={"kl": kl, "most": rules.max_reference_kl},
        )


def _needed(items: int, detectable: float, wanted: float) -> int:
    """Return the total number of items, at least `items` + 1, that would show a gain of `wanted`.
    detectable: the smallest gain that `items` items show; it is taken to shrink with the square
    root of the number of items.
    """
    return max(items + 1, math.ceil(items * (detectable / wanted) ** 2))


def _pair_json(pair: Pair) -> dict[str, Any]:
    """Return a pair as JSON types; an item's outcomes are a text of 1, 0, or - (does not count)."""
    return {
        "items": list(pair.items),
        "families": list(pair.families) if any(pair.families) else None,
        "before": _letters(pair.before),
        "after": _letters(pair.after),
    }


def _pair_of(row: Mapping[str, Any]) -> Pair:
    items = tuple(row["items"])
    families = tuple(row["families"]) if row["families"] else (None,) * len(items)
    before, after = (np.array([_values(text) for text in row[n]]) for n in ("before", "after"))
    if before.shape != after.shape or before.ndim != 2 or len(before) != len(items):
        raise ValueError("outcomes and items are not of one shape")
    return Pair(items, families, before, after)


def _letters(rows: FloatArray) -> list[str]:
    names = {0.0: "0", 1.0: "1"}
    return ["".join(names.get(float(value), "-") for value in row) for row in rows]


def _values(text: str) -> list[float]:
    if not set(text) <= {"0", "1", "-"}:
        raise ValueError("outcomes are written with 0, 1 and -")
    return [math.nan if letter == "-" else float(letter) for letter in text]
