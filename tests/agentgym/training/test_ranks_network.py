"""Where ranks listen for each other."""

import socket

import psutil
import pytest

from agentgym.compute import learner_ranks as raylearner
from agentgym.compute.learner_ranks import LearnerRank, interface_of


def listening():
    return {
        connection.laddr[:2]
        for connection in psutil.Process().net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    }


def test_rank_0_listens_on_its_nodes_address_alone(monkeypatch):
    monkeypatch.setattr(raylearner, "_node_address", lambda: "127.0.0.1")
    before, rank = listening(), LearnerRank(0, 2, "cpu", 5.0)
    host, port = rank.serve()
    assert listening() - before == {("127.0.0.1", port)}
    other = raylearner.TCPStore(host, port, 2, is_master=False)
    other.set("key", "value")
    assert rank._meeting.get("key") == b"value"


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
