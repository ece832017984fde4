"""The client of the retrieval API against a real HTTP server that works or fails."""

import re
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from envs.searchqa import search_r1, spec
from envs.searchqa.retrievers import Document, RetrieverError
from envs.searchqa.search_r1 import SearchR1
from envs.server import ServerSettings, make_app


def failing(url, message, timeout_s=5.0):
    """Assert that a search fails with this message, and that the error names the URL."""
    with pytest.raises(RetrieverError, match=re.escape(f"retriever {url}: ") + message):
        SearchR1(url, timeout_s).search("Japan", 3)


def test_a_search_is_one_request_in_the_words_of_the_api(retrieving):
    with retrieving() as (url, log):
        assert SearchR1(url).search("capital of Japan", 1) == [
            Document("Japan", "Japan is a country. Its capital is Tokyo.")
        ]
        assert log == [
            ("/retrieve", {"queries": ["capital of Japan"], "topk": 1, "return_scores": True})
        ]
        # an empty result is a valid response
        assert SearchR1(url.removesuffix("/retrieve")).search("whale", 2) == []
        assert log[-1][0] == "/retrieve"


def test_contents_without_a_title_line_are_taken_as_they_are(retrieving):
    def behave(handler, asked, number):
        handler.reply(
            b'{"result": [[{"document": {"contents": "only a title"}}, {"document": {"contents":'
            b' "Plain\\n two\\nlines "}, "score": 1}]]}'
        )
        return True

    with retrieving(behave) as (url, _):
        assert SearchR1(url).search("q", 3) == [
            Document("only a title", ""),
            Document("Plain", "two\nlines"),
        ]


def test_queries_of_many_threads_travel_together_and_each_gets_its_own_documents(retrieving):
    def slow(handler, asked, number):
        time.sleep(0.1)
        return False

    countries = ["France", "Japan", "Chile"] * 8
    with retrieving(slow) as (url, log):
        retriever = SearchR1(url)
        barrier = threading.Barrier(len(countries))

        def search(number):
            barrier.wait()
            return retriever.search(f"{countries[number]} country", 1 + number % 3)

        with ThreadPoolExecutor(len(countries)) as pool:
            found = list(pool.map(search, range(len(countries))))
    for number, documents in enumerate(found):
        assert documents[0].title == countries[number]
        assert len(documents) == 1 + number % 3
    sizes = [len(asked["queries"]) for _, asked in log]
    assert sum(sizes) == len(countries)
    assert len(sizes) <= 4  # the first requests, then one batch of all that waited


def test_a_batch_is_bounded_and_nobody_is_forgotten(retrieving, monkeypatch):
    monkeypatch.setattr(search_r1, "MAX_BATCH", 4)
    with retrieving() as (url, log):
        retriever = SearchR1(url)
        with ThreadPoolExecutor(16) as pool:
            found = list(pool.map(lambda _: retriever.search("Japan", 1), range(40)))
    assert all(documents[0].title == "Japan" for documents in found)
    assert sum(len(asked["queries"]) for _, asked in log) == 40
    assert max(len(asked["queries"]) for _, asked in log) <= 4


@pytest.mark.parametrize("trouble", ["status", "cut before", "cut within"])
def test_a_passing_trouble_is_retried(retrieving, monkeypatch, trouble):
    monkeypatch.setattr(search_r1, "BACKOFF_S", 0.01)

    def behave(handler, asked, number):
        if number == 3:
            return False
        if trouble == "status":
            handler.reply(b"loading the index", 503)
        elif trouble == "cut within":
            handler.send_response(200)
            handler.send_header("Content-Length", "1000")
            handler.end_headers()
            handler.wfile.write(b'{"result": [[')
        handler.close_connection = True
        return True

    with retrieving(behave) as (url, log):
        assert SearchR1(url).search("Japan", 1)[0].title == "Japan"
        assert len(log) == 3


def test_a_refused_query_finds_nothing_and_costs_no_other_its_documents(retrieving):
    def refuse(handler, asked, number):
        time.sleep(0.1)
        if "bad" in asked["queries"]:
            handler.reply(b"not this one", 422)
            return True
        return False

    queries = ["France", "bad", "Japan", "bad", "Chile"]
    with retrieving(refuse) as (url, _), ThreadPoolExecutor(5) as pool:
        retriever = SearchR1(url)
        found = list(pool.map(lambda query: retriever.search(query, 1), queries))
    assert [[document.title for document in documents] for documents in found] == [
        ["France"],
        [],
        ["Japan"],
        [],
        ["Chile"],
    ]


def test_a_server_that_refuses_every_query_is_an_error(retrieving):
    def refuse(handler, asked, number):
        handler.reply(b"no", 422)
        return True

    with retrieving(refuse) as (url, log):
        failing(url, "status 422: no")
        assert len(log) == 2  # the query, and a probe that every server can answer


def test_a_lasting_trouble_is_an_error_after_three_attempts(retrieving, monkeypatch):
    monkeypatch.setattr(search_r1, "BACKOFF_S", 0.01)

    def behave(handler, asked, number):
        handler.reply(b"", 500)
        return True

    with retrieving(behave) as (url, log):
        failing(url, r"status 500 \(3 attempts\)")
        assert len(log) == 3


def test_a_dead_retriever_is_an_error_and_never_an_empty_result(monkeypatch):
    monkeypatch.setattr(search_r1, "BACKOFF_S", 0.01)
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}/retrieve"
        failing(url, "ConnectionRefusedError")


@pytest.mark.parametrize("trickle", [False, True])
def test_a_retriever_that_does_not_finish_is_left_at_the_deadline(retrieving, trickle):
    over = threading.Event()

    def behave(handler, asked, number):
        handler.send_response(200)
        handler.end_headers()
        # a byte arrives within the socket's timeout, the whole response never does
        while not over.wait(0.02):
            if trickle:
                handler.wfile.write(b" ")
        return True

    with retrieving(behave) as (url, log):
        try:
            failing(url, r"no answer within 0\.\d+ s \(\d attempts\)", timeout_s=0.6)
            assert 2 <= len(log) <= 3
        finally:
            over.set()


def test_who_gets_no_turn_in_time_is_told_so_and_not_asked_for_later(retrieving):
    with retrieving() as (url, log):
        retriever = SearchR1(url, 0.5)
        # the turn is free only after the other request
        with retriever._turn, pytest.raises(RetrieverError, match=r"no turn within 0\.5 s"):
            retriever.search("France", 1)
        assert retriever.search("Japan", 1)[0].title == "Japan"
        assert [asked["queries"] for _, asked in log] == [["Japan"]]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"<html>", "not a reply of the Search-R1 API: body: Invalid JSON"),
        (b"{}", "not a reply of the Search-R1 API: result: Field required"),
        (b'{"result": [["text"]]}', r"not a reply of the Search-R1 API: result\.0\.0: "),
        (
            b'{"result": [[{"document": {"text": "x"}}]]}',
            r"not a reply of the Search-R1 API: result\.0\.0\.document\.contents: Field required",
        ),
        (
            b'{"result": [[{"document": {"contents": 5}}]]}',
            r"not a reply of the Search-R1 API: result\.0\.0\.document\.contents: ",
        ),
        (b'{"result": []}', "0 lists of documents for 1 queries"),
        (b'{"result": [[], []]}', "2 lists of documents for 1 queries"),
    ],
)
def test_an_ill_formed_reply_is_an_error_at_once(retrieving, body, message):
    def behave(handler, asked, number):
        handler.reply(body)
        return True

    with retrieving(behave) as (url, log):
        failing(url, message)
        assert len(log) == 1


def test_a_refused_request_is_an_error_at_once_and_quotes_the_server(retrieving):
    def behave(handler, asked, number):
        handler.reply(b'{"detail": "no such route"}', 404)
        return True

    with retrieving(behave) as (url, log):
        failing(url, 'status 404: {"detail": "no such route"}')
        assert len(log) == 1


def test_a_reply_without_end_is_not_read_to_the_end(retrieving, monkeypatch):
    monkeypatch.setattr(search_r1, "MAX_REPLY_BYTES", 1000)

    def behave(handler, asked, number):
        handler.reply(b" " * 100_000)
        return True

    with retrieving(behave) as (url, _):
        failing(url, "the reply is longer than 1000 bytes")


def test_a_trouble_of_one_batch_is_not_kept_for_the_next(retrieving):
    def behave(handler, asked, number):
        if number == 1:
            handler.reply(b"{}")
        return number == 1

    with retrieving(behave) as (url, _):
        retriever = SearchR1(url)
        with pytest.raises(RetrieverError):
            retriever.search("Japan", 1)
        assert retriever.search("Japan", 1)[0].title == "Japan"


def test_queries_of_a_request_that_was_given_up_fail_and_are_not_answered_with_nothing(
    retrieving, monkeypatch
):
    with retrieving() as (url, _):
        retriever = SearchR1(url)
        monkeypatch.setattr(search_r1, "WINDOW_S", 0.1)
        # a stopped thread exits in this way
        monkeypatch.setattr(retriever, "_ask", lambda queries, topk: sys.exit())
        with ThreadPoolExecutor(2) as pool:
            first, second = (
                pool.submit(retriever.search, "Japan", 1),
                pool.submit(retriever.search, "Chile", 1),
            )
            errors = {type(first.exception()), type(second.exception())}
        assert errors == {SystemExit, RetrieverError}


async def test_a_dead_retriever_crashes_the_served_step_and_costs_no_other_session(
    retrieving, monkeypatch
):
    monkeypatch.setattr(search_r1, "BACKOFF_S", 0.01)

    def behave(handler, asked, number):
        if broken := "Chile" in asked["queries"]:
            handler.reply(b"", 500)
        return broken

    with retrieving(behave) as (url, _):
        served = spec({"retriever": url, "retriever_timeout_s": 5})
        assert served.blocking
        app = make_app(served, ServerSettings(drain_timeout_s=0.1))
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(
                transport=httpx.ASGITransport(app, raise_app_exceptions=False),
                base_url="http://env",
            ) as client,
        ):
            ids = []
            for key in "ab":
                ids.append(
                    (await client.post("/create", json={"request_key": key, "task_id": 0})).json()[
                        "session_id"
                    ]
                )
            body = {"turn": 1, "action": "<search>Chile</search>"}
            failed = await client.post("/step", json={"session_id": ids[0], **body})
            assert failed.status_code == 500
            assert failed.json()["kind"] == "env_crashed"
            assert url in failed.json()["message"]
            good = await client.post(
                "/step", json={"session_id": ids[1], "turn": 1, "action": "<search>Japan</search>"}
            )
            assert "Tokyo" in good.json()["observation"]
