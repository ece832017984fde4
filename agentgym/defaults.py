"""What every process of ours starts with: no telemetry, one thread, all state inside the
project, and a collector that lets imports pass.
"""

from __future__ import annotations

import atexit
import gc
import os
from pathlib import Path

# of container objects; imports make millions that stay, and by Python's own thresholds a third of
# their time is spent looking for garbage among them
COLLECT_AFTER = (100_000, 50, 100)
VIEWER_PORT = 7340  # of `agentgym view`, where it is free; links that stay name it


def set_process_defaults(state_dir: Path = Path(".agentgym")) -> None:
    """Set environment variables that are not set yet.
    Call before importing torch, mlflow, matplotlib or prefect.
    """
    gc.set_threshold(*COLLECT_AFTER)
    atexit.register(gc.freeze)  # nor is garbage looked for among them in the end
    state = state_dir.resolve()
    for name, value in {
        "DO_NOT_TRACK": "1",
        "DVC_NO_ANALYTICS": "1",
        "DVC_SITE_CACHE_DIR": str(state / "dvc"),
        "DVC_GLOBAL_CONFIG_DIR": str(state / "dvc-config"),
        "DVC_SYSTEM_CONFIG_DIR": str(state / "dvc-config"),
        "HF_HOME": str(state / "huggingface"),
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "MPLCONFIGDIR": str(state / "matplotlib"),
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
        "TOKENIZERS_PARALLELISM": "false",
        # compiled code; its default is a known name in /tmp
        "TORCHINDUCTOR_CACHE_DIR": str(state / "torchinductor"),
        "RAY_USAGE_STATS_ENABLED": "0",
        "PREFECT_HOME": str(state / "prefect"),
        # these three ignore PREFECT_HOME
        "PREFECT_PROFILES_PATH": str(state / "prefect" / "profiles.toml"),
        "PREFECT_LOCAL_STORAGE_PATH": str(state / "prefect" / "storage"),
        "PREFECT_SERVER_MEMO_STORE_PATH": str(state / "prefect" / "memo_store.toml"),
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_CLOUD_ENABLE_ORCHESTRATION_TELEMETRY": "false",
        "PREFECT_TELEMETRY_ENABLE_RESOURCE_METRICS": "false",
        # the default of 20 is too short for a busy machine
        "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "180",
        "PREFECT_LOGGING_EXTRA_LOGGERS": "agentgym",
        "PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW": "ignore",
    }.items():
        os.environ.setdefault(name, value)
