"""Fixtures for a whole run that is small enough for a test and still has a learning signal."""

import functools
import json
import secrets
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from tests.waiting import text_of

ROOT = Path(__file__).parents[2]
# recipes that explore learn from these items
EXPLORING = {"num_items": 8, "chunk_items": 6}
SMALL = {"dpo": {**EXPLORING, "pairs_per_step": 4}, "agent_evol": EXPLORING}
TINY = {
    "env": {
        "options": {
            "levels": ["GoToRedBallNoDists"],
            "view": "compact",
            "actions": "low",
            "reward": "binary",
        }
    },
    "model": {
        "context_tokens": 512,
        "hidden_size": 32,
        "num_heads": 1,
        "num_kv_heads": 1,
        "mlp_size": 64,
    },
    "warm_start": {"num_demos": 60, "steps": 100, "batch_size": 16, "optimizer": {"lr": 0.005}},
    "rollout": {"items_per_step": 4, "group_size": 4, "temperature": 0.7, "concurrency": 8},
    "optimizer": {"warmup_steps": 1, "betas": [0.9, 0.95], "grad_clip": 1.0},
    "horizon": {"max_turns": [5, 7], "stage_steps": [2, 2]},
    "validation": {"every": 2, "num_items": 4, "max_turns": 7},
    "evaluation": {
        "num_items": 12,
        "seed": 9,  # has all episodes that forgeries need, such as a success past the horizon
        "num_samples": 2,
        "k": [1, 2],
        "max_turns": 7,
        "chunk_items": 6,
    },
    "gate": {"min_success": 0.0},
}


@pytest.fixture(scope="session")
def drawn_once():
    """Cache the pictures of equal reports.
    An audit redraws them, a sixth of its time, and tests audit one run often.
    """
    from agentgym.evaluation import publish

    drawn = {}

    def once(draw, *shown):
        key = (draw, repr(shown))
        if key not in drawn:
            drawn[key] = draw(*shown)
        return drawn[key]

    with pytest.MonkeyPatch.context() as patch:
        for name in ("learning_curve_png", "evaluation_png"):
            patch.setattr(publish, name, functools.partial(once, getattr(publish, name)))
        yield


@pytest.fixture(scope="session")
def tiny_params(tmp_path_factory, empty_ledger, drawn_once):
    """Return the params file of a tiny run; its folder has the state and an empty MLflow database.
    changes: {dotted name: value}.
    endpoint: a running server of its environment; without it each step starts one.
    """
    data = tmp_path_factory.mktemp("data")
    for name, first, count in (
        ("train/babyai_train.json", 0, 240),
        ("eval/babyai_test.json", 1000, 12),
    ):
        (data / name).parent.mkdir()
        (data / name).write_text(
            json.dumps([{"item_id": f"babyai_{task}"} for task in range(first, first + count)])
        )

    def write(folder, endpoint=None, **changes):
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / "mlflow.db").exists():
            shutil.copy(empty_ledger, folder)
        if endpoint is not None:
            changes["env"] = {**changes.get("env", TINY["env"]), "endpoints": [endpoint]}
        algorithm = changes.get("algorithm", {})
        tree = {
            "extends": str(ROOT / "params.yaml"),
            **TINY,
            "data": {"path": str(data)},
            "store": {"path": str(folder / "store")},
        }
        own = {"algorithm": {**SMALL.get(algorithm.get("recipe"), {}), **algorithm}}
        (folder / "params.yaml").write_text(yaml.safe_dump({**tree, **changes, **own}))
        return folder / "params.yaml"

    return write


@pytest.fixture(scope="session")
def whole_run(once, tiny_params, tiny_endpoint):
    """Folder of a finished, deterministic tiny run; its `half` is that run after stage 1.
    Read only: modify a copy made by `copy_run`.
    """
    from agentgym.config import load_config
    from agentgym.pipeline.run import run_step
    from agentgym.pipeline.table import steps_of

    def build(folder):
        # every step breaks this limit, so the run has an alarm
        changes = {"deterministic": True, "alarms": {"entropy": {"min": 10.0}}}
        cfg = load_config(tiny_params(folder, tiny_endpoint, **changes))
        for name in steps_of(cfg):
            assert str(run_step(name, cfg)) == "ran"
            if name == "stage-1":
                shutil.copytree(folder, folder / "half")
        tiny_params(folder, **changes)  # other tests read this file when that server has ended

    return once("whole", build)


@pytest.fixture(scope="session")
def started(once, tiny_params, tiny_endpoint):
    """Folder of a tiny run, finished up to its first stage.
    Read only: copy it. Runs of other parameters reuse the steps whose keys are equal.
    """
    from agentgym.config import load_config
    from agentgym.pipeline.run import run_step

    def build(folder):
        cfg = load_config(tiny_params(folder, tiny_endpoint))
        for name in ("prepare", "demonstrate", "initialize", "warm-start"):
            run_step(name, cfg)

    return once("started", build)


@pytest.fixture(scope="session")
def copy_run(whole_run, move_artifacts):
    """Return a function that copies `whole_run`, or its half, into a folder and returns that."""

    def copy(folder, half=False):
        source = whole_run / "half" if half else whole_run
        leave = shutil.ignore_patterns("half", "params.yaml")
        shutil.copytree(source, folder, dirs_exist_ok=True, ignore=leave)
        move_artifacts(folder / "mlflow.db", whole_run, folder)
        return folder

    return copy


@pytest.fixture(scope="session")
def ray_cluster(tmp_path_factory):
    """Ray cluster of one node with a dashboard and a token, started outside the run.
    All tests share it.
    """
    import tempfile

    from agentgym.deploy.owned import owned_process

    log, place = (
        tmp_path_factory.mktemp("cluster") / "log",
        tmp_path_factory.mktemp("address") / "json",
    )
    token = secrets.token_hex(32)
    environment = {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": token,
        "RAY_USAGE_STATS_ENABLED": "0",
        "PYTHONPATH": "",
    }
    with (
        # a Unix socket's name must be short
        tempfile.TemporaryDirectory(prefix="agr-", dir="/tmp") as folder,
        owned_process(
            [sys.executable, "-c", CLUSTER, folder, str(place)], log_path=log, env=environment
        ) as process,
    ):
        yield RayCluster(**json.loads(text_of(place, process, log)), token=token)


CLUSTER = """
import json, os, sys
os.environ["RAY_TMPDIR"] = sys.argv[1]
os.mkdir(sys.argv[1] + "/ray")
from ray.cluster_utils import Cluster
free = {"dashboard_port": 0, "dashboard_agent_listen_port": 0}  # another cluster on this machine \
has the usual ones
cluster = Cluster(True, head_node_args={"num_cpus": 16, "include_dashboard": True, \
"object_store_memory": 200_000_000, **free})
with open(sys.argv[2] + ".new", "w") as file:
    json.dump({"address": cluster.address, "dashboard": "http://" + cluster.webui_url}, file)
os.rename(sys.argv[2] + ".new", sys.argv[2])
sys.stdin.read()
"""


@dataclass(frozen=True)
class RayCluster:
    """Addresses and token of a Ray cluster."""

    address: str
    dashboard: str
    token: str


@pytest.fixture(scope="session")
def forger_of():
    """Return a function that makes a Forger (tests/agentgym/forger.py) of a run."""
    from tests.agentgym.forger import Forger

    return Forger


@pytest.fixture(scope="session")
def family_of():
    """Return a function that makes a tokenizer of a family in tests/agentgym/families.py."""
    from tests.agentgym.families import tokenizer_of

    return functools.cache(tokenizer_of)


@pytest.fixture
def make_learner(make_model):
    """Return a function of (optimizer, seed, LearnerConfig settings) that makes a LocalLearner."""
    from agentgym.config import LearnerConfig
    from agentgym.learner.learner import LocalLearner
    from tests.agentgym.learner.learning import OPTIMIZER

    return lambda config=OPTIMIZER, seed=0, **settings: LocalLearner(
        make_model(seed), config, total_steps=10, settings=LearnerConfig(**settings)
    )


@pytest.fixture(scope="session")
def tiny_endpoint(serving):
    """Server of a tiny run's environment. Without it, each step starts a server process."""
    with serving("babyai", TINY["env"]["options"]) as (endpoint, _):
        yield endpoint


@pytest.fixture
def forger(forger_of, copy_run, tmp_path, tiny_params, tiny_endpoint):
    from agentgym.config import load_config

    params = tiny_params(copy_run(tmp_path), endpoint=tiny_endpoint, deterministic=True)
    return forger_of(load_config(params))
