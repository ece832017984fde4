"""Apply prefect.yaml and report the changes of deployments, schedules and automations."""

import pytest

from agentgym.config import ConfigError
from services.applied import _without_ids, changes, set_up

CRON = {"cron": "0 2 * * *", "timezone": "UTC"}


def deployment(active=False, cron=CRON, **more):
    schedule = {"active": active, "schedule": cron, "parameters": {}}
    return {"tags": ["local"], "schedules": {"nightly": schedule}, **more}


def test_a_schedule_that_was_switched_on_is_told_in_a_line_of_its_own():
    before = {"pipeline/local": deployment()}, {}
    after = {"pipeline/local": deployment(active=True)}, {}
    assert list(changes(before, after)) == ["schedule nightly of pipeline/local: switched on"]
    assert list(changes(after, before)) == ["schedule nightly of pipeline/local: switched off"]
    assert list(changes(after, after)) == []


def test_what_else_has_changed_is_named_and_what_is_new_or_gone():
    before = {"pipeline/local": deployment()}, {"people are told": {"enabled": False}}
    other = deployment(cron={"cron": "0 3 * * *", "timezone": "UTC"}, tags=["mine"])
    after = (
        {
            "pipeline/local": {**other, "tags": ["mine"]},
            "train/local": {"schedules": {}, "tags": []},
        },
        {"people are told": {"enabled": True}, "another": {"enabled": False}},
    )
    assert list(changes(before, after)) == [
        "deployment pipeline/local: changed (tags)",
        "schedule nightly of pipeline/local: changed (schedule), off",
        "deployment train/local: new",
        "automation 'people are told': switched on",
        "automation 'another': new, off",
    ]
    bare = {"pipeline/local": {"tags": ["local"], "schedules": {}}}, {}
    assert list(changes(({"pipeline/local": deployment()}, {}), bare)) == [
        "schedule nightly of pipeline/local: gone"
    ]


def test_a_file_that_is_no_yaml_is_refused_before_anything_is_applied(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prefect.yaml").write_text("deployments: [")
    with pytest.raises(ConfigError, match=r"prefect\.yaml is not valid YAML: "):
        set_up({})


def test_a_rule_whose_events_are_listed_in_another_order_has_not_changed():
    def known(expect):
        rule = {
            "enabled": True,
            "trigger": {"expect": expect, "id": expect[0]},
            "actions": [1, "a"],
        }
        return {}, {"recovery": _without_ids(rule)}

    assert list(changes(known(["a", "b"]), known(["b", "a"]))) == []
    assert list(changes(known(["a", "b"]), known(["b", "c"]))) != []
