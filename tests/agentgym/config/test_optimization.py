"""Memory and speed settings of an update: which change a result, and which do not."""

import pytest

from agentgym.config import ConfigError, LearnerConfig, load_config
from agentgym.pipeline.table import semantic_of, steps_of


@pytest.mark.parametrize(
    "override", ["micro_batch_tokens=8192", "head_chunk_tokens=512", "compile=inductor"]
)
def test_what_rounds_otherwise_is_in_the_keys_of_what_trains_alone(override):
    cfgs = [load_config("params.yaml", each) for each in ([], [f"learner.{override}"])]
    tables = [steps_of(cfg) for cfg in cfgs]
    changed = {
        name
        for name, step in tables[0].items()
        if semantic_of(step, cfgs[0]) != semantic_of(tables[1][name], cfgs[1])
    }
    assert changed == {"warm-start", "stage-1", "stage-2", "stage-3"}


def test_what_is_equal_to_the_bit_is_in_no_key():
    smaller = LearnerConfig(activation_checkpointing=True, offload_optimizer=True)
    assert smaller.semantic() == LearnerConfig().semantic()


def test_states_are_not_moved_from_host_memory_to_host_memory():
    asked = ["learner.offload_optimizer=true"]
    with pytest.raises(ConfigError, match="with compute_device cpu: host memory is where"):
        load_config("params.yaml", asked)
    assert load_config("params.yaml", [*asked, "compute_device=cuda"]).learner.offload_optimizer


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "micro_batch_tokens=0",
            "learner.micro_batch_tokens: input should be 'auto' or greater than 0, got 0",
        ),
        ("compile=true", "learner.compile: input should be 'none', 'inductor' or 'aot_eager'"),
        ("offload=true", "unknown key learner.offload; known: activation_checkpointing, compile"),
    ],
)
def test_a_bad_value_is_named(override, message):
    with pytest.raises(ConfigError, match=message):
        load_config("params.yaml", [f"learner.{override}"])


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["lora.rank=4", "lora.dropout=0.1"], "lora.dropout 0.1: the engine samples without"),
        (["lora.rank=4", "lora.target_modules=[q_proj,q_proj]"], "names a layer twice"),
        (["lora.target_modules=[q_proj]"], "with lora.rank 0 trains no adapter"),
        (["lora.rank=-1"], "lora.rank"),
        (["lora.alpha=0"], "lora.alpha"),
        (["lora.ranks=4"], "did you mean lora.rank"),
    ],
)
def test_settings_that_cannot_work_are_refused_by_name(write, overrides, told):
    with pytest.raises(ConfigError) as raised:
        load_config(write("seed: 1"), overrides)
    assert told in str(raised.value)
    assert "\n" not in str(raised.value)


def test_the_warm_start_of_random_weights_trains_all_of_them(write):
    def adapts(*overrides):
        return load_config(write("seed: 1"), overrides).adapts_warm_start

    hub = ["model.source=hub", "model.name=somebody/model"]
    assert not adapts("lora.rank=4")
    assert adapts("lora.rank=4", *hub)
    assert not adapts(*hub)
