"""Numbers in docs/reference/viewer-index.md match the measurements."""

import json
from pathlib import Path

import pytest

from tests.benched import benchmark

ROOT = Path(__file__).parents[3]
DOCUMENT = (ROOT / "docs/reference/viewer-index.md").read_text()


@pytest.fixture(scope="module")
def result():
    return json.loads((ROOT / "docs/results/viewer.json").read_text())


def test_its_numbers_are_those_of_the_result(result):
    assert " ".join(benchmark("viewer").text_of(result).split()) in " ".join(DOCUMENT.split())


def test_what_was_asked_for_holds_in_cpu_time(result):
    told = result["milliseconds"]
    assert result["episodes"] >= 100_000
    assert result["peak_mib"] <= 500
    assert told["first page"]["cpu"] <= 300
    assert max(told["filter"]["cpu"], told["facet"]["cpu"]) <= 100
    assert max(told["search, many hits"]["cpu"], told["search, few hits"]["cpu"]) <= 200
    assert told["longest episodes"]["cpu"] <= 200
    assert result["idle_cpu_share"] <= 0.02


def test_every_page_was_seen_in_a_browser_and_every_replay_agreed():
    seen = json.loads((ROOT / "docs/results/viewer_pages.json").read_text())
    assert seen["errors"] == []
    assert set(seen["pages"]) == {"desktop-light", "desktop-dark", "phone-light", "phone-dark"}
    for env, told in seen["replays"].items():
        assert told["agree"] == told["episodes"] > 0, env
        assert told["drawn"] == told["episodes"], env
    assert len(seen["replays"]) == 5
