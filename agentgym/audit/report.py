"""What an audit found, and how a check is counted while it is made."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

MAX_FAILURES = 10  # named per check; all are counted


@dataclass(frozen=True)
class Check:
    """One question and its answer."""

    name: str
    counted: int  # comparisons made
    skipped: int  # comparisons that could not be made, for example under weights that were pruned
    failures: tuple[str, ...]  # the first MAX_FAILURES, each naming step, commit, item, ...
    num_failures: int
    note: str = ""  # what was compared, and what was left out
    not_checked: tuple[str, ...] = ()  # "WHAT, WHY" for everything that could not be looked at
    num_unproven: int = 0  # of these, that a decision rests on

    @property
    def ok(self) -> bool:
        return not self.num_failures

    @property
    def word(self) -> str:
        """The answer in words: a check that left something out is never plainly ok."""
        if not self.ok:
            return "FAILED"
        if not self.not_checked:
            return "ok"
        return "ok, not checked" if self.counted else "not checked"


@dataclass(frozen=True)
class AuditReport:
    """What an audit found."""

    run_key: str
    steps: tuple[str, ...]  # audited; a step without a commit has nothing to audit
    checks: tuple[Check, ...]
    seed: int  # of the draws; the same one makes the same audit
    finals: Mapping[str, str] = field(default_factory=dict)  # step -> digest of its last commit

    @property
    def ok(self) -> bool:
        return all(check.ok for check in self.checks)

    @property
    def is_proven(self) -> bool:
        """Return True if the audit looked at everything that a decision rests on."""
        return not any(check.num_unproven for check in self.checks)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {
            **asdict(self),
            "ok": self.ok,
            "is_proven": self.is_proven,
            "checks": [{**asdict(check), "ok": check.ok} for check in self.checks],
        }

    def lines(self) -> Iterator[str]:
        """The report as text: a line for each check, and below it failures and what it left out."""
        width = max((len(check.word) for check in self.checks), default=0)
        for check in self.checks:
            yield f"{check.word:<{width}}  {check.name:<12} {check.counted:<8}{check.note}".rstrip()
            yield from (f"        {failure}" for failure in check.failures)
            yield from (f"        not checked: {left_out}" for left_out in check.not_checked)


@dataclass
class Checks:
    """A check while it is made."""

    name: str
    counted: int = 0
    skipped: int = 0
    failures: list[str] = field(default_factory=list)
    num_failures: int = 0
    num_unproven: int = 0
    notes: list[str] = field(default_factory=list)
    left_out: Counter[tuple[str, str]] = field(default_factory=Counter)  # (what, why) -> how many

    def expect(self, where: str, what: str, expected: object, got: object) -> bool:
        """One comparison; NaN never equals."""
        self.counted += 1
        if expected == got:
            return True
        self.fail(f"{where}: {what}: expected {_short(expected)}, got {_short(got)}")
        return False

    def skip(self, what: str, why: str, num: int = 1, *, weighs: bool = False) -> None:
        """Name what could not be looked at, and why. num: how many of these; equal ones add up;
        weighs: a decision rests on it.
        """
        if num:
            self.skipped += num
            self.num_unproven += weighs
            self.left_out[what, why] += num

    @property
    def num_left_out(self) -> int:
        return sum(self.left_out.values())

    def fail(self, message: str) -> None:
        self.num_failures += 1
        if len(self.failures) < MAX_FAILURES:
            self.failures.append(message)

    @contextmanager
    def guard(self, where: str) -> Iterator[None]:
        """What a check cannot even read is a failure of that check, not the end of the audit."""
        try:
            yield
        except (
            LookupError,
            TypeError,
            ValueError,
            ArithmeticError,
            RuntimeError,
            OSError,
        ) as error:
            self.fail(f"{where}: cannot be checked: {type(error).__name__}: {error}")

    def check(self) -> Check:
        self.skip("comparisons", "the check does not say why", self.skipped - self.num_left_out)
        return Check(
            self.name,
            self.counted,
            self.skipped,
            tuple(self.failures),
            self.num_failures,
            "; ".join(self.notes),
            tuple(
                f"{what}{f' ({num})' if num > 1 else ''}, {why}"
                for (what, why), num in self.left_out.items()
            ),
            self.num_unproven,
        )


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."
