"""What an adapter cannot be is refused when the configuration is read."""

import pytest

from agentgym.config import ConfigError, load_config


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
