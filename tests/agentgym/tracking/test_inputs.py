"""The data of a step: what it read, by which revision."""

import json

import pytest

from agentgym.config import RunConfig
from agentgym.data.items import Splits
from agentgym.store.runstore import store_at
from agentgym.tracking.inputs import LISTS, dvc_revision, inputs_of
from agentgym.types import Item

ITEMS = tuple(Item("babyai", task, "train") for task in range(9))
SPLITS = Splits(ITEMS[:5], ITEMS[5:7], ITEMS[7:], "d" * 64, ())
CFG = RunConfig()


@pytest.fixture
def store(tmp_path):
    return store_at(tmp_path / "store", lease_ttl_s=30.0)


def commit(store, step, config, parents=None, blobs=None):
    with store.open(step, "12" * 32) as writer:
        return writer.commit(
            done=True,
            state={},
            parents=parents or {},
            config=config,
            blobs=blobs or {},
            records={},
            results={},
            timings={},
        )


def test_each_step_has_the_splits_it_read(store):
    prepared = commit(store, "prepare", {}, blobs={LISTS: SPLITS.to_json()})
    parents = {"prepare": prepared.digest}
    trained = commit(store, "stage-1", {"validation": {"num_items": 1}}, parents)
    judged = commit(
        store, "evaluate-stage-1", {"evaluation": {"split": "test", "num_items": 2}}, parents
    )
    told = {
        each.step: [(i.split, i.num_items) for i in inputs_of(CFG, store, each)]
        for each in (prepared, trained, judged)
    }
    assert told == {
        "prepare": [("train", 5), ("validation", 2), ("test", 2)],
        "stage-1": [("train", 5), ("validation", 1)],
        "evaluate-stage-1": [("test", 2)],
    }
    names = {each.name for each in inputs_of(CFG, store, prepared)}
    assert names == {"babyai train", "babyai validation", "babyai test"}
    assert inputs_of(CFG, store, commit(store, "report", {})) == []


def test_another_list_has_another_digest(store):
    other = Splits(SPLITS.train[::-1], SPLITS.validation, SPLITS.test, "d" * 64, ())
    digests = []
    for number, splits in enumerate((SPLITS, other)):
        made = commit(store, f"prepare-{number}", {}, blobs={LISTS: splits.to_json()})
        digests.append([each.digest for each in inputs_of(CFG, store, made)])
    assert digests[0][0] != digests[1][0]
    assert digests[0][1:] == digests[1][1:]


def test_the_revision_is_that_of_the_pointer_that_dvc_keeps(store, tmp_path):
    data = tmp_path / "lists"
    assert dvc_revision(data) == ""
    (tmp_path / "lists.dvc").write_text("outs:\n- md5: 37ab.dir\n  path: lists\n")
    assert dvc_revision(data) == "37ab.dir"
    cfg = CFG.model_copy(update={"data": CFG.data.model_copy(update={"path": data})})
    made = commit(store, "prepare", {}, blobs={LISTS: SPLITS.to_json()})
    source = json.loads(inputs_of(cfg, store, made)[0].source)
    assert source == {"uri": str(data), "dvc": "37ab.dir"}
