"""Unused results are listed and deleted, and differ from lost ones."""

import json

import pytest
from mlflow import MlflowClient

from agentgym.cli import main
from agentgym.config import load_config
from agentgym.pipeline import gc as collecting
from agentgym.pipeline.gc import DAY_S, collect, connected, kept, survey
from agentgym.pipeline.plan import plan
from agentgym.pipeline.run import run_step
from agentgym.pipeline.table import finished, open_store
from agentgym.store.manifest import Manifest

pytestmark = pytest.mark.integration

NOTHING_BY_AGE = ["store.gc_keep_days=0", "store.gc_keep_runs=0"]
OTHER = ["optimizer.lr=0.0001"]  # changes the stages; earlier steps are shared
NONE = "no such folder"


@pytest.fixture
def copied(copy_run, tmp_path, tiny_params, monkeypatch):
    """Params file of a finished run in a store of its own, made two hours ago."""
    monkeypatch.setattr(collecting, "FRESH_S", -7200.0)
    return tiny_params(copy_run(tmp_path / "run"), deterministic=True)


def names(rows):
    return {row.head.step for row in rows}


def garbage(rows):
    return [row.head for row in rows if not row.reason]


def test_the_configured_run_is_kept_whatever_its_age(copied, tmp_path):
    rows = survey(load_config(copied, NOTHING_BY_AGE), tmp_path / NONE)
    assert garbage(rows) == []
    assert {row.reason for row in rows} == {
        "of this run",
        "the history of an alias",
        "what a run was asked for",
    }


def test_a_registered_version_keeps_what_it_is_made_of(copied, tmp_path):
    cfg = load_config(copied, [*NOTHING_BY_AGE, *OTHER])
    rows = survey(cfg, tmp_path / NONE)
    reasons = {row.head.step: row.reason for row in rows}
    assert reasons["register"] == "registered as agentgym-babyai version 1"
    assert "builds on it" in reasons["stage-2"]
    assert {each.step for each in garbage(rows)} == {"evaluate-stage-1", "report"}
    client = MlflowClient(cfg.tracking_uri)
    client.delete_model_version("agentgym-babyai", "1")
    gone = {each.step for each in garbage(survey(cfg, tmp_path / NONE))}
    assert gone >= {"stage-1", "stage-2", "evaluate-stage-2", "register"}
    assert not gone & {"prepare", "demonstrate", "initialize", "warm-start"}


def test_a_pointer_of_dvc_keeps_what_it_names(copied, tmp_path):
    own = load_config(copied)
    stage = finished(own, open_store(own))["stage-1"]
    (tmp_path / "outputs").mkdir()
    pointer = tmp_path / "outputs/stage-1.json"
    pointer.write_text(json.dumps({"manifest": [{"digest": stage.digest}]}))
    (tmp_path / "outputs/stage-1.metrics.json").write_text("{}")
    cfg = load_config(copied, [*NOTHING_BY_AGE, *OTHER])
    MlflowClient(cfg.tracking_uri).delete_model_version("agentgym-babyai", "1")
    rows = survey(cfg, tmp_path / "outputs")
    assert {row.head.step: row.reason for row in rows}["stage-1"] == f"named by {pointer}"


def test_what_was_collected_is_told_and_made_again_to_the_bit(copied, tmp_path, capsys):
    own = load_config(copied)
    before = finished(own, open_store(own))
    other = [*NOTHING_BY_AGE, *OTHER]
    cfg = load_config(copied, other)
    client = MlflowClient(cfg.tracking_uri)
    client.delete_model_version("agentgym-babyai", "1")
    words = [
        "gc",
        "--params",
        str(copied),
        "--pointers",
        str(tmp_path / NONE),
        *(word for each in other for word in ("--set", each)),
    ]
    assert main(words) == 0
    listed = capsys.readouterr().out
    assert "`agentgym gc --remove` removes them" in listed
    assert finished(own, open_store(own)) == before  # nothing was removed
    assert main([*words, "--remove", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["collected"] == told["collectable"] > 0
    assert garbage(survey(cfg, tmp_path / NONE)) == []
    assert finished(own, open_store(own)).keys() == before.keys() - {
        row["step"] for row in told["rows"] if row["collected"]
    }
    found = {step.name: step.why for step in plan(own)}
    assert found["stage-1"] == "collected by `agentgym gc`"
    experiment = client.get_experiment_by_name(cfg.experiment).experiment_id
    tagged = client.search_runs([experiment], filter_string="tags.store = 'collected'")
    assert "stage-2" in {run.data.tags["step"] for run in tagged}
    assert str(run_step("stage-1", own)) == "ran"
    assert finished(own, open_store(own))["stage-1"].digest == before["stage-1"].digest


def test_a_step_that_runs_now_keeps_what_is_connected_with_it(copied, tmp_path):
    cfg = load_config(copied, [*NOTHING_BY_AGE, *OTHER])
    MlflowClient(cfg.tracking_uri).delete_model_version("agentgym-babyai", "1")
    store = open_store(cfg)
    warm = finished(cfg, store)["warm-start"]
    with store.open("stage-1", "cd" * 32, [warm.digest]):
        assert garbage(survey(cfg, tmp_path / NONE)) == []
    doomed = garbage(survey(cfg, tmp_path / NONE))
    held = next(each for each in doomed if each.step == "stage-1")
    with store.open(held.step, held.key):
        gone = [each.step for each in collect(cfg, [held])]
    assert gone == []
    assert store.head(held.step, held.key) == held


NOW = 1_000 * DAY_S


def head(step, *parents, days=100.0):
    return Manifest(
        step=step,
        key="ab" * 32,
        seq=0,
        done=True,
        parents={parent.step: parent.digest for parent in parents},
        config={},
        state={},
        blobs={},
        results={},
        created_at=NOW - days * DAY_S,
    )


DATA = head("prepare", days=300)
WARM = head("warm-start", DATA, days=290)
OLD = head("stage-1", WARM, days=200)
NEW = head("stage-2", WARM, days=20)
UNRELATED_DATA = head("other-data", days=300)
UNRELATED = head("other-stage", UNRELATED_DATA, days=299)
ALL = (DATA, WARM, OLD, NEW, UNRELATED_DATA, UNRELATED)


def needed(days=0.0, runs=0, pinned=(), live=()):
    found = kept(
        ALL,
        now=NOW,
        days=days,
        runs=runs,
        pinned={each.digest: "named" for each in pinned},
        live={each.digest for each in live},
    )
    return {each.step: found[each.digest] for each in ALL if each.digest in found}


def test_nothing_is_needed_that_nobody_needed():
    assert needed() == {}


def test_what_is_young_keeps_what_it_builds_on():
    assert needed(days=30) == {
        "stage-2": "younger than 30 days",
        "warm-start": f"stage-2 ({'ab' * 6}) builds on it",
        "prepare": f"warm-start ({'ab' * 6}) builds on it",
    }


def test_the_newest_ends_of_runs_are_needed():
    assert needed(runs=1).keys() == {"stage-2", "warm-start", "prepare"}
    assert needed(runs=2).keys() == {"stage-1", "stage-2", "warm-start", "prepare"}
    assert needed(runs=99).keys() == {each.step for each in ALL}


def test_what_is_named_is_needed_and_its_descendants_are_not():
    assert needed(pinned=[WARM]).keys() == {"warm-start", "prepare"}
    assert needed(pinned=[WARM])["warm-start"] == "named"


def test_what_a_running_step_builds_on_keeps_all_that_is_connected_with_it():
    assert needed(live=[DATA]).keys() == {"prepare", "warm-start", "stage-1", "stage-2"}
    assert connected(ALL, ["nothing that is there"]) == set()


def test_what_was_committed_within_the_hour_keeps_all_that_is_connected_with_it():
    found = kept(
        [*ALL, head("stage-3", WARM, days=0.01)], now=NOW, days=0, runs=0, pinned={}, live=()
    )
    assert set(found) >= {each.digest for each in (DATA, WARM, OLD, NEW)}
    assert UNRELATED.digest not in found
