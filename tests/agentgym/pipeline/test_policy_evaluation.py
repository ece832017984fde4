"""Any policy under a protocol: no episode is lost or repeated, and failures of the system do not
count against the policy.
"""

import json
import os
import random
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from agentgym.commands.evaluate import code_of
from agentgym.config import ConfigError, load_config
from agentgym.evaluation.protocol import EvaluationRequest
from agentgym.evaluation.record import read_episodes
from agentgym.evaluation.result import Result
from agentgym.evaluation.stored import stored_result
from agentgym.pipeline.contenders import invite
from agentgym.pipeline.policy_evaluation import evaluate_policy, protocol_for, regrade, show
from agentgym.store.lease import LeaseHeld
from envs.registry import load_spec
from tests.agentgym.pipeline.vendor import OPTIONS, Endpoint, ask

pytestmark = pytest.mark.integration
TEXTCRAFT = {"goals": ["paper", "melon seeds"], "distractors": 0}


def test_chance_is_evaluated_once_kept_shown_and_graded_again(cfg):
    ran = evaluate_policy(cfg, ask("random"))
    assert (ran.how, code_of(ran), ran.result.is_complete) == ("ran", 0, True)
    assert len(ran.result.slots) == 12
    assert ran.result.coverage == 1.0
    assert {slot.family for slot in ran.result.slots} == {"GoToRedBallNoDists"}
    assert all(slot.task for slot in ran.result.slots)
    again = evaluate_policy(cfg, ask("random"))
    assert (again.how, again.result) == ("done", ran.result)
    assert show(cfg, ran.result.digest[:8]).result == ran.result
    assert Result.load(ran.folder) == ran.result
    rows = list(read_episodes(ran.folder / "episodes.parquet"))
    assert len(rows) == 12
    assert sum(row["success"] for row in rows) == sum(slot.success for slot in ran.result.slots)
    page = (ran.folder / "report.html").read_text()
    assert "default-src 'none'" in page
    assert "<script" not in page
    graded = regrade(cfg, ran.result.digest[:8])
    assert list(graded.changed) == []
    outcomes = [(slot.outcome, slot.success, slot.reward) for slot in ran.result.slots]
    found = [(slot.outcome, slot.success, slot.reward) for slot in graded.result.slots]
    assert found == outcomes
    assert graded.result.digest != ran.result.digest
    other = evaluate_policy(cfg, ask("random", changes={"seed": 2}))
    assert (other.how, other.result.digest != ran.result.digest) == ("ran", True)
    with pytest.raises(ConfigError, match="is none; there are"):
        show(cfg, "ffff")
    runs = ledger_runs(cfg)
    assert sorted(runs) == sorted({each.result.digest for each in (ran, graded, other)})
    assert runs[ran.result.digest].data.metrics["eval/coverage"] == 1.0


def test_an_evaluation_on_record_is_graded_again_on_what_the_owner_configured_alone(
    tmp_path, tiny_params
):
    recipes = shutil.copy("envs/textcraft/recipes.json", tmp_path)
    params = tiny_params(tmp_path, env={"name": "textcraft", "options": {}})
    own = load_config(params, [f"env.options.recipes={recipes}"])
    ran = evaluate_policy(own, ask("random", changes={"items": {"ids": ["textcraft_0"], "num": 1}}))
    assert ran.result.is_complete
    with pytest.raises(ConfigError, match="textcraft as on record would use recipes"):
        regrade(load_config(params), ran.result.digest[:8])
    assert regrade(own, ran.result.digest[:8]).changed == []


def ledger_runs(cfg):
    from agentgym.tracking.deliver import tracker_of

    tracker = tracker_of(cfg)
    found = tracker.client.search_runs(
        [tracker.experiment_id], filter_string="tags.kind = 'evaluation'"
    )
    return {run.data.tags["evaluation_key"]: run for run in found}


def test_two_environments_are_played_side_by_side_each_as_its_protocol_says(
    cfg, endpoints, tmp_path
):
    protocol = tmp_path / "both.yaml"
    protocol.write_text(
        json.dumps(
            {
                "envs": [
                    {
                        "env": {
                            "name": "babyai",
                            "options": OPTIONS,
                            "endpoints": [endpoints["babyai"]],
                        },
                        "items": {"ids": ["babyai_1", "babyai_2"]},
                        "max_turns": 3,
                        "num_samples": 2,
                    },
                    {
                        "env": {
                            "name": "textcraft",
                            "endpoints": [endpoints["textcraft"]],
                            "options": TEXTCRAFT,
                        },
                        "items": {"ids": ["textcraft_0"]},
                        "max_turns": 2,
                        "greedy": True,
                    },
                ]
            }
        )
    )
    asked = EvaluationRequest(policy="echo:inventory", protocol=str(protocol))
    result = evaluate_policy(cfg, asked).result
    assert result.envs == ("babyai", "textcraft")
    turns = {(slot.env, slot.sample): slot.num_turns for slot in result.slots}
    assert turns == {("babyai", 1): 3, ("babyai", 2): 3, ("textcraft", 0): 2, ("textcraft", 1): 2}
    assert result.numbers["babyai"]["invalid_actions"]["mean"] == 1.0  # babyai has no such action
    assert result.numbers["textcraft"]["invalid_actions"]["mean"] == 0.0
    assert "greedy" not in result.numbers["babyai"]["summary"]
    assert result.numbers["textcraft"]["summary"]["greedy"]["mean"] == 0.0


def test_a_folder_handed_over_is_told_the_rules_and_a_checkpoint_of_ours_as_it_was_trained(
    cfg, model_folder, tmp_path
):
    alone = {"num_samples": 1, "max_turns": 2, "items": {"num": 1}}
    handed = tmp_path / "handed-over"
    shutil.copytree(model_folder, handed)
    (handed / "chat.json").unlink()  # other programs do not write it
    lines = []
    ours = evaluate_policy(cfg, ask(str(model_folder), changes=alone), tell=lines.append)
    assert (lines, ours.result.about["instructions"]) == ([], {})
    theirs = evaluate_policy(cfg, ask(str(handed), changes=alone), tell=lines.append)
    assert "You are in a grid of rooms" in theirs.result.about["instructions"]["babyai"]
    # limited by its context window
    assert "at most 256 tokens a reply and 512 an episode" in lines[0]
    policy = dict(theirs.result.identity["policy"])
    assert policy.pop("asked")["babyai"]["max_new_tokens"] == 256
    assert policy == ours.result.identity["policy"]


def test_longer_episodes_leave_fewer_in_flight_unless_their_number_was_chosen(
    cfg, model_folder, tmp_path
):
    handed = tmp_path / "handed-over"
    shutil.copytree(model_folder, handed)
    (handed / "chat.json").unlink()

    def in_flight(**changes):
        request = EvaluationRequest(policy=str(handed), changes=changes)
        return invite(cfg, protocol_for(cfg, request), request).protocol.concurrency

    before = cfg.rollout.concurrency
    assert in_flight() == before * cfg.model.context_tokens // 512
    assert in_flight(concurrency=before) == before


def test_one_writer_at_a_time(cfg):
    from agentgym.pipeline.table import open_store

    ran = evaluate_policy(cfg, ask("random", changes={"min_coverage": 0.5, "seed": 9}))
    store = open_store(cfg)
    with store.open("evaluation", ran.manifest.key):
        other = store.open("evaluation", ran.manifest.key)
        with pytest.raises(LeaseHeld):
            other.__enter__()


def test_killed_at_five_random_points_the_report_is_that_of_an_undisturbed_one(
    cfg, tmp_path, tiny_params, endpoints, model_folder
):
    changes = {
        "deterministic": True,
        "chunk_episodes": 2,
        "num_samples": 3,
        "greedy": True,
        "concurrency": 4,
        "max_new_tokens": 4,
        "context_tokens": 256,
    }
    asked = ask(str(model_folder), changes=changes)
    whole = evaluate_policy(cfg, asked)
    total = len(whole.result.slots)
    other = load_config(
        tiny_params(tmp_path / "killed", endpoint=endpoints["babyai"]),
        [f"env.options.{name}={json.dumps(value)}" for name, value in OPTIONS.items()],
    )
    points = sorted(random.Random().sample(range(1, total), 5))
    for point in points:
        ended = in_child(lambda point=point: evaluate_policy(other, asked, Killing(point)))
        assert os.WIFSIGNALED(ended), ended
    resumed = evaluate_policy(other, asked)
    assert resumed.how == "resumed", points
    assert resumed.result.to_bytes() == whole.result.to_bytes(), points
    assert resumed.manifest.digest == whole.manifest.digest
    files = [each.folder / "evaluation.png" for each in (whole, resumed)]
    assert files[0].read_bytes() == files[1].read_bytes()


class Killing:
    """Progress that kills the process after this many episodes, earlier processes' included."""

    def __init__(self, point):
        self.left = point

    def start(self, what, total):
        pass

    def advance(self, count=1, note=""):
        self.left -= count
        if self.left <= 0 and count == 1:
            os.kill(os.getpid(), signal.SIGKILL)


def in_child(work):
    """Run `work` in a forked process. Return its wait status."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        finally:
            os._exit(1)
    return os.waitpid(pid, 0)[1]


def test_a_checkpoint_scores_as_the_runs_own_evaluation_of_it_and_as_its_registered_version(
    copy_run, tmp_path, tiny_params, tiny_endpoint
):
    params = tiny_params(copy_run(tmp_path), endpoint=tiny_endpoint, deterministic=True)
    run = load_config(params)
    from agentgym.pipeline.table import finished, open_store

    store = open_store(run)
    own = finished(run, store)["evaluate-stage-2"]
    ours = stored_result(store, own)
    by_step = evaluate_policy(run, EvaluationRequest(policy=":stage-2"))
    registered = evaluate_policy(run, EvaluationRequest(policy=f"models:/{run.registered_model}/1"))
    numbers = by_step.result.numbers["babyai"]
    for name in ("greedy", "avg_at_2", "pass_at_2"):
        assert numbers["summary"][name]["mean"] == own.results["summary"][name]["mean"]
    for found in (by_step, registered):
        assert [slot.to_row()[4:] for slot in found.result.slots] == [
            slot.to_row()[4:] for slot in ours.slots
        ]
    assert by_step.result.identity["policy"] == ours.identity["policy"]
    assert registered.result.identity["policy"]["tokenizer"]


def test_a_repository_of_the_hub_is_evaluated_as_the_folder_of_its_files(
    cfg, model_folder, tmp_path, monkeypatch
):
    """Use the Hub's cache, as a download leaves it, without network access."""
    from huggingface_hub import constants

    commit = "0123456789abcdef0123456789abcdef01234567"
    kept = tmp_path / "hub/models--somebody--tiny"
    shutil.copytree(model_folder, kept / "snapshots" / commit)
    (kept / "refs").mkdir()
    (kept / "refs/main").write_text(commit)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    by_name = evaluate_policy(cfg, ask("somebody/tiny"))
    assert (by_name.how, by_name.result.coverage) == ("ran", 1.0)
    # results are keyed by weights, not by name
    for policy in (f"somebody/tiny@{commit}", str(model_folder)):
        again = evaluate_policy(cfg, ask(policy))
        assert (again.how, again.result.digest) == ("done", by_name.result.digest)
    with pytest.raises(ConfigError, match="somebody/other cannot be had from the Hub"):
        evaluate_policy(cfg, ask("somebody/other"))


def test_chance_is_refused_at_once_where_an_environment_gives_no_hints(
    serving, tmp_path, tiny_params
):
    silent = replace(load_spec("babyai", OPTIONS), offers_hints=False)
    with serving(silent) as (endpoint, _):
        for dialect, url in (("native", endpoint), ("agentgym", f"{endpoint}/agentgym")):
            cfg = load_config(tiny_params(tmp_path / dialect, endpoint=url))
            cfg = cfg.model_copy(update={"env": cfg.env.model_copy(update={"dialect": dialect})})
            with pytest.raises(ConfigError, match=f"babyai: {url} gives no hints, of which random"):
                evaluate_policy(cfg, ask("random"))
            assert not Path(cfg.store.path, "steps").exists()


def test_a_policy_that_is_not_there_is_refused_before_anything_starts(cfg, tmp_path):
    for policy, said in (
        (":stage-9", "unknown step"),
        ("models:/nobody@champion", "models:/nobody"),
        ("http://127.0.0.1:9/v1", "does not say which models"),
        (str(tmp_path), "holds no config.json"),
    ):
        with pytest.raises(ConfigError, match=said):
            evaluate_policy(cfg, ask(policy))
    with pytest.raises(ConfigError, match="endpoint promises"), Endpoint() as stub:
        evaluate_policy(cfg, ask(stub.url, changes={"deterministic": True}))
    assert not Path(cfg.store.path, "steps").exists()
