"""The engine reproduces the worked examples."""

from envs.registry import load_spec
from envs.sciworld.make_examples import TASKS, make


def test_the_recorded_examples_are_played_again_alike(pool):
    offered = load_spec("sciworld", {}).examples()
    assert offered == make(pool)
    assert len(offered) == len(TASKS) == 2
