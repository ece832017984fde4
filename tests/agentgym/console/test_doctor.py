"""`agentgym doctor` prints one line for each missing requirement, with its fix."""

import json
import time

import pytest

from agentgym.cli import main
from agentgym.config import load_config
from agentgym.console import doctor

pytestmark = pytest.mark.integration


def test_everything_the_run_needs_is_named(tiny_params, tmp_path, capsys):
    assert main(["doctor", "--params", str(tiny_params(tmp_path)), "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert {"python", "torch", "babyai", "sciworld", "searchqa", "textcraft", "git"} <= rows.keys()
    assert rows["babyai"] == {"name": "babyai", "ok": True, "text": "can be served", "needed": True}
    assert not rows["textcraft"]["needed"]
    vllm = rows["vllm"]
    assert not vllm["needed"]
    assert vllm["text"].startswith(
        "vllm" if vllm["ok"] else "not installed, for rollout.engine vllm"
    )


def test_what_the_run_needs_and_lacks_is_an_exit_code_and_a_line(
    tiny_params, tmp_path, capsys, monkeypatch
):
    monkeypatch.setenv("JAVA_HOME", "/nowhere")
    run = ["doctor", "--params", str(tiny_params(tmp_path))]
    assert main(run) == 0  # BabyAI needs no Java
    assert "sciworld    absent   sciworld needs a Java runtime" in capsys.readouterr().out
    assert main([*run, "--set", "env.name=sciworld", "--set", "env.options={}"]) == 1
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "MISSING" in line]
    assert line.endswith("install one: apt-get install default-jre-headless")


def test_a_cluster_is_asked_only_by_a_run_with_fleets_and_what_it_lacks_is_told(monkeypatch):
    monkeypatch.setenv("KUBECONFIG", "/nowhere")
    assert not doctor._kubernetes(load_config()).needed
    finding = doctor._kubernetes(load_config(overrides=["env.deploy=kubernetes"]))
    assert (finding.ok, finding.needed) == (False, True)
    assert finding.text == "kubeconfig /nowhere: no such file; correct the variable KUBECONFIG"


def test_more_rounds_take_longer_and_the_wall_time_holds_them(monkeypatch):
    monkeypatch.setattr(doctor, "ROUNDS", 40)
    began = time.perf_counter()
    few = doctor.reference_s()
    assert 0 < few <= time.perf_counter() - began
    calls = []
    monkeypatch.setattr(doctor.json, "dumps", lambda value: calls.append(value) or "{}")
    doctor.reference_s()
    assert len(calls) == 40 * 100
