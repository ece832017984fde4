"""Your environment, a package that `agentgym new environment` writes: installed, served, played and
trained on as its README describes, in a project whose champion plays another environment.
"""

import json
import os
import re
import shlex
import sys

import pytest

from agentgym.cli import main as agentgym
from tests.projects import SHORT_RUN

pytestmark = pytest.mark.timeout(600)  # may first have to make the finished project

SHORT = ("warm_start.num_demos=16", "warm_start.steps=4", *SHORT_RUN)
# of a stage long enough to learn the game
LEARNING = (
    *("model.hidden_size=64", "model.mlp_size=256", "rollout.items_per_step=16"),
    *("rollout.group_size=8", "horizon.kind=fixed", "horizon.max_turns=[12]"),
    *("horizon.stage_steps=[20]", "validation.every=0", "evaluation.num_samples=4"),
)


@pytest.fixture(scope="module")
def installed(finished, tmp_path_factory):
    """Write the package in the finished project, install it with pip and add it to the path."""
    written = finished.run("agentgym", "new", "environment", "grid-world")
    assert written.returncode == 0, written.stderr
    site = str(tmp_path_factory.mktemp("package") / "site")
    words = ("--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--target")
    done = finished.run(sys.executable, "-m", "pip", "install", *words, site, "./grid-world")
    assert done.returncode == 0, done.stderr
    before = finished.environment.get("PYTHONPATH", "")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(finished, "is_separate", True)  # this process lacks the new path
        path = os.pathsep.join(filter(None, (site, before)))
        patch.setitem(finished.environment, "PYTHONPATH", path)
        yield finished


@pytest.fixture(scope="module")
def typed_line(installed):
    """typed_line(beginning, *more) -> the completed README command that starts with `beginning`."""
    readme = (installed.folder / "grid-world/README.md").read_text().splitlines()

    def run(beginning, *more):
        (line,) = (each for each in readme if each.startswith(beginning))
        return installed.run(*shlex.split(line), *more)

    return run


def test_chance_plays_an_installed_environment(typed_line):
    ended = typed_line("agentgym evaluate random", "--num-items", "2", "--max-turns", "3")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "coverage 100.0%: 6 of 6 episodes count" in ended.stdout
    *_, how, report, compare = ended.stdout.splitlines()
    assert [line.split()[0] for line in (how, report, compare)] == ["ran:", "report", "compare"]


def test_its_expert_solves_every_test_item(typed_line):
    ended = typed_line("agentgym evaluate expert")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.startswith("grid-world: greedy 100.0 [93.6, 100.0], avg@2 100.0 "), ended


def test_a_run_of_an_installed_environment_has_a_champion_of_its_own(installed, typed_line):
    before = installed.manifests()
    ran = typed_line("python -m flows.pipeline", *SHORT)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    new = [each for path, each in installed.manifests().items() if path not in before]
    demonstrated = [json.loads(each) for each in new if b'"step": "demonstrate"' in each]
    assert any(each["results"].get("expert_success") == 1.0 for each in demonstrated)
    said = " ".join(ran.stdout.split())
    assert (
        "model agentgym-grid-world version 1 alias champion moves to version 1: the first model"
        " of this name"
    ) in said
    check = ran.stdout.splitlines()[-1]
    named = r"check    agentgym audit r[0-9a-f]{12} --params grid-world/params\.yaml"
    assert re.fullmatch(named, check)
    audit = installed.run(*shlex.split(check)[1:], "--episodes", "2")
    assert audit.returncode == 0, audit.stdout + audit.stderr
    assert re.search(r"^ok +replay +[1-9]", audit.stdout, re.MULTILINE)
    assert re.search(r"audit passed; to repeat it: --seed \d+\n$", audit.stdout)

    of_the_default = installed.call(agentgym, "history")
    assert of_the_default.returncode == 0, of_the_default.stderr
    decision, *_, champion = of_the_default.stdout.splitlines()
    assert decision.split()[3:] == ["PROMOTE", "version", "1", "-", "->", "1"]
    assert champion == "agentgym-babyai: champion is version 1"
    doctor = installed.run("agentgym", "doctor")
    assert doctor.returncode == 0, doctor.stdout
    rows = [line.split(maxsplit=2) for line in doctor.stdout.splitlines()]
    assert ["grid-world", "ok", "can be served"] in rows
    text = "each registered model's alias is at a version for the model's environments"
    assert rows[-1] == ["aliases", "ok", text]


@pytest.mark.slow
def test_a_short_training_on_it_improves(typed_line):
    ran = typed_line("python -m flows.pipeline", *LEARNING)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    # the gain of sampled success over the warm start, with its 95% interval
    low = re.search(r"^stage 1 .* \+\d+\.\d +([+-]\d+) to \+\d+ *$", ran.stdout, re.MULTILINE)[1]
    assert int(low) > 0, ran.stdout
