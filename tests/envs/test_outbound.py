"""A service that options name gets the secret; where it points on to gets nothing."""

import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from envs.searchqa.retrievers import RetrieverError
from envs.searchqa.search_r1 import SearchR1
from envs.webarena.helpers import HelperFailed, SiteHelpers
from envs.webarena.judge import Endpoint, JudgeFailed


@pytest.fixture
def pointing_on(monkeypatch):
    """(URL of a server that points on, the requests that reached where it points to)."""
    reached = []

    class Target(BaseHTTPRequestHandler):
        def do_GET(self):
            reached.append((self.path, self.headers.get("Authorization")))
            self.send_response(200)
            self.end_headers()

        do_POST = do_GET

        def log_message(self, *_):
            pass

    class Pointer(Target):
        def do_GET(self):
            self.send_response(302)
            self.send_header("Location", f"http://127.0.0.1:{servers[0].server_address[1]}/stolen")
            self.end_headers()

        do_POST = do_GET

    servers = [HTTPServer(("127.0.0.1", 0), handler) for handler in (Target, Pointer)]
    for server in servers:
        threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("AGENTGYM_SECRET_JUDGE", "key")
    monkeypatch.setenv("AGENTGYM_SECRET_SHOP_PASSWORD", "key")
    yield f"http://127.0.0.1:{servers[1].server_address[1]}", reached
    for server in servers:
        server.shutdown()
        server.server_close()


def test_a_judge_that_points_on_is_no_judge(pointing_on):
    url, reached = pointing_on
    with pytest.raises(JudgeFailed, match="302"):
        Endpoint(url, "m", "AGENTGYM_SECRET_JUDGE").same_answer("q", "r", "a")
    assert reached == []


def test_a_shop_that_points_on_is_no_shop(pointing_on):
    url, reached = pointing_on
    with pytest.raises(HelperFailed, match="302"):
        SiteHelpers({"shopping": url}).call("shopping_get_latest_order_url", [], None)
    assert reached == []


def test_a_retriever_that_points_on_is_no_retriever(pointing_on):
    url, reached = pointing_on
    with pytest.raises(RetrieverError, match="302"):
        SearchR1(url, 5.0).search("town", 1)
    assert reached == []
