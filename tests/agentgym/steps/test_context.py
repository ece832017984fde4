"""A step's context: whole commits, one callback for each, and pruning of old weights."""

import threading

import pytest

from agentgym.config import load_config
from agentgym.models.tensorfiles import Snapshot
from agentgym.records import TRAJECTORIES
from agentgym.steps.context import METRICS, NoProgress, StepContext, scores
from agentgym.steps.step import Kind, Step
from agentgym.store.manifest import BlobMissing
from agentgym.store.posix import StoreFull
from agentgym.store.runstore import store_at
from agentgym.tracking.points import Point, decode_points

STEP = Step(
    name="stage-1",
    title="Stage 1",
    kind=Kind.TRAIN,
    run=lambda _: None,
    sections=(),
    modules=(),
    data="prepare",
    checkpoint="warm-start",
    start="warm-start",
    demonstrations="demonstrate",
)
KEY = "ab" * 32


@pytest.fixture
def opening(tmp_path):
    """(function that opens a step's context with overrides, list of its commits by callback)."""
    told, store = [], store_at(tmp_path, lease_ttl_s=30.0)
    parents = {}
    for name in ("prepare", "demonstrate", "initialize", "warm-start"):
        with store.open(name, KEY) as writer:
            parents[name] = writer.commit(
                **{key: {} for key in ("state", "parents", "config", "results", "timings")},
                done=True,
                blobs={"content": name.encode()},
                records={},
            )
    opened_by = []

    def open_with(*overrides):
        cfg = load_config(overrides=["store.keep_checkpoints=1", *overrides])
        context = StepContext(
            cfg=cfg,
            step=STEP,
            config={"lr": 1.0},
            store=store,
            writer=writer,
            parents=parents,
            environment=lambda expert: None,
            on_commit=told.append,
        )
        opened_by.append(context)
        return context

    with store.open(STEP.name, KEY) as writer:
        yield open_with, told
        for context in opened_by:
            context.close()


@pytest.fixture
def opened(opening):
    """(context of an open step, list of its commits by callback)."""
    open_with, told = opening
    return open_with(), told


def test_parents_are_known_by_what_they_are_for(opened):
    context, _ = opened
    assert context.read(context.data, "content") == b"prepare"
    assert context.read(context.demonstrations, "content") == b"demonstrate"
    assert context.checkpoint is context.start is context.parents["warm-start"]
    assert context.head is None


def test_a_commit_holds_what_it_was_given_and_is_told_once(opened):
    context, told = opened
    points = [Point(1, 1000, {"loss": 0.75}), Point(2, 2000, {"loss": 0.5})]
    first = context.commit(done=False, state={"n": 1}, blobs={"weights": b"1"}, points=points)
    assert told == [first]
    assert context.head == first
    early, last = decode_points(context.read(first, METRICS))
    assert early == points[0]
    assert last.metrics.pop("system/process_memory_megabytes") > 1  # measured at the last point
    last = {name: value for name, value in last.metrics.items() if not name.startswith("system/")}
    assert last == points[1].metrics
    assert TRAJECTORIES not in first.records
    assert first.parents == {name: each.digest for name, each in context.parents.items()}
    assert (first.config, first.results) == ({"lr": 1.0}, {})


def test_time_adds_up_over_commits_and_older_weights_go(opened):
    context, told = opened
    for number in range(3):
        context.commit(done=number == 2, state={"n": number}, blobs={"weights": b"%d" % number})
    spent = [each.timings["wall_s"] for each in told]
    assert spent == sorted(spent)
    assert spent[0] > 0
    assert context.read(told[-1], "weights") == b"2"
    with pytest.raises(BlobMissing, match="weights"):
        context.read(told[0], "weights")


class Held:
    """Content of a weights file."""

    def __init__(self, data):
        self.data, self.size = data, len(data)

    def pieces(self):
        yield memoryview(self.data)


def take(context, step, last, weights=None):
    return context.step_taken(
        step,
        done=step == last,
        state={"global_step": step},
        files={"config.json": b"{}"},
        snapshot=lambda with_optimizer: Snapshot({"weights": Held(weights or b"%d" % step)}),
        points=[Point(step, 1000 + step, {"loss": 0.5})],
    )


@pytest.mark.parametrize(
    ("every", "durable"), [(1, [1, 2, 3, 4, 5, 6, 7]), (3, [3, 6, 7]), (9, [7])]
)
def test_steps_become_durable_together_and_each_keeps_its_points(opening, every, durable):
    open_with, told = opening
    context = open_with(f"store.commit_every={every}", "store.keep_checkpoints=9")
    for step in range(1, 7):
        assert take(context, step, 7) is None
    last = take(context, 7, 7)
    history = context.store.history(STEP.name, KEY)
    assert [each.state["global_step"] for each in history] == list(range(1, 8))
    assert [each.state["global_step"] for each in history if each.blobs] == durable
    assert [each.state["global_step"] for each in told] == durable
    assert [decode_points(context.read(each, METRICS))[0].step for each in history] == list(
        range(1, 8)
    )
    assert last == history[-1]
    spent = [each.timings["wall_s"] for each in history]
    assert spent == sorted(spent)


def test_between_commits_nothing_is_durable(opening):
    open_with, told = opening
    context = open_with("store.commit_every=2")
    take(context, 1, 9)
    assert context.store.history(STEP.name, KEY) == told == []
    take(context, 2, 9)
    take(context, 3, 9)
    context.close()
    assert context.store.head(STEP.name, KEY).state == {"global_step": 2}
    again = open_with("store.commit_every=2")  # as after a kill: step 3 runs again
    take(again, 3, 9)
    take(again, 4, 9)
    again.close()
    assert again.store.head(STEP.name, KEY).state == {"global_step": 4}
    assert [each.seq for each in again.store.history(STEP.name, KEY)] == [0, 1, 2, 3]


def test_large_commits_are_made_as_often_as_the_bound_allows(opening):
    open_with, told = opening
    context = open_with("store.max_mib_per_minute=1")
    for step in range(1, 6):
        take(context, step, 6, weights=b"%d" % step * 2**20)
    take(context, 6, 6)
    assert [each.state["global_step"] for each in told] == [1, 6]


def test_what_is_written_is_what_was_there_when_the_step_was_taken(opening):
    open_with, told = opening
    slow, written = threading.Event(), threading.Event()
    context = open_with("store.keep_checkpoints=2")
    commit = context.writer.commit

    def held_up(**content):
        written.set()
        assert slow.wait(30)
        return commit(**content)

    context.writer.commit = held_up
    take(context, 1, 9)
    assert written.wait(30)
    assert context.store.head(STEP.name, KEY) is None  # the run may be one commit ahead, ...
    second = threading.Thread(target=take, args=(context, 2, 9))
    second.start()
    second.join(0.2)
    assert second.is_alive()  # ... but not two
    slow.set()
    second.join(30)
    context.close()
    assert [context.read(each, "weights") for each in told] == [b"1", b"2"]


def test_the_commit_that_did_best_in_validation_keeps_its_weights(opening):
    open_with, told = opening

    def validated(context, step, score):
        context.step_taken(
            step,
            done=False,
            state={"global_step": step},
            files={},
            snapshot=lambda with_optimizer: Snapshot({"weights": Held(b"%d" % step)}),
            points=[Point(step, 1000 + step, {"validation/success": score} if score else {})],
        )

    rules = ("store.keep_best=true", "store.commit_every=1000", "store.keep_checkpoints=1")
    context = open_with(*rules)
    for step, score in enumerate([0.3, None, 0.7, 0.7, None, 0.5], 1):
        validated(context, step, score)
    context.close()
    assert [each.state["global_step"] for each in told] == [1, 3, 4, 6]
    assert scores(context.store, STEP.name, KEY) == [(0.3, 0), (0.7, 2), (0.7, 3), (0.5, 5)]
    again = open_with(*rules)  # as after a kill: finds the best commit again
    validated(again, 7, 0.6)
    again.close()
    kept = [each for each in told if again.store.has(each)]
    assert [each.state["global_step"] for each in kept] == [3, 7]


def test_a_failure_of_the_writing_stops_the_run(opening):
    open_with, told = opening
    context = open_with()

    def fails(**content):
        raise StoreFull(28, "no space left")

    context.writer.commit = fails
    take(context, 1, 9)
    with pytest.raises(StoreFull, match="no space left"):
        take(context, 2, 9)
    assert told == []
    assert context.head is None


def test_what_stopped_a_step_is_told_and_not_what_became_of_its_writing(opening, caplog):
    open_with, _ = opening
    context = open_with()

    def fails(**content):
        raise StoreFull(28, "no space left")

    context.writer.commit = fails

    def interrupted():
        with context:
            take(context, 1, 9)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert "step stage-1: its last commit was not made: [Errno 28] no space left" in caplog.text
    again = open_with()
    again.writer.commit = fails
    take(again, 1, 9)
    with pytest.raises(StoreFull):
        again.__exit__(None, None, None)


def test_what_a_killed_writer_left_goes_before_the_first_commit(opening, tmp_path):
    open_with, _ = opening
    context = open_with()
    context.store.add(STEP.name, KEY, Held(b"of a step that was never committed"))
    litter = next(tmp_path.glob("steps/stage-1-*/blobs")) / ".tmp-0123"
    litter.touch()
    found = []
    commit = context.writer.commit
    context.writer.commit = lambda **content: found.append(litter.exists()) or commit(**content)
    last = take(context, 1, 1)
    assert found == [False]
    kept = context.store._folder(STEP.name, KEY).blobs()
    named = {blob.digest for blob in (*last.blobs.values(), *last.records.values())}
    assert kept == named


def test_no_progress_shows_nothing(capsys):
    progress = NoProgress()
    progress.start("stage", 2)
    progress.advance(1, "note")
    assert capsys.readouterr() == ("", "")
