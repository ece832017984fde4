"""Worked examples: going to an object and picking one up, in worlds whose seeds are in no list."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial

from envs.babyai.world import Options, World
from envs.examples import played, solved
from envs.wire import Example

# level, seed; the lists' seeds are below 10,000
TASKS = (("GoToObj", 1_000_000_003), ("PickupDist", 1_000_000_001))


@cache
def worked_examples(options: Options) -> tuple[Example, ...]:
    """Play the worked examples with these options' view and actions; leave out unsolved ones."""
    return solved(
        partial(played, World(replace(options, levels=(level,))), seed) for level, seed in TASKS
    )
