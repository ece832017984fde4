"""HTTP servers for tests, one thread per server."""

import contextlib
import json
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Handler(BaseHTTPRequestHandler):
    """HTTP handler that reads JSON, sends a response and logs nothing."""

    def read_json(self):
        return json.loads(self.rfile.read(int(self.headers["Content-Length"])))

    def send(self, body=b"", status=200, **headers):
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **named}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_): ...


@contextlib.contextmanager
def http_server(handler):
    """Yield the URL of a server that uses this handler class."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def closed_port():
    """Return a port of this machine on which no process listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
