"""Every setting has one default and one description."""

from pathlib import Path

from agentgym.config import OptimizerConfig, RunConfig, load_config, read_tree, settings
from envs.babyai import DEFAULTS as BABYAI


def test_every_default_has_one_home():
    """params.yaml has the options of its environment alone, which are part of keys as they are."""
    assert read_tree(Path("params.yaml")) == {"env": {"options": BABYAI}}
    assert [row.path for row in settings(load_config()) if row.value != row.default] == [
        "env.options"
    ]


def test_a_part_of_the_warm_start_s_optimizer_leaves_the_rest_at_its_own_defaults(tmp_path):
    (tmp_path / "own.yaml").write_text("warm_start: {optimizer: {lr: 0.001}}")
    usual = RunConfig().warm_start.optimizer
    assert (usual.lr, usual.schedule) == (0.002, "cosine")  # training has 0.0005 and constant
    assert load_config(tmp_path / "own.yaml").warm_start.optimizer == usual.model_copy(
        update={"lr": 0.001}
    )


def test_every_setting_is_described_once():
    described = list(settings(RunConfig()))
    assert [each.name for each in described if not each.description] == []
    assert len({(each.section, each.name) for each in described}) == len(described) > 100
    assert {each.name for each in described if each.section == "warm_start.optimizer"} == set(
        OptimizerConfig.model_fields
    )
