"""Defaults of every process of this project: no telemetry, one thread, all state inside the
project, no proxy for servers on this machine, and a garbage collector that does not slow imports.
`keep_blocks` and `return_memory` set the memory allocator while a pretrained model is in memory.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import io
import os
import sys
from pathlib import Path
from typing import Any

# thresholds of the garbage collector: imports create millions of objects that stay, and with
# Python's defaults a third of the import time is a search for garbage among them
COLLECT_AFTER = (100_000, 50, 100)
LOOPBACK = ("127.0.0.1", "localhost", "::1")
VIEWER_PORT = 7340  # `agentgym view` uses it if it is free; stored links contain it


def set_process_defaults(state_dir: Path = Path(".agentgym")) -> None:
    """Set environment variables that are not set yet, with caches below `state_dir`.

    Also let the garbage collector run less often and not at exit, add this machine to NO_PROXY, and
    let stdout escape characters that its encoding lacks.
    Call it before importing torch, mlflow, matplotlib or prefect.
    """
    gc.set_threshold(*COLLECT_AFTER)
    atexit.register(gc.freeze)  # skips the search for garbage at exit
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
    """Add loopback, which no proxy reaches, to NO_PROXY and no_proxy unless they list `*`."""
    listed = os.environ.get("no_proxy", os.environ.get("NO_PROXY", "")).split(",")
    hosts = [host.strip() for host in listed if host.strip()]
    if "*" not in hosts:
        hosts += [host for host in LOOPBACK if host not in hosts]
    os.environ["no_proxy"] = os.environ["NO_PROXY"] = ",".join(hosts)


# Options of glibc's mallopt. By default the threshold grows with the freed blocks; with a fixed one
# `return_memory` misses no block.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8
LARGE, MOST = 32 << 20, 2**31 - 1  # bytes: the maxima of M_MMAP_THRESHOLD and of an int


def keep_blocks() -> None:
    """Let glibc keep freed blocks of up to 32 MiB for reuse in any thread, for the rest of the
    process; `return_memory` gives the free ones back.

    A new page from the system costs microseconds: with every block of 128 KiB returned at once,
    attention to 400 cached tokens took twice as long. No effect under another C library.
    """
    for option, value in ((M_MMAP_THRESHOLD, LARGE), (M_TRIM_THRESHOLD, MOST), (M_ARENA_MAX, 1)):
        _call("mallopt", option, value)


def return_memory() -> None:
    """Return free pages to the system (glibc only): training SmolLM2-135M left 3 GiB unused."""
    _call("malloc_trim", 0)


def _call(name: str, *values: int) -> None:
    function: Any = getattr(ctypes.CDLL(None), name, None)
    if function is not None:
        function(*values)
