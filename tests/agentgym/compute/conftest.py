"""Fixtures: a run whose next step is a stage on Ray, a way to kill its workers, and checks."""

import os
import shutil
import signal

import pytest

from agentgym.audit import audit
from agentgym.compute.rollout_workers import RayEngine
from agentgym.config import load_config
from agentgym.data.items import ItemStream, load_splits
from agentgym.pipeline.run import run_step
from agentgym.pipeline.table import finished, open_store
from agentgym.records import TRAJECTORIES, decode_trajectories
from agentgym.steps.context import METRICS
from agentgym.steps.step import stages
from agentgym.tracking.points import decode_points
from tests.first_steps import BEFORE_AND_EVALUATED


@pytest.fixture(scope="session")
def steps_before():
    """Names of the steps before stage 1."""
    return BEFORE_AND_EVALUATED


@pytest.fixture(scope="module")
def warmed(tmp_path_factory, tiny_params):
    """The folder of a run whose next step is stage 1."""
    folder = tmp_path_factory.mktemp("warm")
    for name in BEFORE_AND_EVALUATED:
        run_step(name, load_config(tiny_params(folder)))
    return folder


@pytest.fixture
def warm(warmed, tmp_path, tiny_params):
    """The params file of a copy of `warmed`."""
    shutil.copytree(warmed, tmp_path, dirs_exist_ok=True)
    return tiny_params(tmp_path, ray={"num_workers": 2, "num_ranks": 2, "placement_timeout_s": 300})


@pytest.fixture
def kill_worker_at(monkeypatch):
    """Return a function of (step, count) that kills the first rollout worker with SIGKILL.
    It does so after `count` episodes of that optimizer step, and returns the list of kills.
    """

    def prepare(step, count):
        killed, collect = [], RayEngine.collect

        def collecting(self, request):
            finished = []

            def progress(number):
                finished.append(number)
                if request.step == step and len(finished) == count and not killed:
                    killed.append(self.workers[0].where)
                    os.kill(int(killed[0].split()[1]), signal.SIGKILL)

            return collect(self, request, progress=progress)

        monkeypatch.setattr(RayEngine, "collect", collecting)
        return killed

    return prepare


@pytest.fixture(scope="session")
def assert_whole():
    """Return a check of (cfg, stages): no item is lost or repeated, and the audit passes."""

    def check(cfg, *names):
        store = open_store(cfg)
        done = finished(cfg, store)
        commits = [commit for name in names for commit in store.history(name, done[name].key)]
        assert [item for commit in commits for item in commit.state["consumed"]] == items(
            cfg, names
        )
        for commit in commits:
            episodes = [
                t
                for t in decode_trajectories(store.read(commit, TRAJECTORIES))
                if t.item.split == "train" and t.max_turns == commit.state["max_turns"]
            ]
            admitted = [
                (item, sample)
                for item in commit.state["consumed"]
                for sample in range(cfg.rollout.group_size)
            ]
            assert [(t.item.item_id, t.sample) for t in episodes[: len(admitted)]] == admitted
            step, stale = commit.state["global_step"], cfg.rollout.max_staleness
            (point,) = decode_points(store.read(commit, METRICS))
            assert_measured(point.metrics, cfg.rollout.engine)
            assert {turn.version for t in episodes for turn in t.turns} <= set(
                range(max(0, step - 1 - stale), step)
            )
        report = audit(cfg)
        assert report.ok, report.to_json()
        return report

    return check


def assert_measured(metrics, engine):
    """Check the engine metrics and the time split of a step, even if it lost a worker."""
    split = ("commit", "generate", "wait", "update", "publish", "validate", "other")
    times = [metrics[f"time/{part}_s"] for part in split]
    assert min(times) >= 0
    assert sum(times) == pytest.approx(metrics["time/step_s"])
    assert metrics["perf/generated_tokens_per_s"] > 0
    assert metrics["perf/prompt_tokens_per_s"] > 0
    hits = metrics["perf/prefix_cache_hit_frac"]
    assert 0 <= hits < 1
    assert hits > 0 or engine == "vllm"  # vLLM's cache blocks are longer than these prompts
    assert 0 < metrics["perf/engine_idle_frac"] < 1
    assert 0 <= metrics["perf/queue_depth_mean"] <= metrics["perf/queue_depth_max"]


def items(cfg, names):
    """Return the item ids that the stages consume, in order."""
    splits = load_splits(
        cfg.data.path, cfg.env.name, validation_fraction=cfg.data.validation_fraction, seed=cfg.seed
    )
    count = sum(
        stage.last_step - stage.first_step + 1
        for stage in stages(cfg.horizon)
        if stage.name in names
    )
    stream = ItemStream(splits.train, seed=cfg.seed)
    return [item.item_id for item in stream.next(count * cfg.rollout.items_per_step)]
