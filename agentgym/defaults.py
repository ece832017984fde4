"""What every process of ours starts with: no telemetry, one thread, all state inside the
project, no proxy for servers on this machine, and a collector that lets imports pass.
"""

from __future__ import annotations

import atexit
import gc
import io
import os
import sys
from pathlib import Path

# of container objects; imports make millions that stay, and by Python's own thresholds a third of
# their time is spent looking for garbage among them
COLLECT_AFTER = (100_000, 50, 100)
LOOPBACK = ("127.0.0.1", "localhost", "::1")
VIEWER_PORT = 7340  # of `agentgym view`, where it is free; links that stay name it


def set_process_defaults(state_dir: Path = Path(".agentgym")) -> None:
    """Set environment variables that are not set yet.
    Call before importing torch, mlflow, matplotlib or prefect.
    """
    gc.set_threshold(*COLLECT_AFTER)
    atexit.register(gc.freeze)  # nor is garbage looked for among them in the end
    _bypass_proxies()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # as stderr: a terminal may be ASCII
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


def _bypass_proxies() -> None:
    """Add loopback to NO_PROXY: the proxy of an office network cannot reach our own servers there.

    Both spellings are set, because programs read one or the other, and lower case wins where both
    are there.
    """
    listed = os.environ.get("no_proxy", os.environ.get("NO_PROXY", "")).split(",")
    hosts = [host.strip() for host in listed if host.strip()]
    if "*" not in hosts:
        hosts += [host for host in LOOPBACK if host not in hosts]
    os.environ["no_proxy"] = os.environ["NO_PROXY"] = ",".join(hosts)
