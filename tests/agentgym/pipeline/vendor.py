"""Evaluations of few items, and an OpenAI-compatible endpoint that counts requests and tokens."""

import contextlib
import json
import threading
import time

from agentgym.evaluation.protocol import EvaluationRequest
from tests.answering import Handler, http_server

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
    """OpenAI-compatible endpoint that counts requests and tokens.
    trouble: request number -> a status, `slow`, `cut` or `empty` instead of a completion.
    refusing: conversations with this text get status 500.
    """

    def __init__(self, trouble=None, retry_after="0", refusing=None):
        self.trouble, self.retry_after, self.refusing = trouble or {}, retry_after, refusing
        self.num, self.told, self.untold, self.refused = 0, [0, 0, 0], 0, 0
        self.heads, self.asked = [], []
        self.lock = threading.Lock()

    def __enter__(self):
        outer = self

        class Answers(Handler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                self.say(200, {"data": [{"id": "stub"}]})

            def do_POST(self):
                outer.answer(self, self.read_json())

            def say(self, status, tree, *, cut=False, **headers):
                body = json.dumps(tree).encode()
                self.close_connection |= cut
                self.send(body, status, Content_Length=str(len(body) + 50 * cut), **headers)

        self.server = http_server(Answers)
        self.url = f"{self.server.__enter__()}/v1"
        return self

    def __exit__(self, *_):
        self.server.__exit__(None, None, None)

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
