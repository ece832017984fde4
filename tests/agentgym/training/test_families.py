"""Models with several stop tokens, or with thoughts, through episodes and the audit."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

from agentgym.audit import audit
from agentgym.config import load_config
from agentgym.models.checkpoint import load_checkpoint, save_pretrained
from agentgym.pipeline.run import run_step
from agentgym.pipeline.table import finished, open_store
from agentgym.records import TRAJECTORIES, decode_trajectories
from tests.pretrained import AS_TINY

pytestmark = pytest.mark.integration

SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "intermediate_size": 64,
    "tie_word_embeddings": True,
}
FAMILIES = {
    "qwen3": (Qwen3Config, ["<|im_end|>", "<|endoftext|>"]),
    "qwen3-thinking": (Qwen3Config, ["<|im_end|>", "<|endoftext|>"]),
    "llama3.1": (LlamaConfig, ["<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"]),
}


@pytest.fixture(
    params=["qwen3", *(pytest.param(x, marks=pytest.mark.slow) for x in [*FAMILIES][1:])]
)
def run(request, family_of, tmp_path, tiny_params, tiny_endpoint):
    """(configuration of a run, ids of its stop tokens).
    As on the Hub, generation_config.json has stop tokens that config.json lacks.
    """
    kind, stops = FAMILIES[request.param]
    tokenizer, folder = family_of(request.param), tmp_path / "model"
    stop_ids = tokenizer.convert_tokens_to_ids(stops)
    torch.manual_seed(0)
    config = kind(**SIZES, vocab_size=len(tokenizer), eos_token_id=stop_ids[0])
    model = AutoModelForCausalLM.from_config(config)
    model.generation_config.eos_token_id = stop_ids
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    assert json.loads((folder / "config.json").read_text())["eos_token_id"] == stop_ids[0]
    changes = [
        *AS_TINY,
        "model.source=hub",
        f"model.name={folder}",
        "model.context_tokens=2048",
        "model.chat.history=append",
        "warm_start.enabled=false",
        "rollout.max_new_tokens=24",  # enough to sample one of some 340 likely tokens
        "horizon.stage_steps=[1,1]",
        "validation.every=0",
    ]
    return load_config(tiny_params(tmp_path / "run", endpoint=tiny_endpoint), changes), stop_ids


def test_a_models_stop_tokens_end_actions_and_its_template_ends_turns(run, tmp_path):
    cfg, stop_ids = run
    for name in ("prepare", "initialize", "evaluate-initialize", "stage-1"):
        run_step(name, cfg)
    store = open_store(cfg)
    done = finished(cfg, store)
    renderer = load_checkpoint(store, done["stage-1"]).renderer
    assert set(renderer.stop_ids) == set(stop_ids)
    assert done["initialize"].results["conversation"] == renderer.notes != []

    seen = set()
    for commit in store.history("evaluate-initialize", done["evaluate-initialize"].key):
        if TRAJECTORIES not in commit.records:
            continue
        for episode in decode_trajectories(store.read(commit, TRAJECTORIES)):
            for turn in episode.turns[:-1]:
                last, following = episode.input_ids[turn.end - 1], episode.input_ids[turn.end]
                assert all(episode.action_mask[turn.start : turn.end])
                assert not episode.action_mask[turn.end]
                assert (following == renderer.stop_id) == (last != renderer.stop_id)
                assert not set(stop_ids) & set(episode.input_ids[turn.start : turn.end - 1])
                seen.add(last)
    assert set(stop_ids) < seen  # every stop token, and truncated actions

    report = audit(cfg)
    assert report.ok, [check.failures for check in report.checks if not check.ok]
    notes = {check.name: check.note for check in report.checks}
    assert all(note in notes["tokens"] for note in renderer.notes)

    save_pretrained(tmp_path / "exported", store, done["stage-1"])
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    assert set(exported.generation_config.eos_token_id) == set(stop_ids)
