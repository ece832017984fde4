"""System metrics: of the whole tree of processes, and no more often than they are worth."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from agentgym.tracking.system import EVERY_S, SystemMetrics

BUSY = """
import time
held = bytearray(50_000_000)
while time.process_time() < 0.3:
    pass
print(flush=True)
time.sleep(60)
"""


@pytest.fixture
def reading(tmp_path):
    """(metrics of a clock that stands still until it is moved, move)."""
    now = [1000.0]

    def move(seconds):
        now[0] += seconds

    return SystemMetrics(tmp_path, lambda: now[0]), move


def test_a_process_that_it_started_counts_with_its_time_and_memory(reading):
    system, move = reading
    with subprocess.Popen([sys.executable, "-c", BUSY], stdout=subprocess.PIPE) as child:
        child.stdout.readline()
        move(0.3)
        first = system.read()
        child.kill()
    move(EVERY_S)
    then = system.read()
    assert first["system/process_cpu_percentage"] >= 90
    lost = first["system/process_memory_megabytes"] - then["system/process_memory_megabytes"]
    assert lost > 40
    assert then["system/disk_available_megabytes"] > 0
    assert 0 <= then["system/cpu_utilization_percentage"] <= 100


def test_readings_are_apart_and_the_first_is_at_once(reading):
    system, move = reading
    assert system.read() == {}  # no time has passed that anything could be of
    move(0.1)
    found = system.read()
    move(EVERY_S - 0.1)
    assert system.read() == {}
    move(0.1)
    assert system.read().keys() == found.keys()
    page = (Path(__file__).parents[3] / "docs/operations.md").read_text()
    assert set(re.findall(r"`(system/\w+)`", page)) == found.keys()


def test_a_state_that_is_not_here_leaves_its_disk_out(tmp_path):
    now = iter((0.0, 1.0))
    found = SystemMetrics(tmp_path / "elsewhere", lambda: next(now)).read()
    assert "system/disk_available_megabytes" not in found
    assert len(found) == 4
