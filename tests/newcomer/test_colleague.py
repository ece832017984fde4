"""A colleague's clone of a repository whose results are in DVC's pointers, and a second store on
one MLflow. That `make up` says when the schedule is switched on is in flows/test_deployments.py.
"""

import json
import re
import shutil

import pytest
import yaml

STEPS = 13
GIT = {
    f"GIT_{who}_{what}": "test@localhost"
    for who in ("AUTHOR", "COMMITTER")
    for what in ("NAME", "EMAIL")
}


@pytest.fixture(scope="module")
def reproduced(finished):
    """The finished project after `dvc repro`; its `dvc_repro` is what that printed."""
    before = finished.manifests()
    finished.dvc_repro = finished.run("dvc", "repro")
    assert finished.dvc_repro.returncode == 0, finished.dvc_repro.stderr
    assert finished.manifests() == before
    return finished


@pytest.fixture(scope="module")
def repository(reproduced):
    """Its results in git, as pointers."""
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
    assert len(re.findall(r"^\S+: done · manifest", first.stdout, re.MULTILINE)) == STEPS
    pointer = json.loads((reproduced.folder / "outputs/stage-3.json").read_text())
    heads = [json.loads(content) for _, content in sorted(reproduced.manifests().items())]
    digests = [head["digest"] for head in heads if head["step"] == "stage-3"]
    assert pointer["manifest"][0]["digest"] == digests[-1]
    assert "safetensors" not in json.dumps(pointer)
    second = reproduced.run("dvc", "repro")
    assert second.returncode == 0
    assert "Running stage" not in second.stdout
    assert "up to date" in second.stdout


@pytest.mark.timeout(600)
def test_a_clone_has_the_results_where_it_shares_the_store_and_else_is_told_how_to_get_them(
    repository, cloned, tmp_path
):
    lacking = cloned.run("dvc", "repro")
    print(lacking.returncode, lacking.stdout, "\n---\n", lacking.stderr)
    assert lacking.returncode != 0
    assert "Data and pipelines are up to date" not in lacking.stdout
    said = " ".join(lacking.stderr.split())
    assert "outputs has pointers to results that the store .agentgym/store lacks: prepare" in said
    assert "set store.uri to a store that you share with whoever made them" in said

    params = cloned.folder / "params.yaml"
    shared = {"path": str(repository.folder / ".agentgym/store")}
    params.write_text(yaml.safe_dump(yaml.safe_load(params.read_text()) | {"store": shared}))
    found = cloned.run("dvc", "repro")
    print(found.returncode, found.stdout, "\n---\n", found.stderr)
    assert found.returncode == 0, found.stdout + found.stderr
    again = cloned.run("dvc", "repro")
    print(again.returncode, again.stdout, "\n---\n", again.stderr)
    model = tmp_path / "model"
    exported = cloned.run("agentgym", "export", "stage-3", str(model))
    print(exported)
    assert (model / "model.safetensors").is_file()


@pytest.mark.timeout(600)
def test_a_second_store_on_one_mlflow(finished, tmp_path):
    second = type(finished)(tmp_path / "project", finished.home)
    leave = shutil.ignore_patterns("promotions-*", "register-*", "report-*", "mlflow*", "delivered")
    shutil.copytree(finished.folder, second.folder, symlinks=True, ignore=leave)
    mlflow = f"tracking.uri=sqlite:///{finished.folder}/.agentgym/mlflow.db"
    short = ("horizon.kind=fixed", "horizon.max_turns=[4]", "horizon.stage_steps=[1]", mlflow)

    def show(p, *words):
        r = p.run(*words)
        print("$", *words, "->", r.returncode)
        print(r.stdout)
        print("--")
        print(r.stderr)

    show(second, "python", "-m", "flows.pipeline", *short)
    show(finished, "agentgym", "history")
    show(second, "agentgym", "history", "--set", mlflow)
    show(finished, "agentgym", "audit", "--episodes", "2")
    sets = [x for w in short for x in ("--set", w)]
    show(second, "agentgym", "audit", "--episodes", "2", *sets)
    show(second, "agentgym", "doctor", *sets)
