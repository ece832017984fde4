"""Plans: the steps to run, and the bytes they would write."""

import pytest

from agentgym.cli import main
from agentgym.config import load_config
from agentgym.pipeline.plan import commit_bytes, num_commits
from agentgym.pipeline.table import finished, open_store
from tests.agentgym.families import save_tiny_llama


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


@pytest.mark.integration
def test_what_a_run_would_refuse_is_refused_by_its_plan(tiny_params, tmp_path, capsys):
    params = tiny_params(tmp_path)
    few = ("--set=evaluation.num_items=8", "--set=rollout.items_per_step=100")
    assert main(["plan", "--params", str(params), *few]) == 2
    assert "error: rollout.items_per_step 100 is more than the " in capsys.readouterr().err
    folder = tmp_path / "llama"
    save_tiny_llama(folder)
    options = ("model.source=hub", f"model.name={folder}", "evaluation.num_items=8")
    command = ["plan", "--params", str(params), *(f"--set={option}" for option in options)]
    assert main(command) == 0, capsys.readouterr().err
    (folder / "chat_template.jinja").unlink()
    capsys.readouterr()
    assert main(command) == 2
    assert "the tokenizer has no chat template" in capsys.readouterr().err


def test_a_setting_in_the_place_of_a_run_is_told_apart(tiny_params, tmp_path, capsys):
    assert main(["plan", "seed=3", "--params", str(tiny_params(tmp_path))]) == 2
    assert "; give settings after --set" in capsys.readouterr().err


def test_commits_of_another_model_say_nothing(whole_run):
    assert commit_bytes(load_config(whole_run / "params.yaml", ["model.mlp_size=128"])) is None
