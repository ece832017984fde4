"""Fixtures with the embedded sites, served, and a visitor."""

import pytest

from sites import SiteServer
from tests.sites.visitor import Visitor


@pytest.fixture(scope="module")
def server():
    server = SiteServer()
    port = server.start()
    yield server, port
    server.stop()


@pytest.fixture
def visitor(server):
    visitor = Visitor(*server)
    yield visitor
    visitor.server.close_tenant(visitor.token)
