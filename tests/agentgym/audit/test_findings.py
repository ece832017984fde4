"""A check counts its comparisons, names its first failures and continues after an error."""

import json

import pytest

from agentgym.audit.findings import MAX_FAILURES, AuditReport, Checks


def test_a_comparison_counts_and_a_failed_one_says_what_was_expected():
    checks = Checks("numbers")
    assert checks.expect("stage-1", "seq", 3, 3)
    assert not checks.expect("stage-1", "seq", 3, 4)
    assert not checks.expect("stage-1", "loss", float("nan"), float("nan"))
    check = checks.check()
    assert (check.counted, check.num_failures, check.ok) == (3, 2, False)
    assert check.failures[0] == "stage-1: seq: expected 3, got 4"


def test_a_long_value_is_cut_and_the_first_failures_alone_are_named():
    checks = Checks("content")
    for number in range(MAX_FAILURES + 5):
        checks.expect(f"commit {number}", "text", "", "x" * 500)
    assert (len(checks.failures), checks.num_failures) == (MAX_FAILURES, MAX_FAILURES + 5)
    assert len(checks.failures[0]) < 300
    assert checks.failures[0].endswith("...")


@pytest.mark.parametrize("error", [KeyError("consumed"), ZeroDivisionError(), OSError(5, "gone")])
def test_what_cannot_be_read_fails_its_check_and_no_other(error):
    checks, others = Checks("lineage"), Checks("replay")
    with checks.guard("stage-2"):
        raise error
    assert checks.failures[0].startswith(f"stage-2: cannot be checked: {type(error).__name__}")
    assert others.check().ok
    with pytest.raises(KeyboardInterrupt), checks.guard("stage-2"):
        raise KeyboardInterrupt


def test_a_check_that_left_something_out_says_what_and_why_and_is_never_plainly_ok():
    whole, part, nothing, bad = (Checks(name) for name in ("content", "pages", "sampling", "old"))
    for each in (whole, part, bad):
        each.expect("here", "it", 1, 1)
    part.skip("previews", "they are for looking at", 2)
    part.skip("previews", "they are for looking at")
    part.skip("nothing", "there is none", 0)
    nothing.skip("draws", "the engine does not repeat them")
    bad.skip("draws", "the weights are gone")
    bad.fail("no")
    report = AuditReport("k", (), tuple(c.check() for c in (whole, part, nothing, bad)), 5)
    assert list(report.lines()) == [
        "ok               content      1",
        "ok, not checked  pages        1",
        "        not checked: previews (3), they are for looking at",
        "not checked      sampling     0",
        "        not checked: draws, the engine does not repeat them",
        "FAILED           old          1",
        "        no",
        "        not checked: draws, the weights are gone",
    ]
    assert report.to_json()["checks"][1]["not_checked"] == report.checks[1].not_checked


def test_a_report_is_ok_where_every_check_is_and_says_so_in_json():
    good, bad = Checks("content"), Checks("replay")
    good.notes += ["two", "notes"]
    bad.fail("no")
    report = AuditReport("k", ("prepare",), (good.check(), bad.check()), 5)
    assert not report.ok
    assert AuditReport("k", (), (good.check(),), 5).ok
    told = json.loads(json.dumps(report.to_json()))
    assert [each["ok"] for each in told["checks"]] == [True, False]
    assert (told["ok"], told["seed"], told["checks"][0]["note"]) == (False, 5, "two; notes")
