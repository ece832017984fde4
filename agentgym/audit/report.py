"""What an audit found, and how a check is counted while it is made."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

MAX_FAILURES = 10  # named per check; all are counted


@dataclass(frozen=True)
class Check:
    """One question and its answer."""

    name: str
    counted: int  # comparisons made
    skipped: int  # what could not be compared, for example under weights that were pruned
    failures: tuple[str, ...]  # the first MAX_FAILURES, each naming step, commit, item, ...
    num_failures: int
    note: str = ""  # what was compared, and what was left out
    not_checked: str = ""  # why the question could not be asked at all

    @property
    def ok(self) -> bool:
        return not self.num_failures


@dataclass(frozen=True)
class AuditReport:
    """What an audit found."""

    run_key: str
    steps: tuple[str, ...]  # audited; a step without a commit has nothing to audit
    checks: tuple[Check, ...]
    seed: int  # of the draws; the same one makes the same audit

    @property
    def ok(self) -> bool:
        return all(check.ok for check in self.checks)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {
            **asdict(self),
            "ok": self.ok,
            "checks": [{**asdict(check), "ok": check.ok} for check in self.checks],
        }


@dataclass
class Checks:
    """A check while it is made."""

    name: str
    counted: int = 0
    skipped: int = 0
    failures: list[str] = field(default_factory=list)
    num_failures: int = 0
    notes: list[str] = field(default_factory=list)
    not_checked: str = ""

    def expect(self, where: str, what: str, expected: object, got: object) -> bool:
        """One comparison; NaN never equals."""
        self.counted += 1
        if expected == got:
            return True
        self.fail(f"{where}: {what}: expected {_short(expected)}, got {_short(got)}")
        return False

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
        return Check(
            self.name,
            self.counted,
            self.skipped,
            tuple(self.failures),
            self.num_failures,
            "; ".join(self.notes),
            self.not_checked,
        )


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."
