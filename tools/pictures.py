"""Pictures of the report and of MLflow's pages for the finished run of a state folder.

    python tools/pictures.py [STATE] [--images FOLDER]    # STATE: .agentgym by default

Starts `make ui` on the folder and opens the pages in Chromium, the charts and the table of runs
also as wide as a phone. Writes report.png and mlflow_*.png. benchmarks/viewer_pages.py makes the
viewer's pictures.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from playwright.sync_api import sync_playwright

from agentgym.config import RunConfig, load_config
from agentgym.pipeline.table import finished, open_store, run_key, steps_of
from agentgym.tracking import deliver
from agentgym.tracking.saved_view import VIEWS, link_to
from envs.webarena.chromium import find_browser

ROOT = Path(__file__).resolve().parents[1]
DESKTOP, PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 844}
SETTLES_MS = 15_000  # until charts are drawn: the network never becomes idle, for they keep polling
LOADS_MS = 120_000


@contextlib.contextmanager
def served(state: Path) -> Iterator[str]:
    """Run `make ui` in the folder above the state; yield the link that it prints."""
    process = subprocess.Popen(
        [sys.executable, "-m", "services", "ui", "--port", "0"],
        cwd=state.parent,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        yield next(link for line in process.stdout for link in re.findall(r"http\S+/login", line))
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(60)


def pages_of(cfg: RunConfig) -> dict[str, str]:
    """Return name of a picture -> page of MLflow, relative to the server's address."""
    tracker = deliver.tracker_of(cfg)
    number, client = tracker.experiment_id, tracker.client
    (run,) = client.search_runs([number], f"tags.run_key = '{run_key(cfg)}'", max_results=1)
    succeeded = "tags.success = 'true'"
    traces = client.search_traces(locations=[number], filter_string=succeeded, max_results=20)
    trace = max(traces, key=lambda candidate: len(candidate.data.spans)).info.trace_id
    version = finished(cfg, open_store(cfg))["register"].results
    charts = link_to(number, VIEWS[0])
    return {
        "mlflow_view": charts,
        "mlflow_runs": charts.replace("&compareRunsMode=CHART", ""),
        "mlflow_run": f"#/experiments/{number}/runs/{run.info.run_id}",
        "mlflow_trace": f"#/experiments/{number}/traces?traceId={trace}",
        "mlflow_version": f"#/models/{version['model']}/versions/{version['version']}",
    }


def shoot(cfg: RunConfig, images: Path) -> None:
    images.mkdir(parents=True, exist_ok=True)
    report = cfg.state_dir / f"reports/r{run_key(cfg)[:12]}/report.html"
    pages = pages_of(cfg)
    with served(cfg.state_dir.resolve()) as link, sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=find_browser(), args=["--no-sandbox"])
        for size, end in ((DESKTOP, ""), (PHONE, "_phone")):
            page = browser.new_page(viewport=size)
            page.goto(report.resolve().as_uri())
            page.screenshot(path=images / f"report{end}.png")
            page.goto(link, timeout=LOADS_MS)
            page.wait_for_url("**/#/experiments/**", timeout=LOADS_MS)
            address = page.url.partition("#")[0]
            for name in pages if size == DESKTOP else ("mlflow_view", "mlflow_runs"):
                page.goto("about:blank")
                page.goto(f"{address}{pages[name]}", timeout=LOADS_MS)
                page.wait_for_timeout(SETTLES_MS)
                page.screenshot(path=images / f"{name}{end}.png")
        browser.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("state", type=Path, nargs="?", default=ROOT / ".agentgym")
    parser.add_argument("--params", default=str(ROOT / "params.yaml"))
    parser.add_argument("--set", action="append", default=[], metavar="key.path=value")
    parser.add_argument("--images", type=Path, default=ROOT / "docs/images", metavar="FOLDER")
    chosen = parser.parse_args()
    cfg = load_config(chosen.params, [f"store.path={chosen.state / 'store'}", *chosen.set])
    if set(finished(cfg, open_store(cfg))) != set(steps_of(cfg)):
        print(f"{chosen.state} has no finished run of {chosen.params}", file=sys.stderr)
        return 2
    shoot(cfg, chosen.images)
    return 0


if __name__ == "__main__":
    sys.exit(main())
