"""RayJobs on a real API server. The tests write the status that KubeRay's operator would write.
They cover our client: what it requests, how it maps each status, and what it deletes.
"""

import contextlib
import secrets
import threading
import time
from types import SimpleNamespace

import pytest

from agentgym.config import ConfigError, load_config
from agentgym.deploy import jobs
from agentgym.deploy.attempts import Job, Phase, RayJobFailed
from agentgym.deploy.jobs import run_as_job
from agentgym.deploy.kube.client import Kind, connect
from agentgym.deploy.kuberay import RAY_CLUSTER, RAY_JOB, KubeRay, end_jobs, look_at, overlap
from agentgym.deploy.rayjob import rayjob
from agentgym.store.runstore import store_at

RUN_KEY, KEY = "ab12" * 16, "cd34" * 16
IMAGE = "registry/agentgym:1"
kubernetes = pytest.mark.kubernetes


@pytest.fixture(scope="module")
def namespace(kubeconfig):
    """A `Kube` in a new namespace."""
    name = f"agentgym-rays-{secrets.token_hex(4)}"
    kube = connect(kubeconfig=kubeconfig, namespace=name)
    kind = Kind("v1", "Namespace")
    kube.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
    yield kube
    kube.delete(kind, name)
    kube.close()


class Operator:
    """Writes the statuses and owned objects that KubeRay would write."""

    def __init__(self, kube):
        self.kube = kube

    def wait_for(self, name, seconds=30):
        return self.until(lambda: self.kube.find(RAY_JOB, name), seconds)

    def until(self, what, seconds=30):
        deadline = time.monotonic() + seconds
        while not (found := what()):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        return found

    def says(self, name, deployment, ray="", **more):
        self.wait_for(name)
        status = {"jobDeploymentStatus": deployment, "jobStatus": ray or None, **more}
        self.kube.patch(RAY_JOB, name, {"status": status}, subresource="status")

    def gives_a_cluster(self, name, cluster):
        owner = self.wait_for(name)
        wanted = {
            "apiVersion": "ray.io/v1",
            "kind": "RayCluster",
            "metadata": {
                "name": cluster,
                "ownerReferences": [
                    {
                        "apiVersion": "ray.io/v1",
                        "kind": "RayJob",
                        "name": name,
                        "uid": owner["metadata"]["uid"],
                        "controller": True,
                        "blockOwnerDeletion": True,
                    }
                ],
            },
            "spec": owner["spec"]["rayClusterSpec"],
        }
        self.kube.create(wanted)
        self.says(name, "Running", "RUNNING", rayClusterName=cluster)

    def gone(self, name):
        self.until(lambda: self.kube.find(RAY_JOB, name) is None)


@pytest.fixture
def scene(namespace, tmp_path, tiny_params, monkeypatch, kubeconfig):
    """A step that runs as RayJobs in a thread; `outcome` has its result."""
    monkeypatch.setenv("AGENTGYM_IMAGE", IMAGE)
    monkeypatch.setenv("KUBECONFIG", str(kubeconfig))
    monkeypatch.setattr(jobs, "POLL_S", 0.1)
    monkeypatch.setattr(jobs, "LOG_END_S", 0.1)
    monkeypatch.setattr("agentgym.deploy.kuberay.LOST_S", 1.0)
    run_key = secrets.token_hex(32)  # keeps the jobs of tests apart
    store = store_at(tmp_path / "s", lease_ttl_s=0.1)
    threads = []

    def config(*overrides):
        usual = [
            "compute=kuberay",
            "store.uri=s3://bucket/runs",
            "tracking.uri=http://mlflow:5000",
            f"kubernetes.namespace={namespace.namespace}",
            "store.lease_ttl_s=0.1",
        ]
        return load_config(tiny_params(tmp_path), [*usual, *overrides])

    def start(*overrides, attempts=2):
        cfg = config(f"ray.job_attempts={attempts}", *overrides)
        outcome = SimpleNamespace(manifest=None, error=None)

        def run():
            try:
                outcome.manifest = run_as_job("stage-2", cfg, store, run_key=run_key, key=KEY)
            except Exception as error:
                outcome.error = error

        threads.append(threading.Thread(target=run, daemon=True))
        threads[-1].start()
        return outcome

    def commit(done=True):
        with store.open("stage-2", KEY) as writer:
            return writer.commit(
                done=done,
                state={},
                parents={},
                config={},
                blobs={},
                records={},
                results={},
                timings={},
            )

    def ended(outcome):
        threads[-1].join(30)
        assert not threads[-1].is_alive()
        return outcome.manifest or outcome.error

    job = Job("stage-2", run_key, KEY, load_config(tiny_params(tmp_path)))
    yield SimpleNamespace(
        start=start,
        commit=commit,
        ended=ended,
        operator=Operator(namespace),
        kube=namespace,
        cfg=config(),
        first=job.name(1),
        second=job.name(2),
        run=f"r{run_key[:12]}",
        run_key=run_key,
    )
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()


def left(scene):
    return [
        each["metadata"]["name"]
        for kind in (RAY_JOB, RAY_CLUSTER)
        for each in scene.kube.list(kind).items
        if each["metadata"]["name"].startswith(scene.run)
    ]


@kubernetes
def test_the_resources_schema_takes_it_whole_and_refuses_a_wrong_field(
    namespace, tmp_path, tiny_params
):
    uris = ["store.uri=s3://bucket/runs", "tracking.uri=http://mlflow:5000", "compute=kuberay"]
    uris += [f"kubernetes.namespace={namespace.namespace}"]
    gpus = ["compute_device=cuda", "ray.rank_gpus=1", "ray.worker_gpus=1", "kuberay.worker_gpus=8"]
    variants = (["kuberay.queue=a"], ["kuberay.deletion=rules"], ["kuberay.mode=HTTPMode", *gpus])
    for number, overrides in enumerate(variants, 1):
        cfg = load_config(tiny_params(tmp_path), [*uris, *overrides])
        job = Job("stage-2", RUN_KEY, KEY, cfg)
        wanted = rayjob(job, job.name(number), IMAGE)
        taken = namespace.create(wanted)
        assert missing(wanted["spec"], taken["spec"]) == []  # no field was pruned as unknown
        namespace.delete(RAY_JOB, job.name(number))
    wanted["spec"]["rayClusterSpec"]["authOptions"]["mode"] = "tokens"
    transport = KubeRay(namespace, IMAGE)
    with (
        pytest.raises(RayJobFailed, match=r"does not take job .*authOptions\.mode"),
        patched(wanted),
    ):
        transport.submit(job, job.name(9))


def missing(wanted, taken, place="spec"):
    """Return the paths of values that were sent and are missing in the stored object."""
    if isinstance(wanted, dict):
        return [
            found
            for name, value in wanted.items()
            for found in (
                missing(value, taken[name], f"{place}.{name}")
                if isinstance(taken, dict) and name in taken
                else [f"{place}.{name}"]
            )
        ]
    if isinstance(wanted, list):
        if len(wanted) != len(taken):
            return [place]
        pairs = zip(wanted, taken, strict=True)
        return [each for i, (a, b) in enumerate(pairs) for each in missing(a, b, f"{place}.{i}")]
    return [] if wanted == taken else [place]


@contextlib.contextmanager
def patched(wanted):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("agentgym.deploy.kuberay.rayjob", lambda *_: wanted)
        yield


@kubernetes
def test_a_success_gives_the_manifest_and_leaves_nothing(scene):
    outcome = scene.start()
    for deployment, ray in (("Initializing", ""), ("Running", "PENDING")):
        scene.operator.says(scene.first, deployment, ray)
    scene.operator.gives_a_cluster(scene.first, f"{scene.first}-c")
    manifest = scene.commit()
    scene.operator.says(scene.first, "Complete", "SUCCEEDED")
    assert scene.ended(outcome) == manifest
    scene.operator.gone(scene.first)
    scene.operator.until(lambda: left(scene) == [])  # its cluster was deleted with it


@kubernetes
def test_a_failure_is_followed_by_the_next_attempt_and_the_last_one_tells_why(scene):
    outcome = scene.start()
    said = "Job entrypoint command failed with exit code 1, last available logs: boom"
    scene.operator.says(scene.first, "Failed", "FAILED", reason="AppFailed", message=said)
    scene.operator.says(scene.second, "Failed", "FAILED", reason="AppFailed", message=said)
    error = scene.ended(outcome)
    assert isinstance(error, RayJobFailed)
    assert str(error).startswith("step stage-2 failed in 2 jobs (ray.job_attempts), the last: job")
    assert f"{scene.second} ended as FAILED (AppFailed) with exit code 1" in str(error)
    assert "boom" in str(error)
    assert left(scene) == [scene.first, scene.second]  # kept: KubeRay deletes their clusters
    again = scene.start()
    third = scene.second.removesuffix("2") + "3"
    scene.operator.wait_for(third)
    manifest = scene.commit()
    scene.operator.says(third, "Complete", "SUCCEEDED")
    assert scene.ended(again) == manifest
    scene.operator.until(lambda: left(scene) == [])


@kubernetes
def test_a_result_counts_whatever_the_status(scene):
    outcome = scene.start()
    scene.operator.wait_for(scene.first)
    manifest = scene.commit()
    scene.operator.says(scene.first, "Failed", "FAILED", reason="AppFailed")
    assert scene.ended(outcome) == manifest


@kubernetes
def test_bad_input_is_not_tried_again(scene):
    outcome = scene.start()
    said = "Job entrypoint command failed with exit code 2, last available logs: error: no such"
    scene.operator.says(scene.first, "Failed", "FAILED", reason="AppFailed", message=said)
    error = scene.ended(outcome)
    assert isinstance(error, ConfigError)
    assert "error: no such" in str(error)
    assert left(scene) == [scene.first]


@kubernetes
def test_a_lost_cluster_is_noticed_its_job_deleted_and_the_next_attempt_made(scene):
    outcome = scene.start()
    cluster = f"{scene.first}-c"
    scene.operator.gives_a_cluster(scene.first, cluster)
    time.sleep(1)
    scene.kube.delete(RAY_CLUSTER, cluster)
    scene.operator.wait_for(scene.second)
    assert scene.kube.find(RAY_JOB, scene.first) is None
    manifest = scene.commit()
    scene.operator.says(scene.second, "Complete", "SUCCEEDED")
    assert scene.ended(outcome) == manifest


@kubernetes
def test_a_queued_job_waits_for_its_queue_and_not_for_its_place(scene):
    outcome = scene.start("ray.placement_timeout_s=3", "kuberay.queue=nightly")
    scene.operator.wait_for(scene.first)
    scene.kube.patch(RAY_JOB, scene.first, {"spec": {"suspend": True}})
    scene.operator.says(scene.first, "Suspended")
    time.sleep(4)  # longer than placement_timeout_s
    assert outcome.error is None
    scene.kube.patch(RAY_JOB, scene.first, {"spec": {"suspend": False}})
    scene.operator.gives_a_cluster(scene.first, f"{scene.first}-c")
    manifest = scene.commit()
    scene.operator.says(scene.first, "Complete", "SUCCEEDED")
    assert scene.ended(outcome) == manifest


@kubernetes
@pytest.mark.parametrize(
    ("overrides", "status", "told"),
    [
        (["ray.placement_timeout_s=1"], ("Initializing", ""), "ray.placement_timeout_s 1"),
        (["kuberay.queue_timeout_s=1"], ("Suspended", ""), "kuberay.queue_timeout_s 1"),
    ],
)
def test_every_wait_ends_and_takes_the_job_with_it(scene, overrides, status, told):
    outcome = scene.start(*overrides)
    scene.operator.says(scene.first, *status)
    error = scene.ended(outcome)
    assert isinstance(error, TimeoutError)
    assert told in str(error)
    assert left(scene) == []


@kubernetes
@pytest.mark.parametrize(
    ("status", "kind", "told"),
    [
        (
            {"jobDeploymentStatus": "Failed", "reason": "DeadlineExceeded"},
            TimeoutError,
            "its cluster ended it at ray.job_timeout_s",
        ),
        (
            {"jobDeploymentStatus": "Complete", "jobStatus": "STOPPED"},
            RayJobFailed,
            "stopped from outside",
        ),
        (
            {"jobDeploymentStatus": "ValidationFailed", "message": "needs a feature gate"},
            ConfigError,
            "needs a feature gate",
        ),
    ],
)
def test_where_no_attempt_helps_none_is_made(scene, status, kind, told):
    outcome = scene.start()
    scene.operator.wait_for(scene.first)
    scene.kube.patch(RAY_JOB, scene.first, {"status": status}, subresource="status")
    error = scene.ended(outcome)
    assert isinstance(error, kind)
    assert told in str(error)
    assert scene.kube.find(RAY_JOB, scene.second) is None


@kubernetes
def test_a_job_that_somebody_deleted_is_not_brought_back(scene):
    outcome = scene.start(attempts=1)
    scene.operator.wait_for(scene.first)
    scene.kube.delete(RAY_JOB, scene.first)
    error = scene.ended(outcome)
    assert isinstance(error, RayJobFailed)
    assert "it was deleted from outside" in str(error)


@kubernetes
def test_whoever_comes_back_follows_the_job_that_is_there(scene):
    first = scene.start()
    scene.operator.gives_a_cluster(scene.first, f"{scene.first}-c")
    second = scene.start()  # as after a kill; the first one keeps reading in this test
    time.sleep(1)
    assert left(scene) == [scene.first, f"{scene.first}-c"]
    manifest = scene.commit()
    scene.operator.says(scene.first, "Complete", "SUCCEEDED")
    assert scene.ended(second) == manifest
    scene.operator.until(lambda: first.manifest == manifest)


@kubernetes
def test_jobs_of_a_cancelled_run_are_deleted_with_their_clusters_and_no_other_runs(scene):
    """Delete jobs whose followers were killed."""
    kube, other = scene.kube, Job("stage-2", secrets.token_hex(32), KEY, scene.cfg)
    ours = Job("stage-2", scene.run_key, KEY, scene.cfg)
    for job in (ours, other):
        kube.create(rayjob(job, job.name(1), IMAGE))
        scene.operator.gives_a_cluster(job.name(1), f"{job.name(1)}-c")
    assert end_jobs(scene.cfg, scene.run) == 1
    scene.operator.until(lambda: left(scene) == [])
    assert end_jobs(scene.cfg, scene.run) == 0
    assert kube.find(RAY_CLUSTER, f"{other.name(1)}-c")
    kube.delete(RAY_JOB, other.name(1))


@kubernetes
def test_a_cluster_without_kuberay_is_told_of(scene, monkeypatch):
    monkeypatch.setattr("agentgym.deploy.kuberay.RAY_JOB", Kind("ray.io/v9", "RayJob"))
    error = scene.ended(scene.start())
    assert isinstance(error, ConfigError)
    assert "this cluster knows no RayJob" in str(error)


@pytest.mark.parametrize(
    ("status", "phase"),
    [
        ({}, Phase.WAITING),
        ({"jobDeploymentStatus": "Initializing"}, Phase.WAITING),
        ({"jobDeploymentStatus": "Running"}, Phase.WAITING),
        ({"jobDeploymentStatus": "Running", "jobStatus": "PENDING"}, Phase.WAITING),
        ({"jobDeploymentStatus": "Running", "jobStatus": "RUNNING"}, Phase.RUNNING),
        # the submitter has not ended, or is still reading the log
        ({"jobDeploymentStatus": "Running", "jobStatus": "SUCCEEDED"}, Phase.RUNNING),
        ({"jobDeploymentStatus": "Retrying"}, Phase.WAITING),
        ({"jobDeploymentStatus": "Suspending", "jobStatus": "RUNNING"}, Phase.QUEUED),
        ({"jobDeploymentStatus": "Suspended"}, Phase.QUEUED),
        ({"jobDeploymentStatus": "Complete", "jobStatus": "SUCCEEDED"}, Phase.ENDED),
        ({"jobDeploymentStatus": "Failed"}, Phase.ENDED),
    ],
)
def test_each_status_is_a_phase(status, phase):
    assert look_at({"metadata": {"name": "a"}, "spec": {}, "status": status}).phase is phase


def test_what_the_head_of_a_cluster_lacks_is_told_while_it_is_waited_for():
    conditions = [{"message": "0/3 nodes are available: insufficient nvidia.com/gpu"}]
    status = {"rayClusterStatus": {"conditions": conditions}}
    look = look_at({"metadata": {"name": "a"}, "spec": {}, "status": status})
    assert look.message == "0/3 nodes are available: insufficient nvidia.com/gpu"


def test_lines_of_a_log_that_is_read_again_are_told_once():
    assert overlap([], ["a", "b"]) == 0
    assert overlap(["a", "b"], ["a", "b", "c"]) == 2
    assert overlap(["a", "b", "c"], ["c", "d"]) == 1
    assert overlap(["a"], ["x", "y"]) == 0
