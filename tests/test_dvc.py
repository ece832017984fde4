"""dvc.yaml is written by hand and must not drift from the steps it runs."""

from pathlib import Path

import yaml

from agentgym.config import load_config
from agentgym.steps import steps_of

ROOT = Path(__file__).parents[1]


def test_every_step_is_a_dvc_stage_with_its_parents_and_parameters():
    stages = yaml.safe_load((ROOT / "dvc.yaml").read_text())["stages"]
    steps = steps_of(load_config(ROOT / "params.yaml"))
    others = steps_of(load_config(ROOT / "params.yaml", ["algorithm.recipe=dpo"]))  # `dvc exp run -S` may choose it, and what it reads
    assert list(stages) == list(steps)
    for name, step in steps.items():
        stage = stages[name]
        assert stage["cmd"] == f"python -m agentgym step {name} --out outputs/{name}.json"
        inputs = [f"outputs/{parent}.json" for parent in step.parents] or ["data/AgentGym-RL-Data-ID"]
        assert stage["deps"] == [*inputs, "agentgym", "envs"]
        assert stage["params"] == list(dict.fromkeys([*step.sections, *others[name].sections]))
        assert stage.get("outs", stage.get("metrics")) == [{f"outputs/{name}.json": {"cache": False}}]
