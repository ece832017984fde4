"""A service that options name gets the secret; where it points on to gets nothing."""

import pytest

from envs.searchqa.retrievers import RetrieverError
from envs.searchqa.search_r1 import SearchR1
from envs.webarena.helpers import HelperFailed, SiteHelpers
from envs.webarena.judge import Endpoint, JudgeFailed
from tests.answering import Handler, http_server


@pytest.fixture
def pointing_on(monkeypatch):
    """(URL of a server that points on, the requests that reached where it points to)."""
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


def test_a_retriever_that_points_on_is_no_retriever(pointing_on):
    url, reached = pointing_on
    with pytest.raises(RetrieverError, match="302"):
        SearchR1(url, 5.0).search("town", 1)
    assert reached == []
