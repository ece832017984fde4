"""A small retrieval server that speaks the Search-R1 API, on loopback, and keeps a log of what
it was asked.
"""

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from envs.searchqa.retrievers import Bm25, Document

CAPITALS = Bm25(
    [
        Document("France", "France is a country. Its capital is Paris."),
        Document("Japan", "Japan is a country. Its capital is Tokyo."),
        Document("Chile", "Chile is a country. Its capital is Santiago."),
        Document("Tokyo", "Tokyo lies on the Kanto plain."),
    ]
)


def found(asked):
    """The reply a retrieval server gives."""
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
    """retrieving(behave) -> (url, log) of a server; behave(handler, asked, number) may answer
    in its own way and then returns True.
    """

    @contextmanager
    def serve(behave=lambda handler, asked, number: False):
        log = []

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                log.append((self.path, asked))
                if not behave(self, asked, len(log)):
                    self.reply(json.dumps(found(asked)).encode())

            def reply(self, body, status=200):
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *arguments):
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/retrieve", log
        finally:
            server.shutdown()
            thread.join()
            server.server_close()

    return serve
