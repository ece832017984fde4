"""Events that restart a run and events that end it; checked with the server's matching code, and
once with a real server.
"""

import time
from datetime import UTC, datetime

import pytest
from prefect import flow, get_client
from prefect.server.events.schemas.automations import Automation as ServerAutomation
from prefect.server.events.schemas.events import ReceivedEvent
from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, temporary_settings
from prefect.states import Crashed, Running

from services.overdue import GOES_ON, MAX_ATTEMPTS, bring_back, given_up
from services.prefect_server import prefect_api
from services.recovery import apply_automations, automations

RULES = {automation.name.removeprefix("agentgym: "): automation for automation in automations()}


def covers(rule, name, run_count=1, deployment=True):
    """Return True if the server would count this event for this rule."""
    automation = ServerAutomation.model_validate(
        RULES[rule].model_dump(mode="json", exclude={"id"})
    )
    related = [{"prefect.resource.id": "prefect.flow.1", "prefect.resource.role": "flow"}]
    if deployment:
        related.append(
            {"prefect.resource.id": "prefect.deployment.1", "prefect.resource.role": "deployment"}
        )
    event = ReceivedEvent(
        occurred=datetime.now(UTC),
        event=f"prefect.flow-run.{name}",
        resource={"prefect.resource.id": "prefect.flow-run.1", "prefect.run-count": str(run_count)},
        related=related,
        id="018f4c2e-0000-7000-8000-000000000000",
    )
    trigger = automation.trigger
    return trigger.covers(event) and (
        trigger.expects(event.event) or trigger.starts_after(event.event)
    )


def test_a_crashed_run_goes_on_until_its_last_attempt_and_then_has_failed():
    again = [covers("a crashed run goes on", "Crashed", count) for count in range(MAX_ATTEMPTS + 2)]
    assert again == [True] * MAX_ATTEMPTS + [False, False]
    over = [
        covers("a run that keeps crashing has failed", "Crashed", count)
        for count in range(MAX_ATTEMPTS + 2)
    ]
    assert over == [False] * MAX_ATTEMPTS + [True, False]


def test_a_run_that_failed_or_was_cancelled_stays_so():
    assert not any(
        covers("a crashed run goes on", name)
        for name in ("Failed", "Cancelled", "Cancelling", "Completed")
    )


@pytest.mark.parametrize("rule", RULES)
def test_what_a_person_started_in_a_terminal_is_left_to_them(rule):
    names = ("heartbeat", "Pending", "Crashed", "AwaitingRetry")
    assert any(covers(rule, name, count) for name in names for count in (1, MAX_ATTEMPTS))
    assert not any(
        covers(rule, name, count, deployment=False) for name in names for count in (1, MAX_ATTEMPTS)
    )


def test_silence_is_three_missed_heartbeats_and_not_a_run_that_waits_or_ends():
    trigger = RULES["a silent run has crashed"].trigger
    assert trigger.after == {"prefect.flow-run.heartbeat"}
    assert trigger.within.total_seconds() == 90
    for name in ("heartbeat", "Completed", "Cancelling", "Cancelled", "Failed", "Crashed"):
        assert f"prefect.flow-run.{name}" in trigger.expect


@flow(name="crashing")
def crashing():
    pass


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    """Yield a client of a new server, even if this project has a running server."""
    folder = tmp_path_factory.mktemp("server")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.delenv("PREFECT_API_URL", raising=False)
        patch.setenv("PREFECT_HOME", str(folder / "prefect"))  # read by the server's process
        with (
            temporary_settings(restore_defaults={PREFECT_API_URL}),
            prefect_api(folder / "state"),
            get_client(sync_client=True) as client,
        ):
            yield client


@pytest.fixture(scope="module")
def deployment(client):
    return client.create_deployment(client.create_flow(crashing), name="local")


def crash(client, run):
    client.set_flow_run_state(run.id, Running(), force=True)
    client.set_flow_run_state(run.id, Crashed(message="killed"), force=True)


def test_a_crashed_run_that_no_automation_answers_is_brought_back_all_the_same(client, deployment):
    api, login = str(client.api_url).rstrip("/"), PREFECT_API_AUTH_STRING.value()
    run, ours, typed = (
        client.create_flow_run_from_deployment(deployment),
        [],
        client.create_flow_run(crashing),
    )
    for number in (1, 2):
        crash(client, run)
        crash(client, typed)
        assert bring_back(api, login, max_attempts=2) == []  # the automations get time to act first
        ours.append(bring_back(api, login, max_attempts=2, overdue_s=0))
        state = client.read_flow_run(run.id).state
        assert (state.name, state.message) == (
            ("AwaitingRetry", GOES_ON) if number == 1 else ("Failed", given_up(2))
        )
    assert ours == [[str(run.id)]] * 2
    assert client.read_flow_run(typed.id).state.name == "Crashed"  # started by a user
    assert bring_back(api, login, overdue_s=0) == []


def test_a_real_server_schedules_a_crashed_run_again_and_gives_up_after_the_last_attempt(
    client, deployment
):
    apply_automations(automations(max_attempts=2))
    made = {found.name: found.id for found in client.read_automations()}
    assert made.keys() == {f"agentgym: {name}" for name in RULES}
    apply_automations(automations(max_attempts=2))
    assert {found.name: found.id for found in client.read_automations()} == made
    apply_automations(automations(max_attempts=3))
    apply_automations(automations(max_attempts=2))
    again = {found.name: found.id for found in client.read_automations()}
    assert again.keys() == made.keys()
    # only the rules that count attempts differed
    assert {name for name in made if again[name] != made[name]} == {
        "agentgym: a crashed run goes on",
        "agentgym: a run that keeps crashing has failed",
    }
    run = client.create_flow_run_from_deployment(deployment)

    def state_after_crash():
        crash(client, run)
        deadline = time.monotonic() + 60
        while (state := client.read_flow_run(run.id).state).name == "Crashed":
            assert time.monotonic() < deadline, "no automation answered"
            time.sleep(0.2)
        return state

    first = state_after_crash()
    assert (first.name, first.message) == ("AwaitingRetry", GOES_ON)
    second = state_after_crash()
    assert (second.name, second.message) == ("Failed", given_up(2))
