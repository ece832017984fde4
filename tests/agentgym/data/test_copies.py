"""Data of a run is fetched from the store by digest on machines without the folders."""

import pytest

from agentgym.config import load_config
from agentgym.data.copies import STEP, fetch_data, keep_data
from agentgym.data.items import DataError
from agentgym.data.trajectories import input_digest
from agentgym.deploy.attempts import sent_config
from agentgym.pipeline.run import require_key
from agentgym.pipeline.table import open_store

ELSEWHERE = ["compute=kuberay", "tracking.uri=http://mlflow:5000"]


@pytest.fixture
def cfg(tmp_path, tiny_params):
    return load_config(tiny_params(tmp_path))


def moved(cfg, folder, digest):
    """Return the run's configuration for a machine that has only the store."""
    data = cfg.data.model_copy(update={"path": folder / "lists", "digest": digest})
    return cfg.model_copy(update={"data": data})


def test_what_is_kept_comes_back_as_it_was_and_is_kept_once(cfg, tmp_path):
    store = open_store(cfg)
    digest = keep_data(cfg, store)
    assert digest == input_digest(cfg) == keep_data(cfg, store)
    assert [each.seq for each in store.history(STEP, digest)] == [0]
    there = moved(cfg, tmp_path / "there", digest)
    assert fetch_data(there, store)
    assert input_digest(there) == digest
    found = {path.name for path in (tmp_path / "there").rglob("*.json")}
    assert found == {"babyai_train.json", "babyai_test.json"}
    assert not fetch_data(there, store)  # already fetched


def test_without_a_digest_or_with_the_folders_nothing_is_fetched(cfg, tmp_path):
    assert not fetch_data(cfg, open_store(cfg))
    assert not fetch_data(moved(cfg, tmp_path / "there", ""), open_store(cfg))


def test_data_that_the_store_does_not_have_is_named(cfg, tmp_path):
    with pytest.raises(DataError, match=r"^data\.digest 000000000000: .* `agentgym data keep`"):
        fetch_data(moved(cfg, tmp_path / "there", "0" * 64), open_store(cfg))


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("lists.train.babyai_train.json", "what came from .* is "),
        ("lists..babyai_train.json", "holds 'lists..babyai_train.json', no list"),
        ("elsewhere", "holds 'elsewhere', no list"),
    ],
)
def test_what_somebody_else_put_there_is_refused(cfg, tmp_path, name, told):
    store, digest = open_store(cfg), "1" * 64
    test = (cfg.data.path / "eval/babyai_test.json").read_bytes()
    train = (cfg.data.path / "train/babyai_train.json").read_bytes()
    with store.open(STEP, digest) as writer:
        writer.commit(
            done=True,
            state={},
            parents={},
            config={},
            blobs={"lists.eval.babyai_test.json": test, name: train},
            records={},
            results={},
            timings={},
        )
    with pytest.raises(DataError, match=told):
        fetch_data(moved(cfg, tmp_path / "there", digest), store)


def test_a_job_elsewhere_finds_its_data_below_its_own_state(tmp_path, tiny_params):
    uris = [*ELSEWHERE, "store.uri=s3://bucket/runs", f"data.digest={'ab' * 32}"]
    inner = sent_config(load_config(tiny_params(tmp_path), uris))
    assert str(inner.data.path) == ".agentgym/data/abababababababab/lists"
    assert str(inner.store.path) == ".agentgym/store"
    assert inner.data.digest == "ab" * 32


def test_a_machine_with_other_source_or_data_refuses_the_step(cfg):
    with pytest.raises(ValueError, match=r"asked for with key 000000000000 and has key .* here"):
        require_key("prepare", cfg, "0" * 64)
    with pytest.raises(ValueError, match="and lacks results that it builds on here"):
        require_key("stage-1", cfg, "0" * 64)
    require_key("stage-9", cfg, "0" * 64)  # an unknown step reports the error itself
