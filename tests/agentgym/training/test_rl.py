"""Rollouts ahead of updates: bounded staleness, same curriculum, each item once after a kill."""

import json
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from agentgym.audit import audit
from agentgym.audit.stored_steps import expected_ahead
from agentgym.config import load_config
from agentgym.data.check import load_data
from agentgym.data.items import ItemStream, train_stream
from agentgym.learner.learner import LocalLearner
from agentgym.models.fidelity import TORCH
from agentgym.pipeline.run import run_step
from agentgym.pipeline.table import finished, open_store
from agentgym.records import TRAJECTORIES, decode_trajectories
from agentgym.rollouts.engine import LocalEngine
from agentgym.steps.context import METRICS
from agentgym.tracking.points import decode_points
from agentgym.training import rl
from agentgym.training.ahead import Ahead, Rollouts, generation, horizon_state, state_after
from agentgym.types import EngineUsage, Item, Status, Trajectory, Turn

PATIENCE_S = 60.0
ITEMS = [Item("babyai", task) for task in range(40)]


def played(item, step, sample=0, versions=(0,), success=True, max_turns=6):
    turns = tuple(Turn("go", "you see", 0.0, 1, 2, version) for version in versions)
    reward = float(success)
    return Trajectory(
        *(item, sample, step, max_turns, Status.TERMINATED, reward, success, "task", turns),
        *((1, 2), (False, True), (0.0, -0.5)),
    )


class ScriptedEngine:
    """Engine whose success depends on the step.
    `teaches`: items of which some samples succeed at a step; all samples of others fail.
    """

    def __init__(self, success, teaches=lambda item, step: True):
        self.success, self.teaches, self.version = success, teaches, 0

    def usage(self):
        return EngineUsage()

    def collect(self, request):
        step, num_samples = request.step, request.num_samples
        return [
            played(
                item,
                step,
                sample,
                (self.version,),
                success=sample < num_samples * self.success(step)
                if self.teaches(item, step)
                else False,
                max_turns=request.max_turns,
            )
            for item in request.items
            for sample in range(num_samples)
        ]


def adaptive(max_staleness, *more):
    return load_config(
        overrides=[
            f"rollout.max_staleness={max_staleness}",
            "rollout.items_per_step=3",
            "rollout.group_size=4",
            "horizon.kind=adaptive",
            "horizon.max_turns=[6,9,12]",
            "horizon.stage_steps=[16]",
            "horizon.window=2",
            "horizon.min_gain=0.1",
            *more,
        ]
    )


def run(cfg, engine, state, first, last):
    """Return the states of optimizer steps first .. last, from a committed state on."""
    stream = ItemStream(ITEMS, seed=0, position=state.get("stream_position", 0))
    states = []
    with Ahead(cfg.rollout.max_staleness) as ahead:
        ahead.begin(
            (Rollouts(step) for step in range(first, last + 1)),
            generation(cfg, engine, stream, horizon_state(SimpleNamespace(state=state))),
        )
        for step in range(first, last + 1):
            rollouts = ahead.take()
            assert rollouts.step == step
            engine.version = step
            ahead.admit()
            states.append(json.loads(json.dumps(state_after(cfg, rollouts, ahead.begun))))
    return states


def plain(states):
    return [{name: state[name] for name in state if name != "ahead"} for state in states]


def test_the_curriculum_is_the_same_however_far_ahead_and_wherever_a_run_is_resumed():
    def success(step):  # grows, stalls, grows, stalls
        return {1: 0.25, 2: 0.25, 3: 0.75, 4: 0.75}.get(step, 0.75)

    runs = {
        most: run(adaptive(most), ScriptedEngine(success), {}, 1, 16) for most in (0, 1, 4, 100)
    }
    turns = [state["max_turns"] for state in runs[0]]
    assert turns == [6] * 6 + [9] * 4 + [12] * 6
    for most, states in runs.items():
        assert plain(states) == runs[0], most
        assert ("ahead" in states[0]) == bool(most)
    for killed_after in (3, 6, 9):
        resumed = run(
            adaptive(4), ScriptedEngine(success), runs[4][killed_after - 1], killed_after + 1, 16
        )
        assert plain(resumed) == runs[0][killed_after:]


def test_refills_ahead_of_the_updates_take_each_item_of_the_stream_once():
    def teaches(item, step):
        return item.task_id % 3 != 0

    def consumed(states):
        return [item for state in states for item in state["consumed"]]

    more = ("algorithm.recipe=dapo",)
    for most in (0, 4):
        engine = ScriptedEngine(lambda step: 0.5, teaches)
        before = run(adaptive(most, *more), engine, {}, 1, 5)
        assert max(len(state["consumed"]) for state in before) > 3
        after = run(adaptive(most, *more), engine, before[-1], 6, 9)
        stream = ItemStream(ITEMS, seed=0)
        items = [item.item_id for item in stream.next(after[-1]["stream_position"])]
        assert consumed(before) + consumed(after) == items


def test_what_waits_is_told_with_its_step_items_and_versions():
    cfg = adaptive(2)
    waiting = [
        Rollouts(7, items=ITEMS[:2], trajectories=[played(ITEMS[0], 7, versions=(4, 5, 5))]),
        Rollouts(8, items=ITEMS[2:3]),  # in progress
    ]
    told = state_after(cfg, Rollouts(6, max_turns=9, items=ITEMS[4:5], position=31), waiting)
    assert told["ahead"] == [
        {"global_step": 7, "items": ["babyai_0", "babyai_1"], "versions": [4, 5]},
        {"global_step": 8, "items": ["babyai_2"], "versions": []},
    ]
    assert (told["global_step"], told["stream_position"]) == (6, 31)


def test_a_turn_of_older_weights_than_may_be_is_an_error_that_names_the_episode():
    episodes = [
        played(ITEMS[3], 7, 0, (3, 4)),
        played(ITEMS[5], 7, 1, (2, 6)),
        played(ITEMS[6], 7, 2, ()),  # the environment failed before its first turn
    ]
    rollouts = Rollouts(7, trajectories=episodes)
    assert rollouts.staleness(most=4) == 4  # the second has weights 2; step 7 comes after update 6
    assert Rollouts(7, trajectories=episodes[2:]).staleness(most=0) == 0
    with pytest.raises(
        RuntimeError,
        match=(
            r"step 7: babyai_5 sample 1 was sampled by weights version 2, 4 updates behind \(limit"
            r" rollout.max_staleness 3\)"
        ),
    ):
        rollouts.staleness(most=3)


STEPS = 7
NARROW = 1e-6  # nats per token: above float32 rounding, below any update
FAR = {
    "rollout": {
        "items_per_step": 4,
        "group_size": 4,
        "temperature": 0.7,
        "concurrency": 8,
        "max_staleness": 4,
    },
    "horizon": {"max_turns": [5], "stage_steps": [STEPS]},
}


@pytest.fixture(scope="module")
def far(tmp_path_factory, tiny_params, tiny_endpoint):
    """A run four updates ahead, interrupted in its third and in its sixth update, and resumed.
    Each update waits until all batches that may be ahead are complete.
    """
    folder = tmp_path_factory.mktemp("far")
    cfg = load_config(tiny_params(folder, endpoint=tiny_endpoint, **FAR))
    for name in ("prepare", "demonstrate", "initialize", "warm-start"):
        run_step(name, cfg)
    ready, changed = set(), threading.Condition()
    collect, update = LocalEngine.collect, LocalLearner.update

    def told(self, request):
        trajectories = collect(self, request)
        if request.items[0].split == "train":
            with changed:
                ready.add(request.step)
                changed.notify_all()
        return trajectories

    def patient(self, experience, config, *, step, seed):
        with changed:
            assert changed.wait_for(lambda: min(step + 4, STEPS) in ready, PATIENCE_S)
            if step in (3, 6) and step not in killed:
                killed.append(step)
                ready.clear()
                raise KeyboardInterrupt
        return update(self, experience, config, step=step, seed=seed)

    killed, said = [], []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            rl, "tolerance_of", lambda *_: replace(TORCH[torch.float32], mismatch_kl=NARROW)
        )
        patch.setattr(LocalEngine, "collect", told)
        patch.setattr(LocalLearner, "update", patient)
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                run_step("stage-1", cfg)
            assert not [each for each in threading.enumerate() if each.name == "ahead"]
        said.append(str(run_step("stage-1", cfg)))
    assert killed == [3, 6]
    assert said == ["resumed at commit 5"]
    store = open_store(cfg)
    return cfg, store, store.history("stage-1", finished(cfg, store)["stage-1"].key)


@pytest.mark.integration
def test_a_killed_run_far_ahead_learns_from_each_item_once_and_passes_its_audit(far):
    cfg, _, commits = far
    assert [commit.state["global_step"] for commit in commits] == list(range(1, STEPS + 1))
    consumed = [item for commit in commits for item in commit.state["consumed"]]
    stream = ItemStream(load_data(cfg).train, seed=cfg.seed)
    assert consumed == [item.item_id for item in stream.next(STEPS * 4)]
    assert len(set(consumed)) == len(consumed)
    report = audit(cfg)
    assert report.ok, [check.failures for check in report.checks if not check.ok]


@pytest.mark.integration
def test_batches_are_as_old_as_may_be_and_begin_anew_with_a_resume(far):
    _, store, commits = far
    metrics = [decode_points(store.read(commit, METRICS))[0].metrics for commit in commits]
    # resumed at steps 3 and 6, where batches ahead are generated again
    assert [row["sync/staleness_max"] for row in metrics] == [0, 1, 0, 1, 2, 0, 1]
    for commit, row in zip(commits, metrics, strict=True):
        episodes = decode_trajectories(store.read(commit, TRAJECTORIES))
        own = [each for each in episodes if each.item.split == "train"]
        assert [each.item.item_id for each in own[::4]] == commit.state["consumed"]
        assert [each.sample for each in own] == [0, 1, 2, 3] * 4
        oldest = min(version for each in own for version in each.versions)
        assert commit.state["global_step"] - 1 - oldest == row["sync/staleness_max"]


@pytest.mark.integration
def test_the_manifest_names_what_was_generated_ahead_and_a_resume_takes_the_same(far):
    _, _, commits = far
    later = {commit.state["global_step"]: commit.state["consumed"] for commit in commits}
    for commit in commits:
        step, ahead = commit.state["global_step"], commit.state["ahead"]
        told = [each["global_step"] for each in ahead]
        assert told[: STEPS - step] == list(range(step + 1, step + 1 + len(told)))
        # batches ahead when the update ended, and perhaps one that was just started
        assert min(4, STEPS - step) <= len(told) <= min(5, STEPS - step)
        for each in ahead[:4]:
            assert each["items"] == later[each["global_step"]]
            assert all(each["global_step"] - 5 <= v <= step for v in each["versions"])


@pytest.mark.integration
def test_the_audit_finds_rollouts_ahead_that_do_not_follow_from_the_stream(far, forger_of):
    cfg, _, commits = far
    commit, (first, second, *_) = commits[1], commits[1].state["ahead"]
    assert expected_ahead(cfg, commit, stream_after(cfg, commit), 5) == commit.state["ahead"]
    for ahead in (
        [{**first, "versions": [*first["versions"], 99]}],  # later weights
        [{**first, "items": second["items"]}],
        [second, first],
    ):
        changed = commit.model_copy(update={"state": {**commit.state, "ahead": ahead}})
        assert expected_ahead(cfg, changed, stream_after(cfg, commit), 5) != ahead
    forged = forger_of(cfg)
    forged.save(changed)
    lineage = next(check for check in audit(cfg).checks if check.name == "lineage")
    assert "stage-1 commit 1: ahead" in lineage.failures[0]
    forged.save(commit)


def stream_after(cfg, commit):
    return train_stream(cfg, load_data(cfg), commit.state)


@pytest.mark.integration
def test_older_weights_alone_stop_no_run(far):
    _, store, commits = far
    rows = [decode_points(store.read(commit, METRICS))[0].metrics for commit in commits]
    learned = [row for row in rows if "mismatch/kl" in row]
    assert all(row["mismatch/kl"] < NARROW for row in learned if not row["sync/staleness_max"])
    assert max(row["mismatch/kl"] for row in learned) > NARROW
