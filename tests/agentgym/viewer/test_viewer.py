"""The state of a run on pages: running or stopped."""

import pytest
from fastapi.testclient import TestClient

from agentgym.viewer.app import make_app
from tests.agentgym.viewer.conftest import TRAINING, episode


def page(viewer, path="/"):
    viewer.refresh()
    return TestClient(make_app(viewer)).get(path).text


def test_a_run_is_under_way_while_somebody_works_on_it_and_stopped_with_the_reason_after(
    made, view
):
    made.add([episode()], step="stage-1", key="a")
    viewer = view()
    with made.store.open("stage-1", "a" * 64):
        assert "under way" in page(viewer)
        assert "under way" in page(viewer, "/training")
    with pytest.raises(ValueError, match="disk"), made.store.open("stage-1", "a" * 64):
        raise ValueError("the disk is <full>")
    for path in ("/", "/training"):
        shown = page(viewer, path)
        assert "under way" not in shown
        assert "stopped" in shown
        assert "stage-1: ValueError: the disk is &lt;full&gt;" in shown


def test_a_run_whose_next_step_has_begun_and_committed_nothing_is_under_way(made, view):
    first = made.add([episode()], step="stage-1", key="a", done=True)
    made.add([episode()], step="evaluate-stage-1", key="b", parents={"stage-1": first.digest})
    viewer = view()
    assert "stopped" in page(viewer)
    with made.store.open("stage-2", "c" * 64, [first.digest]):
        assert "under way" in page(viewer)
    with made.store.open("stage-2", "d" * 64, ["e" * 64]):  # another run's
        assert "under way" not in page(viewer)


def test_a_record_of_what_a_run_was_asked_for_is_no_run(made, view):
    made.add([], step="runs", key="a", done=True, config={"config": TRAINING})
    viewer = view()
    assert viewer.index.reader.execute("SELECT count(*) FROM runs").fetchone()[0] == 0
