"""The number of optimizer steps per commit changes only the cost of a kill."""

import sqlite3

import pytest

from agentgym.audit import audit
from agentgym.config import load_config
from agentgym.learner.learner import LocalLearner
from agentgym.pipeline.run import run_step
from agentgym.pipeline.table import finished, open_store, steps_of

pytestmark = pytest.mark.integration


@pytest.mark.slow
@pytest.mark.parametrize("every", [3, 1, 1000])
def test_a_killed_stage_ends_the_same_however_many_steps_a_commit_holds(
    copy_run, whole_run, tmp_path, tiny_params, tiny_endpoint, monkeypatch, every
):
    params = tiny_params(
        copy_run(tmp_path / "run", half=True), endpoint=tiny_endpoint, deterministic=True
    )
    cfg = load_config(params, [f"store.commit_every={every}"])
    twin = load_config(whole_run / "params.yaml")
    update = LocalLearner.update

    def fatal(self, experience, config, *, step, seed):
        metrics = update(self, experience, config, step=step, seed=seed)
        if step == 4:  # the second step of stage 2
            raise KeyboardInterrupt
        return metrics

    monkeypatch.setattr(LocalLearner, "update", fatal)
    with pytest.raises(KeyboardInterrupt):
        run_step("stage-2", cfg)
    monkeypatch.undo()
    store = open_store(cfg)
    begun = [head for head in store.heads() if head.step == "stage-2"]
    assert bool(begun) == (every != 1000)  # steps 3 and 4, of which 3 is a multiple of 3
    for name in steps_of(cfg):
        run_step(name, cfg)
    done, theirs = finished(cfg, store), finished(twin, open_store(twin))
    assert {name: each.digest for name, each in done.items()} == {
        name: each.digest for name, each in theirs.items()
    }
    ours = store.history("stage-2", done["stage-2"].key)
    assert [each.state for each in ours] == [
        each.state for each in open_store(twin).history("stage-2", theirs["stage-2"].key)
    ]
    assert [bool(each.blobs) for each in ours] == [every != 1000, True]
    with sqlite3.connect(cfg.state_dir / "mlflow.db") as database:
        repeated = database.execute(
            "select key, step from metrics group by run_uuid, key, step having count(*) > 1"
        ).fetchall()
    assert repeated == []
    report = audit(cfg)
    assert report.ok, [check.failures[:5] for check in report.checks if not check.ok]


def test_a_damaged_newest_commit_costs_its_steps_and_is_told(
    copy_run, tmp_path, tiny_params, tiny_endpoint, monkeypatch, caplog
):
    cfg = load_config(
        tiny_params(
            copy_run(tmp_path / "run", half=True),
            endpoint=tiny_endpoint,
            deterministic=True,
            horizon={"max_turns": [5, 7], "stage_steps": [2, 4]},
        )
    )
    twin = load_config(
        tiny_params(
            copy_run(tmp_path / "twin", half=True),
            endpoint=tiny_endpoint,
            deterministic=True,
            horizon={"max_turns": [5, 7], "stage_steps": [2, 4]},
        )
    )
    update = LocalLearner.update

    def fatal(self, experience, config, *, step, seed):
        if step == 5:
            raise KeyboardInterrupt
        return update(self, experience, config, step=step, seed=seed)

    for each in (cfg, twin):
        for name in ("prepare", "demonstrate", "initialize", "warm-start", "stage-1"):
            run_step(name, each)
    monkeypatch.setattr(LocalLearner, "update", fatal)
    with pytest.raises(KeyboardInterrupt):
        run_step("stage-2", cfg)
    monkeypatch.undo()
    (head,) = [each for each in open_store(cfg).heads() if each.step == "stage-2"]
    assert head.state["global_step"] == 4
    blob = head.blobs["model.safetensors"]
    path = cfg.store.path / "steps" / f"stage-2-{head.key[:16]}" / "blobs" / blob.digest
    path.write_bytes(path.read_bytes()[:-1] + b"\x00")
    assert str(run_step("stage-2", cfg)) == "resumed at commit 1"
    assert "model.safetensors of step stage-2 commit 1 is damaged" in caplog.text
    assert "resuming from commit 0, the one before" in caplog.text
    run_step("stage-2", twin)
    finals = [finished(each, open_store(each))["stage-2"] for each in (cfg, twin)]
    assert finals[0].digest == finals[1].digest
    report = audit(cfg)
    assert report.ok, [check.failures[:5] for check in report.checks if not check.ok]
