"""Tests for `agentgym config`: every setting, and which ones were changed."""

import json
from pathlib import Path

from agentgym.cli import main
from agentgym.config import load_config

NEEDED = {
    "lora.target_modules": ["lora.rank=16"],
    "kuberay.priority": ["kuberay.queue=gpu-queue"],
}  # further settings that an example needs


def test_the_command_prints_what_was_changed_beside_its_default(tmp_path, capsys):
    path = str(tmp_path / "params.yaml")
    Path(path).write_text("{rollout: {group_size: 4, concurrency: 8}}")
    assert main(["config", "--params", path]) == 0
    lines = capsys.readouterr().out.splitlines()
    (group_size,) = (line for line in lines if line[2:].startswith("group_size"))
    assert group_size.startswith("* group_size")
    assert "4 (default 8)" in group_size
    (concurrency,) = (line for line in lines if line.startswith("  concurrency"))
    meaning = "episodes that run at the same time; lower it if memory or servers run short"
    assert concurrency.split(maxsplit=2)[2] == f"(default 256)  {meaning}"
    assert main(["config", "--params", path, "--json"]) == 0
    values = {(e["section"], e["name"]): e for e in json.loads(capsys.readouterr().out)}
    assert values["rollout", "group_size"]["value"] == 4
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
    assert main(["config"]) == 0
    printed = capsys.readouterr().out
    assert "one of zero, mask, bootstrap" in printed
