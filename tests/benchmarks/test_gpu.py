"""Statements about GPUs match a measurement, or state that there is none."""

import json
import sys
from pathlib import Path

import pytest

from tests.benchmarks.conftest import imported

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs/results/gpu.json"


gpu = imported("gpu")


def test_the_documents_hold_the_figures_of_the_result_file_or_say_not_run(gpu):
    results = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
    assert gpu.table(results) in (ROOT / "docs/how-to/gpu-first-hour.md").read_text()
    readme = " ".join((ROOT / "README.md").read_text().split())
    assert ("[On a GPU](docs/how-to/gpu-first-hour.md): not run" in readme) == (not results)


def test_a_case_that_ran_shows_its_figures_and_the_others_that_they_did_not(gpu):
    rows = gpu.table(
        {
            "cases": {
                "ceilings": {
                    "matmul_tflops": 770.5,
                    "definition": "words",
                    "machine": {"gpu": "H100"},
                    "command": "python benchmarks/gpu.py",
                }
            }
        }
    ).splitlines()
    assert rows[0].startswith("- `ceilings`: The highest rates")
    assert rows[1] == "  - matmul_tflops 770.5 (H100, `python benchmarks/gpu.py`)"
    assert rows[2:].count("  - not run") == len(gpu.CASES) - 1
    assert max(map(len, rows)) <= 98


def test_an_unknown_case_is_named(gpu, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["benchmarks/gpu.py", "cellings", "--dry"])
    with pytest.raises(SystemExit, match="2"):
        gpu.main()
    assert "no case cellings; there are ceilings, publish" in capsys.readouterr().err


WITHOUT_VLLM = ("ceilings", "step", "optimizer", "head", "varlen", "training_7b")
# cases that start vLLM, among others: make vllm-test SLOW=1
LONG = ("publish", "rollouts", "logprobs", "start", "real", "mismatch", "staged")


def test_every_case_is_run_dry_by_some_test(gpu):
    assert sorted([*WITHOUT_VLLM, "training", *LONG]) == sorted(gpu.CASES)
    assert gpu.EXPECTED_S.keys() == gpu.CASES.keys()


def test_a_lease_that_is_too_short_for_a_case_does_not_begin_it(gpu, monkeypatch, capsys):
    begun = []
    monkeypatch.setattr(gpu, "in_a_process", lambda words, timeout_s: begun.append(words[1]) or {})
    monkeypatch.setattr(sys, "argv", ["benchmarks/gpu.py", "--dry", "--budget", "100"])
    assert gpu.main() == 0
    assert begun == [name for name in gpu.CASES if gpu.EXPECTED_S[name] < 100]
    assert "staged: skipped, 100 s are left and 700 are needed" in capsys.readouterr().out


@pytest.mark.integration
@pytest.mark.parametrize(
    "case",
    [
        *WITHOUT_VLLM,
        pytest.param("training", marks=pytest.mark.slow),  # slow: it compiles
        *(pytest.param(case, marks=[pytest.mark.vllm, pytest.mark.slow]) for case in LONG),
    ],
)
def test_a_dry_run_goes_through_a_case_and_gives_its_figures(gpu, case):
    found = gpu.CASES[case](gpu.DRY)
    numbers = [value for value in found.values() if isinstance(value, int | float)]
    assert numbers
    assert json.loads(json.dumps(found, allow_nan=False)) == found
