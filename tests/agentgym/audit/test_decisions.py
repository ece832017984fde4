"""Tests for auditing a run's decisions when several stores decide on one registered model."""

import json
import os
import pwd
import shutil
import socket
import time
from dataclasses import replace

import pytest

from agentgym.audit.decisions import check_decisions
from agentgym.audit.findings import Checks
from agentgym.audit.stored_steps import read_steps
from agentgym.cli import main
from agentgym.config import GateConfig, load_config
from agentgym.evaluation.gate import Evidence, decision_json, judge
from agentgym.evaluation.history import DECISION, MADE_IN, RECORD, Entry, me
from agentgym.evaluation.publish import promotions_of
from agentgym.pipeline.run import run_step
from agentgym.pipeline.table import open_store, run_key
from agentgym.store.manifest import sha256

pytestmark = pytest.mark.integration


def checked(cfg):
    """Return the check of a run's decisions."""
    store, found, others = open_store(cfg), Checks("decisions"), Checks("others")
    check_decisions(cfg, store, run_key(cfg), read_steps(cfg, store, others, others), found)
    assert found.counted > 3
    return found


def failures(cfg):
    return checked(cfg).failures


@pytest.fixture
def params(copy_run, tmp_path, tiny_params):
    return tiny_params(copy_run(tmp_path), deterministic=True)


def test_a_second_store_on_one_mlflow_leaves_the_audit_of_the_first_whole(params, tmp_path):
    """Register one run from two stores, as when a local store is replaced by a bucket."""
    first, there = load_config(params), tmp_path / "second/store"
    assert failures(first) == []
    shutil.copytree(first.store.path, there)
    for step in ("promotions", "register", "report"):
        for folder in (there / "steps").glob(f"{step}-*"):
            shutil.rmtree(folder)
    second = load_config(params, [f"store.path={there}", f"tracking.uri={first.tracking_uri}"])
    assert str(run_step("register", second)) == "ran"
    assert failures(first) == []
    assert failures(second) == []
    histories = [promotions_of(cfg, open_store(cfg)).history for cfg in (first, second)]
    assert histories[0].entries() == histories[1].entries() != []


def test_what_a_second_store_overwrote_before_histories_lay_apart_is_no_forgery(params):
    """Accept a rewritten decision at the earlier path unless its content changed."""
    cfg = load_config(params)
    promotions = promotions_of(cfg, open_store(cfg))
    client, (entry,) = promotions.tracker.client, promotions.history.entries()
    run_id = client.get_model_version(promotions.model, "1").run_id
    folder = client.get_run(run_id).info.artifact_uri.removeprefix("file://")
    (own,) = (cfg.state_dir / "mlflow-artifacts").glob(f"{run_id}/artifacts/decisions/*/0001.json")
    earlier = own.parents[1] / "0001.json"
    assert str(earlier).startswith(folder)
    tree = json.loads(own.read_bytes())
    shutil.rmtree(own.parent)
    for data, is_whole in (
        (entry.to_bytes(), True),
        (Entry.from_bytes(json.dumps({**tree, "at": tree["at"] + 9}).encode()).to_bytes(), True),
        (Entry.from_bytes(json.dumps({**tree, "why": "it is mine"}).encode()).to_bytes(), False),
    ):
        earlier.write_bytes(data)
        client.set_model_version_tag(promotions.model, "1", DECISION, sha256(data))
        assert (failures(cfg) == []) is is_whole


def add_a_decision(cfg, **changes):
    """Add a promotion of version 2 whose evidence no evaluation produced."""
    promotions = promotions_of(cfg, open_store(cfg))
    (first,) = promotions.history.entries()
    known = Evidence.from_json(first.decision["evidence"])
    won = {
        env: replace(pair, before=pair.after * 0.0, after=pair.after * 0.0 + 1.0)
        for env, pair in known.pairs.items()
    }
    evidence = replace(known, pairs=won, has_champion=True, questions=("a" * 64, "b" * 64))
    rules = GateConfig(min_items=1)
    found = judge(rules, evidence)
    assert found.verdict == "PROMOTE"
    candidate = replace(first.candidate, number="2", checkpoint="c" * 64, evaluation={})
    decision = {**decision_json(rules, evidence, found), MADE_IN: promotions.made_in, **changes}
    entry = Entry(
        *("judged", "d" * 64, candidate, first.after, candidate, "me", time.time(), found.why),
        {name: value for name, value in decision.items() if (name, value) != (MADE_IN, None)},
    )
    with promotions.history.open() as opened:
        opened.add(entry)
        opened.settle()


def test_a_decision_nobody_made_fails_the_audit_for_want_of_its_evidence(params):
    cfg = load_config(params)
    add_a_decision(cfg)
    said = " ".join(failures(cfg))
    assert "evaluation of version 2 in decision 2 is in no store" in said


def test_a_decision_that_does_not_say_where_its_evidence_is_proves_nothing(params, capsys):
    cfg = load_config(params)
    add_a_decision(cfg, made_in=None)
    check = checked(cfg).check()
    assert check.num_unproven == 2  # one for each version
    assert check.word != "ok"
    assert main(["audit", "--params", str(params), "--episodes", "1", "--rescore", "1"]) != 0
    assert "not checked: evaluation of version 2 in decision 2" in capsys.readouterr().out


def test_a_run_that_was_promoted_by_other_rules_than_its_own_is_found(params, forger_of):
    cfg = load_config(params)
    (entry,) = promotions_of(cfg, open_store(cfg)).history.entries()
    rules = GateConfig(min_gain=0.5)
    evidence = Evidence.from_json(entry.decision["evidence"])
    decision = {
        **decision_json(rules, evidence, judge(rules, evidence)),
        MADE_IN: entry.decision[MADE_IN],
    }
    forger_of(cfg).rewrite("promotions", 0, RECORD, replace(entry, decision=decision).to_bytes())
    assert "rules of its gate" in " ".join(failures(cfg))


def test_who_decides_is_the_user_of_the_operating_system(monkeypatch):
    for name in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.setenv(name, "the-boss")
    assert me() == f"{pwd.getpwuid(os.getuid()).pw_name}@{socket.gethostname()}"
