"""An honest run passes its audit.
A careful forger, who puts every digest right again, is still found and named.
"""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load, save

from agentgym.audit import CHECKS, audit
from agentgym.config import ConfigError, load_config
from agentgym.models.checkpoint import WEIGHTS, load_checkpoint
from agentgym.pipeline.table import open_store, run_key, steps_of
from agentgym.records import TRAJECTORIES
from agentgym.rollouts.metrics import rollout_metrics
from agentgym.steps.context import METRICS, OUTCOMES
from agentgym.store.manifest import Blob
from agentgym.tracking.points import decode_points
from agentgym.types import Status


def played(forger, step="stage-1", seq=0, status=Status.MAX_TURNS):
    """An episode that failed by its horizon: index, episode."""
    return next(
        (i, e)
        for i, e in enumerate(forger.episodes(step, seq))
        if e.status is status and len(e.turns) > 2
    )


def test_an_honest_run_passes_and_every_check_had_something_to_check(forger):
    report = audit(forger.cfg, run=f"r{run_key(forger.cfg)[:12]}")
    assert report.ok, [c for c in report.checks if not c.ok]
    assert list(report.steps) == list(steps_of(forger.cfg))
    assert [check.name for check in report.checks] == list(CHECKS)
    assert all(check.counted > 10 for check in report.checks)


def test_an_honest_run_that_is_only_half_done_passes_as_far_as_it_went(
    whole_run, tmp_path, tiny_params
):
    shutil.copytree(whole_run / "half", tmp_path, dirs_exist_ok=True)
    cfg = load_config(tiny_params(tmp_path, deterministic=True))
    report = audit(cfg)
    assert report.ok, [c for c in report.checks if not c.ok]
    assert list(report.steps) == list(steps_of(cfg))[:6]


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


@pytest.mark.parametrize("name", [WEIGHTS, METRICS, TRAJECTORIES])
def test_a_flipped_byte_is_found_by_its_digest(forger, name):
    path = forger.blob("stage-1", 1, name)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    report = audit(forger.cfg)
    content = next(check for check in report.checks if check.name == "content")
    assert f"{name} of step stage-1 commit 1 is damaged" in content.failures[0]


def test_a_changed_manifest_is_found_by_its_digest(forger):
    path = forger.folder("stage-2") / "manifests" / "000001.json"
    path.write_text(path.read_text().replace('"global_step": 4', '"global_step": 5'))
    assert (
        "it was changed"
        in next(check for check in audit(forger.cfg).checks if check.name == "content").failures[0]
    )


def test_a_lost_record_is_found_and_a_pruned_checkpoint_is_none(forger):
    forger.blob("stage-1", 0, TRAJECTORIES).unlink()
    content = next(check for check in audit(forger.cfg).checks if check.name == "content")
    assert content.num_failures == 1
    assert f"{TRAJECTORIES} of step stage-1 commit 0 is not there" in content.failures[0]
    assert content.skipped > 0


def test_a_forged_reward_contradicts_the_metrics_and_the_environment(forger):
    index, episode = played(forger)
    turns = (*episode.turns[:-1], replace(episode.turns[-1], reward=1.0))
    where = forger.edit("stage-1", 0, index, turns=turns, reward=1.0, success=True)
    said = forger.caught("numbers", "replay", "episodes")
    assert f"{where} turn {len(turns)}: (observation, reward)" in said["replay"]
    assert "stage-1 commit 0: rollout/reward_mean" in said["numbers"]


def test_a_forged_reward_with_forged_metrics_everywhere_contradicts_the_environment(forger):
    index, episode = played(forger)
    turns = (*episode.turns[:-1], replace(episode.turns[-1], reward=1.0))
    where = forger.edit("stage-1", 0, index, turns=turns, reward=1.0, success=True)
    forger.metric(
        "stage-1",
        0,
        **rollout_metrics([e for e in forger.episodes("stage-1", 0) if e.item.split == "train"]),
    )
    assert where in forger.caught("replay", "episodes")["replay"]


def test_a_forged_token_with_its_action_is_not_what_the_weights_sampled(forger):
    index, episode = played(forger)
    turn = episode.turns[1]
    renderer = load_checkpoint(open_store(forger.cfg), forger.commits("warm-start")[-1]).renderer
    ids = list(episode.input_ids)
    ids[turn.start] = next(
        token
        for token in range(100, 300)
        if token != ids[turn.start]
        and renderer.action_ids(renderer.text([token, *ids[turn.start + 1 : turn.end]]).strip())
    )
    action = renderer.text(ids[turn.start : turn.end]).strip()
    turns = (episode.turns[0], replace(turn, action=action), *episode.turns[2:])
    where = forger.edit("stage-1", 0, index, input_ids=tuple(ids), turns=turns)
    said = {
        check.name: " | ".join(check.failures) for check in audit(forger.cfg).checks if not check.ok
    }
    assert said.keys() - {"replay"} == {"rescore", "sampling"}
    assert (
        f"{where} turn 2 token {turn.start} (id {ids[turn.start]}): log-probability"
        in said["rescore"]
    )


def test_a_forged_token_alone_is_not_its_action(forger):
    index, episode = played(forger, "evaluate-stage-1", 1)
    ids = list(episode.input_ids)
    ids[episode.turns[0].start] = 90 if ids[episode.turns[0].start] != 90 else 91
    where = forger.edit("evaluate-stage-1", 1, index, input_ids=tuple(ids))
    assert f"{where} turn 1: action" in forger.caught("tokens", "rescore", "sampling")["tokens"]


def test_a_forged_log_probability_is_not_the_weights(forger):
    index, episode = played(forger, "evaluate-warm-start", 0)
    logprobs = list(episode.logprobs)
    place = episode.turns[1].start
    logprobs[place] -= 0.01
    where = forger.edit("evaluate-warm-start", 0, index, logprobs=tuple(logprobs))
    assert f"{where} turn 2 token {place} " in forger.caught("rescore")["rescore"]


def test_a_forged_observation_is_neither_what_was_read_nor_what_was_answered(forger):
    index, episode = played(forger)
    turns = (replace(episode.turns[0], observation="you win"), *episode.turns[1:])
    where = forger.edit("stage-1", 0, index, turns=turns)
    said = forger.caught("tokens", "replay")
    assert f"{where} turn 1: (observation, reward)" in said["replay"]
    assert f"{where}: token ids as rendered" in said["tokens"]


def test_a_forged_last_observation_that_nobody_read_contradicts_the_environment(forger):
    index, episode = played(forger, "evaluate-stage-2", 0)
    turns = (*episode.turns[:-1], replace(episode.turns[-1], observation="you win"))
    where = forger.edit("evaluate-stage-2", 0, index, turns=turns)
    assert where in forger.caught("replay")["replay"]


def test_a_forged_metric_contradicts_the_episodes_even_where_the_ledger_agrees(forger):
    forger.metric("stage-1", 1, **{"rollout/success": 0.987})
    assert "stage-1 commit 1: rollout/success: expected 0." in forger.caught("numbers")["numbers"]


def test_a_forged_metric_contradicts_the_ledger(forger):
    forger.metric("stage-2", 0, ledger=False, **{"actor/loss": 0.987})
    assert "actor/loss at step 3: 0.987" in forger.caught("ledger")["ledger"]


def test_a_forged_evaluation_contradicts_the_episodes(forger):
    final = forger.commits("evaluate-warm-start")[-1]
    results = json.loads(json.dumps(final.results))
    results["summary"]["greedy"]["mean"] = 0.987
    forger.replace(final, results=results)
    report = forger.commits("report")[-1]
    forger.replace(report, results={**report.results, "before": results})
    said = forger.caught("numbers")["numbers"]
    assert "evaluate-warm-start commit 1: results summary greedy" in said
    assert "'mean': 0.987" in said


def test_forged_outcomes_contradict_the_episodes(forger):
    outcomes = json.loads(forger.blob("evaluate-warm-start", 1, OUTCOMES).read_bytes())
    outcomes["greedy"][3] = 1.0 - outcomes["greedy"][3]
    forger.rewrite("evaluate-warm-start", 1, OUTCOMES, json.dumps(outcomes).encode())
    assert "outcomes.json greedy" in forger.caught("numbers")["numbers"]


def test_forged_weights_did_not_sample_the_evaluation_and_are_not_the_registered_model(forger):
    weights = load(forger.blob("stage-2", 1, WEIGHTS).read_bytes())
    name = next(name for name in weights if "mlp.down_proj" in name)
    weights[name] = weights[name] + 0.1 * torch.randn(
        weights[name].shape, generator=torch.Generator().manual_seed(0)
    )
    data = save(weights)
    forger.rewrite("stage-2", 1, WEIGHTS, data)
    old = forger.sql("select value from model_version_tags where key = 'weights.sha256'")[0][0]
    forger.sql("update model_version_tags set value = ? where value = ?", Blob.of(data).digest, old)
    said = forger.caught("rescore", "sampling", "registry")
    # its validation episodes; the evaluation comes behind the first ten
    assert "stage-2 commit 1" in said["rescore"]
    assert f"{name} as in stage-2 commit 1" in said["registry"]


@pytest.mark.parametrize("how", ["altered", "delivered twice", "removed", "added"])
def test_a_forged_point_in_the_ledger_is_not_of_any_commit(forger, how):
    row = forger.sql(
        "select run_uuid, timestamp, value from metrics where key = 'rollout/success' and step = 3"
    )[0]
    where = "where key = 'rollout/success' and step = 3 and run_uuid = ?"
    if how == "altered":
        forger.sql(f"update metrics set value = 0.987 {where}", row[0])
    elif how == "delivered twice":
        forger.sql(
            "insert into metrics select key, value, timestamp + 1, run_uuid, step, is_nan from"
            f" metrics {where}",
            row[0],
        )
    elif how == "removed":
        forger.sql(f"delete from metrics {where}", row[0])
    else:
        forger.sql(
            "insert into metrics select key, value, timestamp, run_uuid, 99, is_nan from metrics"
            f" {where}",
            row[0],
        )
    said = forger.caught("ledger")["ledger"]
    assert f"rollout/success at step {99 if how == 'added' else 3}" in said
    assert ("is missing" in said) is (how in ("altered", "removed"))
    assert ("not of any commit, or more than once" in said) is (how != "removed")


@pytest.mark.parametrize("waiting", [2, 1])
def test_only_the_newest_commits_of_an_unfinished_step_may_wait_for_their_delivery(
    whole_run, tmp_path, tiny_params, forger_of, waiting
):
    shutil.copytree(whole_run / "half", tmp_path, dirs_exist_ok=True)
    forger = forger_of(load_config(tiny_params(tmp_path, deterministic=True)))
    forger.save(forger.commits("stage-1")[1].model_copy(update={"done": False}))
    for point in decode_points(forger.blob("stage-1", waiting - 1, METRICS).read_bytes()):
        forger.sql("delete from metrics where timestamp = ?", point.time_ms)
    ledger = next(
        check for check in audit(forger.cfg, num_episodes=1).checks if check.name == "ledger"
    )
    assert ledger.ok is (waiting == 2), ledger.failures


def test_an_item_trained_twice_contradicts_the_stream(forger):
    commit = forger.commits("stage-2")[0]
    twice = [*commit.state["consumed"][:-1], forger.commits("stage-1")[0].state["consumed"][0]]
    forger.replace(commit, state={**commit.state, "consumed": twice})
    assert "stage-2 commit 0: consumed" in forger.caught("lineage", "episodes")["lineage"]


def test_a_check_that_cannot_read_what_it_needs_fails_and_the_others_go_on(forger):
    commit = forger.commits("stage-2")[1]
    forger.replace(
        commit, state={name: value for name, value in commit.state.items() if name != "consumed"}
    )
    assert (
        "stage-2: cannot be checked: KeyError" in forger.caught("lineage", "episodes")["episodes"]
    )


def test_a_ledger_that_is_not_there_fails_and_is_not_created(forger):
    path = forger.cfg.state_dir / "mlflow.db"
    path.unlink()
    report = audit(forger.cfg)
    assert [check.name for check in report.checks if not check.ok] == ["ledger"]
    assert not path.exists()


def test_an_audit_writes_nothing(forger):
    def listing():
        files = [path for path in Path(forger.cfg.store.path).rglob("*") if path.is_file()]
        return {path: path.stat().st_mtime_ns for path in files}, sorted(
            forger.sql("select run_uuid, end_time, status from runs")
        )

    before = listing()
    audit(forger.cfg, num_episodes=2)
    assert listing() == before
