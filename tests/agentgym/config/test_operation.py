"""Tests for the settings of `alarms`: each has a limit, and none is part of a key or a record."""

import pytest

from agentgym.config import AlarmsConfig, ConfigError, load_config
from agentgym.pipeline.table import key_of, run_key, steps_of
from agentgym.tracking.points import RULES


def test_every_alarm_has_an_action_and_a_limit_and_the_file_says_what_is_usual():
    usual = AlarmsConfig().model_dump()
    # no_success is checked once, before a stage's first update, so it has no limit
    assert usual.pop("no_success") == "stop"
    assert {name: set(alarm) for name, alarm in usual.items()} == {
        name: {"action", rule.limit} for name, rule in RULES.items()
    }
    assert {alarm["action"] for alarm in usual.values()} == {"warn"}
    assert load_config().alarms == AlarmsConfig()


def test_other_alarms_find_the_same_steps_and_the_same_run(tiny_params, tmp_path):
    params = tiny_params(tmp_path)
    cfg, other = (
        load_config(params),
        load_config(params, ["alarms.success.action=stop", "alarms.entropy.min=9"]),
    )
    assert cfg.alarms != other.alarms
    assert run_key(cfg) == run_key(other)
    assert cfg.semantic()["alarms"] == {}  # like in the record of a run with flat settings
    step = steps_of(cfg)["prepare"]
    assert key_of(step, cfg, {}) == key_of(step, other, {})


def test_off_is_a_word_though_yaml_reads_it_as_false():
    for text in ("off", "'off'"):
        cfg = load_config(overrides=[f"alarms.entropy.action={text}"])
        assert cfg.alarms.entropy.action == "off"


@pytest.mark.parametrize(
    ("override", "told"),
    [
        (
            "alarms.success.action=halt",
            "alarms.success.action: input should be 'off', 'warn' or 'stop'",
        ),
        ("alarms.success.max_drop=1.5", "alarms.success.max_drop: input should be less than"),
        ("alarms.success.max_drops=0.1", "did you mean alarms.success.max_drop"),
        ("alarms.update_kl.max=0", "alarms.update_kl.max: input should be greater than 0"),
        ("alarms.succes.max_drop=0.1", "did you mean alarms.success"),
    ],
)
def test_a_wrong_alarm_is_one_line_before_anything_starts(override, told):
    with pytest.raises(ConfigError) as raised:
        load_config(overrides=[override])
    assert told in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("flat", "today"),
    [
        ("entropy", "entropy.action"),
        ("throughput", "throughput.action"),
        ("min_entropy", "entropy.min"),
        ("max_gradient_factor", "gradient.max_factor"),
        ("max_update_kl", "update_kl.max"),
        ("max_zero_variance_frac", "zero_variance.max_frac"),
        ("max_success_drop", "success.max_drop"),
        ("max_mismatch_kl", "mismatch.max_kl"),
        ("min_throughput_frac", "throughput.min_frac"),
    ],
)
def test_a_flat_spelling_of_earlier_versions_is_refused_with_its_name_today(write, flat, today):
    with pytest.raises(ConfigError) as raised:
        load_config(write(f"alarms: {{{flat}: off}}"))
    assert str(raised.value) == f"alarms.{flat} is now alarms.{today}"
