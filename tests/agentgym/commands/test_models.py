"""`agentgym promote | rollback | history | lineage` on a finished run."""

import json

import pytest
from mlflow import MlflowClient

from agentgym.cli import main
from agentgym.config import load_config
from agentgym.pipeline.stored_config import audit_for_gate, keep_audit
from agentgym.pipeline.table import finished, open_store, run_key


@pytest.fixture
def params(copy_run, tmp_path, tiny_params, tiny_endpoint):
    return tiny_params(copy_run(tmp_path), endpoint=tiny_endpoint, deterministic=True)


def test_history_lineage_promotion_and_rollback_of_one_run(params, capsys):
    """Promote, force and roll back on one copy of the run; an audit of the model failed."""

    def call(*words):
        code = main([*words[:1], "--params", str(params), *words[1:]])
        return code, capsys.readouterr()

    cfg = load_config(params)
    store, name = open_store(cfg), cfg.registered_model
    code, said = call("history")
    assert code == 0
    assert "PROMOTE     version 1    - -> 1" in said.out
    assert said.out.endswith(f"{name}: champion is version 1\n")

    assert "version 1: files as they were registered\n" in said.out

    code, said = call("lineage", "--json")
    found = json.loads(said.out)
    assert (found["files"], found["changed"]) == ("files as they were registered", False)
    done = finished(cfg, store)
    assert found["steps"][0]["step"] == "stage-2"
    assert {each["step"] for each in found["steps"]} == {
        *("stage-2", "stage-1", "warm-start", "initialize", "demonstrate", "prepare")
    }
    assert [each["step"] for each in found["evaluations"]] == ["evaluate-stage-2"]
    assert found["data"] == done["prepare"].results["digest"]
    assert found["source"]["mlflow.source.name"] == "agentgym-flow"
    assert found["decisions"][0]["verdict"] == "PROMOTE"
    code, said = call("lineage", done["warm-start"].digest[:10])
    assert code == 0
    assert f"{name} version 1" in said.out
    assert call("lineage", "abcdef0123")[0] == 2

    client = MlflowClient(cfg.tracking_uri)
    ours = client.get_model_version(name, "1")
    tags = {**ours.tags, "step_key": "0" * 64}
    client.create_model_version(name, ours.source, run_id=ours.run_id, tags=tags)
    report = {"run_key": run_key(cfg), "ok": False, "seed": 1}
    keep_audit(store, {**report, "checks": [{"name": "numbers", "ok": False, "failures": ["x"]}]})
    code, said = call("promote", "2", "--json")
    assert code == 3
    entry = json.loads(said.out)
    assert (entry["verdict"], entry["moved"]) == ("REJECT", False)
    assert "its audit failed: numbers: x" in entry["why"]
    assert call("promote", "2")[0] == 3  # repeated: returns the recorded decision
    assert call("promote", "9")[0] == 2
    assert call("promote", "2", "--force")[0] == 2  # --force needs a reason
    assert call("promote", "2", "--force", "--why", "a test")[0] == 0
    assert client.get_model_version_by_alias(name, "champion").version == 2
    code, said = call("rollback", "--why", "it was one")
    assert code == 0
    assert client.get_model_version_by_alias(name, "champion").version == 1
    client.set_registered_model_alias(name, "champion", "2")
    code, said = call("history", "--json")
    assert code == 1
    tree = json.loads(said.out)
    assert [each["kind"] for each in tree["entries"]] == [
        *("judged", "judged", "forced", "rolled back")
    ]
    assert "moved by hand" in tree["standing"]["drift"]


@pytest.mark.slow
def test_a_forged_audit_that_passed_promotes_nothing(forger):
    """Run a new audit where the gate requires one; a stored audit can only forbid a promotion."""
    cfg, key = forger.cfg, run_key(forger.cfg)
    forged = {"run_key": key, "ok": True, "seed": 1, "checks": [], "finals": {}}
    keep_audit(open_store(cfg), forged)
    assert audit_for_gate(cfg, key)["audit"] == "none"
    forger.metric("stage-1", 1, **{"rollout/success": 0.987})
    asked = cfg.model_copy(update={"gate": cfg.gate.model_copy(update={"require_audit": True})})
    found = audit_for_gate(asked, key)
    assert found["audit"] == "failed"
    assert "audit FAILED" in found["audit_note"]


def test_a_kept_failure_of_steps_that_were_made_again_forbids_nothing(forger):
    cfg, key = forger.cfg, run_key(forger.cfg)
    failed = [{"name": "numbers", "ok": False, "failures": ["x"]}]
    report = {"run_key": key, "ok": False, "seed": 1, "checks": failed}
    final = forger.commits("stage-2")[-1].digest
    keep_audit(open_store(cfg), {**report, "finals": {"stage-2": final}})
    assert audit_for_gate(cfg, key) == {"audit": "failed", "audit_note": "numbers: x"}
    keep_audit(open_store(cfg), {**report, "finals": {"stage-2": "0" * 64}})
    assert audit_for_gate(cfg, key)["audit"] == "none"
