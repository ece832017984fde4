"""Runs on Ray survive the loss of a process and leave nothing running."""

import contextlib
import os
import re
import signal
import stat
import subprocess
import sys
import time

import psutil
import pytest
import torch

from agentgym.algorithms.batch import Batch
from agentgym.compute import cluster
from agentgym.compute.cluster import PlacementError, open_cluster
from agentgym.compute.learner_ranks import RankLost
from agentgym.compute.rollout_workers import WorkersLost
from agentgym.config import ConfigError, OptimizerConfig, load_config
from agentgym.deploy.attempts import RayUnreachable
from agentgym.learner.start import LearnerPlan
from agentgym.models.architecture import WEIGHTS
from agentgym.models.tensorfiles import StoredTensors
from agentgym.pipeline.run import run_step
from tests.waiting import wait_until

ray = pytest.mark.ray
STEP = "import sys; from agentgym.cli import main; sys.exit(main(['step', *sys.argv[1:]]))"


def test_a_cluster_that_does_not_answer_is_named_at_once(tmp_path, tiny_params):
    pytest.importorskip("ray")
    cfg = load_config(tiny_params(tmp_path), ["compute=ray", "ray.address=127.0.0.1:9"])
    began = time.monotonic()
    with (
        pytest.raises(
            RayUnreachable,
            match=(
                r"^no Ray cluster answers at 127\.0\.0\.1:9 .*; start the cluster, or correct"
                r" ray\.address"
            ),
        ),
        open_cluster(cfg, num_ranks=1, num_workers=1),
    ):
        pass
    assert time.monotonic() - began < 60


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("ray.worker_cpus=0", r"^ray\.worker_cpus and ray\.worker_gpus are both 0"),
        (
            "ray.address=somewhere",
            r"^ray\.address 'somewhere' must be host:port of a cluster's GCS, auto, or empty",
        ),
    ],
)
def test_what_ray_could_not_use_is_bad_input(tmp_path, tiny_params, override, message):
    pytest.importorskip("ray")

    def use():
        with open_cluster(
            load_config(tiny_params(tmp_path), ["compute=ray", override]),
            num_ranks=1,
            num_workers=1,
        ):
            pass

    with pytest.raises(ConfigError, match=message):
        use()


@pytest.fixture
def temp_root(tmp_path, monkeypatch):
    monkeypatch.setattr(cluster, "TEMP_ROOT", tmp_path)
    return tmp_path


def test_a_local_clusters_folder_is_its_users_alone_and_nobody_can_foresee_it(temp_root):
    with cluster._temp_folder() as one, cluster._temp_folder() as other:
        assert one != other
        assert [stat.S_IMODE(folder.stat().st_mode) for folder in (one, other)] == [0o700, 0o700]
        assert str(os.getpid()) not in one.name
    assert list(temp_root.iterdir()) == []


@pytest.mark.parametrize("name", ["x", "x-y-z", "", "1-2-3"])
def test_a_bogus_name_beside_it_stops_no_run(temp_root, name):
    bogus = temp_root / f"{cluster.TEMP_PREFIX}{name}"
    for make in (
        bogus.touch,
        lambda: bogus.symlink_to(temp_root / "elsewhere"),
        lambda: bogus.symlink_to("/"),
    ):
        make()
        with cluster._temp_folder() as folder:
            assert folder.is_dir()
        assert os.path.lexists(bogus)
        bogus.unlink()


def test_what_a_killed_process_left_is_removed_and_what_is_in_use_or_anothers_is_not(temp_root):
    left, foreign = (
        temp_root / f"{cluster.TEMP_PREFIX}left",
        temp_root / f"{cluster.TEMP_PREFIX}foreign",
    )
    for folder in (left, foreign):
        (folder / "session").mkdir(parents=True)
    if os.getuid() == 0:
        os.chown(foreign, 12345, 12345)
    else:
        foreign.chmod(0)  # looks like another user's folder
    with cluster._temp_folder() as used, cluster._temp_folder():
        assert used.is_dir()
        assert foreign.is_dir()
        assert not left.exists()


@pytest.fixture
def joined(ray_cluster, monkeypatch):
    """Overrides that connect a run to the test session's cluster."""
    monkeypatch.setenv("RAY_AUTH_TOKEN", ray_cluster.token)
    return ["compute=ray", f"ray.address={ray_cluster.address}"]


def local_ray():
    """Return the processes of local clusters; the session's cluster lies in another folder."""
    return [
        process.info["cmdline"]
        for process in psutil.process_iter(["cmdline"])
        if cluster.TEMP_PREFIX in " ".join(process.info["cmdline"] or ())
    ]


def auth_settings():
    return {name: value for name, value in os.environ.items() if name.startswith("RAY_AUTH")}


@ray
@pytest.mark.timeout(900)
def test_a_local_run_survives_its_own_death_and_a_workers_and_leaves_nothing(
    warm, kill_worker_at, assert_whole, caplog
):
    broadcasting = ["compute=ray", "ray.transport=broadcast"]
    cfg = load_config(warm, broadcasting)
    handler, before = signal.getsignal(signal.SIGTERM), auth_settings()

    with subprocess.Popen(
        [sys.executable, "-c", STEP, "stage-1", "--params", str(warm)]
        + [word for each in broadcasting for word in ("--set", each)]
    ) as process:
        wait_until(lambda: list(cfg.store.path.glob("steps/stage-1-*/manifests/000000.json")), 240)
        process.kill()
    wait_until(lambda: not local_ray())
    assert list(cluster.TEMP_ROOT.glob(f"{cluster.TEMP_PREFIX}*"))  # a kill removes no folder

    killed = kill_worker_at(step=2, count=3)
    assert str(run_step("stage-1", cfg)) == "resumed at commit 1"
    assert re.search(
        rf"rollout worker [01] \({killed[0]}\) is lost: .*; its unfinished episodes are played"
        r" again",
        caplog.text,
    )
    wait_until(lambda: not local_ray())
    # the next run removed the folder of the killed one
    assert not list(cluster.TEMP_ROOT.glob(f"{cluster.TEMP_PREFIX}*"))
    assert signal.getsignal(signal.SIGTERM) == handler
    assert auth_settings() == before
    assert_whole(cfg, "stage-1")


@ray
@pytest.mark.timeout(900)
def test_a_job_trains_with_actors_of_its_cluster(
    warm, ray_cluster, steps_before, assert_whole, monkeypatch
):
    monkeypatch.setenv("RAY_AUTH_TOKEN", ray_cluster.token)
    cfg = load_config(
        warm, ["compute=ray-job", f"ray.address={ray_cluster.dashboard}", "rollout.max_staleness=4"]
    )
    for name in steps_before:
        # also under this run's key: max_staleness makes it another run
        assert str(run_step(name, cfg)) == "done"
    assert str(run_step("stage-1", cfg)) == "ran"
    assert_whole(cfg, "stage-1")


@ray
@pytest.mark.timeout(600)
def test_workers_are_replaced_so_often_and_no_more(warm, joined, kill_worker_at):
    cfg = load_config(
        warm, [*joined, "ray.max_lost_workers=0", "ray.num_workers=1", "ray.num_ranks=1"]
    )
    kill_worker_at(step=1, count=1)
    with pytest.raises(
        WorkersLost,
        match=(
            r"^1 rollout workers were lost \(limit ray\.max_lost_workers 0\), the last, process \d+"
            r" on .*; run the step again"
        ),
    ):
        run_step("stage-1", cfg)


@ray
@pytest.mark.timeout(600)
def test_a_group_that_does_not_fit_is_refused_with_what_was_asked_and_what_there_is(
    tmp_path, tiny_params, joined
):
    cfg = load_config(
        tiny_params(tmp_path), [*joined, "ray.rank_cpus=64", "ray.placement_timeout_s=2"]
    )
    began = time.monotonic()
    with (
        pytest.raises(
            PlacementError,
            match=(
                r"no room for this run within ray\.placement_timeout_s 2: asked for 2 x \(CPU 64\)"
                r" and 3 x \(CPU 1\); "
                r"node .* has CPU 16, of which free CPU 16\. Lower ray\.num_workers"
            ),
        ),
        open_cluster(cfg, num_ranks=2, num_workers=3),
    ):
        pass
    assert time.monotonic() - began < 60


def reread(learner, plan):
    """Return the complete weights that the learner's ranks wrote."""
    place = plan.weights
    blobs = learner.snapshot().write(place.place, place.manifest.step, place.manifest.key)
    assert [name for name in blobs if name.startswith("model")] == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    ]
    manifest = place.manifest.model_copy(update={"blobs": blobs})
    return StoredTensors.of(place.store, manifest, WEIGHTS).load()


def assert_same(ours, theirs):
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())


@ray
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("number", "verdict"),
    [
        (signal.SIGKILL, "died: "),
        pytest.param(signal.SIGSTOP, "does not answer; ", marks=pytest.mark.slow),
    ],
)
def test_a_lost_rank_ends_the_step_and_is_named(
    tmp_path, tiny_params, joined, make_model, stored, number, verdict, monkeypatch, stand_still
):
    monkeypatch.setattr("agentgym.compute.learner_ranks.SLACK_S", 5.0)
    cfg = load_config(
        tiny_params(tmp_path), [*joined, "ray.rank_timeout_s=15", "ray.placement_timeout_s=300"]
    )
    model = make_model()
    plan = LearnerPlan(model.config.to_json_string(), stored(model), OptimizerConfig(), 10)
    with open_cluster(cfg, num_ranks=2, num_workers=0) as room, room.learner(plan) as learner:
        assert_same(reread(learner, plan), plan.weights.load())
        where = learner._where[1]
        stand_still(int(where.split()[1]), number)
        with pytest.raises(
            RankLost,
            match=(
                rf"^learner rank 1 \({where}\) {verdict}.*run the step again to go on from its last"
                r" commit$"
            ),
        ):
            learner.snapshot()


@ray
@pytest.mark.timeout(600)
def test_a_reference_is_scored_by_the_ranks_that_hold_it(
    tmp_path, tiny_params, joined, make_model, stored
):
    cfg = load_config(tiny_params(tmp_path), [*joined, "ray.placement_timeout_s=300"])
    model, ids = make_model(), torch.arange(5, 25)
    plan = LearnerPlan(
        model.config.to_json_string(),
        stored(model),
        OptimizerConfig(),
        10,
        reference=stored(make_model(1)),
    )
    none, some = torch.zeros(20), torch.arange(20) % 5 > 1
    starts, groups = torch.tensor([0, 5, 15, 20]), torch.arange(3)
    batch = Batch(ids, starts, some, none, none, groups, groups < 0, 1.0)
    expected = plan.build().score_reference(batch)
    with open_cluster(cfg, num_ranks=2, num_workers=0) as room, room.learner(plan) as learner:
        scores = learner.score_reference(batch)
        torch.testing.assert_close(scores, expected, atol=1e-5, rtol=1e-5)
        assert not torch.allclose(scores, learner.score(batch), atol=1e-2)
        learner.drop_reference()
        with pytest.raises(ValueError, match="a reference model is needed; none was given"):
            learner.score_reference(batch)


@ray
@pytest.mark.timeout(600)
def test_a_cluster_of_a_runs_own_is_out_of_reach_of_other_machines_and_other_users(
    tmp_path, tiny_params, make_model, stored, monkeypatch
):
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")  # the setting of another cluster
    monkeypatch.setenv("RAY_ADDRESS", "203.0.113.5:6379")
    cfg = load_config(tiny_params(tmp_path), ["compute=ray", "ray.placement_timeout_s=300"])
    model = make_model()
    plan = LearnerPlan(model.config.to_json_string(), stored(model), OptimizerConfig(), 10)

    def sockets():
        held = set()
        for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):  # a process that ends at this moment
                held |= {
                    (process.name(), found.laddr.ip.removeprefix("::ffff:"), found.laddr.port)
                    for found in process.net_connections("inet")
                    if found.status == psutil.CONN_LISTEN
                }
        return held

    others = sockets()  # sockets of other tests' clusters
    with open_cluster(cfg, num_ranks=2, num_workers=0) as room, room.learner(plan) as learner:
        assert_same(reread(learner, plan), plan.weights.load())
        listening = [(name, address) for name, address, _ in sockets() - others]
        folder = room._folder
        modes = {
            path.name: stat.S_IMODE(path.stat().st_mode) for path in (folder, *folder.iterdir())
        }
    assert {"gcs_server", "raylet"} <= {name for name, _ in listening}
    # ports of the ranks themselves and of gloo
    assert sum(name.startswith("ray::LearnerRank") for name, _ in listening) >= 4, listening
    assert {address for _, address in listening} == {"127.0.0.1"}, listening
    assert modes[folder.name] == 0o700
    assert "r" in modes
    assert any(name.startswith("ranks-") for name in modes)
    assert not folder.exists()
