"""Fleets that start and end with a run, using the flow's account on a real API server.

The nodes are hollow: pods become ready without a container, and their addresses reach no
server, so these tests leave out the final check that a server responds.
"""

import base64
import json
import secrets
import time

import pytest

from agentgym.cli import main
from agentgym.config import ConfigError, EnvConfig, load_config
from agentgym.deploy import kubernetes
from agentgym.deploy.environment import environment_servers
from agentgym.deploy.fleets.addresses import listed
from agentgym.deploy.fleets.fleet_lease import HOLDER, KEPT, acquire, groups
from agentgym.deploy.fleets.startup import remaining, send
from agentgym.deploy.kube.calls import Forbidden
from agentgym.deploy.kube.client import DEPLOYMENT, LEASE, POD, SECRET, Kind, connect
from agentgym.deploy.kubernetes import (
    Plan,
    check_fleets,
    end_kept,
    end_run,
    fleet_of,
    keep_up,
    orphans,
)
from agentgym.deploy.manifests import CAPACITIES


def load(*overrides):
    return load_config(overrides=["env.deploy=kubernetes", *overrides])


@pytest.mark.parametrize(
    ("overrides", "refusal"),
    [
        (
            ["env.endpoints=[http://127.0.0.1:1]"],
            "names running servers, and env.deploy kubernetes",
        ),
        (["env.dialect=openenv"], "env.dialect openenv of babyai needs env.endpoints"),
        (["env.deploy=local", "env.replicas=2"], "env.replicas 2 of babyai with env.deploy local"),
        (["env.replicas=0"], "env.replicas"),
        (["kubernetes.overlay=../../etc"], "kubernetes.overlay"),
        (["kubernetes.components=[a/../b]"], "kubernetes.components"),
        (
            ["env.deploy=local", "env.endpoints=[http://127.0.0.1:1]", "env.keep=true"],
            "env.keep of babyai with env.endpoints",
        ),
    ],
)
def test_settings_that_contradict_each_other_are_refused(overrides, refusal):
    with pytest.raises(ConfigError, match=refusal):
        load(*overrides)


def test_replicas_follow_the_episodes_in_flight_or_what_was_said():
    cfg = load("rollout.concurrency=3000", "env.options={a: '$x'}")
    sessions = CAPACITIES["babyai"].sessions
    fleet = fleet_of(cfg, cfg.env, "r1", expert=True)
    assert fleet.replicas == -(-3000 // sessions)
    assert fleet.arguments == ("--session-ttl=300", '--options={"a": "$x"}', "--expert")
    given = fleet_of(cfg, cfg.env.model_copy(update={"replicas": 7}), "r1", expert=False)
    assert given.replicas == 7
    own = EnvConfig(name="higher-lower", deploy="kubernetes")
    with pytest.raises(ConfigError, match=r"capacity of a server of higher-lower is not known"):
        fleet_of(cfg, own, "r1", expert=False)


on_a_cluster = pytest.mark.kubernetes


@pytest.fixture
def run():
    return f"r{secrets.token_hex(6)}"


@pytest.fixture
def hollow(monkeypatch):
    monkeypatch.setattr(kubernetes, "reach", lambda addresses: None)


@pytest.fixture(autouse=True)
def nothing_left(request):
    """Delete the namespace's servers after each test."""
    if "admin" not in request.fixturenames:
        yield
        return
    admin = request.getfixturevalue("admin")
    yield
    for kind in (LEASE, DEPLOYMENT):
        for each in admin.list(kind, labels={"agentgym.io/run": None}).items:
            admin.delete(kind, each["metadata"]["name"])
    for pod in admin.list(POD).items:
        admin.delete(POD, pod["metadata"]["name"], grace_s=0)


def wait_for(done):
    end = time.monotonic() + 30
    while not (found := done()):
        assert time.monotonic() < end
        time.sleep(0.2)
    return found


@on_a_cluster
def test_a_run_has_its_servers_and_leaves_nothing(cfg, admin, run, hollow):
    check_fleets(cfg)
    before = admin.list(LEASE).items
    with environment_servers(cfg, False, run) as endpoints:
        (babyai,), (textcraft,) = endpoints["babyai"], endpoints["textcraft"]
        assert babyai == f"http://env-babyai-{run}.{admin.namespace}.svc:8000"
        assert "of-the-tests" not in (babyai.token, textcraft.token)
        for name, token in (("babyai", babyai.token), ("textcraft", textcraft.token)):
            data = admin.get(SECRET, f"env-{name}-{run}")["data"]
            assert base64.b64decode(data["AGENTGYM_ENV_TOKEN"]).decode() == token
        assert len({babyai.token, textcraft.token}) == 2
        found = {
            each["metadata"]["labels"]["agentgym.io/environment"]: each["spec"]["replicas"]
            for each in admin.list(DEPLOYMENT, labels={"agentgym.io/run": run}).items
        }
        assert found == {"babyai": 2, "textcraft": 1}
        addresses, trouble = wait_for(lambda: listed(babyai.listing))
        assert (len(addresses), trouble) == (1, "")  # hollow pods share one address
        (group,) = groups(admin)
        assert group.is_alive()
        with environment_servers(cfg, True, run) as expert:  # a second fleet, with the expert
            assert f"{run}-expert" in expert["babyai"][0]
            (deployment,) = admin.list(
                DEPLOYMENT,
                labels={"agentgym.io/run": f"{run}-expert", "agentgym.io/environment": "babyai"},
            ).items
            (container,) = deployment["spec"]["template"]["spec"]["containers"]
            assert "--expert" in container["args"]
    assert remaining(admin, run) == remaining(admin, f"{run}-expert") == []
    assert admin.list(SECRET, labels={"agentgym.io/run": None}).items == []
    assert listed(babyai.listing) is None
    assert admin.list(LEASE).items == before


@on_a_cluster
def test_what_fails_leaves_nothing_either(cfg, admin, run, monkeypatch):
    def unreachable(addresses):
        raise RuntimeError("none answers here")

    monkeypatch.setattr(kubernetes, "reach", unreachable)
    with (
        pytest.raises(RuntimeError, match="none answers here"),
        environment_servers(cfg, False, run),
    ):
        pass
    assert remaining(admin, run) == []


@on_a_cluster
def test_who_plays_hears_that_the_servers_were_taken_over(cfg, admin, run, hollow):
    short = cfg.kubernetes.model_copy(update={"lease_s": 15.0, "down_timeout_s": 1.0})
    one = cfg.model_copy(update={"kubernetes": short, "mix": ()})
    with environment_servers(one, False, run) as endpoints:
        listing = endpoints["babyai"][0].listing
        admin.patch(LEASE, f"agentgym-{run}", {"metadata": {"annotations": {HOLDER: "null"}}})
        _, trouble = wait_for(lambda: (told := listed(listing)) and told[1] and told)
        assert trouble.startswith(f"the servers of {run} were taken down or taken over by another")


@on_a_cluster
def test_a_kept_fleet_outlives_runs_serves_the_next_and_ends_on_request(cfg, admin, run, hollow):
    (name, other) = (keep_up(cfg, env) for env in cfg.envs)
    assert name != other
    assert keep_up(cfg, cfg.env) == name
    lease = admin.get(LEASE, f"agentgym-{name}")
    assert lease["metadata"]["labels"][KEPT] == "true"
    with environment_servers(cfg, False, run) as endpoints:
        assert name in endpoints["babyai"][0]
        assert remaining(admin, run) == []
    assert admin.get(DEPLOYMENT, f"env-babyai-{name}")["spec"]["replicas"] == 2
    more = cfg.model_copy(update={"env": cfg.env.model_copy(update={"replicas": 3})})
    assert keep_up(more, more.env) == name  # the same fleet, scaled up
    assert admin.get(DEPLOYMENT, f"env-babyai-{name}")["spec"]["replicas"] == 3
    changed = cfg.env.model_copy(update={"options": {"view": "agentgym"}})
    assert kubernetes.kept_plan(cfg, changed).run != name
    assert end_kept(cfg) == [name, other]
    assert remaining(admin, name) == []
    assert end_kept(cfg) == []


@on_a_cluster
def test_servers_of_a_dead_run_are_found_and_taken_away(cfg, admin, run, capsys, tmp_path):
    for each in (f"{run}-a", f"{run}-b"):
        group = acquire(admin, each, ttl_s=60.0)
        send(admin, group, Plan.of(cfg, cfg.envs[1:], each, expert=False).objects)
    holder = json.loads(admin.get(LEASE, f"agentgym-{run}-a")["metadata"]["annotations"][HOLDER])
    gone = json.dumps(holder | {"pid": 2**22 + 1, "started": "1"})  # above the highest pid
    admin.patch(LEASE, f"agentgym-{run}-a", {"metadata": {"annotations": {HOLDER: gone}}})
    params = tmp_path / "params.yaml"
    params.write_text(
        f"store: {{path: {tmp_path}/store}}\nkubernetes: {{namespace: {admin.namespace}}}\n"
    )
    assert main(["envs", "gc", "--params", str(params)]) == 0
    said = capsys.readouterr().out
    assert f"dead    {run}-a" in said
    assert f"{run}-b" not in said
    assert remaining(admin, f"{run}-a") != []
    assert main(["envs", "gc", "--remove", "--params", str(params)]) == 0
    assert f"gone    {run}-a" in capsys.readouterr().out
    assert remaining(admin, f"{run}-a") == []
    assert main(["envs", "list", "--json", "--params", str(params)]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["run"], row["is_alive"]) == (f"{run}-b", True)
    assert end_run(cfg, run) == []  # its process is alive


@on_a_cluster
def test_what_a_killed_attempt_left_elsewhere_goes_when_the_run_ends(cfg, admin, run, hollow):
    group = acquire(admin, run, ttl_s=60.0)
    send(admin, group, Plan.of(cfg, cfg.envs[1:], run, expert=False).objects)
    holder = json.loads(admin.get(LEASE, f"agentgym-{run}")["metadata"]["annotations"][HOLDER])
    elsewhere = json.dumps(holder | {"host": "another-pod", "space": "of another machine"})
    admin.patch(LEASE, f"agentgym-{run}", {"metadata": {"annotations": {HOLDER: elsewhere}}})
    with environment_servers(cfg.model_copy(update={"mix": ()}), False, run) as endpoints:
        assert f"{run}-2" in endpoints["babyai"][0]
        silent = {"spec": {"renewTime": "2020-01-01T00:00:00.000000Z"}}
        admin.patch(LEASE, f"agentgym-{run}", silent)
    assert remaining(admin, run) == remaining(admin, f"{run}-2") == []


@on_a_cluster
def test_objects_without_a_lease_are_orphans(cfg, admin, run):
    (service,) = [
        each
        for each in Plan.of(cfg, cfg.envs[1:], run, expert=False).objects
        if each["kind"] == "Service"
    ]
    admin.apply(service)
    (found,) = [each for each in orphans(admin, observe_s=0.1) if each.run == run]
    assert (found.run, found.why) == (run, "it has no lease")
    admin.delete(Kind.of(service), service["metadata"]["name"])


@on_a_cluster
def test_the_flows_account_is_refused_what_it_does_not_need(admin, flow_kubeconfig):
    kube = connect(kubeconfig=flow_kubeconfig, namespace=admin.namespace)
    with pytest.raises(Forbidden, match=r'User "system:serviceaccount:.*:agentgym-flow" cannot'):
        kube.get(SECRET, "agentgym-env-token")
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "own"}, "spec": {}}
    with pytest.raises(Forbidden):
        kube.create(pod)
    with pytest.raises(Forbidden):
        kube.get(DEPLOYMENT, "any", namespace="default")
    kube.close()


@on_a_cluster
def test_a_cluster_that_lacks_something_stops_a_run_before_it_begins(cfg, monkeypatch):
    monkeypatch.delenv("AGENTGYM_FLEET_KEY")
    with pytest.raises(ConfigError, match="AGENTGYM_FLEET_KEY is not set"):
        check_fleets(cfg)
