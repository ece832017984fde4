"""Tests for a run's upkeep thread on a real API server: it renews leases and lists addresses."""

import secrets
import time

import pytest

from agentgym.deploy.fleets import upkeep
from agentgym.deploy.fleets.addresses import ADDRESS, Listing, listed
from agentgym.deploy.fleets.fleet_lease import acquire, groups
from agentgym.deploy.fleets.upkeep import Upkeep, first_addresses, reach
from agentgym.deploy.kube.client import LEASE, POD, SERVICE, Kind

pytestmark = pytest.mark.kubernetes

SLICE = Kind("discovery.k8s.io/v1beta1", "EndpointSlice")


@pytest.fixture
def run(admin):
    """A run with a headless Service without selector: tests write its addresses."""
    name = f"r{secrets.token_hex(6)}"
    labels = {"agentgym.io/run": name}
    spec = {"clusterIP": "None", "ports": [{"name": "http", "port": 8000, "protocol": "TCP"}]}
    admin.create(
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": f"env-{name}", "labels": labels},
            "spec": spec,
        }
    )
    yield name
    admin.delete(SERVICE, f"env-{name}")
    admin.delete(LEASE, f"agentgym-{name}")


def tell(admin, run, *addresses):
    """Write the Service's addresses, as the kind of object that the cluster has."""
    kind = upkeep.kind_of_addresses(admin)
    labels = {"agentgym.io/run": run, "kubernetes.io/service-name": f"env-{run}"}
    each = {"apiVersion": kind.api_version, "kind": kind.kind}
    rows = [
        {
            "addresses": [ip],
            "conditions": {"ready": True},
            "targetRef": {"kind": "Pod", "name": pod},
        }
        for ip, pod in addresses
    ]
    each |= {"metadata": {"name": f"env-{run}-1", "labels": labels}, "addressType": "IPv4"}
    each |= {"endpoints": rows, "ports": [{"name": "http", "port": 8000, "protocol": "TCP"}]}
    admin.apply(each, force=True)


def wait_for(done):
    end = time.monotonic() + 20
    while not done():
        assert time.monotonic() < end
        time.sleep(0.1)


def test_servers_that_come_and_go_are_told_while_the_lease_is_renewed(
    admin, run, tmp_path, monkeypatch
):
    monkeypatch.setattr(Upkeep, "_period_s", 0.5)
    pod = f"outside-{run}"
    container = {"name": "c", "image": "i"}
    admin.create(
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": pod, "annotations": {ADDRESS: "192.0.2.1:4711"}},
            "spec": {
                "containers": [
                    container | {"resources": {"requests": {"cpu": "1m", "memory": "1Mi"}}}
                ],
                "nodeSelector": {"agentgym.io/nowhere": "true"},
            },
        }
    )
    group = acquire(admin, run, ttl_s=60.0)
    listing = Listing(tmp_path / "listing.json")
    with Upkeep(admin, group, {f"env-{run}": listing}, most=5).running():
        tell(admin, run, ("10.0.0.1", "gone"), ("10.0.0.2", pod))
        expected = ["http://10.0.0.1:8000", "http://192.0.2.1:4711"]
        wait_for(lambda: listed(str(listing.path)) == (expected, ""))
        assert first_addresses(admin, f"env-{run}", num=2, timeout_s=5.0) == expected
        tell(admin, run, ("10.0.0.3", "new"))
        wait_for(lambda: listed(str(listing.path)) == (["http://10.0.0.3:8000"], ""))
        tell(admin, run)
        wait_for(lambda: listed(str(listing.path)) == ([], ""))
        renewed = group.renewed
        wait_for(lambda: any(g.run == run and g.renewed > renewed for g in groups(admin)))
    assert listed(str(listing.path)) is None
    admin.delete(POD, pod, grace_s=0)


def test_servers_that_do_not_answer_here_are_told_with_a_way_out():
    with pytest.raises(RuntimeError, match=r"none answers here .*agentgym.io/address"):
        reach(["http://127.0.0.1:9"], timeout_s=0.2)
