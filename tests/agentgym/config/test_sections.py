"""Every setting has one default and one description."""

from agentgym.config import (
    OptimizerConfig,
    RunConfig,
    load_config,
    settings,
)
from envs.babyai import DEFAULTS as BABYAI


def test_every_default_has_one_home():
    """Compare with params.yaml, which holds all defaults but those of environments."""
    shipped = load_config("params.yaml")
    assert shipped.env.options == BABYAI
    own = shipped.env.model_copy(update={"options": {}})
    assert shipped.model_copy(update={"env": own}) == RunConfig()


def test_every_setting_is_described_once():
    described = list(settings(RunConfig()))
    assert [each.name for each in described if not each.description] == []
    assert len({(each.section, each.name) for each in described}) == len(described) > 100
    assert {each.name for each in described if each.section == "warm_start.optimizer"} == set(
        OptimizerConfig.model_fields
    )
