"""What a site's own API is asked for."""

import json
from contextlib import contextmanager

import pytest

from envs.webarena.helpers import HelperFailed, SiteHelpers
from tests.answering import Handler, http_server


@contextmanager
def shop_api(reviews):
    class Shop(Handler):
        def _answer(self, value):
            self.send(json.dumps(value).encode())

        def do_POST(self):
            login = self.read_json()
            self._answer(f"token-of-{login['username']}-{login['password']}")

        def do_GET(self):
            assert self.headers["Authorization"] == "Bearer token-of-admin-pw"
            if self.path.startswith("/rest/default/V1/orders?"):
                assert "DESC" in self.path
                self._answer({"items": [{"increment_id": "000000189"}]})
            else:
                assert self.path == "/rest/default/V1/products/B00%2FX/reviews"
                self._answer(reviews)

    with http_server(Shop) as address:
        yield address


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
