"""Transported weights arrive unchanged, or an error names the cause."""

import asyncio
import datetime
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict

import psutil
import pytest
import torch
from safetensors.torch import load_file

from agentgym.models.transport import (
    SUMS,
    WORDS,
    Broadcast,
    InProcess,
    TransportBroken,
    _factors,
    _sums,
    interface_of,
    layout_of,
    memory_file,
    opened,
    require_newer,
    serve,
    shared_of,
    weights_digest,
    write_weights,
)
from agentgym.store.manifest import sha256
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


def large(dtype=torch.bfloat16):
    """Return tensors; one spans several blocks and ends inside a 32-bit word."""
    drawn = torch.Generator().manual_seed(0)
    return {
        "large": torch.randn(3, 2 * WORDS + 7, generator=drawn).to(dtype),
        "other": torch.randn(5, 9, generator=drawn).to(dtype),
        "more": torch.randn(5, 9, generator=drawn).to(dtype),
        "scalar": torch.tensor(2.0, dtype=dtype),
        "empty": torch.empty(0, 4, dtype=dtype),
    }


def summed(weights):
    return weights_digest(weights, SUMS)


def test_the_sums_are_those_of_the_definition():
    tensor = torch.randn(WORDS + 3).half()
    content = tensor.numpy().tobytes()
    words = [
        int.from_bytes(content[at : at + 4].ljust(4, b"\0"), "little", signed=True)
        for at in range(0, len(content), 4)
    ]
    inner, outer = _factors(WORDS, (0, 1), CPU).tolist(), _factors(2, (2, 3), CPU).tolist()
    for total, of_word, of_block in zip(_sums(tensor).tolist(), inner, outer, strict=True):
        expected = sum(
            word * of_word[index % WORDS] * of_block[index // WORDS]
            for index, word in enumerate(words)
        )
        assert total % 2**64 == expected % 2**64


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_sums_tell_what_is_not_the_same(dtype):
    weights = large(dtype)
    digest = summed(weights)
    assert digest == summed({name: each.clone() for name, each in reversed(weights.items())})
    row = weights["large"][1]  # begins inside a word
    assert summed({"row": row}) == summed({"row": row.clone()})

    def changed(name, change):
        copy = weights[name].clone()
        change(copy.view(-1).view(torch.uint8))
        return {**weights, name: copy}

    def flip(at, bit):
        def change(content):
            content[at] ^= 1 << bit

        return change

    def exchange(content):  # exchanges two blocks
        half = 4 * WORDS
        content[: 2 * half] = torch.cat([content[half : 2 * half], content[:half]])

    others = [
        *(changed("large", flip(at, bit)) for at in (0, 4 * WORDS, -1) for bit in (0, 7)),
        changed("large", exchange),
        changed("large", lambda content: content[4 * WORDS :].zero_()),  # only half has arrived
        {**weights, "other": weights["more"], "more": weights["other"]},
        {**weights, "other": weights["other"].reshape(9, 5)},
        {name: each for name, each in weights.items() if name != "more"},
        {**weights, "larger": weights["large"]},
        {**weights, "scalar": torch.tensor(2.0, dtype=torch.float64)},
    ]
    found = [summed(each) for each in others]
    assert len({digest, *found}) == 1 + len(others)
    # the highest bits of two words, which cancel in a plain sum of words
    assert summed(changed("large", lambda c: (flip(3, 7)(c), flip(7, 7)(c)))) != digest


def test_what_a_digest_is_compared_with_says_its_kind():
    assert weights_digest(WEIGHTS, SUMS + "0" * 32) == summed(WEIGHTS) != weights_digest(WEIGHTS)
    assert weights_digest(WEIGHTS, "0" * 64) == weights_digest(WEIGHTS)
    assert weights_digest({}) == weights_digest({}, "0" * 64)


@pytest.mark.integration
def test_a_file_in_memory_is_read_by_another_process_and_goes_with_this_one(tmp_path):
    code = "import sys; from safetensors.torch import load_file; print(len(load_file(sys.argv[1])))"
    with memory_file() as path:
        write_weights(path, WEIGHTS)
        told = subprocess.check_output([sys.executable, "-c", code, str(path)], text=True)
        held = load_file(path)
    assert told == f"{len(WEIGHTS)}\n"
    assert not path.exists()
    assert same(held, WEIGHTS)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_another_process_opens_what_lies_on_the_gpu(dtype):
    weights = large(dtype)
    there = {name: each.cuda() for name, each in weights.items()}
    digest = weights_digest(there)
    assert digest == summed(weights)
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as other:
        assert other.submit(_opened_digest, shared_of(there), digest).result(120) == digest


def _opened_digest(shared, digest):
    return weights_digest(opened(shared), digest)


def test_in_one_process_the_receiver_has_a_copy_of_what_was_there_when_it_was_sent():
    learner = {name: each.clone() for name, each in WEIGHTS.items()}
    delivery = InProcess(learner, 3)
    taken = asyncio.run(delivery.weights())
    learner["norm"] += 1  # the next update
    assert (delivery.version, delivery.digest) == (3, weights_digest(taken))
    assert same(taken, WEIGHTS)
    with pytest.raises(EngineMismatch, match="weights version 3 arrived at the engine with digest"):
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
    """Processes that join a broadcast when `go` is called."""

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
    """Return a function of a broadcast that starts its Receivers."""
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
