"""Recovery of flow runs that lost their process: automations on the server, and a new attempt that
tidies up after the old one and resumes from the last commit.
"""

from __future__ import annotations

import contextlib
import logging
import os
import stat
from collections.abc import Sequence
from datetime import timedelta

from prefect import get_client, runtime
from prefect.automations import Automation
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId
from prefect.client.schemas.objects import StateType, TaskRun
from prefect.events.actions import ChangeFlowRunState
from prefect.events.schemas.automations import AutomationCore, EventTrigger, Posture
from prefect.exceptions import ObjectNotFound
from prefect.states import Crashed

from agentgym.deploy.owned import end_with_owner
from services.applied import definition
from services.overdue import GOES_ON, MAX_ATTEMPTS, PAGE, given_up

logger = logging.getLogger(__name__)

SILENCE_S = 90  # three heartbeats missed
START_TIMEOUT_S = 300  # from Pending to Running: importing the flow takes 10 to 30 s
MAX_RETRIES_PER_HOUR = 10  # also counts attempts that died before they ran
END_GRACE_S = 8.0

_ENDED = ("Completed", "Failed", "Cancelled", "Crashed")


def automations(max_attempts: int = MAX_ATTEMPTS) -> list[Automation]:
    """Return the rules that mark lost runs as crashed, reschedule crashed ones and, after too many
    attempts, mark them as failed. They cover runs of deployments only: a run from a terminal is its
    user's to restart.
    """
    attempts = [str(count) for count in range(max_attempts)]
    retry = _change(StateType.SCHEDULED, GOES_ON, name="AwaitingRetry")
    gone = f"for {SILENCE_S} s: worker and process are gone"
    return [
        _automation(
            "agentgym: a silent run has crashed",
            f"No heartbeat {gone}.",
            _trigger(
                after=["heartbeat"],
                expect=["heartbeat", "Cancelling", "Paused", "Suspended", *_ENDED],
                within_s=SILENCE_S,
            ),
            _change(StateType.CRASHED, f"no heartbeat {gone}"),
        ),
        _automation(
            "agentgym: a run that never started has crashed",
            f"Pending for {START_TIMEOUT_S} s: its worker died while it started the run.",
            _trigger(
                after=["Pending"],
                expect=["Running", "AwaitingConcurrencySlot", "Cancelling", *_ENDED],
                within_s=START_TIMEOUT_S,
            ),
            _change(StateType.CRASHED, f"did not start within {START_TIMEOUT_S} s"),
        ),
        _automation(
            "agentgym: a crashed run goes on",
            f"Crashed runs are scheduled again, {max_attempts} attempts in all; they go on from the"
            " last commit.",
            _trigger(expect=["Crashed"], run_counts=attempts),
            retry,
        ),
        _automation(
            "agentgym: a run that keeps crashing has failed",
            f"After {max_attempts} attempts you must look at it.",
            _trigger(expect=["Crashed"], run_counts=[str(max_attempts)]),
            _change(StateType.FAILED, given_up(max_attempts)),
        ),
        _automation(
            "agentgym: a run that crashes fast has failed",
            f"{MAX_RETRIES_PER_HOUR} retries within an hour, also of attempts that died before they"
            " ran.",
            _trigger(expect=["AwaitingRetry"], threshold=MAX_RETRIES_PER_HOUR, within_s=3600),
            _change(
                StateType.FAILED,
                f"crashed {MAX_RETRIES_PER_HOUR} times within an hour; see its logs, "
                "then `prefect flow-run retry` continues from the last commit",
            ),
        ),
    ]


def install(*pools: WorkPoolCreate) -> None:
    """Create or update these work pools and our automations on the server."""
    with get_client(sync_client=True) as client:
        for pool in pools:
            client.create_work_pool(pool, overwrite=True)
    apply_automations(automations())


def apply_automations(wanted: Sequence[Automation]) -> None:
    """Create these automations on the server, replacing those of the same name that differ. Equal
    ones are left alone: a recreated rule forgets which events it has seen.
    """
    with get_client(sync_client=True) as client:
        for automation in wanted:
            existing = client.read_automations_by_name(automation.name)
            if [_definition(rule) for rule in existing] == [_definition(automation)]:
                continue
            for outdated in existing:
                assert outdated.id is not None
                with contextlib.suppress(ObjectNotFound):
                    client.delete_automation(outdated.id)  # gone if a request is repeated
            automation.create()


def _definition(automation: AutomationCore) -> object:
    return definition(automation.model_dump(mode="json"))


def _automation(
    name: str, description: str, trigger: EventTrigger, action: ChangeFlowRunState
) -> Automation:
    return Automation(name=name, description=description, trigger=trigger, actions=[action])


def _change(state: StateType, message: str, name: str | None = None) -> ChangeFlowRunState:
    return ChangeFlowRunState(state=state, name=name, message=message, force=False)


def _trigger(
    *,
    expect: Sequence[str],
    after: Sequence[str] = (),
    run_counts: Sequence[str] = (),
    threshold: int = 1,
    within_s: int = 0,
) -> EventTrigger:
    """Return a trigger that fires once a deployed run had `threshold` of the events `expect` within
    within_s or, with `after`, if none of them follows an event of `after` in that time.
    run_counts: count only events of these attempts, as texts; empty: of all.
    """
    match: dict[str, str | list[str]] = {"prefect.resource.id": "prefect.flow-run.*"}
    if run_counts:
        match["prefect.run-count"] = list(run_counts)
    return EventTrigger(
        match=match,
        match_related={"prefect.resource.role": "deployment"},
        for_each={"prefect.resource.id"},
        after={f"prefect.flow-run.{name}" for name in after},
        expect={f"prefect.flow-run.{name}" for name in expect},
        posture=Posture.Proactive if after else Posture.Reactive,
        threshold=threshold,
        within=timedelta(seconds=within_s),
    )


def begin_attempt() -> None:
    """Send our logs to the flow run and settle an earlier attempt that was killed, see
    `settle_interrupted_attempt`. A run that a process worker started (its stdin is a pipe) also
    ends when its worker does.
    """
    # for the run's logs; the handlers decide what reaches a terminal
    logging.getLogger("agentgym").setLevel(logging.INFO)
    # a process worker holds the other end of stdin: a run that continues without it could not be
    # cancelled; a terminal and a container have no pipe there
    if runtime.deployment.id is not None and stat.S_ISFIFO(os.fstat(0).st_mode):
        end_with_owner(END_GRACE_S)
    settle_interrupted_attempt()


def settle_interrupted_attempt() -> None:
    """Mark the unfinished task runs of the previous attempt as crashed, if this is the second or a
    later attempt of a flow run; Prefect itself would show them as running for ever.
    """
    flow_run_id, attempt = runtime.flow_run.id, int(runtime.flow_run.run_count or 1)
    if flow_run_id is None or attempt < 2:
        return
    with get_client(sync_client=True) as client:
        this_run = FlowRunFilter(id=FlowRunFilterId(any_=[flow_run_id]))
        task_runs: list[TaskRun] = []
        while page := client.read_task_runs(
            flow_run_filter=this_run, limit=PAGE, offset=len(task_runs)
        ):
            task_runs += page
        # a task run whose process died at its start may have no state
        unfinished = [task for task in task_runs if not (task.state and task.state.is_final())]
        message = (
            f"interrupted with attempt {attempt - 1} of its flow run; attempt {attempt} continues"
            " from the last commit"
        )
        for task_run in unfinished:
            client.set_task_run_state(task_run.id, Crashed(message=message), force=True)
    message = "attempt %d; %d task runs of the one before were interrupted"
    logger.info(message, attempt, len(unfinished))
