"""Points are read back unchanged or refused by name; values beyond a limit raise alarms."""

import math
import re
import subprocess
import sys
from pathlib import Path

import pytest

from agentgym.config import AlarmsConfig
from agentgym.tracking.points import (
    EVERY_S,
    RULES,
    TOKENS,
    TURNS,
    AlarmStop,
    LedgerError,
    Point,
    SystemMetrics,
    Watch,
    begun,
    decode_points,
    encode_points,
    progressed,
    tripped,
    with_flat_limits,
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
    """(system metrics with a clock set by hand, function that moves the clock)."""
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
    assert system.read() == {}  # rates need elapsed time
    move(0.1)
    found = system.read()
    move(EVERY_S - 0.1)
    assert system.read() == {}
    move(0.1)
    assert system.read().keys() == found.keys()
    page = (Path(__file__).parents[3] / "docs/reference/metrics-time.md").read_text()
    assert set(re.findall(r"`(system/\w+)`", page)) == found.keys()


def test_a_state_that_is_not_here_leaves_its_disk_out(tmp_path):
    now = iter((0.0, 1.0))
    found = SystemMetrics(tmp_path / "elsewhere", lambda: next(now)).read()
    assert "system/disk_available_megabytes" not in found
    assert len(found) == 4


OFF = AlarmsConfig(**{name: {"action": "off"} for name in RULES})
CALM = {
    "entropy": [0.3] * 60,
    "gradient": [0.2, 0.4] * 30,
    "update_kl": [0.01] * 60,
    "zero_variance": [0.5, 1.0] * 30,
    "success": [0.5, 0.7, 0.4, 0.6, 0.5] * 12,
    "mismatch": [1e-3] * 60,
    "throughput": [100.0, 130.0] * 30,
}


def history(name, values):
    metric = RULES[name].metrics[0]
    return [Point(step, 7, {metric: value}) for step, value in enumerate(values, 1)]


def names_of(name, values, alarms=None):
    return [alarm.name for alarm in tripped(alarms or AlarmsConfig(), history(name, values))]


# values of the steps, and the rule's measure of them
TROUBLE = {
    "entropy": ([0.3, 0.3, 0.01, 0.02, 0.015], 0.015),
    "gradient": ([1.0] * 8 + [2.0, 2.0, 80.0], 28.0),
    "update_kl": ([0.01, 0.01, 0.7], 0.24),
    "zero_variance": ([1.0] * 20, 1.0),
    "success": ([0.1] + [0.6] * 5 + [0.3] * 5, 0.3),
    "mismatch": ([0.0, 0.0, 0.0, 0.0, 0.2], 0.04),
    "throughput": ([100.0] * 30 + [40.0] * 11, 0.4),
}
NOISE = {
    "entropy": [0.3, 0.3, 0.0],
    "gradient": [1.0] * 10 + [50.0],
    "update_kl": [0.01, 0.01, 0.5],
    "zero_variance": [1.0] * 19 + [0.75],
    "success": [0.6, 0.4] * 10,
    "mismatch": [0.0, 0.0, 0.0, 0.0, 0.1],
    "throughput": [100.0] * 31 + [10.0] * 9,
}
TOO_FEW = {
    "entropy": [0.0] * 2,
    "gradient": [1.0] * 4 + [100.0] * 3,
    "update_kl": [9.0] * 2,
    "zero_variance": [1.0] * 19,
    "success": [0.9] * 4 + [0.0],
    "mismatch": [9.0] * 4,
    "throughput": [100.0] * 19 + [1.0] * 20,
}


@pytest.mark.parametrize("name", RULES)
def test_each_alarm_trips_on_its_trouble_and_on_no_noise(name):
    values, measure = TROUBLE[name]
    (alarm,) = tripped(AlarmsConfig(), history(name, values))
    assert (alarm.name, alarm.metric) == (name, RULES[name].metrics[0])
    assert alarm.value == pytest.approx(measure)
    assert alarm.limit == getattr(getattr(AlarmsConfig(), name), RULES[name].limit)
    assert alarm.step == len(values)
    for quiet in (CALM[name], NOISE[name], TOO_FEW[name]):
        assert names_of(name, quiet) == []
    assert names_of(name, values, OFF) == []


@pytest.mark.parametrize("name", RULES)
def test_a_limit_is_a_setting(name):
    values, measure = TROUBLE[name]
    rule = RULES[name]
    inside, outside = (measure * 0.9, measure * 1.1) if rule.at_least else (measure, measure * 0.9)
    assert names_of(name, values, AlarmsConfig(**{name: {rule.limit: inside}})) == []
    assert names_of(name, values, AlarmsConfig(**{name: {rule.limit: outside}})) == [name]


def test_a_text_names_metric_measure_limit_and_what_to_try():
    (alarm,) = tripped(AlarmsConfig(), history("gradient", TROUBLE["gradient"][0]))
    assert str(alarm) == (
        "alarm gradient at optimizer step 11: actor/grad_norm, mean of 3 steps over the median of"
        " the 20 before, is 28, above alarms.gradient.max_factor 20; lower optimizer.lr or"
        " optimizer.grad_clip, and look at these steps' episodes"
    )


def test_limits_have_the_names_that_earlier_versions_gave_them():
    names = [f"alarms.{name}.{rule.limit}" for name, rule in RULES.items()]
    assert with_flat_limits(" ".join(names)) == (
        "alarms.min_entropy alarms.max_gradient_factor alarms.max_update_kl"
        " alarms.max_zero_variance_frac alarms.max_success_drop alarms.max_mismatch_kl"
        " alarms.min_throughput_frac"
    )


def test_a_step_that_lacks_a_metric_is_not_judged_by_it_and_another_name_stands_in():
    points = history("update_kl", [0.9, 0.9, 0.9])
    assert tripped(AlarmsConfig(), [*points, Point(4, 7, {})]) == []
    others = [Point(each.step, 7, {"actor/ratio_kl": 0.9}) for each in points]
    (alarm,) = tripped(AlarmsConfig(), others)
    assert (alarm.name, alarm.metric) == ("update_kl", "actor/ratio_kl")


def test_norms_of_zero_are_no_usual_ones():
    assert names_of("gradient", [0.0] * 20 + [1.0] * 3) == []


def watched(alarms, points):
    watch = Watch(alarms, ())
    return [watch.take(point) for point in points]


def test_whoever_reads_a_history_again_finds_the_same_alarms(caplog):
    points = history("success", [0.6] * 6 + [0.2] * 8 + [0.6] * 8)
    marked = watched(AlarmsConfig(), points)
    assert [{name for name in point.metrics if name.startswith("alarm/")} for point in marked] == [
        {f"alarm/{each.name}{part}" for each in found for part in ("", "_limit")}
        for end in range(1, len(points) + 1)
        for found in [tripped(AlarmsConfig(), points[:end])]
    ]
    for cut in (0, 8, 11, len(points)):  # a run that was killed there and resumed
        watch = Watch(AlarmsConfig(), marked[:cut])
        assert [watch.take(point) for point in points[cut:]] == marked[cut:]
    assert begun(marked) == tripped(AlarmsConfig(), points[: begun(marked)[0].step])


def test_a_trouble_is_told_once_and_again_after_a_while(caplog):
    low, high = [0.0] * 3, [1.0] * 3
    points = history("entropy", [*low, 1.0, *low, *high, *high, *low])
    marked = watched(AlarmsConfig(), points)
    assert [alarm.step for alarm in begun(marked)] == [3, 16]
    assert [record.message for record in caplog.records] == list(map(str, begun(marked)))


@pytest.mark.parametrize("action", ["stop", "off"])
def test_what_is_to_stop_is_said_by_the_error_alone(action, caplog):
    watch = Watch(AlarmsConfig(entropy={"action": action}), history("entropy", [0.0, 0.0]))
    assert watch.stop is None
    point = watch.take(Point(3, 7, {"rollout/entropy": 0.0}))
    assert caplog.records == []
    assert ("alarm/entropy" in point.metrics) == (action == "stop")
    if action == "off":
        assert watch.stop is None
        return
    with pytest.raises(
        AlarmStop, match=r"^alarm entropy at .* with alarms\.entropy\.action warn, or"
    ):
        raise watch.stop
    again = Watch(AlarmsConfig(entropy={"action": "stop", "min": 0.0}), [point])
    assert again.stop is None  # with another limit it continues


def test_an_empty_history_is_calm():
    assert Watch(AlarmsConfig(), ()).stop is None
