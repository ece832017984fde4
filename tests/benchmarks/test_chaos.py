"""The chaos benchmark distinguishes a sound run from one that lost or repeated something, and its
report describes what happened.
"""

import json
import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from tests.benchmarks.conftest import imported

FOLDER = Path(__file__).parents[2] / "benchmarks"


chaos = imported("chaos")
project = imported("chaos_project")


@pytest.fixture
def ledger(tmp_path):
    """Return an MLflow database with only the tables that the benchmark reads."""
    path = tmp_path / "mlflow.db"
    with sqlite3.connect(path) as database:
        database.execute("create table metrics (run_uuid, key, step, timestamp, value)")
        database.execute("create table model_version_tags (name, version, key, value)")
        database.executemany(
            "insert into metrics values ('r', ?, ?, 0, 0.5)",
            [("loss", 1), ("loss", 2), ("success", 1)],
        )
        database.executemany(
            "insert into model_version_tags values (?, ?, 'step_key', ?)",
            [("m", 1, "a" * 64), ("m", 2, "b" * 64)],
        )
    return path


def test_a_point_or_a_model_that_is_there_twice_is_named(project, ledger):
    assert project.repeated_points(ledger) == project.repeated_models(ledger) == []
    with sqlite3.connect(ledger) as database:
        database.execute("insert into metrics values ('r', 'loss', 2, 7, 0.25)")
        database.execute(
            "insert into model_version_tags values ('m', 3, 'step_key', ?)", ["a" * 64]
        )
    assert project.repeated_points(ledger) == ["loss at step 2 of run r: 2 points"]
    assert project.repeated_models(ledger) == ["checkpoint aaaaaaaaaaaa is 2 versions of m"]


def test_temporary_files_count_but_for_those_the_next_commit_removes(project, tmp_path):
    step = tmp_path / "store/steps/stage-1-0123456789abcdef"
    for name in (
        "logs/babyai.log",
        "logs/prefect-server.lock",
        "store/steps/stage-1-0123456789abcdef/blobs/.tmp-1",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert project.leftovers(tmp_path) == []
    (step / ".tmp-2").touch()
    (tmp_path / "logs/babyai-xyz").mkdir()
    assert sorted(project.leftovers(tmp_path)) == [
        "logs/babyai-xyz",
        "store/steps/stage-1-0123456789abcdef/.tmp-2",
    ]


def audited(code, checks, stderr=""):
    return subprocess.CompletedProcess(
        [], code, json.dumps({"checks": checks}) if checks else "", stderr
    )


def test_an_audit_passes_when_it_says_so_and_ends_well(project):
    good, bad = (
        {"name": "items", "ok": True, "failures": []},
        {"name": "ledger", "ok": False, "failures": ["one is missing", "another"]},
    )
    assert project.audit_failures(audited(0, [good])) == []
    assert project.audit_failures(audited(1, [good, bad])) == ["ledger: one is missing"]
    assert project.audit_failures(audited(1, [good])) == ["audit ended with 1"]
    assert project.audit_failures(audited(1, [], "failed: no store")) == [
        "audit ended with 1: failed: no store"
    ]


def test_a_fault_without_a_victim_is_tried_again_and_a_setting_is_observed_once(
    chaos, project, tmp_path, monkeypatch
):
    kinds = [chaos.KINDS["flow"], chaos.KINDS["environment"]]
    hits, tried, observed = {"flow": [False] * 9, "environment": [False, True]}, [], []

    def attempt(lane, kind, reference, seed, number):
        tried.append((kind.name, number))
        return project.Trial(kind.name, number, hit=hits[kind.name][number], at_s=1.0)

    monkeypatch.setattr(chaos, "attempt", attempt)
    reference = project.Reference(80.0, {}, (), (), 1)
    monkeypatch.setattr(chaos, "observe", lambda *given: observed.append(given) or reference)
    result = {"wall_s": 0.0, "trials": [], "references": {}}
    campaign = chaos.Campaign(dict.fromkeys(kinds, 1), 0, tmp_path / "faults.md", result)
    monkeypatch.setattr(chaos, "save", lambda *_: None)
    campaign.lanes.put(None)
    campaign.run(kinds[0].setting)
    flows = [("flow", number) for number in range(chaos.TRIES)]
    assert tried == [*flows, ("environment", 0), ("environment", 1)]
    assert len(observed) == 1


def test_after_a_run_that_ended_before_its_fault_the_next_fault_comes_sooner(project):
    observed = project.Reference(80.0, {"flow": 80.0, "environment": 40.0}, (), (), 1)
    halved = project.Reference(40.0, {"flow": 40.0, "environment": 20.0}, (), (), 1)
    assert observed.faster(40.0) == halved
    assert observed.faster(90.0) == observed


def test_what_listens_on_a_port_is_ours_unless_a_neighbour_started_it(project):
    watched = project.Project.__new__(project.Project)  # skip __init__, which copies the project
    watched.environment = {project.OWNER: "this"}
    program = (
        "import socket, time; s = socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1],"
        " flush=True); time.sleep(60)"
    )
    for owner, is_ours in (("this", True), ("another", False)):
        with subprocess.Popen(
            [sys.executable, "-c", program], env={project.OWNER: owner}, stdout=subprocess.PIPE
        ) as server:
            port = int(server.stdout.readline())
            assert watched.answers(port) is is_ours
            server.kill()
        assert not watched.answers(port)


def test_a_failure_is_said_in_a_line_below_which_may_stand_the_end_of_a_log(project, tmp_path):
    log = tmp_path / "run.log"
    log.write_text(
        "starting\nfailed: RuntimeError: the server ended\nthe last lines of"
        " server.log:\nTraceback\n"
    )
    assert project.failure(log) == "failed: RuntimeError: the server ended"
    log.write_text("starting\nTraceback (most recent call last):\nRuntimeError: the server ended\n")
    assert project.failure(log) == ""


def test_the_phase_is_read_off_the_leases(project, tmp_path):
    watched = project.Project.__new__(project.Project)  # skip __init__, which copies the project
    watched.state = tmp_path
    assert watched.phase() == "before the first step"
    step = tmp_path / "store/steps/stage-1-0123456789abcdef"
    for name in ("leases/000001.json", "manifests/000000.json", "manifests/000001.json"):
        (step / name).parent.mkdir(parents=True, exist_ok=True)
        (step / name).touch()
    assert watched.phase() == "stage-1, 2 commits made"
    (step / "leases/000001.released").touch()
    assert watched.phase() == "after stage-1"


def test_the_report_counts_what_hit_and_names_what_failed(chaos):
    trial = {
        "kind": "flow",
        "number": 0,
        "at_s": 3.0,
        "phase": "stage-1, 2 commits made",
        "hit": True,
        "codes": [-9, 0],
        "recovery_s": 21.4,
    }
    result = {
        "command": "python benchmarks/chaos.py",
        "machine": {"cores": 2, "cpu": ["a processor"]},
        "wall_s": 120.0,
        "kinds": {"flow": "flow process, SIGKILL", "disk": "disk full"},
        "not_run": {"disk": "run as root"},
        "trials": [
            {**trial, "failures": {"audit": []}, "notes": []},
            {
                **trial,
                "number": 1,
                "recovery_s": 7.0,
                "codes": [-9, 1, 0],
                "failures": {"items": ["one is gone"]},
                "notes": [],
            },
            {**trial, "number": 2, "hit": False, "recovery_s": 99.0, "failures": {}, "notes": []},
        ],
    }
    page = chaos.to_markdown(result)
    assert "2 faults of 1 kinds; 1 of them left a run that passes every check below." in page
    assert "| flow process, SIGKILL | 2 | stage-1 2 | 3 | 21 | 1 of 2 |" in page
    assert "| disk full | not run: run as root |  |  |  |  |" in page
    assert "- flow 1, stage-1, 2 commits made: items: one is gone" in page


@pytest.mark.slow
# two undisturbed runs, and five runs with a fault; each is recovered and audited
@pytest.mark.timeout(1800)
def test_one_fault_each_of_a_few_kinds_leaves_a_run_that_passes_every_check(tmp_path):
    command = [
        sys.executable,
        str(FOLDER / "chaos.py"),
        "--short",
        "--out",
        str(tmp_path / "faults.md"),
    ]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(FOLDER.parent), os.environ.get("PYTHONPATH", "")]),
    }
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as program:
        try:
            said, _ = program.communicate(timeout=1700)
        finally:
            program.terminate()  # the program ends the processes it started
    assert program.returncode == 0, said
    result = json.loads((tmp_path / "faults.json").read_text())
    assert sorted(trial["kind"] for trial in result["trials"] if trial["hit"]) == [
        "damaged",
        "environment",
        "flow",
        "step",
        "two-learners",
    ]


def test_kinds_tried_again_take_the_place_of_their_earlier_faults(chaos):
    earlier = {
        "kinds": {"disk": "disk full"},
        "not_run": {},
        "references": {},
        "machine": {"cpu": ["A"], "cores": 2},
        "command": "a",
        "wall_s": 60.0,
        "trials": [{"kind": "flow", "number": 0}, {"kind": "disk", "number": 0}],
    }
    both = chaos.begun([chaos.KINDS["flow"]], earlier, seed=0)
    assert both["trials"] == [{"kind": "disk", "number": 0}]
    assert both["machine"]["cpu"][0] == "A"
    assert both["command"].startswith("a`, then `python ")
    assert (both["wall_s"], set(both["kinds"])) == (60.0, {"disk", "flow"})
