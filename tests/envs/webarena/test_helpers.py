"""Requests that the helpers send to a site's API."""

import json
from contextlib import contextmanager

import pytest

from envs.searchqa.retrievers import RetrieverError
from envs.searchqa.search_r1 import SearchR1
from envs.webarena.evaluators import ScriptFailed
from envs.webarena.helpers import HelperFailed, SiteHelpers
from envs.webarena.judge import Endpoint, JudgeFailed
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


@pytest.fixture
def pointing_on(monkeypatch):
    """Yield (URL of a server that redirects, the requests that reached the redirect's target)."""
    reached = []

    class Target(Handler):
        def do_GET(self):
            reached.append((self.path, self.headers.get("Authorization")))
            self.send()

        do_POST = do_GET

    class Pointer(Handler):
        def do_GET(self):
            self.send(status=302, Location=f"{target}/stolen")

        do_POST = do_GET

    monkeypatch.setenv("AGENTGYM_SECRET_JUDGE", "key")
    monkeypatch.setenv("AGENTGYM_SECRET_SHOP_PASSWORD", "key")
    with http_server(Target) as target, http_server(Pointer) as pointer:
        yield pointer, reached


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


def test_a_script_of_a_helper_that_throws_gives_no_text():
    class Throwing:
        def evaluate(self, script):
            raise ScriptFailed("no table")

    role = SiteHelpers({}).call("gitlab_get_project_memeber_role", ["", "byteblaze"], Throwing())
    assert role == ""


def test_a_retriever_that_points_on_is_no_retriever(pointing_on):
    url, reached = pointing_on
    with pytest.raises(RetrieverError, match="302"):
        SearchR1(url, 5.0).search("town", 1)
    assert reached == []
