"""The embedded sites reproduce the worked examples."""

import json
from pathlib import Path

import pytest

import envs.webarena
from envs.registry import load_spec
from envs.webarena.make_examples import TASKS, make, served


@pytest.mark.usefixtures("chromium")
def test_the_recorded_examples_are_played_again_alike():
    offered = load_spec("webarena", {}).examples()
    env = served()
    try:
        assert offered == make(env)
    finally:
        env.close()
    assert len(offered) == len(TASKS) == 2


def test_no_example_is_an_embedded_task():
    listed = json.loads(Path(envs.webarena.__file__).with_name("tasks.json").read_text())
    assert not {task["intent"] for task in TASKS} & {task["intent"] for task in listed}
