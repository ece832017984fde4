"""A real environment server on loopback, in a thread of the test."""

import socket
import threading
import time
from contextlib import contextmanager

import pytest
import uvicorn

from envs.babyai import spec as babyai
from envs.server import ServerSettings, make_app


@pytest.fixture(scope="session")
def serving():
    """serving(options, **settings) -> (endpoint, sessions) of a BabyAI server, or with `spec` of any other."""

    @contextmanager
    def serve(options=None, spec=None, **settings):
        app = make_app(spec or babyai(options or {}), ServerSettings(**{"drain_timeout_s": 0.1, **settings}))
        listener = socket.socket()
        listener.bind(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(app, log_config=None, access_log=False))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            while not (server.started and app.state.sessions.ready):
                time.sleep(0.01)
            yield f"http://127.0.0.1:{listener.getsockname()[1]}", app.state.sessions
        finally:
            server.should_exit = True
            thread.join(10)
            assert not thread.is_alive()

    return serve
