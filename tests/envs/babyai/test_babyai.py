"""The options of the environment, and its manual."""

import pytest

from envs.babyai import spec


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"level": ["GoToObj"]}, "did you mean 'levels'"),
        ({"view": "compat"}, "did you mean 'compact'"),
        ({"actions": "lo"}, "did you mean 'low'"),
        ({"reward": 1}, "option reward: unknown value 1"),
        ({"levels": ["GoToObjj"]}, "did you mean 'GoToObj'"),
        ({"levels": []}, "expected"),
        ({"levels": "all"}, "agentgym"),
    ],
)
def test_wrong_options_name_the_nearest_known(options, message):
    with pytest.raises(ValueError, match=message):
        spec(options)


@pytest.mark.parametrize("actions", ["low", "high"])
def test_the_manual_agrees_with_the_grammar(actions):
    instructions = spec({"actions": actions}).instructions
    for action in ("turn left", "turn right", "move forward", "pickup", "drop", "toggle"):
        assert action in instructions
    assert ("go to red ball 1" in instructions) == (actions == "high")
