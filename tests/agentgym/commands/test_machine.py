"""`agentgym config`: every setting, and what was changed of it."""

import json
from pathlib import Path

from agentgym.cli import main


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
