"""What made a run: its source, and the packages that are installed here."""

from __future__ import annotations

import contextlib
import functools
import getpass
import importlib.metadata
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
GIT_TIMEOUT_S = 5.0
OURS = {"mlflow.source.name": "agentgym-flow", "mlflow.source.type": "PROJECT"}
OF_MACHINE = ("mlflow.source.git.commit", "mlflow.user", "source")  # tags that no store has


@functools.cache
def source_tags() -> dict[str, str]:
    """Tags that MLflow shows as a run's source and author; without git, of the package alone."""
    tags = dict(OURS)
    commit = _git("rev-parse", "HEAD")
    if commit:
        changed = bool(_git("status", "--porcelain", "--untracked-files=no"))
        tags["mlflow.source.git.commit"] = commit
        tags["source"] = f"{commit[:12]}{' with changes' if changed else ''}"
    with contextlib.suppress(OSError, KeyError):
        tags["mlflow.user"] = getpass.getuser()
    return tags


@functools.cache
def packages() -> bytes:
    """`name==version` of what is installed, a line each."""
    found = {
        each.metadata["Name"].lower(): each.version
        for each in importlib.metadata.distributions()
        if each.metadata["Name"]
    }
    return "".join(f"{name}=={found[name]}\n" for name in sorted(found)).encode()


def _git(*arguments: str) -> str:
    """Of our own repository; empty where there is none, or no git."""
    if not (ROOT / ".git").exists():
        return ""
    try:
        done = subprocess.run(
            ["git", "-C", str(ROOT), *arguments],
            capture_output=True,
            text=True,
            timeout=GIT_TIMEOUT_S,
            check=False,
            encoding="utf-8",
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
