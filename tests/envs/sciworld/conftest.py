"""One pool of Java processes for all tests of this folder: a used slot opens games fast."""

import pytest

from envs.sciworld.slots import SlotPool
from envs.sciworld.tasks import PUBLISHED
from envs.sciworld.world import Options, World


@pytest.fixture(scope="session", autouse=True)
def _needs_java(java):
    pass


@pytest.fixture(scope="package")
def pool():
    pool = SlotPool()
    yield pool
    pool.close()


@pytest.fixture
def world(pool):
    """world(**options) -> a world, closed after the test."""
    worlds = []

    def make(**options):
        worlds.append(
            World(
                pool,
                Options(
                    **{"tasks": PUBLISHED, "max_moves": 100, "reward": "normalised", **options}
                ),
            )
        )
        return worlds[-1]

    yield make
    for world in worlds:
        world.close()
