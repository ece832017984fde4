"""A clone with DVC's pointers reports missing results and how to get them."""

import json
import shutil

import pytest

from agentgym.cli import main
from agentgym.config import load_config
from agentgym.pipeline.dvc import pointer
from agentgym.pipeline.table import finished, open_store, run_key, steps_of
from agentgym.steps.step import Outcome
from agentgym.tracking.deliver import tracker_of

pytestmark = pytest.mark.integration


@pytest.fixture
def repository(copy_run, tiny_params, tiny_endpoint, tmp_path):
    """A finished run and the pointers to it, as in git: (options, folder of pointers)."""
    folder = copy_run(tmp_path / "run")
    params = tiny_params(folder, tiny_endpoint, deterministic=True)
    cfg = load_config(params)
    table, outputs = steps_of(cfg), tmp_path / "outputs"
    outputs.mkdir()
    for name, manifest in finished(cfg, open_store(cfg)).items():
        text = pointer(cfg, Outcome(table[name], manifest, "done"))
        (outputs / f"{name}.json").write_text(text)
    return ["--params", str(params), "--pointers", str(outputs)], outputs


def test_a_clone_without_the_weights_is_told_what_is_missing_and_how_to_get_it(
    repository, tmp_path, empty_ledger, capsys
):
    options, outputs = repository
    (tmp_path / "clone").mkdir()
    shutil.copy(empty_ledger, tmp_path / "clone")
    mine = f"{tmp_path}/clone/store"
    out = tmp_path / "stored.json"
    words = ["stored", *options, "--set", f"store.path={mine}", "--out", str(out)]
    assert main(words) == 2
    said = capsys.readouterr().err
    assert f"{outputs} has pointers to results that the store {mine} lacks: prepare (" in said
    assert "and 9 more. Git and `dvc pull` bring pointers and data, no weights." in said
    assert "set store.uri to a store that you share with the person who made them" in said
    assert f"copy that machine's {tmp_path}/run/store to {mine}" in said
    assert "`dvc repro --force` trains, like the first time" in said
    assert len(said.splitlines()) == 2  # the error, and its page
    assert not out.exists()


def test_a_clone_with_the_same_store_has_everything_its_own_mlflow_too(
    repository, tmp_path, empty_ledger, capsys
):
    options, _ = repository
    shutil.rmtree(tmp_path / "run/delivered")  # deliveries to MLflow are recorded per machine
    shutil.copy(empty_ledger, tmp_path / "mine.db")
    mine = ["--set", f"tracking.uri=sqlite:///{tmp_path}/mine.db"]
    out = tmp_path / "stored.json"
    assert main(["stored", *options, *mine, "--out", str(out)]) == 0, capsys.readouterr().err
    assert "has all that 12 pointers" in capsys.readouterr().out
    cfg = load_config(options[1], mine[1:])
    done = finished(cfg, open_store(cfg))
    assert json.loads(out.read_text()) == {name: each.digest for name, each in done.items()}
    tracker = tracker_of(cfg)
    assert tracker.find_run({"run_key": run_key(cfg), "kind": "pipeline"})
    results = done["register"].results
    assert tracker.client.get_model_version(results["model"], "1")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"digest": "0" * 64}, "take this store's own run in their place: `dvc repro --force`"),
        (
            {"digest": "0" * 64, "store": "s3://theirs/runs"},
            "set store.uri to s3://theirs/runs, or",
        ),
    ],
)
def test_pointers_of_a_colleagues_run_beside_ones_own_are_told_apart(
    repository, capsys, change, said
):
    options, outputs = repository
    tree = json.loads((outputs / "stage-1.json").read_text())
    tree["manifest"][0] |= change
    (outputs / "stage-1.json").write_text(json.dumps(tree))
    assert main(["stored", *options]) == 2
    told = capsys.readouterr().err
    assert "lacks: stage-1 (000000000000). Git" in told
    assert said in told
    assert ("copy that machine's" in told) is ("s3://" not in told)


def test_what_is_no_pointer_is_named(repository, capsys):
    options, outputs = repository
    (outputs / "stage-1.json").write_text("[]")
    assert main(["stored", *options]) == 2
    assert "stage-1.json is no pointer (TypeError); restore it with git" in capsys.readouterr().err
