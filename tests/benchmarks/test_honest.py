"""The honest runs cover every kind, and each has a valid configuration."""

from pathlib import Path

from agentgym.config import load_config
from tests.benchmarks.conftest import imported

ROOT = Path(__file__).parents[2]


honest = imported("honest")


def test_twenty_runs_of_every_kind_some_of_them_killed(honest):
    assert len(honest.PLAN) == 20
    assert {kind for kind, _ in honest.PLAN} == set(honest.KINDS)
    assert sum(kills > 0 for _, kills in honest.PLAN) >= 10
    assert f'budget="{" ".join(honest.BUDGET)}"' in (ROOT / ".ci/run").read_text()


def test_every_kind_is_a_configuration(honest):
    for overrides in honest.KINDS.values():
        load_config(ROOT / "params.yaml", [*honest.BUDGET, *overrides])


def test_a_run_counts_only_where_it_ended_and_its_audit_passed(honest):
    run = honest.Run(0, "free-running", [])
    assert not run.ok
    assert honest.Run(0, "free-running", [], audit_code=0).ok
    assert not honest.Run(0, "free-running", [], audit_code=0, problem="no end").ok
