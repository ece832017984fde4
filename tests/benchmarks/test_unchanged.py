"""Two commits are compared by the results they committed, and the published page states it."""

import json
from pathlib import Path

from tests.benchmarks.conftest import imported

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs/results"


unchanged = imported("unchanged")


def test_the_last_manifest_of_a_step_counts(unchanged, tmp_path):
    folder = tmp_path / "steps/initialize-0123/manifests"
    folder.mkdir(parents=True)
    for seq, digest in enumerate(("old", "new")):
        blobs = {
            "model.safetensors": {"digest": digest},
            "optimizer.safetensors": {"digest": "moments"},
            "config.json": {"digest": "settings"},
        }
        manifest = {"step": "initialize", "blobs": blobs}
        (folder / f"{seq:06d}.json").write_text(json.dumps(manifest))
    assert unchanged.committed(tmp_path) == {
        "initialize/model.safetensors": "new",
        "initialize/optimizer.safetensors": "moments",
    }


def test_what_differs_or_is_missing_is_named(unchanged):
    found = unchanged.compared(("grpo", 0), {"a": "1", "b": "2"}, {"a": "1", "b": "3", "c": "4"})
    assert (found["num_equal"], found["differ"]) == (1, ["b", "c"])


def test_the_published_comparison_holds_every_recipe_and_seed(unchanged):
    found = json.loads((RESULTS / "unchanged.json").read_text())
    cases = [(run["recipe"], run["seed"]) for run in found["runs"]]
    assert cases == [(r, s) for r in unchanged.RECIPES for s in unchanged.SEEDS]
    assert all(run["num_equal"] >= 10 and run["differ"] == [] for run in found["runs"])


def test_the_way_of_one_sample_does_not_grow():
    after = json.loads((RESULTS / "one_sample.json").read_text())["after"]
    assert after["files"] <= 75
    assert after["statements"] <= 2950
