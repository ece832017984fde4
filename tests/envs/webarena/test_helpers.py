"""What a site's own API is asked for."""

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from envs.webarena.helpers import HelperFailed, SiteHelpers


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
