"""Tests for the defaults of a pretrained model, and for where they do not apply."""

import pytest
import yaml

from agentgym.config import ConfigError, load_config
from agentgym.config.pretrained import defaults

HUB = ["model.source=hub", "model.name=folder"]


def test_settings_of_the_tiny_model_are_not_meant_for_a_pretrained_one():
    cfg = load_config("params.yaml", HUB)
    assert cfg.rollout.instructions
    assert (cfg.rollout.max_new_tokens, cfg.rollout.observation_tokens) == (24, 48)
    # the longest horizon of params.yaml has 12 turns
    assert cfg.model.context_tokens == 1408 >= 512 + 12 * (24 + 48)
    assert (cfg.optimizer.lr, cfg.warm_start.optimizer.lr) == (1e-5, 5e-5)
    assert (cfg.evaluation.num_items, cfg.evaluation.num_samples) == (64, 2)
    # settings with the same meaning for both models are kept
    assert cfg.optimizer.warmup_steps == 10
    assert cfg.horizon.max_turns == (6, 9, 12)
    assert load_config("params.yaml").rollout.max_new_tokens == 6


@pytest.mark.parametrize("order", [1, -1])
def test_an_override_wins_wherever_it_stands(order):
    overrides = ["rollout.max_new_tokens=7", *HUB][::order]
    cfg = load_config("params.yaml", overrides)
    assert cfg.rollout.max_new_tokens == 7
    assert cfg.model.context_tokens == 1280  # shorter actions need less


def test_what_a_file_says_beside_the_kind_of_model_wins(tmp_path):
    base = {"rollout": {"max_new_tokens": 6, "temperature": 0.5}}
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(base))
    own = {"extends": "base.yaml", "model": {"source": "hub", "name": "folder"}}
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(own | {"optimizer": {"lr": 3e-6}}))
    cfg = load_config(tmp_path / "own.yaml")
    assert (cfg.optimizer.lr, cfg.rollout.max_new_tokens) == (3e-6, 24)
    assert cfg.rollout.temperature == 0.5


def test_a_file_over_one_of_a_pretrained_model_keeps_all_its_settings(tmp_path):
    base = {"model": {"source": "hub", "name": "folder"}, "rollout": {"max_new_tokens": 99}}
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(base))
    own = {"extends": "base.yaml", "model": {"source": "hub", "name": "other"}}
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(own))
    assert load_config(tmp_path / "own.yaml").rollout.max_new_tokens == 99


def test_environments_format_and_adapters_decide():
    mixed = {"env": {"name": "babyai"}, "mix": [{"name": "webarena"}], "lora": {"rank": 8}}
    found = defaults({**mixed, "rollout": {"action_format": "react"}})
    assert found["rollout.max_new_tokens"].value == 128 + 160
    assert found["rollout.observation_tokens"].value == 1536
    assert found["optimizer.lr"].value == 5e-5
    assert defaults({"env": {"name": "somebodys"}})["rollout.max_new_tokens"].value == 64
    foreign = {"env": {"name": "babyai", "dialect": "agentgym"}}
    assert defaults(foreign)["rollout.instructions"].value is False


@pytest.mark.parametrize(
    "wrong", ["horizon.max_turns=[]", "rollout=3", "env=x", "evaluation.max_turns=x", "mix=4"]
)
def test_what_is_no_setting_is_named_as_for_any_model(wrong):
    with pytest.raises(ConfigError, match=wrong.partition("=")[0]):
        load_config("params.yaml", [*HUB, wrong])
