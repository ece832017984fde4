"""Speed of this machine at the work of a CPU run, so that times of two machines can be compared."""

from __future__ import annotations

import json
import time

ROUNDS = 1_500  # of each half; together about a second
SHAPE = (256, 96, 288)  # tokens, hidden size and MLP size of the default model


def reference_s() -> float:
    """Wall seconds of fixed work in one thread: half are matrix products as in the default model,
    half is interpreter work as in a client and a server of environments. Sets torch to one thread.
    """
    import torch

    from agentgym.models.model import set_threads

    set_threads()
    tokens, hidden, wide = SHAPE
    states = torch.ones(tokens, hidden)
    up, down = torch.ones(hidden, wide) / wide, torch.ones(wide, hidden) / wide
    message = {
        "turn": 1,
        "observation": "see: red ball 3 ahead 1 left",
        "reward": 0.0,
    }
    began = time.perf_counter()
    for _ in range(ROUNDS):
        states = (states @ up) @ down
        for _ in range(100):
            message = json.loads(json.dumps(message))
    return time.perf_counter() - began
