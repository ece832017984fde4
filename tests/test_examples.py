"""The training loop, without the services, learns the default task."""

import json
import re
import sys
from pathlib import Path

import pytest

from tests.completed import completed

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[1]
# runs the example and prints which of these modules were imported
DRIVER = """
import runpy, sys
sys.argv = ["examples/rl_loop.py", *sys.argv[1:]]
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
except SystemExit as end:
    assert not end.code, end.code
print("imported:", sorted({"prefect", "mlflow", "dvc"} & sys.modules.keys()))
"""
LEARNS = ["horizon.stage_steps=[4,4,4]", "evaluation.num_items=64"]
RUNS = [
    *("warm_start.num_demos=60", "warm_start.steps=10", "rollout.items_per_step=4"),
    *("horizon.stage_steps=[1,1,1]", "evaluation.num_items=8", "env.options.levels=[GoToObj]"),
]


@pytest.mark.parametrize(
    ("budget", "steps", "gain"),
    [(RUNS, 3, None), pytest.param(LEARNS, 12, 0.1, marks=pytest.mark.slow)],
    ids=["runs", "learns"],
)
def test_the_loop_in_one_file_learns_the_default_task_without_prefect_store_or_mlflow(
    tmp_path, budget, steps, gain
):
    assert len((ROOT / "examples/rl_loop.py").read_text().splitlines()) <= 150
    for name, first, count in (
        ("train/babyai_train.json", 0, 1200),
        ("eval/babyai_test.json", 5000, 96),
    ):
        file = tmp_path / "data" / name
        file.parent.mkdir(parents=True)
        file.write_text(
            json.dumps([{"item_id": f"babyai_{task}"} for task in range(first, first + count)])
        )
    place = [f"data.path={tmp_path / 'data'}", f"store.path={tmp_path / 'state/store'}"]
    done = completed(sys.executable, "-c", DRIVER, *budget, *place, cwd=ROOT, timeout=600)
    assert done.returncode == 0, done.stderr
    assert "imported: []" in done.stdout
    assert len(re.findall(r"^step +\d+  max_turns", done.stdout, re.M)) == steps
    start, end = _ends(done.stdout)
    assert gain is None or end - start > gain, done.stdout
    # only the environment servers' log; no store and no MLflow
    assert {path.name for path in (tmp_path / "state").iterdir()} == {"logs"}


def _ends(told):
    """Success after imitation, and after reinforcement learning."""
    return [float(x) for x in re.findall(r"^after [\w ]+: success ([\d.]+)", told, re.M)]
