"""dvc.yaml is generated from the steps and must match them."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from agentgym.cli import main
from agentgym.config import ConfigError, load_config
from agentgym.pipeline.dvc import dvc_yaml, metrics, require_current
from agentgym.pipeline.table import steps_of
from agentgym.steps.step import Kind

ROOT = Path(__file__).parents[3]
SCHEDULES = {
    "default": [],
    "two stages": ["horizon.max_turns=[6,12]", "horizon.stage_steps=[15,15]"],
    "fixed": ["horizon.kind=fixed", "horizon.max_turns=[12]", "horizon.stage_steps=[50]"],
    "no warm start": ["warm_start.enabled=false", "model.source=hub", "model.name=x"],
    "penalty": ["algorithm.kl_coef=0.1"],
    "agent_evol": ["algorithm.recipe=agent_evol"],
}


def test_the_file_is_what_the_command_makes():
    made = dvc_yaml(load_config(ROOT / "params.yaml"))
    assert (ROOT / "dvc.yaml").read_text() == made, "run `agentgym dvc`"


@pytest.mark.integration
def test_what_looks_at_steps_that_are_done_imports_no_torch():
    code = (
        "import sys, agentgym.pipeline.dvc, agentgym.pipeline.plan, agentgym.pipeline.run;"
        "\nimport agentgym.pipeline.versions, agentgym.comparison.versus;"  # history, compare
        "\nsys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("overrides", SCHEDULES.values(), ids=list(SCHEDULES))
def test_every_step_is_a_dvc_stage_with_its_parents_and_parameters(overrides):
    cfg = load_config(ROOT / "params.yaml", overrides)
    tree, steps = yaml.safe_load(dvc_yaml(cfg)), steps_of(cfg)
    assert list(tree["stages"]) == ["params", *steps, "stored"]
    assert tree["stages"]["params"] == {
        "cmd": "python -m agentgym config --out outputs/params.json",
        "deps": ["params.yaml", "agentgym"],
        "outs": [{"outputs/params.json": {"cache": False}}],
    }
    assert tree["stages"]["stored"] == {
        "cmd": "python -m agentgym stored --out .agentgym/stored.json",
        "deps": [f"outputs/{name}.json" for name in steps],
        "outs": [{".agentgym/stored.json": {"cache": False, "persist": True}}],
    }
    for name, step in steps.items():
        stage = tree["stages"][name]
        assert stage["cmd"] == f"python -m agentgym step {name} --out outputs/{name}.json"
        inputs = [f"outputs/{parent}.json" for parent in step.parents]
        if step.kind is Kind.PREPARE:
            inputs = [str(cfg.data.path), "data/trajectories"]
        assert stage["deps"] == [*inputs, "agentgym", "envs"]
        assert stage["params"] == [{"outputs/params.json": list(step.sections)}]
        assert stage["outs"] == [{f"outputs/{name}.json": {"cache": False}}]
        assert ("metrics" in stage) == (step.kind is Kind.EVALUATE)
    plotted = {file for plot in tree["plots"] for each in plot.values() for file in each["y"]}
    assert plotted <= {f"outputs/{name}.json" for name in steps}
    assert len(plotted) == sum(step.kind in (Kind.TRAIN, Kind.EVALUATE) for step in steps.values())


@pytest.mark.parametrize("name", [name for name in SCHEDULES if name != "default"])
def test_a_step_refuses_a_file_that_was_made_for_another_run(tmp_path, monkeypatch, capsys, name):
    monkeypatch.chdir(tmp_path)
    shutil.copy(ROOT / "dvc.yaml", tmp_path)
    params = f"{ROOT}/params.yaml"
    Path("params.yaml").write_text(f"extends: {params}\n")
    overrides = [word for each in SCHEDULES[name] for word in ("--set", each)]
    assert main(["step", "prepare", "--out", "outputs/prepare.json", *overrides]) == 2
    said = capsys.readouterr().err
    assert "dvc.yaml does not describe the run that params.yaml asks for: " in said
    assert "Run `agentgym dvc`, then `dvc repro`" in said
    assert not Path("outputs").exists()
    require_current(load_config("params.yaml"))  # negative control
    require_current(load_config("params.yaml", ["evaluation.num_items=10", "algorithm.recipe=ppo"]))


def test_the_file_of_a_profile_reads_the_profile(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("params.yaml").write_text(f"extends: {ROOT}/params.yaml\n")
    Path("short.yaml").write_text(
        "{extends: params.yaml, horizon: {max_turns: [6, 12], stage_steps: [1, 1]}}"
    )
    assert main(["dvc", "--params", "short.yaml"]) == 0
    stages = yaml.safe_load(Path("dvc.yaml").read_text())["stages"]
    assert "stage-2" in stages
    assert "stage-3" not in stages
    assert stages["stage-1"]["cmd"].endswith("--out outputs/stage-1.json --params short.yaml")
    assert stages["params"]["deps"] == ["short.yaml", "params.yaml", "agentgym"]
    assert stages["params"]["cmd"].endswith("--out outputs/params.json --params short.yaml")
    require_current(load_config("short.yaml"), "short.yaml")
    assert main(["config", "--out", "outputs/params.json", "--params", "short.yaml"]) == 0
    written = json.loads(Path("outputs/params.json").read_text())
    assert written == load_config("short.yaml").semantic()
    assert main(["config", "--out", "outputs/params.json"]) == 2  # the file is of another run
    with pytest.raises(ConfigError, match="stage-3 is missing in it"):
        require_current(load_config("params.yaml"))


def test_a_store_outside_the_project_is_looked_at_each_time(tmp_path):
    """Check it on every run: DVC tracks no outputs outside the project."""
    cfg = load_config(ROOT / "params.yaml", [f"store.path={tmp_path}/store"])
    last = yaml.safe_load(dvc_yaml(cfg))["stages"]["stored"]
    assert last["cmd"] == "python -m agentgym stored"
    assert last["always_changed"] is True
    assert "outs" not in last


def test_the_numbers_of_an_evaluation_are_flat_and_few():
    interval = {"mean": 0.51234, "low": 0.5, "high": 0.6}
    summary = dict.fromkeys(("greedy", "avg_at_4", "pass_at_1", "pass_at_4"), interval)
    results = {"summary": summary, "paired": {"avg_at_4": interval}, "coverage": 1.0}
    told = metrics(results)
    assert told == {
        "greedy": 0.5123,
        "avg_at_4": 0.5123,
        "pass_at_4": 0.5123,
        "gain": 0.5123,
        "coverage": 1.0,
    }
