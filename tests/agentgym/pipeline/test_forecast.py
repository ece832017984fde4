"""Estimates of a run's needs, before it starts."""

import json
import re
from pathlib import Path

import pytest

from agentgym.cli import main
from agentgym.config import load_config
from agentgym.models import architecture, half
from agentgym.pipeline import forecast as module
from agentgym.pipeline.forecast import forecast, shape_of, work_of

FOLDER = Path("profiles/small")
ON_CPU = FOLDER / "smollm2-135m-cpu.yaml"
PROFILES = sorted(set(FOLDER.glob("*.yaml")) - {ON_CPU})
SMOLLM2 = {"model_type": "llama", "vocab_size": 49_152, "tie_word_embeddings": True}
QWEN = {"model_type": "qwen2", "vocab_size": 151_936, "tie_word_embeddings": True}
WIDTHS = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "num_hidden_layers",
)
# from the published config.json files
MODELS = {
    "SmolLM2-135M": (SMOLLM2, (576, 1536, 9, 3, 30), 134_515_008),
    "SmolLM2-360M": (SMOLLM2, (960, 2560, 15, 5, 32), 361_821_120),
    "Qwen2.5-0.5B": (QWEN, (896, 4864, 14, 2, 24), 494_032_768),
    "Qwen2.5-1.5B": (QWEN, (1536, 8960, 12, 2, 28), 1_543_714_304),
    "Qwen2.5-3B": (QWEN, (2048, 11_008, 16, 2, 36), 3_085_938_688),
    "Qwen2.5-7B": (
        QWEN | {"vocab_size": 152_064, "tie_word_embeddings": False},
        (3584, 18_944, 28, 4, 28),
        7_615_616_512,
    ),
}


@pytest.fixture
def published(monkeypatch):
    """Replace the Hub by the models' config.json."""

    def config_of(config, local_only):
        name = config.name.rpartition("/")[2].removesuffix("-Instruct")
        family, widths, _ = MODELS["SmolLM2-135M" if "smollm2" in name else name]
        values = {**family, **dict(zip(WIDTHS, widths, strict=True)), "dtype": "bfloat16"}
        return architecture.read_architecture(json.dumps(values))

    monkeypatch.setattr(architecture, "published_architecture", config_of)
    monkeypatch.setattr(half, "has_fast_half", lambda: False)  # such CPUs need more memory


@pytest.mark.parametrize("path", [*PROFILES, ON_CPU])
def test_a_profile_says_at_its_top_what_it_needs(published, path):
    taken = forecast(load_config(path, ["compute_peak_tflops=989"]))
    top = " ".join(path.read_text().partition("\nextends")[0].replace("#", " ").split())
    gib = 2**30
    needed = [f"{taken.host_bytes / gib:.1f} GiB on the host"]
    if path != ON_CPU:
        on_gpu = (taken.learner_bytes + taken.engine_bytes) / gib
        needed += [f"{on_gpu:.1f} GiB on the GPU", f"{taken.seconds / 60:.0f} minutes of an H200"]
    for each in needed:
        assert each in top


def test_a_models_size_is_counted(published):
    sizes = {
        name.partition("/")[2].removesuffix("-Instruct"): shape_of(cfg).num_parameters
        for path in PROFILES
        for cfg in [load_config(path)]
        for name in [cfg.model.name]
    }
    assert sizes == {name: count for name, (_, _, count) in MODELS.items()}
    lora = shape_of(load_config("profiles/small/qwen2.5-7b-babyai.yaml"))
    # rank 32 on seven linear layers of each of 28 blocks
    rows = 2 * (3584 + 3584) + 2 * (3584 + 512) + 3 * (3584 + 18_944)
    assert lora.num_trained == 28 * 32 * rows


def test_the_work_of_a_run_is_counted_in_tokens():
    overrides = [
        "horizon.kind=fixed",
        "horizon.max_turns=[10]",
        "horizon.stage_steps=[2]",
        "rollout.items_per_step=3",
        "rollout.group_size=4",
        "rollout.max_new_tokens=8",
        "rollout.observation_tokens=20",
        "algorithm.recipe=reinforce++",
        "warm_start.num_demos=1",
        "warm_start.steps=1",
        "warm_start.batch_size=1",
        "validation.every=0",
        "evaluation.max_turns=10",
        "evaluation.num_items=1",
        "evaluation.num_samples=1",
        "evaluation.k=[1]",
    ]
    work = work_of(load_config("params.yaml", overrides))
    # 6 of 10 turns are played, half of 8 and 20 tokens; the first observation once per group
    trained, played = 2 * 3 * 4, 3 * 1 * 2
    assert work.sampled == (trained + played) * 6 * 4
    assert work.read == trained * (10 / 4 + 6 * 10) + played * (10 / 2 + 6 * 10)
    assert work.turns == (trained + played) * 6 + 6
    epochs = load_config("params.yaml", overrides).algorithm.epochs
    in_group, alone = 10 / 4 + 6 * 14, 10 + 6 * 14
    assert work.passes == trained * in_group * (3 * epochs + 1) + 3 * alone
    # a deterministic run shares no prefixes and saves no forward
    once = [*overrides, "algorithm.minibatches=1", "algorithm.epochs=1"]
    assert work_of(load_config("params.yaml", once)).passes == trained * in_group * 3 + 3 * alone
    apart = work_of(load_config("params.yaml", [*once, "deterministic=true"]))
    assert apart.passes == trained * alone * 4 + 3 * alone


@pytest.mark.integration
def test_plan_says_what_a_pretrained_model_takes_and_which_settings_it_got(
    published, tmp_path, capsys
):
    own = ["--set", f"store.path={tmp_path / 'store'}", "--params"]
    profile = str(ON_CPU)
    assert main(["plan", *own, profile]) == 0
    printed = capsys.readouterr().out
    assert "memory   " in printed
    assert "of weights a checkpoint" in printed
    assert re.search(r"min, [0-9.]+ s an optimizer step \(", printed)
    assert "rollout.instructions             false   usual: true; it has never seen" in printed
    assert "note: rollout.instructions false: the model learns the environment's grammar" in printed
    assert "warning" not in printed
    assert main(["plan", *own, profile, "--set", "warm_start.enabled=false"]) == 0
    assert "warning: rollout.instructions false and warm_start.enabled" in capsys.readouterr().out
    assert main(["plan", "--json", *own, profile]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["forecast"]["weight_bytes"] == 2 * 134_515_008
    assert told["forecast"]["num_commits"] == 1
    assert {each["path"] for each in told["pretrained"]} >= {"optimizer.lr", "evaluation.k"}


def test_plan_says_whether_a_gpu_holds_learner_and_engine(published, tmp_path, monkeypatch, capsys):
    profile, own = "qwen2.5-1.5b-textcraft.yaml", ("--set", f"store.path={tmp_path / 'store'}")
    words = ["plan", *own, "--set", "compute_peak_tflops=989", "--params", str(FOLDER / profile)]
    taken = forecast(load_config(FOLDER / profile, ["compute_peak_tflops=989"]))
    weights = 2 * MODELS["Qwen2.5-1.5B"][2]
    parts = (weights, taken.optimizer_bytes, taken.activation_bytes)
    assert taken.learner_bytes == sum(parts)
    assert taken.optimizer_bytes == 8 * weights  # gradient, master weight and moments in float32
    assert taken.engine_bytes == weights + taken.cache_bytes
    assert 0 < taken.step_seconds < taken.seconds / 10
    both = taken.learner_bytes + taken.engine_bytes
    for memory, verdict in (
        (None, None),
        (both, "both fit at once"),
        (both - 1, "they fit in turns, the engine sleeps while the learner updates"),
        (both // 3, "in turns; lower learner.micro_batch_tokens"),
    ):
        monkeypatch.setattr(module, "_memory_of_gpu", lambda memory=memory: memory)
        assert main(words) == 0
        printed = capsys.readouterr().out
        assert "gradients and optimizer" in printed
        assert "s an optimizer step (989 TFLOP/s" in printed
        assert ("the GPU has" in printed) == (memory is not None)
        assert verdict is None or verdict in printed


def test_plan_asks_no_network_for_a_model_that_is_not_here(tmp_path, capsys):
    profile = str(FOLDER / "qwen2.5-7b-textcraft.yaml")
    assert main(["plan", "--params", profile, "--set", f"store.path={tmp_path / 'store'}"]) == 0
    printed = capsys.readouterr()
    assert "memory and time are not known: model.name 'Qwen/Qwen2.5-7B-Instruct'" in printed.out
    assert "Retrying" not in printed.err
