"""A failed test, and one that hangs where signals have no effect, end and are named."""

import sys
from pathlib import Path

import pytest

from tests.completed import completed

ROOT = Path(__file__).parents[1]

FAILED = """
import threading
import pytest

@pytest.fixture
def what_never_ends():
    yield
    threading.Event().wait()

def test_it(what_never_ends):
    raise ValueError("the first error")
"""
DEAF = """
import ctypes
import tests.deadlines
tests.deadlines.SLACK_S = 1.0

def test_it():
    c, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
    c.pthread_mutex_lock(mutex)
    c.pthread_mutex_lock(mutex)  # goes on waiting after a signal, as many a call in C
"""


@pytest.mark.integration
@pytest.mark.parametrize(
    ("source", "told"),
    [
        (FAILED, ("the first error", "Timeout (>1.0s)", "threading.Event().wait()")),
        (DEAF, ("Timeout (0:00:02)!", "in test_it")),
    ],
)
def test_what_waits_forever_ends_and_is_named(tmp_path, source, told):
    (tmp_path / "test_waits.py").write_text(source)
    command = [sys.executable, "-m", "pytest", "-p", "tests.deadlines", "--timeout", "1", "-q"]
    ended = completed(*command, "--rootdir", tmp_path, tmp_path, cwd=ROOT)
    said = ended.stdout + ended.stderr
    assert ended.returncode == 1, said
    for each in told:
        assert each in said
