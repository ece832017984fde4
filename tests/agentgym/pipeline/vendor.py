"""Evaluations of few items, and an OpenAI-compatible endpoint that keeps books."""

import contextlib
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from agentgym.evaluation.request import EvaluationRequest

OPTIONS = {"levels": ["GoToRedBallNoDists"], "view": "compact", "actions": "low"}
NUM_ITEMS = 6
MAX_TURNS = 4


def ask(policy, **more):
    changes = {
        "items": {"num": NUM_ITEMS},
        "max_turns": MAX_TURNS,
        "greedy": False,
        "num_samples": 2,
        "concurrency": 4,
        **more.pop("changes", {}),
    }
    return EvaluationRequest(policy=policy, changes=changes, **more)


class Endpoint:
    """An OpenAI-compatible endpoint that keeps books. trouble: request number -> what it answers
    in place of a completion: a status, `slow`, `cut` or `empty`; refusing: text whose
    conversations get 500.
    """

    def __init__(self, trouble=None, retry_after="0", refusing=None):
        self.trouble, self.retry_after, self.refusing = trouble or {}, retry_after, refusing
        self.num, self.told, self.untold, self.refused = 0, [0, 0, 0], 0, 0
        self.heads, self.asked = [], []
        self.lock = threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_):
                pass

            def do_GET(self):
                self.say(200, {"data": [{"id": "stub"}]})

            def do_POST(self):
                asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.answer(self, asked)

            def say(self, status, tree, *, cut=False, **headers):
                body = json.dumps(tree).encode()
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name.replace("_", "-"), value)
                self.send_header("Content-Length", str(len(body) + 50 * cut))
                self.end_headers()
                self.wfile.write(body)
                if cut:
                    self.close_connection = True

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever)

    def answer(self, handler, asked):
        with self.lock:
            self.num += 1
            now = self.trouble.get(self.num)
            self.heads.append(dict(handler.headers))
            self.asked.append(asked)
        if self.refusing and self.refusing in json.dumps(asked["messages"]):
            now = 500
        if isinstance(now, int):
            with self.lock:
                self.refused += 1
            said = {"error": f"not with {handler.headers['Authorization']}"}
            handler.say(now, said, Retry_After=self.retry_after)
            return
        if now == "slow":
            time.sleep(1.5)
        if now in ("slow", "cut", "empty"):
            with self.lock:
                self.untold += 1
        if now == "empty":
            handler.say(200, {})
            return
        tokens = (20 * len(asked["messages"]), 5, 2)
        usage = {
            "prompt_tokens": tokens[0],
            "completion_tokens": tokens[2],
            "total_tokens": tokens[0] + tokens[2],
            "prompt_tokens_details": {"cached_tokens": tokens[1]},
        }
        if now is None:
            with self.lock:
                self.told = [a + b for a, b in zip(self.told, tokens, strict=True)]
        choice = {"message": {"content": "move forward"}, "finish_reason": "stop"}
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            handler.say(200, {"choices": [choice], "usage": usage}, cut=now == "cut")

    def __enter__(self):
        self.thread.start()
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1"
        return self

    def __exit__(self, *_):
        self.server.shutdown()
        self.server.server_close()
        self.thread.join(10)
