"""Weights follow from the recorded optimizer steps and episodes, or are reported as unproven."""

import json

import pytest
import torch
from safetensors.torch import load, save

from agentgym.audit.findings import Checks
from agentgym.audit.stored_steps import read_steps
from agentgym.audit.updates import check_updates
from agentgym.cli import main
from agentgym.pipeline.table import open_store

pytestmark = pytest.mark.integration
WEIGHTS = "model.safetensors"


MANY = 100  # more optimizer steps than any step of the run has


def checked(cfg, most):
    others, found = Checks("others"), Checks("updates")
    steps = read_steps(cfg, open_store(cfg), others, others)
    check_updates(cfg, steps, most, found)
    return found


def test_each_stage_taken_again_comes_to_the_weights_on_record(forger):
    cfg = forger.cfg
    found = checked(cfg, MANY)
    num_steps = cfg.warm_start.steps + sum(cfg.horizon.stage_steps)
    assert (found.failures, found.counted) == ([], num_steps)
    assert [note.partition(":")[0] for note in found.notes] == ["warm-start", "stage-1", "stage-2"]
    assert all(note.endswith("0.0e+00 of the change") for note in found.notes)


def test_what_is_not_taken_again_is_not_proven(forger, capsys):
    found = checked(forger.cfg, 0)
    assert not found.counted
    check = found.check()
    assert check.word == "not checked"
    assert any("weights of stage-2, --updates" in line for line in check.not_checked)
    assert any("weights of warm-start" in line for line in check.not_checked)


def test_an_audit_that_was_asked_for_weights_and_left_some_out_is_not_a_proof(forger):
    assert not checked(forger.cfg, 0).num_unproven
    assert checked(forger.cfg, 2).num_unproven == 1  # the warm start is unproven
    assert not checked(forger.cfg, MANY).num_unproven


@pytest.mark.parametrize("forgery", ["one percent more", "another stage's"])
def test_weights_that_never_came_of_the_run_are_found(forger, forgery):
    before, final = forger.commits("stage-1")[-1], forger.commits("stage-2")[-1]
    ours = load(forger.blob("stage-2", final.seq, WEIGHTS).read_bytes())
    theirs = load(forger.blob("stage-1", before.seq, WEIGHTS).read_bytes())
    share = 1.01 if forgery == "one percent more" else 0.0
    changed = {name: torch.lerp(theirs[name], ours[name], share) for name in ours}
    forger.rewrite("stage-2", final.seq, WEIGHTS, save(changed))
    found = checked(forger.cfg, 3)
    assert len(found.failures) == 1
    assert found.failures[0].startswith("stage-2: its weights are ")


def test_a_warm_start_that_demonstrations_do_not_lead_to_is_found(forger):
    before, final = forger.commits("initialize")[-1], forger.commits("warm-start")[-1]
    ours = load(forger.blob("warm-start", final.seq, WEIGHTS).read_bytes())
    theirs = load(forger.blob("initialize", before.seq, WEIGHTS).read_bytes())
    changed = {name: torch.lerp(theirs[name], ours[name], 1.01) for name in ours}
    forger.rewrite("warm-start", final.seq, WEIGHTS, save(changed))
    found = checked(forger.cfg, MANY)
    # the stages trained from other weights, so they fail too
    assert any(each.startswith("warm-start: its weights are ") for each in found.failures)


def test_the_command_says_what_weights_it_did_not_prove(forger, capsys):
    params = str(forger.cfg.store.path.parent / "params.yaml")
    words = ["audit", "--episodes", "1", "--rescore", "1", "--params", params]
    main(words)
    assert "not checked: weights of stage-1" in capsys.readouterr().out
    main([*words, "--updates", "9", "--json"])
    checks = {check["name"]: check for check in json.loads(capsys.readouterr().out)["checks"]}
    assert checks["updates"]["ok"]
    assert checks["updates"]["counted"]
