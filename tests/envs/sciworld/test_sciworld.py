"""The options of the environment, and its requirements."""

import pytest

from envs.registry import load_spec


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"task": "boil"}, "no option 'task'; did you mean 'tasks'"),
        ({"tasks": ["boill"]}, "unknown task 'boill'; did you mean 'boil'"),
        ({"tasks": []}, 'expected "agentgym" or a list of task names'),
        ({"max_moves": 0}, "max_moves: expected a whole number from 1, got 0"),
        ({"reward": "agentgim"}, "option reward: .* did you mean 'agentgym'"),
        ({"protocol": "agentgim"}, "option protocol: .* did you mean 'agentgym'"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        load_spec("sciworld", options)


def test_without_java_the_server_says_what_to_install(monkeypatch):
    monkeypatch.setenv("JAVA_HOME", "/nowhere")
    with pytest.raises(
        ValueError,
        match=(
            r"needs a Java runtime and found no `java` in /nowhere; install one: apt-get"
            r" install \S+"
        ),
    ):
        load_spec("sciworld", {})


def test_the_seven_other_kinds_of_task_can_be_chosen(world):
    playing = world(tasks=("mendelian-genetics-known-plant", "grow-plant"))
    assert "plant" in playing.reset(120)
    assert playing.task.name == "grow-plant"
