"""Rate limits of a running step's deliveries to MLflow."""

import time
from types import SimpleNamespace

import pytest

from agentgym.tracking import deliver as ledger
from agentgym.tracking.deliver import Paced
from agentgym.tracking.reaching import LedgerUnavailable, check_server, reaching

ONE, LAST = SimpleNamespace(done=False), SimpleNamespace(done=True)


@pytest.fixture
def clock(monkeypatch):
    now = SimpleNamespace(s=1000.0)
    monkeypatch.setattr(ledger, "time", SimpleNamespace(monotonic=lambda: now.s))
    return now


def test_deliveries_take_a_hundredth_of_the_time_but_the_first_and_the_last_are_at_once(clock):
    told = []

    def deliver(manifest):
        told.append(clock.s - 1000.0)
        clock.s += 0.04

    paced = Paced(deliver)
    for _ in range(16):
        paced(ONE)
        clock.s += 0.75
    paced(LAST)
    # a delivery of 0.04 s is 1 % of 4 s
    # the first commit after 0.04 + 4 s is the seventh, at 6 * 0.75 + 0.04 = 4.54 s
    assert told == pytest.approx([0.0, 4.54, 9.08, 12.12])


def test_a_slow_server_is_told_once_a_minute(clock):
    told = []

    def deliver(manifest):
        told.append(clock.s - 1000.0)
        clock.s += 5.0

    paced = Paced(deliver)
    for _ in range(70):
        paced(ONE)
        clock.s += 1.0
    assert told == [0.0, 65.0]


def test_a_step_goes_on_while_mlflow_is_away_and_stops_for_anything_else(clock, caplog):
    def away(manifest):
        raise LedgerUnavailable("no MLflow server answers")

    Paced(away)(LAST)
    assert caplog.messages == ["metrics wait in the store: no MLflow server answers"]

    def broken(manifest):
        raise ValueError("metric name")

    with pytest.raises(ValueError, match="metric name"):
        Paced(broken)(ONE)


class MlflowException(Exception):
    def __init__(self, message, error_code="INTERNAL_ERROR"):
        super().__init__(message)
        self.error_code = error_code


class OperationalError(Exception):
    """SQLAlchemy's error, by name."""


@pytest.mark.parametrize(
    ("error", "is_outage"),
    [
        (
            MlflowException("API request to http://h/api failed with exception HTTPConnectionPool"),
            True,
        ),
        (
            MlflowException(
                "(sqlite3.OperationalError) database is locked", "TEMPORARILY_UNAVAILABLE"
            ),
            True,
        ),
        (OperationalError("database is locked"), True),
        (MlflowException("metric name is too long", "INVALID_PARAMETER_VALUE"), False),
        (ValueError("API request to nowhere"), False),
    ],
)
def test_only_an_outage_is_an_outage(error, is_outage):
    with (
        pytest.raises(LedgerUnavailable if is_outage else type(error)),
        reaching("sqlite:////x/mlflow.db"),
    ):
        raise error


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        (500, "the MLflow server at tracking.uri http://x:5 refuses: .*error code 500.*NUL"),
        (413, "the MLflow server at tracking.uri http://x:5 refuses: .*error code 413.*NUL"),
        (503, "no MLflow server answers at tracking.uri http://x:5: .*error code 503"),
    ],
)
def test_a_server_that_refuses_is_quoted_and_not_called_absent(status, expected):
    from mlflow.exceptions import MlflowException

    answer = f"API request to endpoint /v1/traces failed with error code {status} != 200."
    body = " Response body: 'a string literal cannot contain NUL (0x00) characters \x00'"
    with pytest.raises(LedgerUnavailable, match=expected) as raised, reaching("http://x:5"):
        raise MlflowException(answer + body)
    assert "Nothing is lost" in str(raised.value)
    assert "\x00" not in str(raised.value)


def test_a_server_that_does_not_answer_is_named_in_time(monkeypatch):
    import socket

    monkeypatch.setattr("agentgym.tracking.reaching.REACH_TIMEOUT_S", 0.3)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        uri = f"http://127.0.0.1:{silent.getsockname()[1]}"
        began = time.monotonic()
        with pytest.raises(
            LedgerUnavailable,
            match=rf"no MLflow server answers at tracking.uri {uri}: .*timed out.*Nothing is lost",
        ):
            check_server(uri)
        assert time.monotonic() - began < 10
    check_server("sqlite:////x/mlflow.db")  # no server involved
