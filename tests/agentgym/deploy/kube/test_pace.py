"""Attempts are bounded and spread; creates and deletes wait their turn."""

import pytest

from agentgym.deploy.kube.pace import RateLimiter, Retries, retry_after_s


def test_waits_double_up_to_the_longest_and_are_spread():
    retries = Retries(first_s=0.2, longest_s=10.0)
    most = [retries.wait_s(attempt, 0.0, draw=1.0) for attempt in range(8)]
    assert most == pytest.approx([0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10.0, 10.0])
    assert retries.wait_s(3, 0.0, draw=0.0) == pytest.approx(0.8)


def test_what_a_server_asks_for_is_waited_for_and_believed_for_so_long_only():
    retries = Retries(longest_s=10.0)
    assert retries.wait_s(0, 4.0, draw=0.0) == 4.0
    assert retries.wait_s(0, 4.0, draw=1.0) == 5.0  # a quarter of spread on top
    assert retries.wait_s(0, 3600.0, draw=0.0) == 30.0


@pytest.mark.parametrize(
    ("header", "seconds"), [("7", 7.0), (None, 0.0), ("Wed, 21 Oct", 0.0), ("-1", 0.0)]
)
def test_a_retry_after_that_is_no_number_of_seconds_counts_as_none(header, seconds):
    assert retry_after_s(header) == seconds


def test_only_what_may_pass_is_tried_again():
    again = [0, 408, 429, 500, 502, 503, 504]
    never = [400, 401, 403, 404, 409, 410, 422, 501]
    assert [each for each in again + never if Retries().may_retry(each)] == again


def test_a_burst_goes_at_once_and_the_rest_at_its_rate():
    now = [100.0]
    limiter = RateLimiter(per_s=4.0, burst=3, clock=lambda: now[0])
    waits = [limiter.reserve_s() for _ in range(5)]
    assert waits == pytest.approx([0.0, 0.0, 0.0, 0.25, 0.5])
    now[0] += 0.5  # the last turn has come, nothing is saved up
    assert limiter.reserve_s() == pytest.approx(0.25)
    now[0] += 100.0
    assert [limiter.reserve_s() for _ in range(4)] == pytest.approx([0.0, 0.0, 0.0, 0.25])
