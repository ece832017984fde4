"""What a site's own API is asked for."""

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from envs.searchqa.retrievers import RetrieverError
from envs.searchqa.search_r1 import SearchR1
from envs.webarena.helpers import HelperFailed, SiteHelpers
from envs.webarena.judge import Endpoint, JudgeFailed


@contextmanager
def shop_api(reviews):
    class Handler(BaseHTTPRequestHandler):
        def _answer(self, value):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(value).encode())

        def do_POST(self):
            login = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self._answer(f"token-of-{login['username']}-{login['password']}")

        def do_GET(self):
            assert self.headers["Authorization"] == "Bearer token-of-admin-pw"
            if self.path.startswith("/rest/default/V1/orders?"):
                assert "DESC" in self.path
                self._answer({"items": [{"increment_id": "000000189"}]})
            else:
                assert self.path == "/rest/default/V1/products/B00%2FX/reviews"
                self._answer(reviews)

        def log_message(self, *_):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


def test_a_real_shops_orders_and_reviews_are_asked_for_over_its_api(monkeypatch):
    monkeypatch.setenv("AGENTGYM_SECRET_SHOP_PASSWORD", "pw")
    with shop_api(
        [
            {"nickname": "Ann", "ratings": [{"percent": 20}]},
            {"nickname": "Bob", "ratings": [{"percent": 80}]},
        ]
    ) as url:
        helpers = SiteHelpers({"shopping": url})
        assert (
            helpers.call("shopping_get_latest_order_url", [], None)
            == f"{url}/sales/order/view/order_id/189/"
        )
        assert helpers.call("shopping_get_sku_latest_review_author", ["B00/X"], None) == "Bob"
        assert helpers.call("shopping_get_sku_latest_review_rating", ["B00/X"], None) == "80"
    with pytest.raises(HelperFailed, match="shopping_get_latest_order_url"):
        helpers.call("shopping_get_latest_order_url", [], None)


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
