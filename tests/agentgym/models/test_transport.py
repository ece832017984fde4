"""Weights on their way: what arrives is what was sent, or it is said who broke it."""

import asyncio
import datetime
import json
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import asdict

import psutil
import pytest
import torch
from safetensors.torch import load_file

from agentgym.models.tensorfiles import sha256
from agentgym.models.transport import (
    Broadcast,
    InProcess,
    TransportBroken,
    interface_of,
    layout_of,
    require_newer,
    serve,
    weights_digest,
    write_weights,
)
from agentgym.types import EngineMismatch

CPU = torch.device("cpu")
WEIGHTS = {
    "norm": torch.arange(3.0),
    "half": torch.randn(40, 7).bfloat16(),
    "scalar": torch.tensor(2.0),
    "empty": torch.empty(0, 4),
}


def same(ours, theirs):
    return ours.keys() == theirs.keys() and all(
        torch.equal(each, theirs[name]) and each.dtype == theirs[name].dtype
        for name, each in ours.items()
    )


def test_the_digest_is_that_of_the_file(tmp_path):
    write_weights(tmp_path / "w.safetensors", WEIGHTS)
    assert weights_digest(WEIGHTS) == sha256((tmp_path / "w.safetensors").read_bytes())
    assert same(load_file(tmp_path / "w.safetensors"), WEIGHTS)
    assert weights_digest({**WEIGHTS, "norm": WEIGHTS["norm"] + 1e-6}) != weights_digest(WEIGHTS)


def test_in_one_process_the_receiver_has_a_copy_of_what_was_there_when_it_was_sent():
    learner = {name: each.clone() for name, each in WEIGHTS.items()}
    delivery = InProcess(learner, 3)
    taken = asyncio.run(delivery.weights())
    learner["norm"] += 1  # the next update
    assert (delivery.version, delivery.digest) == (3, weights_digest(taken))
    assert same(taken, WEIGHTS)
    with pytest.raises(EngineMismatch, match="weights version 3 arrived at the engine with sha256"):
        asyncio.run(delivery.weights())


def test_a_version_must_grow():
    require_newer(0, 0)
    require_newer(6, 5)
    for version, held in ((5, 5), (4, 5), (0, 5)):
        with pytest.raises(ValueError, match=f"engine holds 5, got {version}"):
            require_newer(version, held)


RECEIVER = """
import asyncio, json, sys
from agentgym.models.transport import Broadcast, write_weights
from pathlib import Path
told = json.loads(sys.argv[1])
print("here", flush=True)
sys.stdin.readline()
write_weights(Path(sys.argv[2]), asyncio.run(Broadcast(**told).weights()))
"""


class Receivers:
    """Processes that wait for a word before they take their place in a broadcast."""

    def __init__(self, broadcast, paths):
        self.paths = paths
        self.processes = [
            subprocess.Popen(
                [
                    *(sys.executable, "-c", RECEIVER),
                    *(json.dumps(asdict(broadcast.at(rank))), str(path)),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env={**os.environ, "GLOO_SOCKET_IFNAME": interface_of("127.0.0.1")},
            )
            for rank, path in enumerate(paths, 1)
        ]
        for each in self.processes:
            assert each.stdout.readline() == "here\n"

    def go(self):
        for each in self.processes:
            if each.poll() is not None:  # killed
                continue
            each.stdin.write("go\n")
            each.stdin.flush()

    def end(self):
        for each in self.processes:
            each.kill()
            each.communicate()


@pytest.fixture
def receivers(tmp_path, monkeypatch):
    """receivers(broadcast) -> Receivers"""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", interface_of("127.0.0.1"))
    started = []

    def start(broadcast):
        paths = [tmp_path / f"{rank}.safetensors" for rank in range(1, broadcast.size)]
        started.append(Receivers(broadcast, paths))
        return started[-1]

    yield start
    for each in started:
        each.end()


def broadcast(path="", port=0, digest=None, timeout_s=60.0):
    return Broadcast(
        digest or weights_digest(WEIGHTS),
        7,
        layout_of(WEIGHTS),
        "gloo",
        timeout_s,
        size=3,
        host="127.0.0.1" if port else "",
        port=port,
        path=str(path),
    )


@pytest.mark.integration
@pytest.mark.parametrize("how", [pytest.param("file", marks=pytest.mark.slow), "port"])
def test_a_broadcast_brings_all_receivers_the_same_bytes(how, receivers, tmp_path):
    meeting, port = None, 0
    if how == "port":
        meeting, (_, port) = serve("127.0.0.1", 3, datetime.timedelta(seconds=60))
    own = broadcast("" if port else tmp_path / "meet", port)
    others = receivers(own)
    others.go()
    own.send(WEIGHTS, CPU, meeting)
    assert [each.wait(60) for each in others.processes] == [0, 0]
    assert all(same(load_file(path), WEIGHTS) for path in others.paths)


@pytest.mark.integration
def test_other_bytes_than_were_sent_are_refused_by_who_receives_them(receivers, tmp_path):
    own = broadcast(tmp_path / "meet", digest="0" * 64)
    others = receivers(own)
    others.go()
    own.send(WEIGHTS, CPU, None)
    for each in others.processes:
        assert "EngineMismatch: weights version 7 arrived at" in each.communicate(timeout=60)[1]


@pytest.mark.integration
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_receiver_that_is_lost_breaks_it_within_the_deadline(
    receivers, tmp_path, stand_still, number
):
    own = broadcast(tmp_path / "meet", timeout_s=5.0)
    others = receivers(own)
    stand_still(others.processes[1].pid, number)
    others.go()
    began = time.monotonic()
    with pytest.raises(TransportBroken, match=r"version 7: broadcast to 2 processes broke at rank"):
        own.send(WEIGHTS, CPU, None)
    assert time.monotonic() - began < 30
    assert "TransportBroken" in others.processes[0].communicate(timeout=60)[1]


def test_the_interface_of_an_address_is_found():
    names = {name for _, name in socket.if_nameindex()}
    assert interface_of("127.0.0.1") == interface_of("127.0.0.2") != ""
    for name, addresses in psutil.net_if_addrs().items():
        own = [address.address for address in addresses if address.family is socket.AF_INET]
        if own and name in names:
            assert interface_of(own[0]) == name


@pytest.mark.parametrize("address", ["203.0.113.77", "::1", ""])
def test_an_address_of_no_interface_has_none(address):
    assert interface_of(address) == ""
