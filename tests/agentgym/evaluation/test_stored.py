"""Results are computed from stored episodes and compared with the result file."""

import json
from dataclasses import asdict

import numpy as np
import pytest

from agentgym.cli import main
from agentgym.comparison.versus import find_result, versus
from agentgym.config import ConfigError, load_config
from agentgym.evaluation.numbers import Table
from agentgym.evaluation.paired import align, compare
from agentgym.evaluation.protocol import EvaluationRequest
from agentgym.evaluation.publish import evidence_anew, promotions_of
from agentgym.evaluation.record import PLAN
from agentgym.evaluation.result import CLOCK, RESULT
from agentgym.evaluation.stored import OUTCOMES, NumbersChanged, plan_of, stored_result
from agentgym.pipeline.policy_evaluation import evaluate_policy, regrade
from agentgym.pipeline.table import finished, open_store
from agentgym.pipeline.versions import play_anew, promote
from agentgym.records import TRAJECTORIES
from agentgym.store.manifest import Blob
from agentgym.viewer.names import identity_of
from agentgym.viewer.study_page import versus as viewed
from agentgym.viewer.viewer import Viewer

pytestmark = pytest.mark.integration
LAST = "evaluate-stage-2"


@pytest.fixture
def cfg(copy_run, tmp_path, tiny_params, tiny_endpoint):
    params = tiny_params(copy_run(tmp_path), endpoint=tiny_endpoint, deterministic=True)
    return load_config(params)


def forged(data):
    """Return a result in which every episode is a success."""
    tree = json.loads(data)
    columns = {name: place for place, name in enumerate(tree["columns"])}
    for slot in tree["slots"]:
        slot[columns["success"]], slot[columns["reward"]] = True, 1.0
    return json.dumps(tree, separators=(",", ":")).encode()


def test_a_result_that_is_not_that_of_its_episodes_is_read_by_nobody(cfg, forger_of, capsys):
    forger = forger_of(cfg)
    asked = EvaluationRequest(policy="random", changes={"num_samples": 1, "items": {"num": 4}})
    evaluation = evaluate_policy(cfg, asked).manifest
    assert all(slot.counts for slot in stored_result(open_store(cfg), evaluation).slots)
    data = open_store(cfg).read(evaluation, RESULT)
    folder = next((cfg.store.path / "steps").glob("evaluation-*"))
    blob = Blob.of(forged(data))
    (folder / "blobs" / blob.digest).write_bytes(forged(data))
    final = forger.commits("evaluation")[-1]
    forger.save(final.model_copy(update={"blobs": {RESULT: blob}}))
    head = open_store(cfg).final("evaluation", evaluation.key)
    assert open_store(cfg).read(head, RESULT) == forged(data)
    said = "its result is not that of its episodes: babyai_"
    for ask in (
        lambda: stored_result(open_store(cfg), head),
        lambda: evaluate_policy(cfg, asked),
        lambda: regrade(cfg, head.key),
    ):
        with pytest.raises(NumbersChanged, match=said):
            ask()
    with pytest.raises(ConfigError, match=said):
        find_result(head.key, cfg)
    params = str(cfg.store.path.parent / "params.yaml")
    assert main(["evaluate", "--show", head.key, "--params", params]) != 0
    assert said in capsys.readouterr().err


def test_the_gate_refuses_a_forged_result_of_its_own_protocol(cfg, forger_of, tmp_path):
    """Forge a result as a writer of the store could: a model without success would be promoted."""
    forger = forger_of(cfg)
    protocol = tmp_path / "gate.yaml"
    protocol.write_text(
        "envs:\n- {env: {name: babyai}, items: {num: 12}, num_samples: 2, max_turns: 4,"
        " context_tokens: 512, max_new_tokens: 6, instructions: false}\n"
    )
    gated = cfg.model_copy(
        update={"gate": cfg.gate.model_copy(update={"protocol": str(protocol), "min_items": 1})}
    )
    asked = EvaluationRequest(policy=f"models:/{cfg.registered_model}/1", protocol=str(protocol))
    played = evaluate_policy(gated, asked).manifest
    blob = Blob.of(forged(open_store(cfg).read(played, RESULT)))
    folder = next((cfg.store.path / "steps").glob("evaluation-*"))
    (folder / "blobs" / blob.digest).write_bytes(forged(open_store(cfg).read(played, RESULT)))
    forger.save(forger.commits("evaluation")[-1].model_copy(update={"blobs": {RESULT: blob}}))
    with pytest.raises(NumbersChanged):
        evaluate_policy(gated, asked)
    candidate = promotions_of(gated, open_store(gated)).version("1")
    with pytest.raises(NumbersChanged):
        evidence_anew(gated, candidate, None, play_anew(gated))


def test_a_version_whose_recorded_result_was_forged_is_rejected(cfg, forger_of):
    forger, store = forger_of(cfg), open_store(cfg)
    last = forger.commits(LAST)[-1]
    forger.rewrite(LAST, last.seq, RESULT, forged(store.read(last, RESULT)))
    held_by_none = cfg.registry.model_copy(update={"alias": "next"})
    entry = promote(cfg.model_copy(update={"registry": held_by_none}), "1")
    assert (entry.verdict, entry.moved) == ("REJECT", False)
    assert (
        "its result is not that of its episodes: babyai_"
        in entry.decision["evidence"]["audit_note"]
    )


def test_an_evaluation_of_a_run_before_it_had_a_plan_is_still_read(cfg):
    """Read commits that hold the episodes, with the outcomes as two tables in the last one."""
    store, done = open_store(cfg), finished(cfg, open_store(cfg))
    now = stored_result(store, done[LAST])
    table = Table.of(now.slots)
    plain = {
        "items": table.items,
        "greedy": [None if np.isnan(value) else value for value in table.greedy],
        "samples": [[None if np.isnan(v) else v for v in row] for row in table.samples],
    }
    commits = store.history(LAST, done[LAST].key)

    def written_earlier(key, outcomes):
        with store.open(LAST, key) as writer:
            for commit in commits:
                if TRAJECTORIES in commit.records:
                    records = {TRAJECTORIES: store.read(commit, TRAJECTORIES)}
                    writer.commit(**{**told(commit), "records": records, "blobs": {}})
            last = {"blobs": {OUTCOMES: json.dumps(outcomes).encode()}, "records": {}}
            return writer.commit(**{**told(commits[-1]), **last, "done": True})

    earlier = written_earlier("a" * 64, plain)
    found = stored_result(store, earlier)
    assert [slot.to_row()[4:] for slot in found.slots] == [s.to_row()[4:] for s in now.slots]
    assert found.numbers == now.numbers
    assert compare(align(found, found), confidence=0.95)["babyai"].difference.mean == 0.0
    changed = {**plain, "greedy": [1.0 - value for value in plain["greedy"]]}
    with pytest.raises(NumbersChanged, match="its outcomes are not those of its episodes"):
        stored_result(store, written_earlier("b" * 64, changed))


def told(commit):
    return {
        "done": False,
        "state": commit.state,
        "parents": commit.parents,
        "config": commit.config,
        "results": commit.results,
        "timings": commit.timings,
    }


def test_a_run_s_evaluation_has_the_record_of_any(cfg):
    store, done = open_store(cfg), finished(cfg, open_store(cfg))
    commits = store.history(LAST, done[LAST].key)
    asked = EvaluationRequest(policy=":stage-2")
    other = evaluate_policy(cfg, asked)
    theirs = store.history("evaluation", other.manifest.key)
    for each in (commits, theirs):
        names = [{*commit.records, *commit.blobs} - {"metrics.jsonl"} for commit in each]
        assert (names[0], names[-1]) == ({PLAN}, {RESULT, CLOCK})
        assert all(own == {TRAJECTORIES} for own in names[1:-1])
    plans = [plan_of(store, each) for each in (commits, theirs)]
    assert plans[0].slots == plans[1].slots
    assert plans[0].identity == plans[1].identity
    assert stored_result(store, done[LAST]).slots == other.result.slots


def test_the_viewer_and_the_command_decide_alike(cfg):
    """Compare both estimates: pages once gave 47.4 points (episodes), the command 49.8 (items)."""
    named = [find_result(f":{name}", cfg) for name in ("initialize", "stage-2")]
    (contrast,) = versus(named)["contrasts"]
    viewer = Viewer.open(cfg)
    try:
        viewer.refresh()
        steps = {step["name"]: step for step in viewer.bodies.steps().values()}
        both = [steps[f"evaluate-{name}"] for name in ("initialize", "stage-2")]
        asked = tuple(identity_of(step) for step in both)
        found = asdict(viewed(viewer.index.reader, *both, asked).decisions["babyai"])
    finally:
        viewer.close()
    told_by_command = json.loads(json.dumps(contrast["envs"]["babyai"]))
    for name, value in json.loads(json.dumps(found)).items():
        assert told_by_command[name] == value, name
