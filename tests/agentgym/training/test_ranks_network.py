"""Network addresses on which ranks listen."""

import psutil

from agentgym.compute import learner_ranks as raylearner
from agentgym.compute.learner_ranks import LearnerRank
from agentgym.models.transport import TCPStore


def listening():
    return {
        connection.laddr[:2]
        for connection in psutil.Process().net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    }


def test_rank_0_listens_on_its_nodes_address_alone(monkeypatch):
    monkeypatch.setattr(raylearner, "node_address", lambda: "127.0.0.1")
    before, rank = listening(), LearnerRank(0, 2, "cpu", 5.0)
    host, port = rank.serve()
    assert listening() - before == {("127.0.0.1", port)}
    other = TCPStore(host, port, 2, is_master=False)
    other.set("key", "value")
    assert rank._meeting.get("key") == b"value"
