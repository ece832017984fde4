"""A step's weights can be exported as a folder that other libraries load, with card and lineage."""

import json
import subprocess
from dataclasses import replace

import pytest
from huggingface_hub import ModelCard
from transformers import AutoModelForCausalLM

from agentgym.cli import main
from agentgym.config import load_config
from agentgym.evaluation.history import History
from agentgym.models import checkpoint
from agentgym.models.architecture import WEIGHTS
from agentgym.models.checkpoint import load_checkpoint
from agentgym.pipeline.export import card_of, export, lineage_of
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
    assert "its steps with weights: initialize, warm-start, stage-1" in capsys.readouterr().err


def test_a_run_may_be_named_that_is_not_the_configured_one(params, tmp_path, capsys):
    own = load_config(params)
    named = f"r{run_key(own)[:12]}"
    other = ["--params", str(params), "--set", "optimizer.lr=0.5"]
    assert main(["export", named, "stage-1", str(tmp_path / "model"), *other]) == 0
    done = finished(own, open_store(own))
    assert f"stage-1 commit 1, digest {done['stage-1'].digest[:12]}" in capsys.readouterr().out
    assert main(["export", "stage-1", str(tmp_path / "none"), *other]) == 2
    said = capsys.readouterr().err
    assert f"steps with weights: initialize, warm-start; runs with this step: {named}" in said
    assert main(["export", "r0000", "stage-1", str(tmp_path / "none"), *other]) == 2
    assert f"run r0000 is none of those known under {own.state_dir}: {named}" in (
        capsys.readouterr().err
    )
    assert main(["export", named, "evaluate-stage-1", str(tmp_path / "none"), *other]) == 2
    assert (
        "its steps with weights: initialize, warm-start, stage-1, stage-2"
        in capsys.readouterr().err
    )


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


def exported_files(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*")}


def test_an_export_has_card_lineage_and_digests_and_is_the_same_each_time(params, tmp_path):
    cfg = load_config(params)
    for name in ("first", "second"):
        export(cfg, "stage-2", tmp_path / name)
    files = exported_files(tmp_path / "first")
    assert files == exported_files(tmp_path / "second")
    checked = subprocess.run(
        ["sha256sum", "--check", "--strict", "SHA256SUMS"],
        cwd=tmp_path / "first",
        capture_output=True,
        text=True,
    )
    assert checked.returncode == 0, checked.stderr
    checked_files = {line.removesuffix(": OK") for line in checked.stdout.splitlines()}
    assert checked_files == files.keys() - {"SHA256SUMS"}

    store = open_store(cfg)
    done = finished(cfg, store)
    final, result = done["stage-2"], done["evaluate-stage-2"]
    lineage = json.loads(files["lineage.json"])
    assert lineage["digest"] == final.digest
    assert lineage["run"] == f"r{run_key(cfg)[:12]}"
    assert lineage["data"] == done["prepare"].results["digest"]
    assert lineage["config"]["settings"] == final.config
    parents = {row["step"]: row["digest"] for row in lineage["parents"]}
    names = ("prepare", "demonstrate", "initialize", "warm-start", "stage-1")
    assert parents == {name: done[name].digest for name in names}
    (evaluation,) = lineage["evaluations"]
    assert evaluation["digest"] == result.digest
    (env,) = evaluation["environments"]
    means = {key: value["mean"] for key, value in result.results["summary"].items()}
    assert {key: value["mean"] for key, value in env["success"].items()} == means
    (decision,) = lineage["decisions"]
    assert (decision["verdict"], decision["moved"]) == ("PROMOTE", True)


def test_the_hubs_own_reader_takes_the_card(params, tmp_path):
    cfg = load_config(params)
    export(cfg, "stage-2", tmp_path / "model")
    card = ModelCard.load(tmp_path / "model/README.md")
    assert (card.data.library_name, card.data.pipeline_tag) == ("transformers", "text-generation")
    assert card.data.tags == ["agentgym-flow", "reinforcement-learning", "grpo", "babyai"]
    assert (card.data.base_model, card.data.license) == (None, None)
    success = finished(cfg, open_store(cfg))["evaluate-stage-2"].results["summary"]
    values = {each.metric_name: each.metric_value for each in card.data.eval_results}
    names = {"greedy": "greedy", "avg_at_2": "avg@2", "pass_at_1": "pass@1", "pass_at_2": "pass@2"}
    assert values == {
        name: pytest.approx(success[key]["mean"], abs=1e-6) for key, name in names.items()
    }
    assert "| candidate | PROMOTE | yes         | the first model of this name |" in card.text


def test_a_step_without_evaluation_or_decision_says_so(params, tmp_path):
    cfg = load_config(params)
    export(cfg, "warm-start", tmp_path / "model")
    assert "has no decision on these weights" in (tmp_path / "model/README.md").read_text()
    store = open_store(cfg)
    lineage = lineage_of(cfg, store, finished(cfg, store)["warm-start"], "r0")
    lineage["evaluations"][0]["valid"] = False  # too few of its episodes count
    text = card_of(lineage, "Qwen/Qwen3-0.6B", is_adapter=True)
    card = ModelCard(text)
    assert "has no evaluation of these weights" in text
    assert card.data.eval_results is None
    assert (card.data.library_name, card.data.base_model) == ("peft", "Qwen/Qwen3-0.6B")
    assert card.data.base_model_relation == "adapter"
    folder = ModelCard(card_of(lineage, str(tmp_path), is_adapter=False))
    assert folder.data.base_model is None


def test_text_from_others_adds_no_markup_to_the_card(params, monkeypatch):
    cfg = load_config(params)
    store = open_store(cfg)
    entries = History.entries
    hostile = "x <img src=y> [a](b) | c\n# d \x1b[2J"
    monkeypatch.setattr(
        History, "entries", lambda self: [replace(each, why=hostile) for each in entries(self)]
    )
    lineage = lineage_of(cfg, store, finished(cfg, store)["stage-2"], "r0")
    lineage["config"]["settings"]["env"]["name"] = "e\n---\n[a](b)"
    lineage["evaluations"][0]["environments"][0]["name"] = "<b>: |\n"
    text = card_of(lineage, None, is_adapter=False)
    card = ModelCard(text)
    assert card.data.tags[-1] == "e\n---\n[a](b)"
    assert card.data.eval_results[0].dataset_name == "<b>: |\n"
    assert "x &lt;img src=y> [a]\\(b) \\| c # d \\x1b[2J" in card.text
    assert "| &lt;b>: \\|" in card.text
    assert "\n# d" not in card.text
    assert "](b)" not in card.text
