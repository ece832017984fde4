"""Server addresses: the ready servers only, each once, reachable from the client."""

import json

from agentgym.deploy.fleets.addresses import (
    ADDRESS,
    Listing,
    Outside,
    Server,
    listed,
    servers_of,
    service_of,
)
from agentgym.deploy.kube.calls import NotFound


def endpoint(address, pod, **conditions):
    return {"addresses": [address], "conditions": conditions, "targetRef": {"name": pod}}


def slice_of(*endpoints, port=8000):
    return {
        "kind": "EndpointSlice",
        "metadata": {"name": "env-x", "labels": {"kubernetes.io/service-name": "env"}},
        "ports": [{"port": port}],
        "endpoints": list(endpoints),
    }


def test_servers_that_are_ready_are_told_once():
    found = servers_of(
        [
            slice_of(endpoint("10.0.0.2", "b", ready=True), endpoint("10.0.0.1", "a")),
            slice_of(
                endpoint("10.0.0.2", "b", ready=True),  # listed in two slices
                endpoint("10.0.0.3", "c", ready=False),
                endpoint("10.0.0.4", "d", ready=True, terminating=True),
                endpoint("fd00::1", "e", ready=None),
            ),
            {"kind": "EndpointSlice", "metadata": {"name": "n"}, "ports": None, "endpoints": None},
        ]
    )
    assert found == [
        Server("a", "10.0.0.1:8000"),
        Server("b", "10.0.0.2:8000"),
        Server("e", "[fd00::1]:8000"),
    ]
    assert service_of(slice_of()) == "env"


class Pods:
    def __init__(self, **annotations):
        self.annotations, self.asked = annotations, []

    def get(self, kind, name):
        self.asked.append(name)
        if name not in self.annotations:
            raise NotFound("gone")
        return {"metadata": {"annotations": self.annotations[name]}}


def test_a_pod_that_says_where_it_is_reached_is_asked_once():
    pods = Pods(a={ADDRESS: "127.0.0.1:4711"}, b={})
    outside = Outside(pods)
    servers = [
        Server("a", "10.0.0.1:8000"),
        Server("b", "10.0.0.2:8000"),
        Server("c", "10.0.0.3:1"),
    ]
    expected = ["http://10.0.0.2:8000", "http://10.0.0.3:1", "http://127.0.0.1:4711"]
    assert outside.addresses(servers) == expected
    assert outside.addresses(servers) == expected
    assert pods.asked == ["a", "b", "c"]


def test_a_listing_is_whole_or_not_there(tmp_path):
    listing = Listing(tmp_path / "fleets" / "env.json")
    assert listed(str(listing.path)) is None
    listing.say(["http://10.0.0.1:8000"])
    assert listed(str(listing.path)) == (["http://10.0.0.1:8000"], "")
    listing.say([], "taken over")
    assert json.loads(listing.path.read_text()) == {"addresses": [], "trouble": "taken over"}
    listing.remove()
    listing.remove()
    assert listed(str(listing.path)) is None
    (tmp_path / "half").write_text('{"addr')
    assert listed(str(tmp_path / "half")) is None
