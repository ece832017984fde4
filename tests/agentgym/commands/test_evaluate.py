"""Tests for `agentgym evaluate`: arguments become a request, results an exit code."""

import argparse
import shlex
from dataclasses import replace

import pytest

from agentgym.cli import main
from agentgym.commands import evaluate
from agentgym.config import ConfigError
from agentgym.evaluation.result import Outcome, Result, expected_slots
from agentgym.pipeline.policy_evaluation import Evaluated
from agentgym.types import Item


def request(*words):
    parser = argparse.ArgumentParser()
    parser.add_argument("policy")
    evaluate.add_options(parser)
    return evaluate.request_of(parser.parse_args(words))


def test_what_is_typed_lies_over_the_protocol_and_nothing_else_does():
    asked = request(
        *("random", "--env", "babyai,textcraft", "--env", "searchqa", "--max-turns", "7"),
        *("--num-items", "3", "--split", "validation", "--no-greedy", "--fail-on-error"),
    )
    assert asked.envs == ("babyai", "textcraft", "searchqa")
    assert asked.changes == {
        "max_turns": 7,
        "greedy": False,
        "fail_on_error": True,
        "items": {"num": 3, "split": "validation"},
    }
    assert request("expert").changes == {}


def test_a_setting_that_is_typed_holds_for_models_that_were_not_trained_here_too():
    parser = argparse.ArgumentParser()
    parser.add_argument("policy")
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("overrides", nargs="*")
    evaluate.add_options(parser)
    url = "https://host/v1"
    words = [url, "--set", "rollout.max_new_tokens=64", "--set", "seed=1"]
    assert evaluate.request_of(parser.parse_args(words)).kept == ("max_new_tokens",)
    words = [url, "rollout.instructions=true"]  # the positional form that the flow accepts
    assert evaluate.request_of(parser.parse_args(words)).kept == ("instructions",)
    assert request(url).kept == ()


@pytest.mark.parametrize(
    ("text", "value"), [("true", True), ("false", False), ("5", 5), ("0.25", 0.25)]
)
def test_a_limit_of_failures_is_a_flag_a_count_or_a_share(text, value):
    found = request("random", "--fail-on-error", text).changes["fail_on_error"]
    assert (found, type(found)) == (value, type(value))


def test_nonsense_is_refused_in_one_line():
    with pytest.raises(ConfigError, match="timeout_s: input should be greater than 0"):
        request("random", "--timeout", "-1")
    with pytest.raises(SystemExit):
        request("random", "--fail-on-error", "often")


def kept(folder, name, policy, *, items=1, valid=True):
    """Save an evaluation with this policy in folder/name."""
    slots = expected_slots(
        {"babyai": [Item("babyai", task) for task in range(items)]},
        {"babyai": (1,)},
        {"babyai": [None] * items},
    )
    ended = replace(slots[0], outcome=Outcome.SCORED, reward=1.0, success=True)
    identity = {"policy": {"kind": policy}, "protocol": {}, "items": items}
    result = Result(identity, (ended, *slots[1:]), {}, {"valid": valid})
    (folder / name).mkdir(parents=True)
    result.save(folder / name)
    return Evaluated(result, manifest=None, folder=folder / name, how="ran")


def test_an_evaluation_ends_with_its_report_and_a_comparison_that_runs_as_printed(tmp_path):
    folder = tmp_path / "my runs"
    alone = kept(folder, "aa", "random")
    report, compare = evaluate.next_steps(alone, "")
    assert report == f"report   {folder}/aa/report.html"
    assert "give the same command another policy" in compare
    kept(folder, "bb", "expert", items=2)  # another item set: not comparable
    kept(folder, "cc", "echo", valid=False)
    (folder / "dd").mkdir()
    (folder / "dd/result.json").write_text("{}")
    second = kept(folder, "ee", "endpoint")
    _, compare = evaluate.next_steps(second, " --set store.path=x")
    digests = [ended.result.digest[:12] for ended in (alone, second)]
    name, command = compare.split(maxsplit=1)
    assert (name, shlex.split(command)) == (
        "compare",
        ["agentgym", "compare", *digests, "--set", "store.path=x"],
    )
    (only,) = evaluate.next_steps(kept(folder, "ff", "late", valid=False), "")
    assert only.startswith("report")


def test_exactly_one_thing_is_asked_for(capsys, tmp_path, monkeypatch):
    for words in ((), ("random", "--show", "ab")):
        assert main(["evaluate", *words, "--set", f"store.path={tmp_path}/s/store"]) == 2
        assert "expected one of POLICY, --show RESULT" in capsys.readouterr().err
