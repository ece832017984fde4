"""A run's training as a whole."""

import pytest

from agentgym.types import Status
from agentgym.viewer.training import heat_map, kind_of, line_chart, training_of
from tests.agentgym.viewer.conftest import episode, failed


@pytest.mark.parametrize(
    ("won", "kind"),
    [
        ((0, 0, 2), "learned"),
        ((1, 0), "forgotten"),
        ((0, 1, 0), "forgotten"),
        ((0, 0), "never solved"),
        ((1, 2), "always solved"),
        ((1, 0, 1), "changing"),
        ((2,), "solved by every sample"),
        ((1,), "solved by some samples"),
        ((0,), "solved by no sample"),
    ],
)
def test_an_item_has_a_kind_by_its_visits(won, kind):
    assert kind_of([(step, number, 2) for step, number in enumerate(won, 1)]) == kind


def test_items_families_and_lengths_are_told_over_steps(made, view):
    made.add([failed(0, step=1), failed(1, step=1), failed(2, 0, step=1)], key="a")
    left_out = failed(2, 1, step=2, status=Status.TIMEOUT, reward=None)
    made.add([episode(0, step=2), failed(1, step=2, actions=("wait",)), left_out], key="a")
    viewer = view()
    steps = list(viewer.bodies.steps())
    told = training_of(viewer.index.reader, steps)
    assert told.items["learned"] == ["babyai_0"]
    assert told.items["never solved"] == ["babyai_1"]
    assert told.items["solved by no sample"] == ["babyai_2"]  # failed episodes do not count
    assert told.episodes == 5
    families, items = told.maps
    assert list(families.rows) == ["go"]
    assert list(items.rows) == ["babyai_0", "babyai_1"]  # a map needs two visits
    assert items.rows["babyai_0"] == [(0, 0, 1), (1, 1, 1)]
    tables = {
        chart.title: {name: [dot[2:] for dot in dots] for name, dots in chart.lines.items()}
        for chart in told.charts
    }
    assert tables["success"]["training"] == [("1", "0 %"), ("2", "50 %")]
    assert tables["how episodes end"]["timeout"] == [("1", "0 %"), ("2", "33.3 %")]
    assert tables["turns, and the horizon"]["horizon"] == [("1", "4"), ("2", "4")]
    assert tables["turns, and the horizon"]["turns"] == [("1", "2"), ("2", "1.667")]
    # in these records weights 4 played step 2: 2 - 1 - 4 updates behind
    assert tables["staleness: updates behind"]["oldest weights"] == [("1", "-4"), ("2", "-3")]


def test_a_run_that_plays_each_item_once_shows_whether_its_samples_agree(made, view):
    made.add([play(n, s, step=1) for n, play in ((0, failed), (1, episode)) for s in (0, 1)])
    made.add([episode(2, 0, step=2), failed(2, 1, step=2), episode(3, step=2)])
    viewer = view()
    told = training_of(viewer.index.reader, list(viewer.bodies.steps()))
    assert {kind: items for kind, items in told.items.items() if items} == {
        "solved by every sample": ["babyai_1", "babyai_3"],
        "solved by some samples": ["babyai_2"],
        "solved by no sample": ["babyai_0"],
    }
    (chart,) = [chart for chart in told.charts if chart.title == "items solved by ..."]
    assert {name: [dot[2:] for dot in dots] for name, dots in chart.lines.items()} == {
        "every sample": [("1", "50 %"), ("2", "0 %")],  # an item of one sample is left out
        "some samples": [("1", "0 %"), ("2", "100 %")],
        "no sample": [("1", "50 %"), ("2", "0 %")],
    }
    assert [heat.title for heat in told.maps] == ["success by family"]


def test_a_chart_places_its_points_within_its_frame():
    chart = line_chart("success", {"a": [(1, 0.0), (3, 1.0)]}, share=True)
    assert [dot[:2] for dot in chart.lines["a"]] == [(56.0, 194.0), (548.0, 12.0)]
    assert [text for _, text in chart.x_ticks] == ["1", "2", "3"]
    assert [text for _, text in chart.y_ticks] == ["0 %", "20 %", "40 %", "60 %", "80 %", "100 %"]
    assert line_chart("nothing", {"a": []}) is None
    assert line_chart("one", {"a": [(5, 2.0)]}).lines["a"][0][2:] == ("5", "2")


def test_a_heat_map_joins_steps_where_there_are_many():
    rows = {"a": [(step, step % 2, 1) for step in range(1, 101)]}
    found = heat_map("success", rows, most_columns=25)
    assert found.columns[0] == "1-4"
    assert len(found.columns) == 25
    assert found.rows["a"][0] == (0, 2, 4)
    assert heat_map("nothing", {}) is None
