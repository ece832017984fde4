"""An honest run passes its audit, which lists what it checked and writes nothing."""

from pathlib import Path

import pytest

from agentgym.audit import CHECKS, audit
from agentgym.config import ConfigError, load_config
from agentgym.pipeline.table import run_key, steps_of


def test_an_honest_run_passes_and_every_check_had_something_to_check(forger):
    report = audit(forger.cfg, run=f"r{run_key(forger.cfg)[:12]}", num_updates=2)
    assert report.ok, [c for c in report.checks if not c.ok]
    assert list(report.steps) == list(steps_of(forger.cfg))
    assert [check.name for check in report.checks] == list(CHECKS)
    counted = {check.name: check.counted for check in report.checks}
    assert counted.pop("updates") == sum(forger.cfg.horizon.stage_steps)
    assert all(number > 10 for number in counted.values())


def test_an_honest_run_in_a_folder_whose_name_has_blanks_passes(copy_run, tmp_path, tiny_params):
    cfg = load_config(tiny_params(copy_run(tmp_path / "my runs"), deterministic=True))
    report = audit(cfg, num_episodes=1)
    assert report.ok, [c for c in report.checks if not c.ok]
    skipped = {check.name: check.skipped for check in report.checks}
    assert (skipped["registry"], skipped["decisions"]) == (0, 0)


def test_an_honest_run_that_is_only_half_done_passes_as_far_as_it_went(
    copy_run, tmp_path, tiny_params
):
    cfg = load_config(tiny_params(copy_run(tmp_path, half=True), deterministic=True))
    report = audit(cfg)
    assert report.ok, [c for c in report.checks if not c.ok]
    assert list(report.steps) == list(steps_of(cfg))[:7]


def test_another_run_is_refused_by_name_and_the_existing_ones_are_listed(
    forger, tmp_path, tiny_params
):
    mine = f"r{run_key(forger.cfg)[:12]}"
    with pytest.raises(ConfigError, match=f"run r0123 is not .*known under .*{mine}"):
        audit(forger.cfg, run="r0123")
    other = load_config(tiny_params(tmp_path, seed=5))
    with pytest.raises(ConfigError, match=f"nothing to audit.*known under .*{mine}$"):
        audit(other)


def test_a_run_of_another_version_is_told_by_the_settings_that_changed_their_name(
    forger, tmp_path, tiny_params
):
    manifest = forger.commits("warm-start")[-1]
    settings = dict(manifest.config["warm_start"])
    settings["optimiser"] = settings.pop("optimizer")
    forger.replace(manifest, config={**manifest.config, "warm_start": settings})
    other = load_config(tiny_params(tmp_path, seed=5))
    told = r"of another version \(warm-start: .*warm_start.optimiser is gone, .*optimizer is new"
    with pytest.raises(ConfigError, match=told):
        audit(other)


def test_an_audit_writes_nothing(forger):
    def listing():
        files = [path for path in Path(forger.cfg.store.path).rglob("*") if path.is_file()]
        return {path: path.stat().st_mtime_ns for path in files}, sorted(
            forger.sql("select run_uuid, end_time, status from runs")
        )

    before = listing()
    audit(forger.cfg, num_episodes=2)
    assert listing() == before
