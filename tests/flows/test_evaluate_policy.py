"""Evaluate any policy by the flow and as a DVC stage: the second finds the first's result."""

import json

import pytest
import yaml

pytestmark = pytest.mark.timeout(900)
ASKED = ("--env", "babyai", "--num-items", "3", "--num-samples", "1", "--no-greedy")


@pytest.mark.slow
def test_the_flow_and_a_stage_of_dvc_take_what_the_command_takes(
    tmp_path, make_clone, made_databases
):
    project = make_clone(tmp_path)
    made_databases(project)
    pulled = project.run("dvc", "pull", "-q", "data/AgentGym-RL-Data-ID.dvc")
    assert pulled.returncode == 0, pulled.stderr
    ran = project.run("python", "-m", "flows.evaluate", "--policy", "random", *ASKED, timeout=600)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "ran · evaluation" in ran.stdout
    stages = yaml.safe_load((project.folder / "examples/evaluations.yaml").read_text())
    file = project.folder / "evaluations/dvc.yaml"
    file.parent.mkdir()
    own = {"random": stages["stages"]["random"]}
    words = " ".join(ASKED)
    own["random"]["cmd"] = (
        f"python -m agentgym evaluate random {words} --out outputs/evaluation-random.json"
    )
    file.write_text(yaml.safe_dump({"stages": own}))
    (project.folder / "outputs").mkdir(exist_ok=True)
    reproduced = project.run("dvc", "repro", "evaluations/dvc.yaml:random", timeout=600)
    assert reproduced.returncode == 0, reproduced.stdout + reproduced.stderr
    assert "done: evaluation" in reproduced.stdout  # the flow has played it
    told = json.loads((project.folder / "outputs/evaluation-random.json").read_text())
    assert told["results"]["coverage"] == 1.0
    again = project.run("dvc", "repro", "evaluations/dvc.yaml:random")
    assert "didn't change, skipping" in again.stdout
