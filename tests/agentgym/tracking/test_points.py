"""What is spooled comes back as it was, or is refused by name."""

import math
import re
import subprocess
import sys
from pathlib import Path

import pytest

from agentgym.tracking.points import (
    EVERY_S,
    TOKENS,
    TURNS,
    LedgerError,
    Point,
    SystemMetrics,
    decode_points,
    encode_points,
    progressed,
)


def test_points_survive_the_spool_exactly() -> None:
    points = [
        Point(1, 1_700_000_000_123, {"rollout/reward mean": 0.1 + 0.2, "actor/loss": -1e-17}),
        Point(2, 1_700_000_000_456, {}),
    ]
    assert decode_points(encode_points(points)) == points
    assert (
        encode_points(points[:1])
        == b'{"step": 1, "time_ms": 1700000000123, "metrics": {"rollout/reward mean":'
        b' 0.30000000000000004, "actor/loss": -1e-17}}\n'
    )


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_metric_that_is_no_number_is_refused_by_name(value: float) -> None:
    with pytest.raises(LedgerError, match=r"metric actor/kl is -?(nan|inf) at step 7"):
        encode_points([Point(7, 0, {"actor/loss": 1.0, "actor/kl": value})])


def test_a_name_mlflow_would_reject_is_refused_before_it_is_spooled() -> None:
    with pytest.raises(LedgerError, match=r"'eval/pass@1' at step 0 .*write pass_at_1"):
        encode_points([Point(0, 0, {"eval/pass@1": 1.0})])


def test_a_damaged_spool_is_named_with_its_line() -> None:
    with pytest.raises(LedgerError, match=r"line 2 of metrics\.jsonl is not a point"):
        decode_points(encode_points([Point(0, 0, {})]) + b'{"step": 1\n')


def played(episodes, turns, tokens, failed=0.0, **more):
    metrics = {
        "rollout/num_episodes": episodes,
        "rollout/env_error_frac": failed,
        "rollout/turns_mean": turns,
        "rollout/tokens_mean": tokens,
    }
    return Point(1, 0, metrics | more)


def test_turns_and_tokens_of_the_episodes_that_count_add_up():
    first = played(128.0, 5.5, 100.0)
    told = progressed([], first)
    assert told == {TURNS: 704.0, TOKENS: 12800.0}
    before = [Point(1, 0, first.metrics | told), Point(2, 0, {"sft/loss": 1.0})]
    assert progressed(before, played(100.0, 4.0, 50.0, failed=0.1)) == {
        TURNS: 704.0 + 360.0,
        TOKENS: 12800.0 + 4500.0,
    }


def test_a_point_without_episodes_has_none():
    assert progressed([], Point(1, 0, {"sft/loss": 1.0})) == {}


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
