"""The one way to make progress durable: whole commits, told when made, old weights pruned."""

import pytest

from agentgym.config import load_config
from agentgym.records import TRAJECTORIES
from agentgym.steps.context import METRICS, NoProgress, StepContext
from agentgym.steps.step import Kind, Step
from agentgym.store.posix import posix_store
from agentgym.store.runstore import BlobMissing
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
    demonstrations="initialize",
)
KEY = "ab" * 32


@pytest.fixture
def opened(tmp_path):
    """(context of an open step, what was told of its commits)."""
    told, store = [], posix_store(tmp_path, lease_ttl_s=30.0)
    parents = {}
    for name in ("prepare", "initialize", "warm-start"):
        with store.open(name, KEY) as writer:
            parents[name] = writer.commit(
                **{key: {} for key in ("state", "parents", "config", "results", "timings")},
                done=True,
                blobs={"content": name.encode()},
                records={},
            )
    cfg = load_config(overrides=["store.keep_checkpoints=1"])
    with store.open(STEP.name, KEY) as writer:
        yield (
            StepContext(
                cfg=cfg,
                step=STEP,
                config={"lr": 1.0},
                store=store,
                writer=writer,
                parents=parents,
                environment=lambda expert: None,
                on_commit=told.append,
            ),
            told,
        )


def test_parents_are_known_by_what_they_are_for(opened):
    context, _ = opened
    assert context.read(context.data, "content") == b"prepare"
    assert context.read(context.demonstrations, "content") == b"initialize"
    assert context.checkpoint is context.start is context.parents["warm-start"]
    assert context.head is None


def test_a_commit_holds_what_it_was_given_and_is_told_once(opened):
    context, told = opened
    points = [Point(1, 1000, {"loss": 0.5})]
    first = context.commit(done=False, state={"n": 1}, blobs={"weights": b"1"}, points=points)
    assert told == [first]
    assert context.head == first
    assert decode_points(context.read(first, METRICS)) == points
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


def test_no_progress_shows_nothing(capsys):
    progress = NoProgress()
    progress.start("stage", 2)
    progress.advance(1, "note")
    assert capsys.readouterr() == ("", "")
