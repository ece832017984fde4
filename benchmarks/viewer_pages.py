"""Browser test of every page of `agentgym view`: `python benchmarks/viewer_pages.py`.

The default task is trained with few evaluation items, and the expert and the random policy play
each of the five environments. Every feature is used in Chromium at the widths of a desktop and of a
phone, in light and dark; axe-core checks each page; every episode of the five evaluations is
replayed.
Writes docs/results/viewer_pages.json and the pictures in docs/images. Needs Java and Chromium.
"""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness import ROOT, config_in, kept, parser_of, serving_app, wait_for, write

from agentgym.config import RunConfig
from agentgym.defaults import set_process_defaults
from agentgym.evaluation.protocol import EvaluationRequest
from agentgym.pipeline.policy_evaluation import evaluate_policy
from agentgym.pipeline.run import run_with_parents
from agentgym.viewer.app import make_app
from agentgym.viewer.bodies import address_of
from agentgym.viewer.guard import LOOPBACK, Guard
from agentgym.viewer.index import Address
from agentgym.viewer.query import Query
from agentgym.viewer.viewer import Viewer
from envs.webarena.chromium import find_browser

IMAGES = ROOT / "docs/images"
ENVS = ("babyai", "textcraft", "searchqa", "webarena", "sciworld")
TASKS = 3  # per environment
TURNS = 30
TOKEN = "of-these-pages"  # noqa: S105
VARIANTS = {
    "desktop-light": (1280, 860, "light"),
    "desktop-dark": (1280, 860, "dark"),
    "phone-light": (390, 844, "light"),
    "phone-dark": (390, 844, "dark"),
}
SHOWN = ("episodes", "episode", "training")  # pages whose pictures are kept


def main() -> int:
    arguments = parser_of(__doc__, "viewer_pages.json", state=True).parse_args()
    set_process_defaults()
    settings = [f"evaluation.{name}" for name in ("num_items=32", "num_samples=2", "k=[1,2]")]
    with kept(arguments.state) as folder:
        cfg = config_in(folder.resolve(), "horizon.stage_steps=[5,5,6]", *settings)
        make_runs(cfg)
        with served(cfg) as (viewer, base):
            result = {"replays": replays(viewer), **looked_at(viewer, base)}
    write(arguments.out, result)
    print(result)
    return 0


def make_runs(cfg: RunConfig) -> None:
    """Run a training and ten evaluations; finished ones are not repeated."""
    run_with_parents("report", cfg)
    for env in ENVS:
        ids = [f"{env}_{task}" for task in range(1, TASKS + 1)]
        items = {"ids": ids, "num": None}
        changes = {"items": items, "num_samples": 1, "greedy": False, "max_turns": TURNS}
        other = {"env": type(cfg.env)(name=env)}
        env_cfg = cfg if env == cfg.env.name else cfg.model_copy(update=other)
        for policy in ("random", "expert"):
            request = {"policy": policy, "envs": (env,), "changes": changes}
            evaluate_policy(env_cfg, EvaluationRequest.model_validate(request))


@contextlib.contextmanager
def served(cfg: RunConfig) -> Iterator[tuple[Viewer, str]]:
    """Yield a viewer that has read its store, and the address of its pages."""
    with Viewer.open(cfg) as viewer:
        app = make_app(viewer)
        with serving_app(lambda port: Guard(app, LOOPBACK, port, TOKEN)) as base:
            wait_for(lambda: viewer.indexing is None, 300.0, "the store is not read")
            yield viewer, base


def replays(viewer: Viewer) -> dict[str, Any]:
    """Return the number of episodes per environment that agree when they are replayed."""
    by_env: dict[str, Any] = {}
    for env in ENVS:
        rows = viewer.lists.all(Query({"env": (env,), "stage": ("evaluation",)}), 1_000)
        replayed = [viewer.replays.now(body) for body in viewer.bodies.read(rows)]
        by_env[env] = {
            "episodes": len(replayed),
            "agree": sum(replay.agrees is True for replay in replayed),
            "drawn": sum(any(shot.media_type for shot in replay.shots) for replay in replayed),
            "others": sorted({replay.said for replay in replayed if replay.agrees is not True})[:5],
        }
    return by_env


@dataclass
class Walk:
    """Walk of a browser through the pages: visited pages and errors."""

    page: Any  # Playwright's
    base: str
    visited: list[str] = field(default_factory=list)
    # of scripts and of the content security policy
    errors: list[str] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)  # that axe-core found

    def __post_init__(self) -> None:
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("console", self.hear)

    def hear(self, message: Any) -> None:
        if message.type == "error":
            self.errors.append(message.text)

    def go(self, path: str) -> None:
        """Open a page. Errors: AssertionError if the reply is not OK."""
        answer = self.page.goto(f"{self.base}{path}")
        assert answer is not None
        assert answer.ok, f"{path}: {answer.status}"

    def look(self, name: str) -> None:
        """Check the current page with axe-core."""
        from axe_playwright_python.sync_playwright import Axe

        self.visited.append(name)
        for violation in Axe().run(self.page).response["violations"]:
            nodes = violation["nodes"]
            such = f"{len(nodes)} such as {nodes[0]['html'][:160]}"
            self.violations.append(f"{name}: {violation['id']}: {such}")


def looked_at(viewer: Viewer, base: str) -> dict[str, Any]:
    """Check every page in every variant; take pictures of some."""
    from playwright.sync_api import sync_playwright

    result: dict[str, Any] = {"pages": {}, "violations": [], "errors": []}
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=find_browser(), args=["--no-sandbox"])
        for name, (width, height, scheme) in VARIANTS.items():
            context = browser.new_context(
                viewport={"width": width, "height": height},
                color_scheme=scheme,
                http_credentials={"username": "agentgym", "password": TOKEN},
            )
            walk = Walk(context.new_page(), base)
            for shown, path in addresses(viewer).items():
                walk.go(path)
                walk.look(shown)
                if shown in SHOWN:
                    picture(walk.page.screenshot(), IMAGES / f"view-{shown}-{name}.png")
            if name == "desktop-light":
                use(walk)
            result["pages"][name] = len(walk.visited)
            result["violations"] += [f"{name} {violation}" for violation in walk.violations]
            result["errors"] += [f"{name} {error_text}" for error_text in walk.errors]
            context.close()
        browser.close()
    return result


def addresses(viewer: Viewer) -> dict[str, str]:
    steps = viewer.bodies.steps()

    def one(**facets: tuple[str, ...]) -> str:
        (row, *_) = viewer.lists.all(Query(facets), 1)
        return f"/e/{address_of(row, steps[row['step_id']])}"

    trained = one(tokens_kept=("yes",), success=("yes",), stage=("stage-2",))
    viewer.replays.now(viewer.bodies.find(Address.parse(trained[3:])))
    newest = sorted(steps.values(), key=lambda step: -(step["created"] or 0))
    shown = ("evaluate-warm-start", "evaluate-stage-3")
    after, before = [step["folder"] for step in newest if step["name"] in shown][:2]
    (run,) = viewer.index.reader.execute(
        "SELECT run FROM run_steps JOIN steps ON steps.id = step_id WHERE steps.name = 'stage-3'"
    ).fetchone()
    return {
        "runs": "/",
        "episodes": f"/episodes?run={run}",
        "search": "/episodes?q=%22red+ball%22&success=no&sort=turns",
        "nothing found": "/episodes?q=nowhere+to+be+found",
        "episode": f"{trained}?overlay=advantage",
        **{env: one(env=(env,), stage=("evaluation",), success=("yes",)) for env in ENVS},
        "group": f"{trained}/group",
        "item": "/item/babyai_1",
        "compare": f"/compare?a={before}&b={after}",
        "decisions": "/decisions",
        "training": f"/training?run={run}",
        "play": "/play",
    }


def use(walk: Walk) -> None:
    """Use keys and forms as a user does."""
    page = walk.page
    walk.go("/episodes?env=babyai")
    page.keyboard.press("j")
    page.keyboard.press("j")
    assert page.locator("tr.at").count() == 1
    page.keyboard.press("o")
    page.wait_for_url("**/e/**")
    page.keyboard.press("j")
    assert page.locator(".turn.at").get_attribute("id") == "turn-0"
    page.keyboard.press("?")
    assert page.locator("dialog dt").count() > 5
    page.keyboard.press("Escape")
    before = page.url
    page.keyboard.press("n")
    moved = "before => location.href.split('#')[0] !== before.split('#')[0]"
    page.wait_for_function(moved, arg=before)
    page.keyboard.press("/")
    page.keyboard.type('"red ball"')
    page.keyboard.press("Enter")
    page.wait_for_url("**/episodes?q=**")
    assert page.locator("tbody tr").count() > 0
    walk.go("/play")
    page.get_by_role("button", name="begin").click()
    page.wait_for_url("**/play/*")
    walk.look("a game")
    page.get_by_label("your action").fill("turn left")
    page.keyboard.press("Enter")
    page.wait_for_selector("#turn-1")
    assert page.locator("svg.grid").count() == 2
    page.get_by_role("button", name="end this game").click()
    page.wait_for_url("**/play")


def picture(data: bytes, file: Path) -> None:
    """Save with few colors: a third of the size, without a visible difference."""
    from PIL import Image

    small = Image.open(io.BytesIO(data)).convert("RGB").quantize(128)
    small.save(file, optimize=True)


if __name__ == "__main__":
    sys.exit(main())
