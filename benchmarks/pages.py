"""Cost of MLflow's pages for a run, and their load time with many runs.

    python benchmarks/pages.py [FOLDER]    # FOLDER: state of a finished default run

Writes docs/results/pages.json:

- `cost`: CPU seconds to deliver the run to an empty MLflow database with everything on, and with
  points and report only, in turns, the minimum of each. `ratio` compares that with the run's own
  CPU time in docs/results/pipeline.json.
- `opens`: seconds until the first page and the page of charts of an experiment of two hundred runs
  show their runs, in Chromium.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from harness import RESULTS, ROOT, free_port, parser_of, read, wait_for_url, write

from agentgym.config import RunConfig, load_config
from agentgym.deploy.owned import owned_process
from agentgym.pipeline.table import finished, open_store, run_key, steps_of
from agentgym.steps.step import Kind
from agentgym.tracking import deliver
from agentgym.tracking.mlflow import Tracker
from agentgym.tracking.points import Point
from agentgym.tracking.saved_view import VIEWS, link_to
from envs.webarena.chromium import find_browser

RUNS, STEPS, TURNS = 200, 50, 3
SETTLES_MS = 15_000  # until charts are drawn
SHOWN = {"x": 0, "y": 0, "width": 1410, "height": 1100}  # without the assistant at the right
MOST = 1.05  # limit of the ratio to a run without pages


def delivered_s(cfg: RunConfig, folder: Path, *, pages: bool) -> float:
    """CPU seconds to deliver all of a finished run to an MLflow database in this folder."""
    tracking = cfg.tracking.model_copy(update={"uri": f"sqlite:///{folder / 'mlflow.db'}"})
    target_cfg = cfg.model_copy(update={"tracking": tracking})
    store, table = open_store(cfg), steps_of(cfg)
    deliver.tracker_of(target_cfg).experiment_id  # noqa: B018  creates the tables first
    show, nothing = deliver.show_step, lambda *_: None
    deliver.show_step = show if pages else nothing
    began = time.process_time()
    try:
        for name, manifest in finished(cfg, store).items():
            deliver.deliver_step(
                target_cfg,
                store,
                manifest,
                run_key(cfg),
                title=table[name].title,
                headline=table[name].headline,
                is_report=table[name].kind is Kind.REPORT,
            )
    finally:
        deliver.show_step = show
    return time.process_time() - began


def cost(cfg: RunConfig) -> dict[str, float]:
    """Cost of all pages together, compared with the run's own."""
    times: dict[bool, list[float]] = {True: [], False: []}
    for turn in range(TURNS + 1):
        for pages in (False, True):
            with tempfile.TemporaryDirectory() as folder:
                seconds = delivered_s(cfg, Path(folder), pages=pages)
            if turn:  # the first turn only imports
                times[pages].append(seconds)
    runs = read(RESULTS / "pipeline.json")["runs"]
    whole = statistics.median(run["cpu_s"] for run in runs)
    extra = min(times[True]) - min(times[False])
    return {
        "with_s": round(min(times[True]), 2),
        "without_s": round(min(times[False]), 2),
        "run_cpu_s": whole,
        "ratio": round((whole + extra) / whole, 4),
    }


def fill(tracker: Tracker) -> None:
    """Write runs as pipelines leave them, with curves of fifty optimizer steps."""
    for number in range(RUNS):
        run = tracker.parent_run(f"{number:064x}", params={"seed": number}, tags={"seed": "0"})
        points = [
            Point(
                step,
                1_700_000_000_000 + step,
                {
                    "rollout/success": 1 - math.exp(-step / (10 + number % 20)),
                    "validation/success": 1 - math.exp(-step / (12 + number % 20)),
                    "rollout/max_turns": 6.0 + 3 * (step // 17),
                    "rollout/entropy": math.exp(-step / 30),
                },
            )
            for step in range(1, STEPS + 1)
        ]
        tracker.deliver(run, points)
        tracker.end_run(run)


@contextlib.contextmanager
def served(database: Path) -> Iterator[str]:
    port = free_port()
    command = [sys.executable, "-m", "mlflow", "server", "--host=127.0.0.1", f"--port={port}"]
    command += [f"--backend-store-uri=sqlite:///{database}", "--workers=1"]
    environment = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "PATH": os.environ["PATH"]}
    log = database.with_name("log")
    with owned_process(command, log_path=log, env=environment) as process:
        wait_for_url(f"http://127.0.0.1:{port}/health", process, log)
        yield f"http://127.0.0.1:{port}"
        os.killpg(process.pid, signal.SIGKILL)


def opens() -> dict[str, float]:
    """Seconds of each page's second visit, for which the browser has cached the program."""
    from playwright.sync_api import sync_playwright

    with tempfile.TemporaryDirectory() as folder:
        tracker = Tracker(f"sqlite:///{folder}/mlflow.db", "agentgym-many", Path(folder, "files"))
        fill(tracker)
        pages = {
            "first_page_s": (f"#/experiments/{tracker.experiment_id}/runs", "[role=row]"),
            "charts_s": (link_to(tracker.experiment_id, VIEWS[0]), ".js-plotly-plot .trace"),
        }
        seconds = {}
        with served(Path(folder, "mlflow.db")) as url, sync_playwright() as driver:
            browser = driver.chromium.launch(executable_path=find_browser(), args=["--no-sandbox"])
            for name, (path, sign) in pages.items():
                for _ in range(2):
                    page = browser.new_page(viewport={"width": 1500, "height": 1000})
                    began = time.monotonic()
                    page.goto(f"{url}/{path}", timeout=120_000)
                    page.locator(sign).first.wait_for(timeout=120_000)
                    seconds[name] = round(time.monotonic() - began, 2)
                    page.close()
            browser.close()
    return seconds


def shoot(cfg: RunConfig, images: Path) -> None:
    """Take pictures of a run's pages: charts, run, trace, registered version."""
    from playwright.sync_api import sync_playwright

    tracker = deliver.tracker_of(cfg)
    number, client = tracker.experiment_id, tracker.client
    (run,) = client.search_runs([number], f"tags.run_key = '{run_key(cfg)}'", max_results=1)
    traces = client.search_traces(
        locations=[number], filter_string="tags.success = 'true'", max_results=20
    )
    trace = max(traces, key=lambda candidate: len(candidate.data.spans)).info.trace_id
    version = finished(cfg, open_store(cfg))["register"].results
    paths = {
        "mlflow_view": link_to(number, VIEWS[0]),
        "mlflow_run": f"#/experiments/{number}/runs/{run.info.run_id}",
        "mlflow_trace": f"#/experiments/{number}/traces?traceId={trace}",
        "mlflow_version": f"#/models/{version['model']}/versions/{version['version']}",
    }
    images.mkdir(parents=True, exist_ok=True)
    database = Path(cfg.tracking_uri.removeprefix("sqlite:///"))
    with served(database) as url, sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=find_browser(), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1900, "height": 1100})
        for name, path in paths.items():
            page.goto("about:blank")
            page.goto(f"{url}/{path}", timeout=120_000)
            page.wait_for_timeout(SETTLES_MS)  # the network never becomes idle: charts keep polling
            for label in ("Got it", "Close"):  # dialogs that the UI shows new users
                button = page.get_by_role("button", name=label)
                if name != "mlflow_trace" and button.count():
                    button.first.click()
            page.screenshot(path=images / f"{name}.png", clip=SHOWN)
        browser.close()


def main() -> int:
    parser = parser_of(__doc__, "pages.json")
    state = ROOT / ".agentgym"
    parser.add_argument("folder", type=Path, nargs="?", default=state, help="its store's parent")
    parser.add_argument("--params", default=str(ROOT / "params.yaml"))
    parser.add_argument("--set", action="append", default=[], metavar="key.path=value")
    parser.add_argument("--images", type=Path, help="only take pictures, into this folder")
    chosen = parser.parse_args()
    store = f"store.path={chosen.folder / 'store'}"
    cfg = load_config(chosen.params, [store, *chosen.set])
    if set(finished(cfg, open_store(cfg))) != set(steps_of(cfg)):
        print(f"{chosen.folder} contains no finished run of {chosen.params}", file=sys.stderr)
        return 2
    if chosen.images is not None:
        shoot(cfg, chosen.images)
        return 0
    result: dict[str, Any] = {
        "cost": cost(cfg),
        "runs": RUNS,
        "opens": opens(),
    }
    write(chosen.out, result)
    print(json.dumps({name: result[name] for name in ("cost", "runs", "opens")}, indent=1))
    return 0 if result["cost"]["ratio"] <= MOST else 1


if __name__ == "__main__":
    sys.exit(main())
