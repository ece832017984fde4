"""Every result names its origin, and `make measure` lists every benchmark."""

import json
from pathlib import Path

import pytest

from tests.benchmarks.conftest import imported

ROOT = Path(__file__).parents[2]


harness = imported("harness")


def test_a_result_has_machine_command_and_date_and_a_line_for_each_row(
    harness, tmp_path, monkeypatch
):
    monkeypatch.setattr("sys.argv", [str(ROOT / "benchmarks/gate.py"), "--seed", "2"])
    path = tmp_path / "new/result.json"
    assert harness.read(path, {}) == {}
    harness.write(path, {"machine": "another", "cases": [{"a": 1}, {"b": 2}]}, rows=("cases",))
    found = json.loads(path.read_text())
    assert found["command"] == "python benchmarks/gate.py --seed 2"
    assert found["machine"]["cores"] >= 1
    assert found["cases"] == [{"a": 1}, {"b": 2}]
    assert path.read_text().endswith(' "cases": [\n  {"a": 1},\n  {"b": 2}\n ]\n}\n')


def test_a_program_that_fails_or_never_gets_ready_is_named(harness):
    assert harness.output_of(["-c", "print('said')"]) == "said\n"
    with pytest.raises(RuntimeError, match=r"-c .*: 3\n"):
        harness.output_of(["-c", "raise SystemExit(3)"])
    with pytest.raises(RuntimeError, match=r"no server within 0 s"):
        harness.wait_for(lambda: False, 0, "no server")


def test_each_benchmark_is_listed_with_what_it_measures(harness, capsys):
    harness.main()
    listed = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    programs = {path.stem for path in (ROOT / "benchmarks").glob("*.py")}
    assert {"gate", "house", "viewer"} <= listed.keys() <= programs - {"harness", "endless"}
