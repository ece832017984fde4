"""Runs that train an adapter: commits, resuming, and exports."""

import json

import pytest
import torch
from huggingface_hub import ModelCard
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from agentgym.audit import audit
from agentgym.cli import main
from agentgym.config import ConfigError, load_config
from agentgym.models.adapter import is_matrix
from agentgym.models.architecture import ADAPTER, ADAPTER_RECORD, WEIGHTS, digest_of, policy_digest
from agentgym.models.checkpoint import OPTIMIZER, load_checkpoint, save_pretrained
from agentgym.models.tensorfiles import StoredTensors
from agentgym.pipeline.run import run_step
from agentgym.pipeline.table import finished, key_of, open_store, steps_of
from agentgym.steps.context import StepContext
from agentgym.store.manifest import BlobMissing
from tests.pretrained import AS_TINY

pytestmark = pytest.mark.integration

LORA = {"rank": 4, "alpha": 8}
# reference: the warm start's weights, the adapter's base
ALGORITHM = {"kl_coef": 0.01, "kl_place": "loss"}


@pytest.fixture(scope="module")
def adapted(copy_run, tiny_params, tiny_endpoint, tmp_path_factory):
    """params.yaml of a whole run with an adapter on the warm start of `whole_run`."""
    folder = copy_run(tmp_path_factory.mktemp("adapted"), half=True)
    changes = {"lora": LORA, "algorithm": ALGORITHM}
    params = tiny_params(folder, tiny_endpoint, deterministic=True, **changes)
    cfg = load_config(params)
    for name in steps_of(cfg):
        told = str(run_step(name, cfg))
        assert told == ("ran" if "stage" in name or name in ("register", "report") else "done")
    return params


def test_a_commit_holds_the_matrices_and_names_the_weights_they_change(adapted):
    cfg = load_config(adapted)
    store = open_store(cfg)
    done = finished(cfg, store)
    base = done["warm-start"]
    for name in ("stage-1", "stage-2"):
        held = done[name]
        assert WEIGHTS not in held.blobs
        record = json.loads(store.read(held, ADAPTER_RECORD))
        assert record["base_step"] == "warm-start"
        assert record["base_weights"] == digest_of(base, WEIGHTS)
        assert (record["rank"], record["alpha"]) == (4, 8)
        matrices = StoredTensors.of(store, held, ADAPTER)
        assert all(map(is_matrix, matrices.tensors))
        assert (OPTIMIZER in held.blobs) == (name == "stage-1")  # stage-2 resumes from it
        if OPTIMIZER in held.blobs:
            state = StoredTensors.of(store, held, OPTIMIZER)
            assert {name.rpartition(":")[0] for name in state.tensors} == matrices.tensors.keys()
        # this model's weights are so few that the adapter is not much smaller
        assert matrices.size < 0.6 * base.blobs[WEIGHTS].size
    assert policy_digest(done["stage-1"]) != policy_digest(done["stage-2"])


def test_what_is_exported_and_registered_is_merged_and_the_adapter_alone_is_pefts(
    adapted, tmp_path, capsys
):
    cfg = load_config(adapted)
    params = ["--params", str(adapted)]
    for name, words in (
        ("merged", ["stage-2"]),
        ("adapter", ["stage-2", "--adapter"]),
        ("base", ["warm-start"]),
    ):
        words = ["export", words[0], str(tmp_path / name), *words[1:], *params]
        assert main(words) == 0
    assert {each.name for each in (tmp_path / "adapter").iterdir()} == {
        "README.md",
        "SHA256SUMS",
        "adapter_config.json",
        "adapter_model.safetensors",
        "lineage.json",
    }
    card = ModelCard.load(tmp_path / "adapter/README.md").data
    assert (card.library_name, card.base_model) == ("peft", None)  # no published name
    store = open_store(cfg)
    ours = load_checkpoint(store, finished(cfg, store)["stage-2"]).model.state_dict()
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert all((merged.state_dict()[name] == tensor).all() for name, tensor in ours.items())
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        before = base(ids).logits
        theirs = PeftModel.from_pretrained(base, tmp_path / "adapter")(ids).logits
        torch.testing.assert_close(merged(ids).logits, theirs, rtol=0, atol=1e-5)
        assert float((theirs - before).abs().max()) > 1e-3
    capsys.readouterr()
    assert main(["export", "warm-start", str(tmp_path / "none"), "--adapter", *params]) == 2
    assert "warm-start commit 4 holds whole weights and no adapter" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()
    # the audit compares the registered weights with these, and scores every token with them
    report = audit(cfg, num_episodes=4)
    assert report.ok, [check.failures for check in report.checks if not check.ok]


def test_a_killed_run_resumes_to_the_bit(adapted, copy_run, tiny_params, tmp_path, monkeypatch):
    folder, step_taken = copy_run(tmp_path / "run", half=True), StepContext.step_taken
    cfg = load_config(tiny_params(folder, deterministic=True, lora=LORA, algorithm=ALGORITHM))

    def fatal(*arguments, **named):
        step_taken(*arguments, **named)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(StepContext, "step_taken", fatal)
        with pytest.raises(KeyboardInterrupt):
            run_step("stage-1", cfg)
    assert str(run_step("stage-1", cfg)) == "resumed at commit 1"
    whole = load_config(adapted)
    assert (
        finished(cfg, open_store(cfg))["stage-1"].digest
        == finished(whole, open_store(whole))["stage-1"].digest
    )


def test_an_adapter_whose_base_is_gone_says_so(adapted, monkeypatch):
    cfg = load_config(adapted)
    store = open_store(cfg)
    held = finished(cfg, store)["stage-1"]
    monkeypatch.setattr(store, "final", lambda step, key: None)
    with pytest.raises(
        BlobMissing, match=r"of step warm-start \(.*not in the store; run that step"
    ):
        load_checkpoint(store, held)


def test_a_loop_that_trains_no_adapter_is_refused(adapted, monkeypatch):
    cfg = load_config(adapted, ["seed=0", "optimizer.lr=0.001"])
    monkeypatch.setattr(StepContext, "adapter", lambda self, manifest: None)
    with pytest.raises(ConfigError, match=r"lora\.rank 4 with recipe grpo, whose training loop"):
        run_step("stage-1", cfg)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["agent_evol", "sft", "dpo"])
def test_a_handed_over_model_is_adapted_from_the_warm_start_on(
    adapted, tiny_params, tiny_endpoint, tmp_path, recipe
):
    done = load_config(adapted)
    store = open_store(done)
    save_pretrained(tmp_path / "model", store, finished(done, store)["warm-start"])
    changes = [
        *AS_TINY,
        "model.source=hub",
        f"model.name={tmp_path / 'model'}",
        "warm_start.steps=2",
        "warm_start.num_demos=8",
        "horizon.stage_steps=[1,1]",
        "validation.every=0",
        "lora.target_modules=[q_proj,up_proj]",
        "lora.rank=2",
    ]
    params = tiny_params(tmp_path / "run", endpoint=tiny_endpoint, algorithm={"recipe": recipe})
    cfg = load_config(params, changes)
    for name in ("prepare", "demonstrate", "initialize", "warm-start", "stage-1", "stage-2"):
        run_step(name, cfg)
    store = open_store(cfg)
    done = finished(cfg, store)
    records = [
        json.loads(store.read(done[name], ADAPTER_RECORD))
        for name in ("warm-start", "stage-1", "stage-2")
    ]
    assert records[0] == records[1] == records[2]
    assert records[0]["base_step"] == "initialize"
    assert records[0]["target_modules"] == ["q_proj", "up_proj"]
    digests = {digest_of(done[name], ADAPTER) for name in ("warm-start", "stage-1", "stage-2")}
    assert len(digests) == 3
    # another rank gives another warm start
    other = load_config(params, [*changes, "lora.rank=4"])
    step, parents = (
        steps_of(cfg)["warm-start"],
        {name: done[name] for name in ("demonstrate", "initialize")},
    )
    assert key_of(step, cfg, parents) == done["warm-start"].key != key_of(step, other, parents)
    words = ["--params", str(params), *(word for each in changes for word in ("--set", each))]
    assert main(["export", "stage-2", str(tmp_path / "adapter"), "--adapter", *words]) == 0
    told = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    assert told["base_model_name_or_path"] == str(tmp_path / "model")
    assert load_file(tmp_path / "adapter/adapter_model.safetensors")


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ranks_on_a_cluster_publish_and_store_an_adapter_that_one_process_goes_on_with(
    copy_run, tiny_params, tmp_path
):
    folder = copy_run(tmp_path / "run", half=True)
    params = tiny_params(folder, lora=LORA, algorithm=ALGORITHM)
    for name in ("prepare", "demonstrate", "initialize", "warm-start"):
        run_step(name, load_config(params))
    ranks = ["compute=ray", "ray.num_ranks=2", "ray.worker_cpus=0.1", "ray.rank_cpus=0.1"]
    cfg = load_config(params, ranks)
    assert str(run_step("stage-1", cfg)) == "ran"
    held = finished(cfg, open_store(cfg))["stage-1"]
    assert {name for name in held.blobs if name.startswith("adapter")} == {
        "adapter-00001-of-00002.safetensors",
        "adapter-00002-of-00002.safetensors",
        "adapter.json",
    }
    cfg = load_config(params)
    assert str(run_step("stage-2", cfg)) == "ran"
    store = open_store(cfg)
    done = finished(cfg, store)
    assert ADAPTER in done["stage-2"].blobs
    before, after = (
        StoredTensors.of(store, done[name], ADAPTER).load() for name in ("stage-1", "stage-2")
    )
    assert before.keys() == after.keys()
    assert any(not torch.equal(before[name], after[name]) for name in before)
