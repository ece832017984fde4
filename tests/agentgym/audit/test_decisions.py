"""The audit of a run's decisions, where other stores decide on the same registered model."""

import json
import shutil

import pytest

from agentgym.audit.decisions import check_decisions
from agentgym.audit.report import Checks
from agentgym.audit.steps import read_steps
from agentgym.config import load_config
from agentgym.evaluation.history import Entry
from agentgym.evaluation.promotion import DECISION
from agentgym.evaluation.publish import promotions_of
from agentgym.pipeline.run import run_step
from agentgym.pipeline.table import open_store, run_key
from agentgym.store.manifest import sha256

pytestmark = pytest.mark.integration


def failures(cfg):
    """Of the check of a run's decisions."""
    store, found, others = open_store(cfg), Checks("decisions"), Checks("others")
    check_decisions(cfg, store, run_key(cfg), read_steps(cfg, store, others, others), found)
    assert found.counted > 3
    return found.failures


@pytest.fixture
def params(copy_run, tmp_path, tiny_params):
    return tiny_params(copy_run(tmp_path), deterministic=True)


def test_a_second_store_on_one_mlflow_leaves_the_audit_of_the_first_whole(params, tmp_path):
    """As where a local store is followed by a bucket: the same run, registered from both."""
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
    """And a decision that was changed where an earlier release put it still is one."""
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
