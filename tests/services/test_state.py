"""A supervisor's state files: damaged ones are ignored, and a user's prefect.toml is kept."""

from pathlib import Path

import pytest

from services.__main__ import down, status
from services.state import TOML, TOML_MARK, is_stale, running


@pytest.fixture
def state(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".agentgym").mkdir()
    return Path(".agentgym")


@pytest.mark.parametrize("content", ["", "{", "[]", '{"pid": 1}'])
def test_a_damaged_state_file_counts_as_nothing_running(state, content, capsys):
    (state / "services.json").write_text(content)
    assert running(state) is None
    assert status(state) == 1
    assert capsys.readouterr().out == "nothing is running; `make up` starts it\n"


def test_a_prefect_toml_of_ones_own_is_neither_removed_nor_called_stale(state):
    TOML.write_text('[api]\nurl = "http://elsewhere/api"\n')
    assert not is_stale(state)
    assert down(state) == 0
    assert TOML.exists()
    TOML.write_text(f"{TOML_MARK}\n")
    assert is_stale(state)
    assert down(state) == 0
    assert not TOML.exists()
