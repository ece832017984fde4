"""dvc.yaml is made from the steps it runs and must not drift from them; data goes to a remote
and comes back whole.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import boto3
import pytest
import yaml

from agentgym.cli import main
from agentgym.config import ConfigError, load_config
from agentgym.data.published import check_pin, import_dataset, run_dvc
from agentgym.pipeline.dvc import dvc_yaml, metrics, require_current
from agentgym.pipeline.table import steps_of
from agentgym.steps.step import Kind

ROOT = Path(__file__).parents[1]
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


@pytest.mark.parametrize("overrides", SCHEDULES.values(), ids=list(SCHEDULES))
def test_every_step_is_a_dvc_stage_with_its_parents_and_parameters(overrides):
    cfg = load_config(ROOT / "params.yaml", overrides)
    tree, steps = yaml.safe_load(dvc_yaml(cfg)), steps_of(cfg)
    assert list(tree["stages"]) == list(steps)
    for name, step in steps.items():
        stage = tree["stages"][name]
        assert stage["cmd"] == f"python -m agentgym step {name} --out outputs/{name}.json"
        inputs = [f"outputs/{parent}.json" for parent in step.parents] or [
            "${data.path}",
            "data/trajectories",
        ]
        assert stage["deps"] == [*inputs, "agentgym", "envs"]
        assert stage["params"] == list(step.sections)
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
    assert stages["stage-1"]["params"] == [{"short.yaml": []}, {"params.yaml": []}]
    require_current(load_config("short.yaml"), "short.yaml")
    with pytest.raises(ConfigError, match="stage-3 is missing in it"):
        require_current(load_config("params.yaml"))


def test_the_numbers_of_an_evaluation_are_flat_and_few():
    interval = {"mean": 0.51234, "low": 0.5, "high": 0.6}
    summary = dict.fromkeys(("greedy", "avg_at_4", "pass_at_1", "pass_at_4"), interval)
    results = {"summary": summary, "paired": {"avg_at_4": interval}, "coverage": 1.0}
    told = json.loads(metrics(SimpleNamespace(manifest=SimpleNamespace(results=results))))
    assert told == {
        "greedy": 0.5123,
        "avg_at_4": 0.5123,
        "pass_at_4": 0.5123,
        "gain": 0.5123,
        "coverage": 1.0,
    }


def content(folder):
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.mark.parametrize("kind", ["local", "s3"])
def test_a_tracked_dataset_goes_to_a_remote_and_comes_back_whole(
    kind, dvc_project, tmp_path, request
):
    remote = request.getfixturevalue("s3_uri") if kind == "s3" else str(tmp_path / "remote")
    folder = Path("data/lists")
    for name in ("train/babyai_train.json", "eval/babyai_test.json"):
        (folder / name).parent.mkdir(parents=True)
        (folder / name).write_text(f'[{{"item_id": "babyai_{len(name)}"}}]')
    before = content(folder)
    for command in (
        ("add", "-q", str(folder)),
        ("remote", "add", "-q", "--default", "shelf", remote),
        ("push", "-q"),
    ):
        run_dvc(*command, timeout_s=240)
    if kind == "s3":
        prefix = remote.removeprefix("s3://tests/")
        objects = [
            found.key.removeprefix(prefix)
            for found in boto3.resource("s3").Bucket("tests").objects.filter(Prefix=prefix)
        ]
    else:
        objects = list(content(Path(remote)))
    assert len(objects) == 3  # two lists and the list of the folder
    shutil.rmtree(folder)
    shutil.rmtree(".dvc/cache")
    run_dvc("pull", "-q", timeout_s=240)
    assert content(folder) == before
    check_pin(folder)


def test_an_imported_dataset_is_never_pushed_and_comes_back_from_where_it_was_imported(
    hub, dvc_project, tmp_path
):
    """Its licence forbids to hand it on, and a remote inside a repository is handed on with it."""
    sha = hub.commit({"train/babyai_train.json": b"[]", "eval/babyai_test.json": b"[]"})
    folder = import_dataset(hub.url, sha, Path("data/lists")).path
    before = content(folder)
    run_dvc("remote", "add", "-q", "--default", "shelf", str(tmp_path / "remote"), timeout_s=240)
    run_dvc("push", "-q", timeout_s=240)
    assert not (tmp_path / "remote").exists()
    shutil.rmtree(folder)
    shutil.rmtree(".dvc/cache")
    run_dvc("pull", "-q", timeout_s=240)
    assert (
        content(folder)
        == before
        == {
            "train/babyai_train.json": b"[]",
            "eval/babyai_test.json": b"[]",
        }
    )
    check_pin(folder)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")
def test_another_user_reaches_nothing_that_dvc_unpickles(empty_dvc_project):
    with tempfile.TemporaryDirectory() as place:
        Path(place).chmod(0o755)  # unlike pytest's own folders, others may enter
        folder = shutil.copytree(empty_dvc_project, Path(place, "project"))
        (folder / "numbers.txt").write_text("1 2 3")
        environment = {
            name: value for name, value in os.environ.items() if not name.startswith("DVC_")
        }
        environment["PYTHONPATH"] = str(ROOT)
        command = (
            "import flows; from agentgym.data.published import run_dvc;"
            " run_dvc('add', 'numbers.txt', timeout_s=120)"
        )
        subprocess.run([sys.executable, "-c", command], cwd=folder, env=environment, check=True)
        caches = list((folder / ".agentgym/dvc/repo").glob("*/*"))
        assert caches, "DVC keeps its caches elsewhere"
        attempt = (
            "for path in .agentgym .agentgym/dvc .agentgym/dvc/repo; do ls $path; echo x >"
            " $path/planted; done; cat numbers.txt"
        )
        theirs = subprocess.run(
            ["sh", "-c", attempt],
            cwd=folder,
            user=65534,
            group=65534,
            extra_groups=[],
            capture_output=True,
            text=True,
        )
        assert theirs.stdout == "1 2 3"
        assert not list(folder.rglob("planted"))
