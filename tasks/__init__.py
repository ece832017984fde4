"""Thin Prefect tasks: retries, a timeout and an artifact around one library call each."""

import os
from pathlib import Path

from agentgym.defaults import set_process_defaults

# before the first import of prefect, which reads its settings once and makes its folder, but not the one above
set_process_defaults()
Path(os.environ["PREFECT_HOME"]).parent.mkdir(parents=True, exist_ok=True)
