"""Options as a user gives them: defaults are filled in, and secrets do not leak by their names."""

import pytest

from envs.options import choose, hint, secret_variable

DEFAULTS = {"view": "compact", "limit": 3}


def test_what_is_not_said_has_its_default_in_the_defaults_order():
    assert choose("babyai", {"limit": 5}, DEFAULTS) == {"view": "compact", "limit": 5}
    assert list(choose("babyai", {"limit": 5, "view": "x"}, DEFAULTS)) == ["view", "limit"]
    assert DEFAULTS == {"view": "compact", "limit": 3}


def test_an_unknown_option_is_named_with_the_nearest():
    with pytest.raises(
        ValueError, match="babyai has no option 'veiw'; did you mean 'view'"
    ) as error:
        choose("babyai", {"veiw": "compact"}, DEFAULTS)
    assert "\n" not in str(error.value)
    assert hint("zzz", DEFAULTS)
    assert not hint("zzz", DEFAULTS, cutoff=0.6)


@pytest.mark.parametrize("name", ["HOME", "AGENTGYM_SECRET_", "AGENTGYM_SECRET_a", 7, None])
def test_an_option_names_no_variable_that_was_not_meant_for_it(monkeypatch, name):
    monkeypatch.setenv("HOME", "/home/somebody")
    with pytest.raises(ValueError, match="judge: options may only name variables that begin with"):
        secret_variable("judge", name)


def test_a_variable_that_was_meant_must_be_set(monkeypatch):
    with pytest.raises(ValueError, match="judge: the variable AGENTGYM_SECRET_KEY is not set"):
        secret_variable("judge", "AGENTGYM_SECRET_KEY")
    monkeypatch.setenv("AGENTGYM_SECRET_KEY", "secret")
    assert secret_variable("judge", "AGENTGYM_SECRET_KEY") == "AGENTGYM_SECRET_KEY"
