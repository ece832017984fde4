"""Pictures of MLflow's pages for a run: charts, run, trace and registered version.

    python benchmarks/pages.py [FOLDER]    # FOLDER: state of a finished default run

Writes docs/images/mlflow_*.png. Needs Chromium.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

from harness import ROOT, free_port, parser_of, wait_for_url

from agentgym.config import RunConfig, load_config
from agentgym.deploy.owned import owned_process
from agentgym.pipeline.table import finished, open_store, run_key, steps_of
from agentgym.tracking import deliver
from agentgym.tracking.saved_view import VIEWS, link_to
from envs.webarena.chromium import find_browser
from services.mlflow_server import PREFERENCES

SETTLES_MS = 15_000  # until charts are drawn


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


def shoot(cfg: RunConfig, images: Path) -> None:
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
        page = browser.new_page(viewport={"width": 1410, "height": 1100})
        kept = {name: json.dumps(value) for name, value in PREFERENCES.items()}
        page.add_init_script(f"Object.assign(localStorage, {json.dumps(kept)})")
        for name, path in paths.items():
            page.goto("about:blank")
            page.goto(f"{url}/{path}", timeout=120_000)
            page.wait_for_timeout(SETTLES_MS)  # the network never becomes idle: charts keep polling
            page.screenshot(path=images / f"{name}.png")
        browser.close()


def main() -> int:
    parser = parser_of(__doc__)
    state = ROOT / ".agentgym"
    parser.add_argument("folder", type=Path, nargs="?", default=state, help="its store's parent")
    parser.add_argument("--params", default=str(ROOT / "params.yaml"))
    parser.add_argument("--set", action="append", default=[], metavar="key.path=value")
    parser.add_argument("--images", type=Path, default=ROOT / "docs/images", metavar="FOLDER")
    chosen = parser.parse_args()
    store = f"store.path={chosen.folder / 'store'}"
    cfg = load_config(chosen.params, [store, *chosen.set])
    if set(finished(cfg, open_store(cfg))) != set(steps_of(cfg)):
        print(f"{chosen.folder} contains no finished run of {chosen.params}", file=sys.stderr)
        return 2
    shoot(cfg, chosen.images)
    return 0


if __name__ == "__main__":
    sys.exit(main())
