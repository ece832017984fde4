"""Your environment, the package of examples/higher_lower: installed, served, played and trained on
as its README describes, in a project whose champion plays another environment.
"""

import json
import os
import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest

from tests.projects import SHORT_RUN

pytestmark = pytest.mark.timeout(600)  # may first have to make the finished project

EXAMPLE = Path(__file__).parents[2] / "examples/higher_lower"
COMMANDS = [
    line.strip()
    for line in (EXAMPLE / "README.md").read_text().splitlines()
    if line.startswith("    ")
]
SHORT = ("warm_start.num_demos=16", "warm_start.steps=4", *SHORT_RUN)


@pytest.fixture(scope="module")
def lists(tmp_path_factory):
    """Write its item lists as the README describes. Return the folder."""
    folder = tmp_path_factory.mktemp("lists")
    for name, tasks in (("train", range(40)), ("eval", range(50, 60))):
        items = [{"item_id": f"higher-lower_{task}"} for task in tasks]
        (folder / name).mkdir()
        end = "train" if name == "train" else "test"
        (folder / name / f"higher-lower_{end}.json").write_text(json.dumps(items))
    return folder


@pytest.fixture(scope="module")
def installed(finished, tmp_path_factory):
    """Install the package with pip and add it to the path of the finished project."""
    folder = tmp_path_factory.mktemp("package")
    source = shutil.copytree(EXAMPLE, folder / "source")  # setuptools writes into it
    words = ("--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--target")
    site = str(folder / "site")
    done = finished.run(sys.executable, "-m", "pip", "install", *words, site, str(source))
    assert done.returncode == 0, done.stderr
    before = finished.environment.get("PYTHONPATH", "")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(finished, "is_separate", True)  # this process lacks the new path
        path = os.pathsep.join(filter(None, (site, before)))
        patch.setitem(finished.environment, "PYTHONPATH", path)
        yield finished


@pytest.fixture(scope="module")
def typed_line(installed, lists):
    """typed_line(beginning, *more) -> the completed README command that starts with `beginning`."""

    def run(beginning, *more):
        (line,) = (each for each in COMMANDS if each.startswith(beginning))
        return installed.run(*shlex.split(line.replace("FOLDER", str(lists))), *more)

    return run


def test_chance_plays_an_installed_environment(typed_line):
    assert len((EXAMPLE / "higher_lower.py").read_text().splitlines()) <= 60
    ended = typed_line("agentgym evaluate random", "--num-items", "2", "--max-turns", "3")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "coverage 100.0%: 6 of 6 episodes count" in ended.stdout
    *_, how, report, compare = ended.stdout.splitlines()
    assert [line.split()[0] for line in (how, report, compare)] == ["ran:", "report", "compare"]


def test_a_run_of_an_installed_environment_has_a_champion_of_its_own(installed, typed_line, lists):
    before = installed.manifests()
    ran = typed_line("python -m flows.pipeline", *SHORT)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    new = [each for path, each in installed.manifests().items() if path not in before]
    demonstrated = [json.loads(each) for each in new if b'"step": "demonstrate"' in each]
    assert any(each["results"].get("expert_success") == 1.0 for each in demonstrated)
    said = " ".join(ran.stdout.split())
    assert (
        "model agentgym-higher-lower version 1 alias champion moves to version 1: the first model"
        " of this name"
    ) in said
    check = ran.stdout.splitlines()[-1]
    # the audit uses only environments and lists that its command names
    own = "--set env.name=higher-lower --set 'env.options={limit: 100}'"
    named = rf"check    agentgym audit r[0-9a-f]{{12}} {re.escape(own)} --set data.path={lists}"
    assert re.fullmatch(named, check)
    audit = installed.run(*shlex.split(check)[1:], "--episodes", "2")
    assert audit.returncode == 0, audit.stdout + audit.stderr
    assert re.search(r"^ok +replay +[1-9]", audit.stdout, re.MULTILINE)
    assert re.search(r"audit passed; to repeat it: --seed \d+\n$", audit.stdout)

    of_the_default = installed.run("agentgym", "history")
    assert of_the_default.returncode == 0, of_the_default.stderr
    decision, *_, champion = of_the_default.stdout.splitlines()
    assert decision.split()[3:] == ["PROMOTE", "version", "1", "-", "->", "1"]
    assert champion == "agentgym-babyai: champion is version 1"
    doctor = installed.run("agentgym", "doctor")
    assert doctor.returncode == 0, doctor.stdout
    rows = [line.split(maxsplit=2) for line in doctor.stdout.splitlines()]
    assert ["higher-lower", "ok", "can be served"] in rows
    text = "each registered model's alias is at a version for the model's environments"
    assert rows[-1] == ["aliases", "ok", text]
