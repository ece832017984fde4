"""A step's weights can be exported as a folder that other libraries load."""

import json

import pytest
from transformers import AutoModelForCausalLM

from agentgym.cli import main
from agentgym.config import load_config
from agentgym.models import checkpoint
from agentgym.models.checkpoint import WEIGHTS, load_checkpoint
from agentgym.pipeline.contenders import export
from agentgym.pipeline.table import finished, open_store, run_key

pytestmark = pytest.mark.integration


@pytest.fixture
def params(whole_run):
    """The params file of a finished run."""
    return whole_run / "params.yaml"


def test_an_exported_step_is_a_folder_that_others_load(params, tmp_path, capsys):
    folder = tmp_path / "model"
    assert main(["export", "stage-2", str(folder), "--params", str(params)]) == 0
    cfg = load_config(params)
    store = open_store(cfg)
    ours = load_checkpoint(store, finished(cfg, store)["stage-2"]).model.state_dict()
    theirs = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    assert all((theirs[name] == tensor).all() for name, tensor in ours.items())
    assert {"config.json", "tokenizer.json", WEIGHTS} <= {each.name for each in folder.iterdir()}
    capsys.readouterr()
    assert main(["export", "stage-2", str(folder), "--params", str(params)]) == 2
    assert f"{folder} exists" in capsys.readouterr().err
    other = str(tmp_path / "other")
    assert main(["export", "evaluate-stage-2", other, "--params", str(params)]) == 2
    assert "those that have: initialize, warm-start, stage-1" in capsys.readouterr().err


def test_a_run_may_be_named_that_is_not_the_configured_one(params, tmp_path, capsys):
    own = load_config(params)
    named = f"r{run_key(own)[:12]}"
    other = ["--params", str(params), "--set", "optimizer.lr=0.5"]
    assert main(["export", named, "stage-1", str(tmp_path / "model"), *other]) == 0
    done = finished(own, open_store(own))
    assert f"stage-1 commit 1, digest {done['stage-1'].digest[:12]}" in capsys.readouterr().out
    assert main(["export", "stage-1", str(tmp_path / "none"), *other]) == 2
    assert "those that have: initialize, warm-start" in capsys.readouterr().err
    assert main(["export", "r0000", "stage-1", str(tmp_path / "none"), *other]) == 2
    assert f"run r0000 is none of those known under {own.state_dir}: {named}" in (
        capsys.readouterr().err
    )
    assert main(["export", named, "evaluate-stage-1", str(tmp_path / "none"), *other]) == 2
    assert "those that have: initialize, warm-start, stage-1, stage-2" in capsys.readouterr().err


def test_the_best_commit_can_be_exported_where_it_was_kept(params, tmp_path, capsys):
    words = ["export", "stage-2", str(tmp_path / "best"), "--best", "--params", str(params)]
    assert main(words) == 0  # validation ran at the last commit only
    assert "stage-2 commit 1" in capsys.readouterr().out
    words[1] = "warm-start"
    assert main([*words[:2], str(tmp_path / "none"), *words[3:]]) == 2
    assert "has no commit that was validated" in capsys.readouterr().err


def test_large_weights_are_written_in_several_files(params, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "SHARD_BYTES", 50_000)
    cfg = load_config(params)
    export(cfg, "stage-2", tmp_path / "model")
    index = json.loads((tmp_path / "model/model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 1
    store = open_store(cfg)
    ours = load_checkpoint(store, finished(cfg, store)["stage-2"]).model.state_dict()
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "model").state_dict()
    assert all((theirs[name] == tensor).all() for name, tensor in ours.items())
