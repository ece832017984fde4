"""The origin of a run: its source, and the installed packages."""

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
OF_MACHINE = ("mlflow.source.git.commit", "mlflow.user", "source")  # tags not in any store


@functools.cache
def source_tags() -> dict[str, str]:
    """Return the tags that MLflow shows as source and author; without git, the package."""
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
    """Return a line `name==version` for each installed package."""
    versions = {
        distribution.metadata["Name"].lower(): distribution.version
        for distribution in importlib.metadata.distributions()
        if distribution.metadata["Name"]
    }
    return "".join(f"{name}=={versions[name]}\n" for name in sorted(versions)).encode()


def _git(*arguments: str) -> str:
    """Return a git command's output in our own repository; empty if git fails or is missing."""
    if not (ROOT / ".git").exists():
        return ""
    try:
        completed = subprocess.run(
            ["git", "-C", str(ROOT), *arguments],
            capture_output=True,
            text=True,
            timeout=GIT_TIMEOUT_S,
            check=False,
            encoding="utf-8",
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return completed.stdout.strip() if completed.returncode == 0 else ""
