"""Defaults of every process of this project: no telemetry, one thread, all state inside the
project, no proxy for servers on this machine, and a garbage collector that does not slow imports.
"""

from __future__ import annotations

import atexit
import gc
import io
import os
import sys
from pathlib import Path

# container objects: imports make millions that stay, and with Python's own thresholds the search
# for garbage among them takes a third of their time
COLLECT_AFTER = (100_000, 50, 100)
LOOPBACK = ("127.0.0.1", "localhost", "::1")
VIEWER_PORT = 7340  # of `agentgym view` if it is free; stored links name it


def set_process_defaults(state_dir: Path = Path(".agentgym")) -> None:
    """Set the garbage collector, and environment variables that are not set yet.

    Call it before importing torch, mlflow, matplotlib or prefect.
    """
    gc.set_threshold(*COLLECT_AFTER)
    atexit.register(gc.freeze)  # no search for garbage among them at exit
    _bypass_proxies()
    if isinstance(sys.stdout, io.TextIOWrapper):
        # like stderr, because a terminal may be ASCII
        sys.stdout.reconfigure(errors="backslashreplace")
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
        # the default for compiled code is a predictable name in /tmp
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


def _bypass_proxies() -> None:
    """Add loopback to NO_PROXY, because a network proxy cannot reach servers on this machine.

    Both spellings are set, because programs read one or the other. Lower case wins if both exist.
    """
    listed = os.environ.get("no_proxy", os.environ.get("NO_PROXY", "")).split(",")
    hosts = [host.strip() for host in listed if host.strip()]
    if "*" not in hosts:
        hosts += [host for host in LOOPBACK if host not in hosts]
    os.environ["no_proxy"] = os.environ["NO_PROXY"] = ",".join(hosts)
