"""Requests for tests of the built-in engine."""

import random

from agentgym.types import SampleKey


def key(sample=0, turn=0):
    return SampleKey(0, 1, "babyai_3", sample, turn)


def prompts(count, seed=0):
    draw = random.Random(seed)
    return [[draw.randrange(4, 250) for _ in range(draw.randrange(1, 40))] for _ in range(count)]
