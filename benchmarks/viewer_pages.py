"""Every page of `agentgym view`, in a browser: `python benchmarks/viewer_pages.py`.

The default task is trained with few evaluation items, and expert and chance play each of the five
environments. Every feature is used in Chromium at the widths of a desktop and of a phone, in light
and dark; axe-core looks at each page; every episode of the five evaluations is played again.
Writes docs/results/viewer_pages.json and the pictures in docs/images. Needs Java and Chromium.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvicorn
from viewer import ROOT, write  # of this folder; it sets what a process needs to begin with

from agentgym.config import RunConfig, load_config
from agentgym.viewer.app import make_app
from agentgym.viewer.guard import LOOPBACK, Guard
from agentgym.viewer.query import Query
from agentgym.viewer.rows import Address
from agentgym.viewer.viewer import Viewer

OUT, IMAGES = ROOT / "docs/results/viewer_pages.json", ROOT / "docs/images"
ENVS = ("babyai", "textcraft", "searchqa", "webarena", "sciworld")
TASKS = 3  # of each environment
TURNS = 30
TOKEN = "of-these-pages"  # noqa: S105
VARIANTS = {
    "desktop-light": (1280, 860, "light"),
    "desktop-dark": (1280, 860, "dark"),
    "phone-light": (390, 844, "light"),
    "phone-dark": (390, 844, "dark"),
}
SHOWN = ("episodes", "episode", "training")  # whose pictures are kept


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--folder", type=Path, help="state that is there already, or is to stay")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--images", type=Path, default=IMAGES)
    arguments = parser.parse_args()
    with contextlib.ExitStack() as stack:
        folder = arguments.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        cfg = load_config(
            ROOT / "params.yaml",
            [
                f"store.path={folder.resolve() / 'store'}",
                "evaluation.num_items=32",
                "horizon.stage_steps=[5,5,6]",
                "evaluation.num_samples=2",
                "evaluation.k=[1,2]",
            ],
        )
        make_runs(cfg)
        with served(cfg) as (viewer, base):
            told = {"replays": replays(viewer), **looked_at(viewer, base, arguments.images)}
    write(arguments.out, "python benchmarks/viewer_pages.py", told)
    return 0


def make_runs(cfg: RunConfig) -> None:
    """A training and ten evaluations; what is done already is not done again."""
    from agentgym.evaluation.request import EvaluationRequest
    from agentgym.pipeline.evaluation import evaluate_policy
    from agentgym.pipeline.run import run_with_parents

    run_with_parents("report", cfg)
    for env in ENVS:
        ids = [f"{env}_{task}" for task in range(1, TASKS + 1)]
        changes = {
            "items": {"ids": ids, "num": None},
            "num_samples": 1,
            "greedy": False,
            "max_turns": TURNS,
        }
        own = cfg
        if env != cfg.env.name:
            own = cfg.model_copy(update={"env": type(cfg.env)(name=env)})
        for policy in ("random", "expert"):
            request = EvaluationRequest.model_validate(
                {"policy": policy, "envs": (env,), "changes": changes}
            )
            evaluate_policy(own, request)


@contextlib.contextmanager
def served(cfg: RunConfig) -> Iterator[tuple[Viewer, str]]:
    """A viewer that has looked at its store, and the address of its pages."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        bound.listen()
        port = bound.getsockname()[1]
        with Viewer.open(cfg) as viewer:
            app = Guard(make_app(viewer), LOOPBACK, port, TOKEN)
            server = uvicorn.Server(uvicorn.Config(app, log_level="warning", ws="none"))
            thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
            thread.start()
            try:
                deadline = time.monotonic() + 300
                while viewer.indexing is not None or not server.started:
                    assert time.monotonic() < deadline, "the store is not read"
                    time.sleep(0.05)
                yield viewer, f"http://127.0.0.1:{port}"
            finally:
                server.should_exit = True
                thread.join(30)


def replays(viewer: Viewer) -> dict[str, Any]:
    """Of each environment's evaluations, how many episodes agree when they are played again."""
    told: dict[str, Any] = {}
    for env in ENVS:
        rows = viewer.lists.all(Query({"env": (env,), "stage": ("evaluation",)}), 1_000)
        said = [viewer.replays.now(found) for found in viewer.bodies.read(rows)]
        told[env] = {
            "episodes": len(said),
            "agree": sum(each.agrees is True for each in said),
            "drawn": sum(any(shot.media_type for shot in each.shots) for each in said),
            "others": sorted({each.said for each in said if each.agrees is not True})[:5],
        }
    return told


@dataclass
class Walk:
    """A browser's way through the pages, and what it met."""

    page: Any  # Playwright's
    base: str
    visited: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)  # of scripts and of the page's policy
    violations: list[str] = field(default_factory=list)  # that axe-core found

    def __post_init__(self) -> None:
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on(
            "console",
            lambda said: self.errors.append(said.text) if said.type == "error" else None,
        )

    def go(self, path: str) -> None:
        """Errors: AssertionError where it is no page."""
        answer = self.page.goto(f"{self.base}{path}")
        assert answer is not None
        assert answer.ok, f"{path}: {answer.status}"

    def look(self, name: str) -> None:
        """Have axe-core look at the page that is shown."""
        from axe_playwright_python.sync_playwright import Axe

        self.visited.append(name)
        for each in Axe().run(self.page).response["violations"]:
            where = each["nodes"][0]["html"][:160]
            self.violations.append(f"{name}: {each['id']}: {len(each['nodes'])} such as {where}")


Visit = Callable[[Walk, str], None]


def looked_at(viewer: Viewer, base: str, images: Path) -> dict[str, Any]:
    """Every page in every variant; pictures of some."""
    from playwright.sync_api import sync_playwright

    from envs.webarena.chromium import find_browser

    images.mkdir(parents=True, exist_ok=True)
    told: dict[str, Any] = {"pages": {}, "violations": [], "errors": []}
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
                    picture(walk.page.screenshot(), images / f"view-{shown}-{name}.png")
            if name == "desktop-light":
                use(walk)
            told["pages"][name] = len(walk.visited)
            told["violations"] += [f"{name} {each}" for each in walk.violations]
            told["errors"] += [f"{name} {each}" for each in walk.errors]
            context.close()
        browser.close()
    return told


def addresses(viewer: Viewer) -> dict[str, str]:
    """Every kind of page, by a name."""
    steps = viewer.bodies.steps()

    def one(**facets: tuple[str, ...]) -> str:
        from agentgym.viewer.bodies import address_of

        (row, *_) = viewer.lists.all(Query(facets), 1)
        return f"/e/{address_of(row, steps[row['step_id']])}"

    trained = one(tokens_kept=("yes",), success=("yes",), stage=("stage-2",))
    viewer.replays.now(viewer.bodies.find(Address.parse(trained[3:])))
    (after, before) = [
        step["folder"]
        for step in sorted(steps.values(), key=lambda step: -(step["created"] or 0))
        if step["name"] in ("evaluate-warm-start", "evaluate-stage-3")
    ][:2]
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
    """What a person does with keys and forms."""
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
    page.wait_for_function(
        "before => location.href.split('#')[0] !== before.split('#')[0]", arg=before
    )
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
    """Few colors: a third of the size, and no eye sees it."""
    from PIL import Image

    small = Image.open(io.BytesIO(data)).convert("RGB").quantize(128)
    small.save(file, optimize=True)


if __name__ == "__main__":
    sys.exit(main())
