"""Tests for the weights that the first rank keeps and sends on request."""

import asyncio
import threading

import pytest
import torch

from agentgym.compute import transfer
from agentgym.compute.transfer import BroadcastSender, InObjectStore, Outbox
from agentgym.models.transport import TransportBroken, interface_of, weights_digest
from agentgym.types import EngineMismatch

CPU = torch.device("cpu")
WEIGHTS = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4)}


@pytest.fixture(autouse=True)
def loopback(monkeypatch):
    monkeypatch.setattr(transfer, "node_address", lambda: "127.0.0.1")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", interface_of("127.0.0.1"))


def send(outbox, own):
    """Send in a thread, as a rank does. Return a function that joins it and returns its errors."""
    raised = []

    def run():
        try:
            outbox.send(own)
        except TransportBroken as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()

    def end():
        thread.join(60)
        return raised

    return end


@pytest.mark.parametrize("at_a_port", [False, True])
def test_what_was_kept_is_sent_now_and_to_one_who_comes_later(tmp_path, at_a_port):
    outbox = Outbox(CPU, None if at_a_port else tmp_path)
    template = outbox.keep(WEIGHTS, 4, 30.0)
    for _ in range(2):
        own = outbox.open(template, 2)
        assert bool(own.port) == at_a_port
        ended = send(outbox, own)
        taken = asyncio.run(own.at(1).weights())
        assert ended() == []
        assert weights_digest(taken) == weights_digest(WEIGHTS) == own.digest


def test_an_older_version_is_sent_no_more(tmp_path):
    outbox = Outbox(CPU, tmp_path)
    old = outbox.open(outbox.keep(WEIGHTS, 4, 5.0), 2)
    outbox.keep(WEIGHTS, 5, 5.0)
    with pytest.raises(TransportBroken, match="version 4 are sent no more: 5 took their place"):
        outbox.send(old)


def test_each_worker_has_as_many_places_as_its_engine_has_processes(monkeypatch, tmp_path):
    outbox = Outbox(CPU, tmp_path)

    class Remote:
        """Actor method that is called in this process."""

        def __init__(self, method):
            self._method = method

        def options(self, concurrency_group):
            assert concurrency_group == "send"
            return self

        def remote(self, *arguments):
            return self._method(*arguments)

    class Rank:
        open_broadcast = Remote(outbox.open)
        send = Remote(lambda own: own)

    ray = pytest.importorskip("ray")
    monkeypatch.setattr(ray, "get", lambda answer, timeout: answer)
    sender = BroadcastSender(Rank(), outbox.keep(WEIGHTS, 3, 5.0))
    deliveries, own = sender.open([2, 2, 1])
    assert own.version == 3
    assert (own.rank, own.size) == (0, 6)
    assert [each.rank for each in deliveries] == [1, 3, 5]


def test_through_the_object_store_all_take_the_same_and_other_bytes_are_refused():
    async def stored():
        import numpy as np
        from safetensors.torch import save

        return np.frombuffer(save(WEIGHTS), np.uint8)

    async def take(digest):
        delivery = InObjectStore(asyncio.ensure_future(stored()), digest, 2)
        deliveries, nothing = delivery.open([1, 1])
        assert deliveries == [delivery, delivery]
        assert nothing is None
        return await delivery.weights()

    assert weights_digest(asyncio.run(take(weights_digest(WEIGHTS)))) == weights_digest(WEIGHTS)
    with pytest.raises(EngineMismatch, match="version 2 arrived at"):
        asyncio.run(take("0" * 64))


def test_nobody_who_stays_away_is_waited_for_longer_than_the_deadline(tmp_path):
    outbox = Outbox(CPU, tmp_path)
    own = outbox.open(outbox.keep(WEIGHTS, 4, 2.0), 3)
    with pytest.raises(TransportBroken, match="broke at rank 0"):
        outbox.send(own)
