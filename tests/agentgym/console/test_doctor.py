"""What a machine lacks is said in one line each, with the way to get it."""

import json

import pytest

from agentgym.cli import main

pytestmark = pytest.mark.integration


def test_everything_the_run_needs_is_named(tiny_params, tmp_path, capsys):
    assert main(["doctor", "--params", str(tiny_params(tmp_path)), "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert {"python", "torch", "babyai", "sciworld", "searchqa", "textcraft", "git"} <= rows.keys()
    assert rows["babyai"] == {"name": "babyai", "ok": True, "text": "can be served", "needed": True}
    assert not rows["textcraft"]["needed"]
    vllm = rows["vllm"]
    assert not vllm["needed"]
    assert vllm["text"].startswith(
        "vllm" if vllm["ok"] else "not installed, for rollout.engine vllm"
    )


def test_what_the_run_needs_and_lacks_is_an_exit_code_and_a_line(
    tiny_params, tmp_path, capsys, monkeypatch
):
    monkeypatch.setenv("JAVA_HOME", "/nowhere")
    run = ["doctor", "--params", str(tiny_params(tmp_path))]
    assert main(run) == 0  # a babyai run needs no Java
    assert "sciworld    absent   sciworld needs a Java runtime" in capsys.readouterr().out
    assert main([*run, "--set", "env.name=sciworld", "--set", "env.options={}"]) == 1
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "MISSING" in line]
    assert line.endswith("install one: apt-get install default-jre-headless")
