"""Failures and deaths in a deployment are reported, detected and recovered."""

import json
import os
import signal

import pytest

from tests.answering import Handler, http_server
from tests.flows.deployed import make, processes
from tests.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def test_a_wrong_parameter_fails_at_once_with_one_line_and_is_not_tried_again(deployed):
    refused = deployed.project.run(
        "prefect",
        "--no-prompt",
        "deployment",
        "run",
        "train/local",
        "--param",
        'run={"overrides": ["seed"]}',
    )
    assert refused.returncode == 1  # refused by the form's schema, before a run exists
    misspelled = deployed.request("train/local", "rollout.gruop_size=4")
    seen = deployed.wait(misspelled, "Failed", "Completed")
    assert "unknown key rollout.gruop_size; did you mean rollout.group_size?" in seen["message"]
    assert seen["tasks"] == []
    misplaced = deployed.request("train/local", "data.path=nowhere")
    seen = deployed.wait(misplaced, "Failed", "Completed")
    assert "data.path nowhere does not exist" in seen["message"]
    assert [(name, state) for name, state, _ in seen["tasks"]] == [("pull data", "Failed")]
    assert seen["attempts"] == 1


@pytest.fixture
def inbox():
    """Yield (its address, the received messages)."""
    received = []

    class Inbox(Handler):
        def do_POST(self):
            received.append(self.read_json())
            self.send(status=204)

    with http_server(Inbox) as address:
        yield f"{address}/", received


MAKE_BLOCK = """
import sys
from prefect.blocks.notifications import CustomWebhookNotificationBlock as Webhook
Webhook(name="failures", url=sys.argv[1], json_data={"subject": "{{subject}}", "text": "{{body}}"}
).save("agentgym-failures", overwrite=True)
"""


def test_people_are_told_of_a_failed_run_once_that_is_switched_on(deployed, switched_on, inbox):
    (rule,) = (
        each
        for each in deployed.api("automations/filter", {})
        if each["name"] == "agentgym: people are told of a failed run"
    )
    assert rule["enabled"] is False
    address, received = inbox
    made = deployed.project.run("python", "-c", MAKE_BLOCK, address)
    assert made.returncode == 0, made.stderr
    switched_on("notify", "enabled")
    nobody = deployed.request("train/local", "data.path=elsewhere")  # no such block
    deployed.wait(nobody, "Failed")
    wait_until(
        lambda: any(
            "'slack-webhook/agentgym-failures', which cannot be used"
            in str(each["state"]["message"])
            for each in deployed.api("flow_runs/filter", {"flows": {"name": {"any_": ["notify"]}}})
        ),
        120,
        why=lambda: deployed.log("prefect"),
    )

    file = deployed.project.folder / "prefect.yaml"
    file.write_text(file.read_text().replace("slack-webhook/", "custom-webhook/"))
    deployed.prefect("deploy", "--name", "notify/local")
    run = deployed.request("train/local", "data.path=nowhere")
    deployed.wait(run, "Failed")
    wait_until(lambda: received, 120, why=lambda: deployed.log("prefect"))
    ((subject, text),) = (each.values() for each in received)
    assert subject == "agentgym: params.yaml data.path=nowhere failed"
    assert "failed: pull data: " in text
    assert "data.path nowhere does not exist" in text
    assert f"{deployed.services['prefect']}/runs/flow-run/{run}" in text
    assert f"prefect flow-run retry {run}" in text


def test_environments_that_are_up_serve_the_next_run_and_go_down_on_request(deployed):
    up = deployed.request("envs-up/local")
    seen = deployed.wait(up, "Completed", "Failed")
    assert seen["state"] == "Completed", seen["message"]
    ((key, kind, _, table),) = seen["artifacts"]
    assert (key, kind) == ("environments", "table")
    (server,) = json.loads(table)
    file = next((deployed.project.folder / ".agentgym/environments").iterdir())
    assert json.loads(file.read_bytes())["token"] not in str(deployed.look(up))
    log = deployed.project.folder / ".agentgym/logs/babyai.log"
    before = log.read_bytes()
    run = deployed.request("evaluate/local", "evaluation.num_items=2")
    seen = deployed.wait(run, "Completed", "Failed")
    assert seen["state"] == "Completed", seen["message"]
    assert log.read_bytes() == before  # the run started no server
    assert int(server["held by"].removeprefix("process ")) in deployed.pids(
        "agentgym.deploy.environment"
    )
    down = deployed.request("envs-down/local")
    assert deployed.wait(down, "Completed", "Failed")["state"] == "Completed"
    wait_until(
        lambda: not deployed.pids("agentgym.deploy.environment", "envs serve"),
        30,
        why=lambda: processes(deployed.project),
    )


def test_a_flow_typed_in_a_terminal_uses_the_running_server(deployed):
    refused = deployed.project.run("python", "-m", "flows.train", "seed=7")
    assert refused.returncode == 2
    assert refused.stderr == (
        "error: step stage-1 needs prepare, warm-start first; run `python -m flows.prepare` with"
        " the same parameters\n"
        "see docs/reference/errors-configuration.md#configerror\n"
    )
    prepared = deployed.project.run("python", "-m", "flows.prepare", "seed=7")
    assert prepared.returncode == 0, prepared.stdout + prepared.stderr
    assert "warm start (SFT)" in prepared.stdout
    assert "params.yaml seed=7" in deployed.prefect("flow-run", "ls", "--flow-name", "prepare")


def test_a_run_that_lost_its_worker_too_is_found_by_its_silence(deployed):
    run = deployed.request("pipeline/local", "seed=8", "horizon.stage_steps=[6,1,2]")
    deployed.wait_for_commit("stage-1", deployed.commits("stage-1") + 2)
    for pid in deployed.pids("services.supervisor worker", "prefect.engine"):
        os.kill(pid, signal.SIGKILL)
    wait_until(
        lambda: not deployed.pids("envs serve"),
        30,
        why=lambda: "an environment server outlived its run",
    )
    seen = deployed.wait(run, "Completed", "Failed", timeout_s=600)
    assert (seen["state"], seen["attempts"]) == ("Completed", 2)
    assert {state for _, state, _ in seen["tasks"]} == {"Completed", "Crashed"}


def test_a_crashed_run_that_no_automation_answers_is_found_by_the_supervisor(deployed):
    (answer,) = [
        each
        for each in deployed.api("automations/filter", {})
        if each["name"] == "agentgym: a crashed run goes on"
    ]
    deployed.api(f"automations/{answer['id']}", {"enabled": False}, method="PATCH")
    run = deployed.request("pipeline/local", "seed=9", "horizon.stage_steps=[6,1,2]")
    deployed.wait_for_commit("stage-1", deployed.commits("stage-1") + 2)
    for pid in deployed.pids("prefect.engine"):
        os.kill(pid, signal.SIGKILL)
    seen = deployed.wait(run, "Completed", "Failed")
    deployed.api(f"automations/{answer['id']}", {"enabled": True}, method="PATCH")
    assert (seen["state"], seen["attempts"]) == ("Completed", 2)
    assert "no automation answered" in deployed.log("supervisor")


def test_services_end_with_a_killed_supervisor_and_come_back_with_up(deployed):
    (supervisor,) = deployed.pids("services.supervisor supervise")
    os.kill(supervisor, signal.SIGKILL)
    wait_until(lambda: not processes(deployed.project), 30, why=lambda: processes(deployed.project))
    again = make(deployed.project, "up")
    assert again.returncode == 0, again.stdout + again.stderr
    assert "http://127.0.0.1:" in again.stdout
    assert "pipeline/local" in deployed.prefect("deployment", "ls")
