"""Pages in Chromium: scripts, keys, forms, both color schemes, a phone's width, and axe-core.
One server and one browser per file; `make measure NAME=viewer_pages` does more, on real runs.
"""

from pathlib import Path

import pytest

from agentgym.config import load_config
from agentgym.types import Learned
from agentgym.viewer.bundle import write_bundle
from agentgym.viewer.query import Query
from tests.agentgym.viewer.conftest import HOSTILE, TRAINING, Made, episode, failed
from tests.agentgym.viewer.test_replay import played
from tests.benched import benchmark
from tests.servers import chromium_browser

pytestmark = pytest.mark.integration
FOLDER = f"stage-1-{'a' * 16}"
ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def walks():
    """The benchmark module that visits every page."""
    return benchmark("viewer_pages")


@pytest.fixture(scope="module")
def served(walks, serving, gold, tmp_path_factory):
    """(viewer, base URL) of a store with expert episodes and hostile text."""
    made = Made(tmp_path_factory.mktemp("browser"))
    tokens = {
        "input_ids": tuple(range(3, 83)),
        "action_mask": (False, True) * 40,
        "logprobs": (0.0, -0.7) * 40,
        "learned": Learned((-0.8,) * 40, (0.5,) * 40, (1.1,) * 40, "", (0.4,) * 40),
    }
    own = [played(gold, "babyai", task, sample=sample) for task in (3, 5) for sample in (0, 1)]
    marked = episode(7, first_observation=HOSTILE, error=HOSTILE, **tokens)
    for step in (1, 2):
        made.add([*own, marked, failed(3, 2)], state={"global_step": step, "max_turns": 40})
    result = {"protocol": {"envs": [{"env": {"name": "babyai", "options": {}}}]}}
    for key, play in (("b", failed), ("c", episode)):
        made.add([play(n, step=0) for n in range(3)], step="evaluation", key=key, config=result)
    made.add([failed(1)], step="stage-2", key="e", config=TRAINING)
    with serving("babyai") as (endpoint, _):
        cfg = load_config(
            "params.yaml",
            [
                f"store.path={made.folder / 'store'}",
                f"env.endpoints=[{endpoint}]",
                "env.options={}",
            ],
        )
        with walks.served(cfg) as found:
            yield (*found, made)


@pytest.fixture(scope="module")
def browser(chromium):
    with chromium_browser() as opened:
        yield opened


@pytest.fixture
def walk(walks, served, browser):
    """Return a function of a variant: a Walk of the benchmark, which checks for page errors."""
    opened = []

    def begin(variant="desktop-light"):
        width, height, scheme = walks.VARIANTS[variant]
        context = browser.new_context(
            viewport={"width": width, "height": height},
            color_scheme=scheme,
            http_credentials={"username": "agentgym", "password": walks.TOKEN},
        )
        opened.append((context, walks.Walk(context.new_page(), served[1])))
        return opened[-1][1]

    yield begin
    for context, own in opened:
        context.close()
        assert own.errors == []


def pages():
    return {
        "runs": "/",
        "episodes": "/episodes",
        "search": "/episodes?q=red&success=yes",
        "nothing": "/episodes?q=unheard-of",
        "hostile": f"/e/{FOLDER}.0.t4?overlay=ratio",
        "group": f"/e/{FOLDER}.0.t0/group",
        "item": "/item/babyai_3",
        "beside": f"/beside?e={FOLDER}.0.t0&e={FOLDER}.0.t1",
        "compare": f"/compare?a=evaluation-{'b' * 16}&b=evaluation-{'c' * 16}",
        "one result": f"/compare?a=evaluation-{'b' * 16}",
        "decisions": "/decisions",
        "training": "/training",
        "play": "/play",
    }


@pytest.mark.parametrize("variant", ["desktop-light", "phone-dark"])
def test_every_page_is_accessible_and_fits_its_screen(walk, variant):
    own = walk(variant)
    for name, path in pages().items():
        own.go(path)
        own.look(name)
        wide = own.page.evaluate("document.documentElement.scrollWidth - innerWidth")
        assert wide <= 0, f"{name} is {wide} pixels too wide"
    assert own.violations == [], "\n".join(own.violations)


def test_a_row_of_runs_fits_a_phone_and_shows_its_numbers(walk):
    own = walk("phone-dark")
    own.go("/")
    for row in own.page.locator(".cards tbody tr").all():
        box, shown = row.bounding_box(), row.locator("td:visible").all()
        assert box["height"] < 140
        assert len(shown) >= 4
        for cell in shown:
            place = cell.bounding_box()
            assert box["x"] <= place["x"]
            assert place["x"] + place["width"] <= box["x"] + box["width"]


def test_nothing_that_a_model_wrote_acts(walk):
    own = walk()
    own.page.on("dialog", lambda dialog: own.errors.append(dialog.message))
    own.go(f"/e/{FOLDER}.0.t4")
    assert own.page.locator("script").count() == 1
    assert own.page.locator("main img").count() == 0
    assert "<script>alert(1)</script>" in own.page.locator("#turn-0").inner_text()


def test_an_episode_is_drawn_and_stepped_through_by_keys(walk):
    own = walk()
    own.go(f"/e/{FOLDER}.0.t0")
    own.page.keyboard.press("r")
    own.page.wait_for_selector("p.agrees")
    grids = own.page.locator("svg.grid")
    assert grids.count() == own.page.locator(".turn").count() > 2
    assert "agent at" in grids.first.get_attribute("aria-label")
    own.page.keyboard.press("j")
    own.page.keyboard.press("j")
    assert own.page.locator(".turn.at").get_attribute("id") == "turn-1"
    assert own.page.url.endswith("#turn-1")
    own.look("a drawn episode")
    assert own.violations == [], "\n".join(own.violations)


def test_keys_lists_forms_and_a_game_work(walk, walks):
    own = walk()
    walks.use(own)
    assert own.violations == [], "\n".join(own.violations)


def test_a_page_says_that_there_is_news_and_one_that_follows_loads_it(walk, served, monkeypatch):
    viewer, _, made = served
    monkeypatch.setattr(viewer, "why_stopped", lambda run: None)  # shows the run as running
    own, following = walk(), walk()
    own.go("/episodes?env=babyai")
    following.go(f"/training?run=stage-2-{'e' * 12}")
    assert following.page.locator("[data-follow]").count() == 1
    told = following.page.locator(".lead")
    before = told.inner_text()
    made.add([failed(2), episode(3)], step="stage-2", key="e", config=TRAINING)
    own.page.wait_for_selector("#news:not([hidden])")
    following.page.wait_for_function(
        "before => document.querySelector('.lead').innerText !== before", arg=before
    )
    assert viewer.lists.page(Query({"stage": ("stage-2",)})).total == 3


def test_a_bundle_opens_from_a_file(walk, served, tmp_path):
    viewer, *_ = served
    write_bundle(viewer, Query(item="babyai_3"), tmp_path)
    own = walk()
    own.page.goto((tmp_path / "index.html").as_uri())
    assert own.page.evaluate("getComputedStyle(document.body).margin") == "0px"  # styles apply
    own.page.locator("a.open").first.click()
    own.page.wait_for_selector(".turn")
    own.page.get_by_role("link", name="agentgym").first.click()
    own.page.wait_for_selector("table.rows")
