"""Plans: the steps to run, and the bytes they would write."""

import pytest

from agentgym.config import load_config
from agentgym.pipeline.plan import commit_bytes, num_commits
from agentgym.pipeline.table import finished, open_store


@pytest.mark.parametrize(("every", "commits"), [(1, 4), (2, 2), (3, 3), (1000, 2)])
def test_the_plan_says_how_much_training_writes(whole_run, every, commits):
    cfg = load_config(whole_run / "params.yaml", [f"store.commit_every={every}"])
    store = open_store(cfg)
    key = finished(cfg, store)["stage-2"].key
    resumable, last = (
        sum(blob.size for blob in commit.blobs.values()) for commit in store.history("stage-2", key)
    )
    assert commit_bytes(cfg) == resumable > 2 * last > 100_000
    assert num_commits(cfg) == commits  # four optimizer steps in two stages


def test_of_a_run_that_never_trained_nothing_is_said(tiny_params, tmp_path):
    assert commit_bytes(load_config(tiny_params(tmp_path))) is None


def test_commits_of_another_model_say_nothing(whole_run):
    assert commit_bytes(load_config(whole_run / "params.yaml", ["model.mlp_size=128"])) is None
