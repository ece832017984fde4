"""The report of an audit, and the counters of a check while it runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

MAX_FAILURES = 10  # named per check; all are counted
UNREADABLE = (LookupError, TypeError, ValueError, ArithmeticError, RuntimeError, OSError)


@dataclass(frozen=True)
class Check:
    """The result of one check."""

    name: str
    counted: int  # comparisons made
    skipped: int  # comparisons that could not be made, for example under weights that were pruned
    failures: tuple[str, ...]  # the first MAX_FAILURES, each naming step, commit, item, ...
    num_failures: int
    note: str = ""  # comparisons made, and those left out
    not_checked: tuple[str, ...] = ()  # "WHAT, WHY" for everything that could not be checked
    num_unproven: int = 0  # entries of not_checked that a decision depends on

    @property
    def ok(self) -> bool:
        return not self.num_failures

    @property
    def word(self) -> str:
        """Result in words: `FAILED`, `ok`, or if something was left out, `ok, not checked`, or
        `not checked` if no comparison was made.
        """
        if not self.ok:
            return "FAILED"
        if not self.not_checked:
            return "ok"
        return "ok, not checked" if self.counted else "not checked"


@dataclass(frozen=True)
class AuditReport:
    """The results of all checks of one run."""

    run_key: str
    steps: tuple[str, ...]  # audited; a step without a commit has nothing to audit
    checks: tuple[Check, ...]
    seed: int  # of the draws; the same seed repeats the audit
    finals: Mapping[str, str] = field(default_factory=dict)  # step -> digest of its last commit

    @property
    def ok(self) -> bool:
        return all(check.ok for check in self.checks)

    @property
    def is_proven(self) -> bool:
        """True if the audit checked everything that a decision depends on; it may have failed."""
        return not any(check.num_unproven for check in self.checks)

    def to_json(self) -> dict[str, Any]:
        """Return the report as a dict that JSON can encode, also with `ok` and `is_proven`."""
        return {
            **asdict(self),
            "ok": self.ok,
            "is_proven": self.is_proven,
            "checks": [{**asdict(check), "ok": check.ok} for check in self.checks],
        }

    def lines(self) -> Iterator[str]:
        """Yield the report as text: a line for each check, then its failures and omissions."""
        width = max((len(check.word) for check in self.checks), default=0)
        for check in self.checks:
            yield f"{check.word:<{width}}  {check.name:<12} {check.counted:<8}{check.note}".rstrip()
            yield from (f"        {failure}" for failure in check.failures)
            yield from (f"        not checked: {left_out}" for left_out in check.not_checked)


@dataclass
class Checks:
    """Counters and failures of a check while it runs; `check` returns its result."""

    name: str
    counted: int = 0
    failures: list[str] = field(default_factory=list)
    num_failures: int = 0
    num_unproven: int = 0
    notes: list[str] = field(default_factory=list)
    left_out: Counter[tuple[str, str]] = field(default_factory=Counter)  # (what, why) -> how many

    def expect(self, where: str, what: str, expected: object, got: object) -> bool:
        """Count one comparison, and record a failure if the two differ (NaN always does).

        where, what: for the failure's text. Result: True if they are equal.
        """
        self.counted += 1
        if expected == got:
            return True
        self.fail(f"{where}: {what}: expected {_short(expected)}, got {_short(got)}")
        return False

    def skip(self, what: str, why: str, num: int = 1, *, weighs: bool = False) -> None:
        """Record what could not be checked, and why.

        num: number of comparisons; 0 records nothing. Equal entries add up.
        weighs: True if a decision depends on these comparisons; the audit is then not proven.
        """
        if num:
            self.num_unproven += weighs
            self.left_out[what, why] += num

    def fail(self, message: str) -> None:
        self.num_failures += 1
        if len(self.failures) < MAX_FAILURES:
            self.failures.append(message)

    @contextmanager
    def guard(self, where: str) -> Iterator[None]:
        """Suppress an exception of UNREADABLE in the block; record it as a failure at `where`."""
        try:
            yield
        except UNREADABLE as error:
            self.fail(f"{where}: cannot be checked: {type(error).__name__}: {error}")

    def check(self) -> Check:
        counts = self.counted, self.left_out.total()
        failures, note = (tuple(self.failures), self.num_failures), "; ".join(self.notes)
        not_checked = tuple(
            f"{what}{f' ({num})' if num > 1 else ''}, {why}"
            for (what, why), num in self.left_out.items()
        )
        return Check(self.name, *counts, *failures, note, not_checked, self.num_unproven)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."
