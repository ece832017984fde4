"""Tests for the RayJob of an attempt: the fields that an operator and a reader rely on."""

import re

import pytest
import yaml

from agentgym.config import ConfigError, load_config
from agentgym.deploy.attempts import Job
from agentgym.deploy.rayjob import image_of, main, rayjob

RUN_KEY, KEY = "ab12" * 16, "cd34" * 16
IMAGE = "registry/agentgym@sha256:" + "0" * 64
URIS = ["store.uri=s3://bucket/runs", "tracking.uri=http://mlflow:5000", "compute=kuberay"]


@pytest.fixture
def job(tmp_path, tiny_params):
    def make(*overrides, **changes):
        cfg = load_config(tiny_params(tmp_path, **changes), [*URIS, *overrides])
        return Job("stage-2", RUN_KEY, KEY, cfg)

    return make


def made(job, name="rab12ab12ab12-s2-a1"):
    return rayjob(job, name, IMAGE)


def pods(resource):
    cluster = resource["spec"]["rayClusterSpec"]
    found = {"head": cluster["headGroupSpec"], "worker": cluster["workerGroupSpecs"][0]}
    found = {name: group["template"] for name, group in found.items()}
    if "submitterPodTemplate" in resource["spec"]:
        found["submitter"] = resource["spec"]["submitterPodTemplate"]
    return found


def test_its_name_is_the_attempt_and_whole_digests_are_annotations(job):
    asked = job()
    assert asked.name(1) == "rab12ab12ab12-s2-a1"
    metadata = made(asked)["metadata"]
    assert metadata["labels"]["agentgym.io/run"] == "rab12ab12ab12"
    assert metadata["labels"]["agentgym.io/step"] == "stage-2"
    assert metadata["annotations"] == {"agentgym.io/run-key": RUN_KEY, "agentgym.io/step-key": KEY}
    assert made(asked)["spec"]["jobId"] == metadata["name"]


def test_it_ends_with_its_job_and_never_outlives_its_deadline(job):
    spec = made(job("ray.job_timeout_s=7200"))["spec"]
    assert spec["shutdownAfterJobFinishes"] is True
    assert (spec["ttlSecondsAfterFinished"], spec["activeDeadlineSeconds"]) == (30, 7200)
    assert spec["backoffLimit"] == 0  # attempts are counted here, not by KubeRay
    assert spec["submissionMode"] == "K8sJobMode"
    assert "suspend" not in spec  # set by queues only


def test_deletion_rules_take_the_cluster_first_and_the_job_later_and_stand_alone(job):
    spec = made(job("kuberay.deletion=rules", "kuberay.keep_job_s=600"))["spec"]
    assert spec["shutdownAfterJobFinishes"] is False  # KubeRay refuses both
    assert "ttlSecondsAfterFinished" not in spec
    told = [
        (rule["policy"], *rule["condition"].values())
        for rule in spec["deletionStrategy"]["deletionRules"]
    ]
    assert told == [
        ("DeleteCluster", "SUCCEEDED", 30),
        ("DeleteCluster", "FAILED", 30),
        ("DeleteCluster", "Failed", 30),
        ("DeleteSelf", "SUCCEEDED", 600),
        ("DeleteSelf", "FAILED", 600),
        ("DeleteSelf", "Failed", 600),
    ]


def test_the_cluster_asks_for_a_token_and_its_head_computes_nothing(job):
    cluster = made(job())["spec"]["rayClusterSpec"]
    assert cluster["authOptions"] == {"mode": "token"}
    assert re.fullmatch(r"2\.\d+\.\d+", cluster["rayVersion"])  # required for tokens
    assert cluster["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"


def test_gpus_are_the_workers_alone_and_their_nodes_tell_by_label_and_taint(job):
    resource = made(
        job(
            "compute_device=cuda",
            "ray.rank_gpus=1",
            "ray.worker_gpus=1",
            "kuberay.workers=2",
            "kuberay.worker_gpus=8",
            "kuberay.node_labels={pool: h100}",
        )
    )
    (group,) = resource["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    assert (group["groupName"], group["replicas"], group["maxReplicas"]) == ("gpu", 2, 2)
    assert {
        name: "nvidia.com/gpu" in pod["spec"]["containers"][0]["resources"]["limits"]
        for name, pod in pods(resource).items()
    } == {"head": False, "worker": True, "submitter": False}
    spec = group["template"]["spec"]
    assert spec["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "8"
    assert spec["nodeSelector"] == {"pool": "h100"}
    assert spec["tolerations"] == [
        {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
    ]


def test_a_step_that_computes_in_its_own_process_is_placed_where_the_room_is(job):
    spec = made(job(deterministic=True))["spec"]
    assert spec["entrypointNumCpus"] == 1  # on a worker: the head has no CPUs
    assert made(job())["spec"]["entrypointNumCpus"] == 0  # its actors request them


def test_kueue_admits_it_by_its_labels(job):
    labels = made(job("kuberay.queue=team-a", "kuberay.priority=nightly"))["metadata"]["labels"]
    assert labels["kueue.x-k8s.io/queue-name"] == "team-a"
    assert labels["kueue.x-k8s.io/priority-class"] == "nightly"
    assert not any(name.startswith("kueue") for name in made(job())["metadata"]["labels"])


def test_secrets_come_by_reference_alone_and_the_submitter_gets_none(job):
    resource = made(job())
    for name, pod in pods(resource).items():
        (container,) = pod["spec"]["containers"]
        assert [each["secretRef"]["name"] for each in container.get("envFrom", ())] == (
            [] if name == "submitter" else ["agentgym-rollout", "agentgym-env-token"]
        )
        literal = {each["name"] for each in container["env"] if "value" in each}
        assert not [each for each in literal if re.search("SECRET|PASSWORD|TOKEN|KEY", each)]


def test_it_gets_the_token_of_each_fleet_by_reference_and_no_key_of_tokens(job):
    url = "http://env-babyai-r1.agentgym-fleets.svc:8000"
    (container,) = pods(made(job(f"env.endpoints=[{url}]")))["head"]["spec"]["containers"]
    (token,) = [each for each in container["env"] if "valueFrom" in each]
    assert token["name"] == "AGENTGYM_ENV_TOKEN_BABYAI"
    reference = token["valueFrom"]["secretKeyRef"]
    assert (reference["name"], reference["key"]) == ("env-babyai-r1", "AGENTGYM_ENV_TOKEN")
    elsewhere = job("env.endpoints=[http://env-babyai-r1.other.svc:8000]")
    (container,) = pods(made(elsewhere))["head"]["spec"]["containers"]
    assert [each for each in container["env"] if "valueFrom" in each] == []


def test_http_mode_needs_no_pod_to_hand_it_over(job):
    spec = made(job("kuberay.mode=HTTPMode"))["spec"]
    assert spec["submissionMode"] == "HTTPMode"
    assert "submitterPodTemplate" not in spec
    assert "submitterConfig" not in spec


def test_its_parameters_are_the_runs_and_survive_kubernetes_variables(job, monkeypatch, tmp_path):
    asked = job("env.options={actions: 'a $(HOME) $$b'}")
    resource = made(asked)
    (container,) = pods(resource)["head"]["spec"]["containers"]
    values = {each["name"]: each["value"] for each in container["env"]}
    sent = values["AGENTGYM_PARAMS"].replace("$$", "$")
    monkeypatch.setenv("AGENTGYM_PARAMS", sent)
    monkeypatch.setattr("sys.argv", ["sent", "stage-2", "--key", KEY])
    ran = []
    monkeypatch.setattr("os.execv", lambda program, words: ran.append(words))
    main()
    ((*_, file),) = ran
    inner = load_config(file)
    assert (inner.compute, inner.ray.address) == ("ray", "auto")
    assert inner.store.uri == "s3://bucket/runs"
    assert inner.semantic() == asked.cfg.semantic()
    assert not inner.data.path.is_absolute()
    assert values["MLFLOW_TRACKING_URI"] == "http://mlflow:5000"
    assert str(tmp_path) not in yaml.safe_dump(resource)  # no local path


def test_the_image_is_the_deployments_choice():
    assert image_of({"AGENTGYM_IMAGE": IMAGE}) == IMAGE
    with pytest.raises(ConfigError, match="AGENTGYM_IMAGE names no image"):
        image_of({})


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["kuberay.deletion=rules", "kuberay.queue=a"], "Kueue suspends, which KubeRay allows"),
        (["kuberay.deletion=rules", "kuberay.keep_job_s=1"], "is less than keep_cluster_s 30"),
        (["kuberay.priority=a"], "kuberay.queue names none"),
        (["ray.rank_cpus=8"], "ray.rank_cpus 8 is more than kuberay.worker_cpus 4: no pod has"),
        (["kuberay.mode=SidecarMode"], "kuberay.mode: input should be 'K8sJobMode' or 'HTTPMode'"),
        (["kuberay.image=evil"], "unknown key kuberay.image"),
    ],
)
def test_what_kuberay_would_refuse_is_refused_when_it_is_read(job, overrides, told):
    with pytest.raises(ConfigError, match=told):
        job(*overrides)
