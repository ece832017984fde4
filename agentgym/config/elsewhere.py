"""Checks for steps that compute on other machines: settings that mean this machine alone."""

from __future__ import annotations

from pathlib import Path

from agentgym.config.run import RunConfig
from agentgym.trust import is_here


def is_elsewhere(cfg: RunConfig) -> bool:
    """Return True if steps compute on machines that do not have this machine's paths."""
    if cfg.compute == "kuberay":
        return True
    return cfg.compute == "ray-job" and not (cfg.ray.shared_paths or is_here(cfg.ray.address))


def local_there(cfg: RunConfig) -> list[str]:
    """Return a line with a remedy per setting that is of no use, or unsafe, on other machines."""
    problems = []
    if not cfg.store.uri:
        problems.append("store.uri '': name s3://bucket/prefix")
    uri = cfg.tracking.uri
    if not uri.startswith(("http://", "https://")) or is_here(uri):
        problems.append(f"tracking.uri {uri!r}: name an MLflow server that other machines reach")
    if "@" in uri:
        problems.append("tracking.uri with a password: it belongs into a secret")
    for env in cfg.envs:
        problems += [
            f"env.endpoints {url} ({env.name}): name servers that other machines reach"
            for url in env.endpoints
            if is_here(url)
        ]
    name = cfg.model.name
    if cfg.model.source == "hub" and (Path(name).is_dir() or name.startswith(("/", ".", "~"))):
        problems.append(f"model.name {name}: name a repository of the Hub")
    return problems


def refused_elsewhere(cfg: RunConfig) -> str | None:
    """Return the error text for settings that steps on other machines cannot use, or None."""
    local = local_there(cfg) if is_elsewhere(cfg) else []
    if not local:
        return None
    shared = (
        "; where the cluster has the same paths, set ray.shared_paths"
        if cfg.compute == "ray-job"
        else ""
    )
    return (
        f"compute {cfg.compute} sends steps to other machines, where this would be local:"
        f" {'; '.join(local)}{shared}"
    )
