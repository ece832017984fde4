"""Tests for `agentgym config`: every setting, and which ones were changed."""

import json
from pathlib import Path

import pytest

from agentgym.cli import main
from agentgym.config import load_config, settings

NEEDED = {
    "lora.target_modules": ["lora.rank=16"],
    "kuberay.priority": ["kuberay.queue=gpu-queue"],
}  # further settings that an example needs


MATTER_MOST = [
    *("model.name", "env.name", "env.options", "rollout.engine", "algorithm.recipe"),
    *("horizon.max_turns", "horizon.stage_steps", "rollout.items_per_step", "rollout.group_size"),
    *("optimizer.lr", "evaluation.num_items", "compute"),
]


@pytest.fixture
def printed(capsys, monkeypatch):
    """printed(*arguments) -> lines of `agentgym config`, in a terminal of 80 columns."""
    monkeypatch.setenv("COLUMNS", "80")

    def lines(*arguments):
        assert main(["config", *arguments]) == 0
        return capsys.readouterr().out.splitlines()

    return lines


def test_without_arguments_it_prints_what_matters_and_what_differs(tmp_path, printed):
    (tmp_path / "own.yaml").write_text(
        "{rollout: {group_size: 4, concurrency: 8}, learner: {activation_checkpointing: true}}"
    )
    lines = printed("--params", str(tmp_path / "own.yaml"))
    assert lines[2] == "the settings that matter most"
    assert [line[2:].split()[0] for line in lines[3:15]] == MATTER_MOST
    assert "* rollout.group_size      4             (default 8) episodes per item and …" in lines
    assert "* horizon.stage_steps     [15, 15, 20]  optimizer steps per stage" in lines
    assert lines[15:] == [
        "",
        "others that are not the default",
        "  rollout.concurrency  8     (default 256) episodes that run at the same time",
        "  learner.activation_checkpointing",
        "                       true  (default false) keep each block's input alone, …",
        "",
        "agentgym config SECTION, --all or --search WORD prints more, with whole meanings",
    ]


def test_a_long_value_is_whole_and_the_default_run_differs_by_its_environment_alone(printed):
    lines = printed()
    at = lines.index(
        '* env.options             {"levels": ["GoToObj", "GoToRedBallNoDists"], "view":'
    )
    assert lines[at + 1 : at + 3] == [
        '                          "compact", "actions": "low", "reward": "binary"}',
        "                                        (default {}) options of the …",
    ]
    assert "all others have their defaults" in lines
    assert sum("(default" in line for line in lines) == 1


def test_a_section_is_printed_in_columns_with_whole_meanings(printed):
    lines = printed("learner")
    assert lines[:4] == [
        "* changes results; what has none changes where and how fast they are computed",
        "",
        "learner",
        "* micro_batch_tokens        16384   tokens of one forward and backward, but",
    ]
    assert (
        "  activation_checkpointing  false   keep each block's input alone, and compute"
    ) in lines
    assert printed("optimizer.lr")[2:] == [
        "optimizer",
        "* lr  0.0005  AdamW's learning rate after the warm-up; lower it if training is",
        "              unstable",
    ]
    assert [line for line in printed("warm_start") if line.startswith("warm_start")] == [
        "warm_start",
        "warm_start.optimizer",
    ]


def test_everything_fits_80_columns_and_names_are_apart_from_values(printed):
    lines = printed("--all", "--set", f"model.name={'long/' * 40}")
    assert max(map(len, lines)) <= 80
    rows = {line[2:].split(" ")[0] for line in lines if line.startswith(("* ", "  "))}
    assert {row.name for row in settings(load_config())} <= rows


def test_a_search_looks_at_path_meaning_and_example(printed, capsys):
    def found(word):
        assert main(["config", "--json", "--search", word]) == 0
        rows = json.loads(capsys.readouterr().out)
        return {".".join(filter(None, (row["section"], row["name"]))) for row in rows}

    assert "optimizer.warmup_steps" in found("Learning Rate")  # in the meaning
    assert found("group_s") == {"rollout.group_size"}
    assert found("qwen2.5-7b") == {"model.name"}
    assert "vllm" in printed("--search", "tensor_parallel")
    assert main(["config", "rollout", "--search", "vllm", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in rows] == [
        *("engine", "engine_python", "engine_dtype", "engine_logprobs")
    ]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["rolout"], "error: unknown key rolout; did you mean rollout?\n"),
        (["warm_start.optimzer"], "did you mean warm_start.optimizer?\n"),
        (["--search", "xyzzy"], "error: no setting's path, meaning or example contains xyzzy\n"),
    ],
)
def test_what_is_not_there_is_one_line(arguments, told, capsys):
    assert main(["config", *arguments]) == 2
    assert told in capsys.readouterr().err


def test_json_has_every_setting_with_its_default(tmp_path, capsys):
    path = str(tmp_path / "own.yaml")
    Path(path).write_text("{rollout: {group_size: 4}}")
    assert main(["config", "--params", path, "--json"]) == 0
    values = {(e["section"], e["name"]): e for e in json.loads(capsys.readouterr().out)}
    assert (
        values["rollout", "group_size"]["value"],
        values["rollout", "group_size"]["default"],
    ) == (4, 8)
    assert values["rollout", "group_size"]["changes_results"]
    assert not values["store", "path"]["changes_results"]


def test_each_setting_is_described_with_its_choices_and_one_without_a_value_has_an_example(capsys):
    assert main(["config", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in rows if not row["description"]] == []
    assert [row["name"] for row in rows if row["example"] in (None, "", [], {})] == []
    (truncated,) = (row for row in rows if row["name"] == "truncated")
    assert truncated["choices"] == ["zero", "mask", "bootstrap"]
    for row in rows:  # every example is a valid value
        if row["example"] != row["default"]:
            path = ".".join(filter(None, (row["section"], row["name"])))
            load_config(
                "params.yaml", [f"{path}={json.dumps(row['example'])}", *NEEDED.get(path, ())]
            )
    assert main(["config", "algorithm.truncated"]) == 0
    assert "one of zero, mask, bootstrap" in " ".join(capsys.readouterr().out.split())
