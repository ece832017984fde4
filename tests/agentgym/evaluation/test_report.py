from __future__ import annotations

import base64
import dataclasses
import hashlib
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from agentgym.evaluation.intervals import Interval
from agentgym.evaluation.report import Curve, EvaluationRow, evaluation_png, learning_curve_png
from agentgym.pages import single_page
from agentgym.steps.step import Stage
from agentgym.types import Item, Status, Trajectory, Turn

BEFORE = EvaluationRow(
    "before",
    "warm start",
    {"greedy": Interval(0.5, 0.4, 0.6, 100), "pass_at_4": Interval(0.8, 0.7, 0.9, 100)},
    None,
    100,
    12,
)
AFTER = EvaluationRow(
    "after",
    "after stage 3",
    {"greedy": Interval(0.75, 0.65, 0.83, 98), "pass_at_4": Interval(0.79, 0.7, 0.9, 100)},
    {"greedy": Interval(0.25, 0.125, 0.375, 98), "pass_at_4": Interval(-0.01, -0.05, 0.03, 100)},
    100,
    12,
)
PNG = b"\x89PNG\r\n\x1a\n"


def episode(
    text: str = "goal: go to the red ball", success: bool = True, reward: float | None = 1.0
) -> tuple[str, Trajectory]:
    trajectory = Trajectory(
        item=Item(text, 7),
        sample=0,
        step=0,
        max_turns=12,
        status=Status.TERMINATED,
        reward=reward,
        success=success,
        first_observation=text,
        turns=(Turn(text, text, 0.0, 3, 5, 1),),
        input_ids=(1, 2),
        action_mask=(False, True),
        logprobs=(0.0, -1.0),
    )
    return text, trajectory


def page(**changes: object) -> str:
    arguments: dict[str, object] = {
        "title": "BabyAI",
        "facts": {"seed": "0"},
        "rows": [BEFORE, AFTER],
        "figures": {"Learning curve": PNG},
        "episodes": [episode()],
        "timings": {"stage 1": 90.0, "prepare": 10.0},
        "confidence": 0.95,
        "notes": [],
    }
    return single_page("report.html", **(arguments | changes)).decode()


class Tags(HTMLParser):
    """Checks that tags nest, and collects names and attributes."""

    VOID = ("meta", "img", "br")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.names: set[str] = set()
        self.links: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.add(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_well_formed_and_fetches_nothing() -> None:
    tags = Tags(page())
    assert tags.open == []
    assert "script" not in tags.names
    assert "link" not in tags.names
    assert [link[:22] for link in tags.links] == ["data:image/png;base64,"]
    assert "http" not in page().replace("http-equiv", "")
    assert "url(" not in page()


@pytest.mark.parametrize("place", ["title", "facts", "episode", "row", "figure", "timing", "note"])
def test_a_script_in_any_text_is_escaped(place: str) -> None:
    evil = "<script>alert('x')</script>\" onload=\""
    changes: dict[str, dict[str, object]] = {
        "title": {"title": evil},
        "facts": {"facts": {evil: evil}},
        "episode": {"episodes": [episode(evil)]},
        "row": {
            "rows": [EvaluationRow(evil, evil, {evil: Interval(0.5, 0.4, 0.6, 1)}, None, 1, 1)]
        },
        "figure": {"figures": {evil: PNG}},
        "timing": {"timings": {evil: 1.0}},
        "note": {"notes": [evil]},
    }
    text = page(**changes[place])
    assert "<script" not in text
    assert "&lt;script&gt;alert(&#39;x&#39;)&lt;/script&gt;" in text
    assert Tags(text).open == []


def test_the_table_shows_intervals_and_paired_gains_in_percent() -> None:
    text = re.sub(r"<[^>]+>", " ", page())
    text = re.sub(r"\s+", " ", text)
    assert "warm start 100 12 100.0 50.0 40.0 – 60.0 80.0 70.0 – 90.0" in text
    assert "75.0 65.0 – 83.0 (98 items) +25.0 +12.5 to +37.5" in text
    assert "−1.0 −5.0 to +3.0" in text


def test_a_difference_is_coloured_only_where_its_interval_excludes_zero() -> None:
    text = page()
    assert '<span class="gain good">+25.0</span>' in text
    assert '<span class="gain even">−1.0</span>' in text


def test_the_headline_compares_the_first_row_with_the_last_paired_one() -> None:
    unpaired = EvaluationRow("other", "other", BEFORE.summary, None, 100, 12)
    assert '50.0 <span class="note">→</span> 75.0' in page(rows=[BEFORE, AFTER, unpaired])
    assert 'class="tile"' not in page(rows=[BEFORE])


def test_timings_have_their_share_and_total() -> None:
    text = re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", page()))
    assert "stage 1 1 min 30 s 90 %" in text
    assert "prepare 10.0 s 10 %" in text
    assert "total 1 min 40 s" in text


def test_an_episode_whose_environment_failed_is_neither_solved_nor_unsolved() -> None:
    text = page(episodes=[episode(success=False, reward=None)])
    assert ">failed</span>" in text
    assert "no reward" in text
    assert "solved</span>" not in text


def test_a_page_without_parts_has_none_of_their_headings() -> None:
    text = page(facts={}, rows=[], figures={}, episodes=[], timings={})
    assert "<h2>" not in text
    assert Tags(text).open == []


@pytest.mark.integration
def test_figures_are_png_and_repeat_byte_for_byte() -> None:
    steps = list(range(1, 31))
    curves = [
        Curve("training", steps, [float("nan"), *[0.5] * 29], smooth=True),
        Curve("validation", [10, 20, 30], [0.4, 0.5, 0.6]),
    ]
    stages = [Stage(1, 5, 1, 10), Stage(2, 12, 11, 30)]
    points = {"test": (0, BEFORE.summary["greedy"]), "after": (30, AFTER.summary["greedy"])}
    first = learning_curve_png(curves, stages, points)
    assert first.startswith(PNG)
    assert len(first) > 10_000
    assert first == learning_curve_png(curves, stages, points)
    assert learning_curve_png([], [], {}).startswith(PNG)
    for rows in ([BEFORE], [BEFORE, AFTER], [BEFORE, AFTER, AFTER]):
        assert evaluation_png(rows).startswith(PNG)
    with pytest.raises(ValueError, match="at least one row"):
        evaluation_png([])


@pytest.mark.integration
def test_importing_the_room_does_not_import_matplotlib_and_drawing_leaves_pyplot_alone() -> None:
    code = """
import sys
from agentgym.evaluation.report import learning_curve_png
assert "matplotlib" not in sys.modules
learning_curve_png([], [], {})
assert "matplotlib.pyplot" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def policy_of(text: str) -> dict[str, str]:
    found = re.search(r'<meta http-equiv="Content-Security-Policy" content="([^"]*)">', text)
    assert found
    return dict(part.split(" ", 1) for part in found[1].split("; "))


def test_the_page_says_that_nothing_but_its_own_style_and_pictures_may_load() -> None:
    text = page(timings={"stage 1": 0.0})
    style = re.search(r"<style>(.*?)</style>", text, re.DOTALL)
    assert style
    digest = base64.b64encode(hashlib.sha256(style[1].encode()).digest()).decode()
    assert policy_of(text) == {
        "default-src": "'none'",
        "img-src": "data:",
        "style-src": f"'sha256-{digest}'",
        "base-uri": "'none'",
        "form-action": "'none'",
    }
    assert text.index("Content-Security-Policy") < text.index("<style>")
    assert not re.search(r"\sstyle=|\son\w+=|javascript:", text)


def test_under_its_policy_the_page_shows_as_before_and_runs_no_script(
    tmp_path: Path, browser: Any
) -> None:
    curve = learning_curve_png([Curve("success", [0, 1], [0.1, 0.4])], [Stage(1, 5, 0, 2)], {})
    evil = (
        '<script>document.title = "ran"</script><img src="x" onerror="document.title = 1"><p'
        ' id="evil" style="color: red">x</p>'
    )
    (tmp_path / "report.html").write_text(
        page(figures={"Learning curve": curve}).replace("</main>", f"{evil}</main>")
    )
    shown = browser.new_page(viewport={"width": 1280, "height": 900})
    shown.goto((tmp_path / "report.html").as_uri())
    facts = shown.evaluate("""() => ({
            width: getComputedStyle(document.querySelector('main')).maxWidth,
            picture: document.querySelector('figure img').naturalWidth,
            bars: [...document.querySelectorAll('.bar rect')].map(bar => \
Math.round(bar.getBoundingClientRect().width)),
            cell: Math.round(document.querySelector('.bar svg').getBoundingClientRect().width),
            colour: getComputedStyle(document.querySelector('.bar svg')).fill,
            evil: getComputedStyle(document.querySelector('#evil')).color,
            title: document.title,
        })""")
    assert facts["width"] == "1040px"
    assert facts["picture"] > 500
    assert facts["bars"] == pytest.approx([0.9 * facts["cell"], 0.1 * facts["cell"]], abs=1.5)
    assert facts["colour"] == "rgb(29, 78, 216)"
    assert facts["evil"] != "rgb(255, 0, 0)"
    assert facts["title"] == "BabyAI"


def test_where_episodes_failed_the_other_convention_stands_beside_the_number():
    partial = dataclasses.replace(
        AFTER, coverage=0.97, failed={"greedy": Interval(0.7312, 0.6, 0.8, 100)}
    )
    assert "failed as failures 73.1" in page(rows=[BEFORE, partial])
    assert "<td>97.0</td>" in page(rows=[BEFORE, partial])
    assert "failed as failures 7" not in page()
