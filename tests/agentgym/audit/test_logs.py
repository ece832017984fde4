"""A second digest, a pointer in git and the chain of commits cover what the first digest omits."""

import json
from types import SimpleNamespace

from agentgym.audit import audit
from agentgym.audit.findings import Checks
from agentgym.audit.logs import check_records
from agentgym.evaluation.history import STEP as HISTORY
from agentgym.pipeline.dvc import began_of, pointer
from agentgym.pipeline.table import finished, open_store, steps_of
from agentgym.steps.context import METRICS
from agentgym.steps.step import Outcome
from agentgym.store.manifest import Manifest, decode_commit, encode_commit
from agentgym.tracking.points import decode_points, encode_points


def test_a_pointer_in_git_pins_what_the_first_digest_leaves_out(forger, tmp_path):
    """Shorten recorded times and recompute every digest and tag."""
    kept = tmp_path / "outputs"
    kept.mkdir()
    done, table = finished(forger.cfg, open_store(forger.cfg)), steps_of(forger.cfg)
    for name in ("prepare", "stage-1"):
        (kept / f"{name}.json").write_text(
            pointer(forger.cfg, Outcome(table[name], done[name], "done"))
        )
    honest = audit(forger.cfg, num_episodes=1, pointers=kept)
    assert honest.ok, [check for check in honest.checks if not check.ok]
    assert "2 pointers in" in next(check.note for check in honest.checks if check.name == "records")
    points = decode_points(forger.blob("stage-1", 0, METRICS).read_bytes())
    points[0].metrics["time/step_s"] /= 2
    for table_name in ("metrics", "latest_metrics"):
        values = (points[0].metrics["time/step_s"], points[0].time_ms)
        forger.sql(
            f"update {table_name} set value = ? where key = 'time/step_s' and timestamp = ?",
            *values,
        )
    forger.rewrite("stage-1", 0, METRICS, encode_points(points))
    forger.report()
    assert audit(forger.cfg, num_episodes=1).ok  # without pointers the store is consistent
    said = {
        check.name: check.failures
        for check in audit(forger.cfg, num_episodes=1, pointers=kept).checks
        if not check.ok
    }
    assert list(said) == ["records"]
    assert f"{kept / 'stage-1.json'}: records_digest: expected" in said["records"][0]


def committed(step, at, **changes):
    """Return a step with one commit, and the fields of its pointer."""
    fields = {"step": step, "key": "a" * 64, "seq": 0, "done": True, "created_at": at}
    empty = {name: {} for name in ("parents", "config", "state", "blobs", "results")}
    manifest = Manifest(**{**fields, **empty, "follows": "", **changes})
    record = SimpleNamespace(
        name=step, key=manifest.key, commits=[manifest], final=manifest, at=lambda _: step
    )
    names = {
        "step": step,
        "key": manifest.key,
        "digest": manifest.digest,
        "records_digest": manifest.records_digest,
        "run": "f" * 64,
        "began": began_of([manifest]),
    }
    return record, names


def test_a_colleagues_pointers_of_the_same_parameters_are_anothers_in_words_and_no_failure(
    tmp_path,
):
    """Compare two honest runs: clock times, and so keys and digests, may differ."""
    mine = [committed(step, 1000.0)[0] for step in ("prepare", "stage-1", "stage-2", "report")]
    theirs = {
        "prepare": committed("prepare", 2000.0)[1],
        "stage-1": committed("stage-1", 2000.0, key="b" * 64, results={"success": 0.5})[1],
        "stage-2": {**committed("stage-2", 2000.0)[1], "began": None},  # an earlier version's
        "report": {**committed("report", 2000.0)[1], "key": "c" * 64, "run": "e" * 64},
    }
    for name, names in theirs.items():
        (tmp_path / f"{name}.json").write_text(json.dumps({"manifest": [names]}))
    checks = Checks("records")
    check_records("f" * 64, mine, tmp_path, checks)
    assert checks.failures == []
    assert checks.notes == [
        f"0 pointers in {tmp_path} compared",
        "1 are of another run: report",
        "2 are of another run of the same parameters, which has records of its own: prepare,"
        " stage-1",
        "1 are of another run of the same parameters, or of this one before its records were"
        " changed: they were written before pointers had the time a step began: stage-2",
    ]


def test_ones_own_pointers_still_find_what_was_changed(tmp_path):
    record, names = committed("stage-1", 1000.0)
    (tmp_path / "stage-1.json").write_text(json.dumps({"manifest": [names]}))
    changed = committed("stage-1", 1000.0, timings={"wall_s": 1.0})[0]
    for found, failures in ((record, 0), (changed, 1)):
        checks = Checks("records")
        check_records("f" * 64, [found], tmp_path, checks)
        assert checks.num_failures == failures, checks.failures
        assert checks.notes[0] == f"1 pointers in {tmp_path} compared"


def test_a_commit_that_was_exchanged_breaks_the_chain(forger):
    path = forger.folder("stage-1") / "manifests" / "000000.json"
    path.write_bytes(
        encode_commit([forger.commits("stage-1")[0].model_copy(update={"created_at": 1.0})])
    )
    records = next(
        check for check in audit(forger.cfg, num_episodes=1).checks if check.name == "records"
    )
    assert "stage-1 commit 1: records digest of the commit before: expected" in records.failures[0]


def test_a_store_from_before_the_second_digest_is_told_from_one_that_has_it(forger):
    for path in forger.steps.glob("*/manifests/*.json"):
        tree = json.loads(path.read_bytes())
        if tree["step"] == HISTORY:  # did not exist then
            continue
        del tree["follows"], tree["records_digest"]
        path.write_text(json.dumps(tree))
        assert decode_commit(path.read_bytes())[-1].digest == tree["digest"]
    report = audit(forger.cfg, num_episodes=1)
    assert report.ok, [check for check in report.checks if not check.ok]
    records = next(check for check in report.checks if check.name == "records")
    assert records.not_checked == (
        f"the order of a step's records ({len(report.steps)}), they were written"
        " before manifests had a records digest",
    )
