from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from agentgym.data.items import load_splits
from envs.registry import load_spec
from tests.completed import completed

pytestmark = pytest.mark.integration

ROOT = Path(__file__).resolve().parents[1]
DATASET = "data/AgentGym-RL-Data-ID"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("make_standin", ROOT / "data/make_standin.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def pulled(tmp_path_factory):
    """Copy the tracked part of the data and run `dvc pull`. Return the copy."""
    copy, home = tmp_path_factory.mktemp("clone"), tmp_path_factory.mktemp("home")
    (copy / ".dvc").mkdir()
    (copy / "data").mkdir()
    for name in (
        ".dvc/config",
        ".dvc/.gitignore",
        ".dvcignore",
        f"{DATASET}.dvc",
        "data/.gitignore",
    ):
        shutil.copy(ROOT / name, copy / name)
    shutil.copytree(ROOT / "data/dvc-remote", copy / "data/dvc-remote")
    subprocess.run(["git", "init", "-q"], cwd=copy, check=True)
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("DVC_", "XDG_"))
    } | {
        "HOME": str(home),
        # a proxy that refuses connections: a pull must not use the network
        **dict.fromkeys(
            ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9"
        ),
    }
    command = [sys.executable, "-m", "dvc", "pull", "-q", f"{DATASET}.dvc"]
    result = completed(*command, cwd=copy, env=environment)
    assert result.returncode == 0, result.stderr
    assert list(home.iterdir()) == [], "DVC wrote to the home directory"
    assert (copy / ".agentgym/dvc").is_dir(), "DVC's site cache belongs into the project"
    return copy


def test_dvc_pull_restores_the_dataset_in_a_fresh_clone(pulled):
    for env in ("babyai", "textcraft", "sciworld", "searchqa", "webarena"):
        splits = load_splits(pulled / DATASET, env, validation_fraction=0.1, seed=0)
        assert len(splits.test) >= 40


def test_no_task_stands_twice_in_the_lists_and_every_id_names_one(pulled, script):
    """Tasks are identified by the environments with default options, which raise for an unknown
    id.
    """
    for env in script.SIZES:
        identity = script._identity(env)
        ids = [
            row["item_id"]
            for name in (f"train/{env}_train", f"eval/{env}_test")
            for row in read(pulled / DATASET / f"{name}.json")
        ]
        tasks = [identity(int(item_id.rpartition("_")[2])) for item_id in ids]
        repeated = (
            [item_id for item_id, task in zip(ids, tasks, strict=True) if tasks.count(task) > 1]
            if len(set(tasks)) < len(ids)
            else []
        )
        assert not repeated, f"{env}: {len(repeated)}: {repeated[:10]}"


def read(path):
    return json.loads(path.read_text())


def validate(*settings):
    command = [
        sys.executable,
        "-m",
        "agentgym",
        "data",
        "validate",
        *(part for each in settings for part in ("--set", each)),
    ]
    return completed(*command, cwd=ROOT, timeout=300)


@pytest.mark.usefixtures("java", "chromium")
def test_data_validate_compares_the_tasks_of_all_five_environments(pulled, script):
    ended = validate(f"data.path={pulled / DATASET}")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert [
        line.partition(":")[0] for line in ended.stdout.splitlines() if "sha256" in line
    ] == list(script.SIZES)
    warnings = [line for line in ended.stdout.splitlines() if line.startswith("warning: ")]
    assert all("published are" in line for line in warnings), warnings  # intended


@pytest.mark.parametrize(
    ("env", "train", "test", "said"),
    [
        (
            "babyai",
            (53, *range(20)),
            (135, 100),
            "babyai: 1 of 2 test items are the same task as a train item: babyai_135 = babyai_53; ",
        ),
        (
            "searchqa",
            range(51_713, 51_763),
            (0, 1200),
            "test items are the same task as another test item: searchqa_1200 = searchqa_0",
        ),
        (
            "textcraft",
            range(20),
            (547, 100),
            "textcraft: 1 of 2 test items are the same task as a ",
        ),
    ],
)
def test_data_validate_fails_where_a_test_task_stands_under_another_id(
    env, train, test, said, tmp_path
):
    for name, tasks in ((f"train/{env}_train.json", train), (f"eval/{env}_test.json", test)):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(json.dumps([{"item_id": f"{env}_{task}"} for task in tasks]))
    few = ("evaluation.num_items=1", "rollout.items_per_step=1", "validation.num_items=1")
    ended = validate(
        f"data.path={tmp_path}",
        f"env.name={env}",
        *few,
        *(() if env == "babyai" else ("env.options={}",)),
    )
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert said in ended.stdout


def test_the_script_writes_exactly_what_is_tracked(pulled, script, tmp_path):
    script.write(tmp_path)
    written = {path.relative_to(tmp_path): path.read_bytes() for path in tmp_path.rglob("*.json")}
    root = pulled / DATASET
    assert written == {path.relative_to(root): path.read_bytes() for path in root.rglob("*.json")}
    assert len(written) == 10


def test_the_embedded_remote_holds_the_stand_in_and_nothing_else(pulled):
    objects = [path for path in (ROOT / "data/dvc-remote").rglob("*") if path.is_file()]
    assert len(objects) == 11  # ten lists and the list of the folder
    assert sum(path.stat().st_size for path in objects) < 300_000


def test_babyai_has_items_for_the_pipeline_s_evaluation(pulled):
    splits = load_splits(pulled / DATASET, "babyai", validation_fraction=0.1, seed=0)
    assert (len(splits.train) + len(splits.validation), len(splits.test)) == (1536, 600)
    # two levels alternate by index: neither is rare in a prefix that a run uses
    for items in (splits.train, splits.validation[:64], splits.test[:512]):
        assert 0.35 < sum(item.task_id % 2 for item in items) / len(items) < 0.65


def test_indices_stay_in_each_environment_s_range(pulled, script):
    for env, (num_train, train_indices, num_eval, eval_indices) in script.SIZES.items():
        for name, count, indices in (
            (f"train/{env}_train.json", num_train, train_indices),
            (f"eval/{env}_test.json", num_eval, eval_indices),
        ):
            ids = [row["item_id"] for row in json.loads((pulled / DATASET / name).read_text())]
            assert len(ids) == len(set(ids)) == count
            assert all(int(item_id.rpartition("_")[2]) in indices for item_id in ids)


def test_the_invented_goals_are_for_training_and_the_game_s_own_for_the_test(script, tmp_path):
    root = ROOT / "data/textcraft-invented"
    script.write_invented(tmp_path)
    assert all(
        (tmp_path / name).read_bytes() == (root / name).read_bytes()
        for name in ("train/textcraft_train.json", "eval/textcraft_test.json")
    )
    splits = load_splits(root, "textcraft", validation_fraction=0.1, seed=0)
    options = yaml.safe_load((ROOT / "profiles/textcraft-cpu.yaml").read_text())["env"]["options"]
    world, shipped = (
        load_spec("textcraft", options).make(),
        load_spec("textcraft", {"max_depth": 1, "distractors": 0}).make(),
    )

    def goals(items):
        return [world.reset(item.task_id).rpartition("Goal: ")[2] for item in items]

    asked = {shipped.reset(task_id).rpartition("Goal: ")[2] for task_id in range(124)}
    assert set(goals(splits.test)) == asked
    assert len(asked) == len(splits.test) == 124
    learned = goals((*splits.train, *splits.validation))
    assert len(set(learned)) == len(learned) == 8000
    assert not asked & set(learned)
