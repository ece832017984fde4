"""A colleague's clone of a repository with its results in DVC's pointers, and a second store on one
MLflow. flows/test_deployments.py checks that `make up` reports when the schedule is on.
"""

import json
import re
import shlex

import pytest
import yaml

from tests.projects import SHORT_RUN

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
]  # may first have to make the finished project

STEPS = 14
GIT = {
    f"GIT_{who}_{what}": "test@localhost"
    for who in ("AUTHOR", "COMMITTER")
    for what in ("NAME", "EMAIL")
}


@pytest.fixture(scope="module")
def reproduced(finished):
    """Return the finished project after `dvc repro`; `dvc_repro` is the completed command."""
    before = finished.manifests()
    finished.dvc_repro = finished.run("dvc", "repro")
    assert finished.dvc_repro.returncode == 0, finished.dvc_repro.stderr
    assert finished.manifests() == before
    return finished


@pytest.fixture(scope="module")
def repository(reproduced):
    """Commit the results to git, as pointers."""
    reproduced.environment |= GIT
    for words in (("add", "--all"), ("commit", "--quiet", "--message", "the run")):
        assert reproduced.run("git", *words).returncode == 0
    return reproduced


@pytest.fixture
def cloned(repository, tmp_path):
    clone = type(repository)(tmp_path / "project", repository.home)
    clone.environment |= {"DVC_SITE_CACHE_DIR": str(tmp_path / "dvc"), "DVC_NO_ANALYTICS": "1"}
    done = repository.run("git", "clone", "--quiet", ".", str(clone.folder))
    assert done.returncode == 0, done.stderr
    pulled = clone.run("dvc", "pull")
    assert pulled.returncode == 0, pulled.stderr
    return clone


def test_dvc_repro_after_it_trains_nothing_and_a_second_one_runs_no_stage(reproduced):
    first = reproduced.dvc_repro
    assert len(re.findall(r"^\S+: done · .*manifest", first.stdout, re.MULTILINE)) == STEPS
    pointer = json.loads((reproduced.folder / "outputs/stage-3.json").read_text())
    heads = [json.loads(content) for _, content in sorted(reproduced.manifests().items())]
    digests = [head["digest"] for head in heads if head["step"] == "stage-3"]
    assert pointer["manifest"][0]["digest"] == digests[-1]
    assert "safetensors" not in json.dumps(pointer)
    second = reproduced.run("dvc", "repro")
    assert second.returncode == 0
    assert "Running stage" not in second.stdout
    assert "up to date" in second.stdout


def test_a_clone_has_the_results_where_it_shares_the_store_and_else_is_told_how_to_get_them(
    repository, cloned, tmp_path
):
    lacking = cloned.run("dvc", "repro")
    assert lacking.returncode != 0
    assert "Data and pipelines are up to date" not in lacking.stdout
    said = " ".join(lacking.stderr.split())
    assert "outputs has pointers to results that the store .agentgym/store lacks: prepare" in said
    assert (
        "To have them, set store.uri to a store that you share with the person who made them, or"
        " copy that machine's .agentgym/store to the same place here, or make them here: `dvc repro"
        " --force`"
    ) in said

    params = cloned.folder / "params.yaml"
    shared = {"path": str(repository.folder / ".agentgym/store")}
    params.write_text(yaml.safe_dump(yaml.safe_load(params.read_text()) | {"store": shared}))
    found = cloned.run("dvc", "repro")
    assert found.returncode == 0, found.stdout + found.stderr
    assert f"{shared['path']} has all that {STEPS} pointers in outputs name" in found.stdout
    assert cloned.run("dvc", "repro").stdout.endswith("Data and pipelines are up to date.\n")
    exported = cloned.run("agentgym", "export", "stage-3", str(tmp_path / "model"))
    assert exported.returncode == 0, exported.stderr
    assert (tmp_path / "model/model.safetensors").is_file()


def test_a_colleagues_run_on_the_same_mlflow_is_judged_in_the_one_history_and_both_audits_pass(
    repository, cloned, made_databases
):
    made_databases(cloned)
    mlflow = f"tracking.uri=sqlite:///{repository.folder}/.agentgym/mlflow.db"
    ran = cloned.pipeline("warm_start.num_demos=16", "warm_start.steps=4", *SHORT_RUN, mlflow)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    said = " ".join(ran.stdout.split())
    assert "model agentgym-babyai version 2 alias champion stays with version 1: HOLD: " in said
    check = ran.stdout.splitlines()[-1]

    ours = repository.run("agentgym", "history")
    theirs = cloned.run("agentgym", "history", "--set", mlflow)
    assert (ours.returncode, theirs.returncode) == (0, 0), ours.stderr + theirs.stderr
    assert ours.stdout == theirs.stdout
    assert re.findall(r"^ +(\d+) .* (PROMOTE|HOLD) ", ours.stdout, re.MULTILINE) == [
        ("1", "PROMOTE"),
        ("2", "HOLD"),
    ]
    assert ours.stdout.endswith("agentgym-babyai: champion is version 1\n")

    (own,) = re.findall("agentgym audit r[0-9a-f]{12}", repository.first.stdout)
    for project, line in ((repository, own), (cloned, check.partition(" ")[2])):
        audit = project.run(*shlex.split(line), "--episodes", "1")
        assert audit.returncode == 0, audit.stdout + audit.stderr
        assert re.search(r"audit passed; to repeat it: --seed \d+\n$", audit.stdout)
