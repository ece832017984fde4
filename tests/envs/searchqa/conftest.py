"""A small retrieval server with the Search-R1 API, on loopback. It logs its requests."""

import json
from contextlib import contextmanager

import pytest

from envs.searchqa.retrievers import Bm25, Document
from tests.answering import Handler, http_server

CAPITALS = Bm25(
    [
        Document("France", "France is a country. Its capital is Paris."),
        Document("Japan", "Japan is a country. Its capital is Tokyo."),
        Document("Chile", "Chile is a country. Its capital is Santiago."),
        Document("Tokyo", "Tokyo lies on the Kanto plain."),
    ]
)


def found(asked):
    """Return a retrieval server's response to a request."""
    hits = [CAPITALS.search(query, asked["topk"]) for query in asked["queries"]]
    return {
        "result": [
            [
                {"document": {"id": "1", "contents": f'"{d.title}"\n{d.text}'}, "score": 0.5}
                for d in documents
            ]
            for documents in hits
        ]
    }


@pytest.fixture
def retrieving():
    """retrieving(behave) -> (url, log) of a server. behave(handler, request, number) may send a
    different response; it then returns True.
    """

    @contextmanager
    def serve(behave=lambda handler, asked, number: False):
        log = []

        class Retriever(Handler):
            def do_POST(self):
                asked = self.read_json()
                log.append((self.path, asked))
                if not behave(self, asked, len(log)):
                    self.reply(json.dumps(found(asked)).encode())

            def reply(self, body, status=200):
                self.send(body, status, Content_Type="application/json")

        with http_server(Retriever) as address:
            yield f"{address}/retrieve", log

    return serve
