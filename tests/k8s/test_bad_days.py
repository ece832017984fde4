"""The client of fleets when the API server fails, with the real server behind the tests' proxy:
storms of 429, errors, lost responses, broken or expired watches, a server that is down.
"""

import contextlib
import itertools
import secrets
import threading
import time

import pytest

from agentgym.deploy.kube.client import Kind, connect

pytestmark = [pytest.mark.kubernetes, pytest.mark.filterwarnings("ignore:Unverified HTTPS request")]

MAP = Kind("v1", "ConfigMap")
DEADLINE_S = 60.0


@pytest.fixture
def label():
    return {"agentgym.io/test": secrets.token_hex(4)}


@pytest.fixture
def direct(kubeconfig, label):
    """Yield a client without the proxy; at the end, delete the test's objects."""
    with contextlib.closing(connect(kubeconfig=kubeconfig, namespace="default")) as kube:
        yield kube
        for each in kube.list(MAP, labels=label).items:
            kube.delete(MAP, each["metadata"]["name"])


@pytest.fixture
def kube(api_proxy, direct):
    with contextlib.closing(connect(kubeconfig=api_proxy.kubeconfig, namespace="default")) as kube:
        yield kube


@pytest.fixture
def a_map(label):
    """a_map(value) -> a config map with a new name for this test."""
    names = (f"{label['agentgym.io/test']}-{number}" for number in itertools.count())
    return lambda value="": {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": next(names), "labels": label},
        "data": {"value": value},
    }


def writes(method, path):
    return method != "GET"


def test_a_storm_of_429_is_waited_out_as_long_as_it_says(kube, api_proxy, a_map):
    began = time.monotonic()
    api_proxy.fail(429, 3, writes, retry_after_s=1)
    assert kube.apply(a_map("told"))["data"] == {"value": "told"}
    assert time.monotonic() - began >= 3.0
    assert api_proxy.asked["PATCH", 429] == 3
    assert kube.transport.calls["server_side_apply"] == 4


@pytest.mark.parametrize("status", [500, 503, 504])
def test_errors_of_the_server_are_repeated_and_what_is_sent_twice_is_there_once(
    kube, direct, api_proxy, a_map, label, status
):
    api_proxy.fail(status, 2, writes)
    made = kube.create(a_map())
    (found,) = direct.list(MAP, labels=label).items
    assert found["metadata"]["uid"] == made["metadata"]["uid"]
    api_proxy.fail(status, 2, writes)
    kube.delete(MAP, made["metadata"]["name"])
    assert direct.list(MAP, labels=label).items == []


class Watcher:
    """Values of config maps by a watch, in a thread."""

    def __init__(self, kube, label):
        self.told = {}
        self._watch = kube.watch(MAP, labels=label, for_s=DEADLINE_S, idle_s=0.5)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow)
        self._thread.start()

    def _follow(self):
        for maps in self._watch:
            self.told = {each["metadata"]["name"]: each["data"]["value"] for each in maps}
            if self._stop.is_set():
                return

    def until(self, told):
        deadline = time.monotonic() + DEADLINE_S / 2
        while self.told != told:
            assert self._thread.is_alive(), "the watch has ended"
            assert time.monotonic() < deadline, (self.told, told)
            time.sleep(0.05)

    def end(self):
        self._stop.set()
        self._thread.join(DEADLINE_S)


@pytest.fixture
def watcher(kube, label):
    watcher = Watcher(kube, label)
    yield watcher
    watcher.end()


def dropped(proxy):
    deadline = time.monotonic() + DEADLINE_S
    while not proxy.drop_watches():
        assert time.monotonic() < deadline, "nobody watches"
        time.sleep(0.05)


def test_a_watch_that_breaks_goes_on_and_misses_nothing(watcher, direct, api_proxy, a_map):
    first, second = a_map("1"), a_map("2")
    one, two = first["metadata"]["name"], second["metadata"]["name"]
    direct.apply(first)
    watcher.until({one: "1"})
    for _ in range(3):
        dropped(api_proxy)
    direct.apply(second)
    direct.delete(MAP, one)
    watcher.until({two: "2"})


@pytest.mark.parametrize("as_event", [True, False], ids=["in the stream", "at once"])
def test_a_version_that_is_forgotten_is_listed_anew(watcher, direct, api_proxy, a_map, as_event):
    """Objects deleted during the gap are reported as deleted."""
    first, second = a_map("1"), a_map("2")
    one, two = first["metadata"]["name"], second["metadata"]["name"]
    direct.apply(first)
    watcher.until({one: "1"})
    api_proxy.expire_watches(2, as_event=as_event)
    dropped(api_proxy)
    direct.delete(MAP, one)
    direct.apply(second)
    watcher.until({two: "2"})  # the first list afterwards may already show this
    deadline = time.monotonic() + DEADLINE_S
    while api_proxy.failures_left:
        assert time.monotonic() < deadline, "no watch was refused a second time"
        time.sleep(0.05)
    watcher.until({two: "2"})


def test_a_server_that_is_away_is_waited_for(watcher, kube, direct, api_proxy, a_map):
    first, second = a_map("1"), a_map("2")
    direct.apply(first)
    watcher.until({first["metadata"]["name"]: "1"})
    made = []
    with api_proxy.away():
        applying = threading.Thread(target=lambda: made.append(kube.apply(second)))
        applying.start()
        time.sleep(3)
        assert not made
    applying.join(DEADLINE_S)
    assert made[0]["data"] == {"value": "2"}
    watcher.until({each["metadata"]["name"]: each["data"]["value"] for each in (first, second)})
