"""DVC's commands on a copy of this repository: experiments, their differences, and pages that
need no network.
"""

import json
import re
import shutil

import pytest
import yaml

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

GIT = {
    f"GIT_{who}_{what}": "test@localhost"
    for who in ("AUTHOR", "COMMITTER")
    for what in ("NAME", "EMAIL")
}


CHECKPOINTS = ("initialize", "warm-start", "stage-1", "stage-2", "stage-3")


@pytest.fixture(scope="module")
def experiment(tmp_path_factory, finished):
    """A clone whose outputs are committed, after `dvc exp run -S` with another number of test
    items.
    """
    project = type(finished)(tmp_path_factory.mktemp("dvc") / "project", finished.home)
    shutil.copytree(finished.folder, project.folder, ignore=shutil.ignore_patterns(".venv"))
    project.environment |= {
        **GIT,
        "DVC_SITE_CACHE_DIR": str(project.folder / ".agentgym/dvc"),
        "DVC_NO_ANALYTICS": "1",
    }
    reproduced = project.run("dvc", "repro", timeout=600)
    assert reproduced.returncode == 0, reproduced.stderr
    for words in (("add", "--all"), ("commit", "--quiet", "--message", "the run")):
        assert project.run("git", *words).returncode == 0
    tracked = project.run("git", "ls-files").stdout.split()
    assert "outputs/evaluate-stage-3.json" in tracked
    assert "dvc.lock" in tracked
    before = project.manifests()
    ran = project.run(
        "dvc", "exp", "run", "-S", "evaluation.num_items=10", "-n", "more-items", timeout=900
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    project.added = {
        path.parts[-3].rpartition("-")[0] for path in project.manifests().keys() - before.keys()
    }
    return project


def test_an_experiment_runs_what_depends_on_its_parameter_and_goes_on_from_the_shared_store(
    experiment,
):
    assert experiment.added == {
        *(
            f"evaluate-{name}"
            for name in ("initialize", "warm-start", "stage-1", "stage-2", "stage-3")
        ),
        "register",
        "report",
    }
    assert "more-items" in experiment.run("dvc", "exp", "list").stdout


def test_params_diff_names_the_changed_parameter_alone(experiment):
    differences = json.loads(experiment.run("dvc", "params", "diff", "--json").stdout)
    changed = {"evaluation.num_items": {"old": 8, "new": 10, "diff": 2}}
    assert differences == {"params.yaml": changed, "outputs/params.json": changed}


def test_metrics_diff_compares_numbers_of_both_revisions(experiment):
    differences = json.loads(experiment.run("dvc", "metrics", "diff", "--json").stdout)
    assert set(differences) <= {f"outputs/{name}.metrics.json" for name in CHECKPOINTS}
    shown = json.loads(experiment.run("dvc", "metrics", "show", "--json").stdout)
    (workspace,) = shown.values()
    numbers = workspace["data"]["outputs/stage-3.metrics.json"]["data"]
    assert numbers.keys() == {"greedy", "avg_at_2", "pass_at_2", "gain", "coverage"}


# --all: a model this small may solve equally few of more items
@pytest.mark.parametrize("command", ["show", "diff --all"])
def test_metrics_fit_a_terminal_of_100_columns(experiment, command):
    project = experiment
    told = project.run("env", "COLUMNS=100", "dvc", "metrics", *command.split())
    assert told.returncode == 0, told.stderr
    lines = told.stdout.rstrip().splitlines()
    assert len(lines) > len(CHECKPOINTS)
    assert max(map(len, lines)) <= 100, told.stdout
    if command == "show":
        assert len(lines) == 1 + len(CHECKPOINTS)
        assert lines[0].split() == ["Path", "avg_at_2", "coverage", "gain", "greedy", "pass_at_2"]


SCHEDULES = {
    "two stages": ["-S", "+horizon.max_turns=[6,12]", "-S", "horizon.stage_steps=[1,2]"],
    "fixed": [
        *("-S", "+horizon.kind=fixed", "-S", "+horizon.max_turns=[12]"),
        *("-S", "horizon.stage_steps=[2]"),
    ],
    "no warm start": ["-S", "+warm_start.enabled=false", "-S", "+model.source=hub"],
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_another_schedule_is_refused_until_its_file_is_made_and_then_runs(
    experiment, tmp_path, name
):
    project = type(experiment)(tmp_path / "project", experiment.home)
    shutil.copytree(experiment.folder, project.folder, ignore=shutil.ignore_patterns("plots-page"))
    project.environment |= experiment.environment | {
        "DVC_SITE_CACHE_DIR": str(project.folder / ".agentgym/dvc")
    }
    changes = list(SCHEDULES[name])
    if name == "no warm start":
        changes += ["-S", f"+model.name={project.exported_model()}"]
    refused = project.run("dvc", "exp", "run", *changes, timeout=300)
    assert refused.returncode != 0
    assert "dvc.yaml does not describe the run that params.yaml asks for" in refused.stderr
    assert "Run `agentgym dvc`, then `dvc repro`" in refused.stderr
    # DVC leaves the change in the workspace
    made = project.run("agentgym", "dvc")
    assert made.returncode == 0, made.stderr
    ran = project.run("dvc", "repro", timeout=900)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    stages = yaml.safe_load((project.folder / "dvc.yaml").read_text())["stages"]
    for each in stages.keys() - {"stored"}:
        assert (project.folder / f"outputs/{each}.json").is_file(), each
    assert ("stage-3" in stages) is (name == "no warm start")
    assert ("warm-start" in stages) is (name != "no warm start")
    assert "Data and pipelines are up to date" in project.run("dvc", "status").stdout


@pytest.mark.parametrize(
    ("command", "revisions"),
    [(("show",), ["workspace"]), (("diff", "HEAD", "more-items"), ["HEAD", "more-items"])],
)
def test_plots_open_without_a_network(experiment, command, revisions):
    made = experiment.run("dvc", "plots", *command, "--out", "plots-page")
    assert made.returncode == 0, made.stderr
    assert "failed to load" not in made.stderr
    assert "WARNING" not in made.stderr
    page = (experiment.folder / "plots-page/index.html").read_text()
    markup = re.sub(r"<script[^>]*>.*?</script>", "", page, flags=re.DOTALL)
    assert not re.search(r"""<(script|link|img)[^>]*(src|href)=["']?(https?:)?//""", page)
    assert "vegaEmbed" in page
    for title in (
        "success while training",
        "validation success while training",
        "success on test items",
        "loss of the warm start",
    ):
        assert f'"{title}"' in page or title in markup
    for revision in revisions:
        assert f'"rev": "{revision}"' in page
