"""Tests for the settings of `alarms`: each has a limit, and none is part of a key."""

import pytest

from agentgym.config import AlarmsConfig, ConfigError, load_config
from agentgym.pipeline.table import key_of, run_key, steps_of
from agentgym.tracking.points import RULES


def test_every_alarm_has_an_action_and_a_limit_and_the_file_says_what_is_usual():
    limits = {rule.limit for rule in RULES.values()}
    # no_success is checked once, before a stage's first update, so it is no rule over points
    assert AlarmsConfig.model_fields.keys() == {*RULES, *limits, "no_success"}
    assert load_config().alarms == AlarmsConfig()
    assert {getattr(AlarmsConfig(), name) for name in RULES} == {"warn"}


def test_other_alarms_find_the_same_steps_and_the_same_run(tiny_params, tmp_path):
    params = tiny_params(tmp_path)
    cfg, other = (
        load_config(params),
        load_config(params, ["alarms.success=stop", "alarms.min_entropy=9"]),
    )
    assert cfg.alarms != other.alarms
    assert run_key(cfg) == run_key(other)
    step = steps_of(cfg)["prepare"]
    assert key_of(step, cfg, {}) == key_of(step, other, {})


def test_off_is_a_word_though_yaml_reads_it_as_false():
    assert load_config(overrides=["alarms.entropy=off"]).alarms.entropy == "off"
    assert load_config(overrides=["alarms.entropy='off'"]).alarms.entropy == "off"


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("alarms.success=halt", "alarms.success: input should be 'off', 'warn' or 'stop'"),
        ("alarms.max_success_drop=1.5", "alarms.max_success_drop: input should be less than"),
        ("alarms.max_success_fall=0.1", "did you mean alarms.max_success_drop"),
        ("alarms.max_update_kl=0", "alarms.max_update_kl: input should be greater than 0"),
    ],
)
def test_a_wrong_alarm_is_one_line_before_anything_starts(override, told):
    with pytest.raises(ConfigError) as raised:
        load_config(overrides=[override])
    assert told in str(raised.value)
    assert "\n" not in str(raised.value)
