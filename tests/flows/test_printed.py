"""Commands that a run prints, in the terminal and on its pages, run as written."""

import contextlib
import re
import shlex
import sqlite3
from html import unescape

import pytest

COMMAND = r"(?:agentgym|make|python -m|dvc|prefect) [^`<>\n]+"
TITLED = rf"^(?:see|check|compare) +({COMMAND})$"
# servers that run until stopped (test_readme.py, test_view.py), or named without arguments
NOT_TYPED = ("agentgym view", "make ui", "make up", "agentgym promote", "agentgym rollback")


def commands_of(text):
    return {
        *re.findall(TITLED, text, re.MULTILINE),
        *re.findall(rf"[`>]({COMMAND})[`<]", unescape(text)),
    }


def pages_of(project):
    """Yield the texts of MLflow, Prefect and reports."""
    with contextlib.closing(sqlite3.connect(project.folder / ".agentgym/mlflow.db")) as mlflow:
        notes = mlflow.execute("select value from tags where key = 'mlflow.note.content'")
        described = mlflow.execute("select description from registered_models")
        yield from (text for (text,) in (*notes, *described) if text)
    yield from filter(None, project.told_in_prefect("artifact", "description"))
    for path in project.folder.glob(".agentgym/**/report.html"):
        yield path.read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.timeout(900)  # it runs three audits
def test_what_runs_with_and_without_overrides_print_works_as_it_stands(
    finished, copied, tmp_path_factory
):
    project = copied(finished.folder.parent, tmp_path_factory.mktemp("printed"))
    ran = project.pipeline("evaluation.num_items=6")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    waiting = set().union(
        *map(commands_of, (finished.first.stdout, ran.stdout, *pages_of(project)))
    )
    audits = {command for command in waiting if command.startswith("agentgym audit r")}
    assert len(audits) == 2  # one with the override and one without
    typed = set()
    while waiting:
        command = waiting.pop()
        if command in typed or command.startswith(NOT_TYPED):
            continue
        typed.add(command)
        ended = project.run(*shlex.split(command))
        assert ended.returncode == 0, f"{command}\n{ended.stdout}{ended.stderr}"
        waiting |= commands_of(ended.stdout)
    assert {"agentgym history", "agentgym lineage"} | audits <= typed
