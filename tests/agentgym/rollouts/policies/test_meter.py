"""An engine's counters, on a clock moved by hand."""

from agentgym.rollouts.policies.meter import Meter
from agentgym.types import EngineUsage


def test_time_counts_as_what_was_in_work_and_what_waited_meanwhile():
    now = [10.0]
    meter = Meter(lambda: now[0])
    now[0] = 12.0  # 2 s of nothing
    meter.requests(running=2, waiting=1)
    now[0] = 15.0  # 3 s of work while one waits
    meter.requests(running=0, waiting=4)
    now[0] = 16.0  # 1 s in which four wait for new weights
    meter.requests(running=4, waiting=0)
    meter.prompt(30, 20)
    meter.prompt(10, 0)
    now[0] = 20.0  # and 4 s of work until it is asked
    first = meter.usage()
    assert first == EngineUsage(40, 20, busy_s=7.0, depth_s={0: 6.0, 1: 3.0, 4: 1.0})
    assert (first.total_s, first.busy_frac, first.mean_depth) == (10.0, 0.7, 0.7)
    now[0] = 22.0
    meter.requests(running=0, waiting=0)
    now[0] = 24.0
    since = meter.usage() - first
    assert since == EngineUsage(0, 0, busy_s=2.0, depth_s={0: 4.0})
    assert (since.busy_frac, max(since.depth_s)) == (0.5, 0)


def test_several_engines_are_added_up():
    one = EngineUsage(10, 5, 1.0, {0: 2.0})
    other = EngineUsage(30, 0, 2.0, {0: 1.0, 2: 1.0})
    assert one + other == EngineUsage(40, 5, 3.0, {0: 3.0, 2: 1.0})
    assert (one + other).busy_frac == 0.75
    assert one + other - one == other
    assert EngineUsage().busy_frac == 1.0
    assert EngineUsage().mean_depth == 0.0
