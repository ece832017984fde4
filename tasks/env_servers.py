"""Environment servers that outlive a run, as tasks: processes here, or fleets of a cluster."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from prefect.artifacts import create_table_artifact

from agentgym.config import EnvConfig, RunConfig
from agentgym.deploy.keepers import KeptServer, end_all, keep
from agentgym.deploy.kubernetes import end_kept, keep_up
from tasks.retries import retried

MORE_S = 300.0  # in addition to the cluster's timeout, for the other calls


@dataclass(frozen=True)
class Standing:
    """Kept servers of an environment, running or ended."""

    env: str
    where: str  # an address, or a fleet
    held_by: str  # a process, or a namespace
    options: dict[str, Any]


def keep_environment(cfg: RunConfig, env: EnvConfig) -> Standing:
    """Return servers of this environment, started if none run; `end_environments` ends them."""
    return _keep.with_options(timeout_seconds=900 + cfg.kubernetes.ready_timeout_s)(cfg, env)


@retried("environment up", run_name="{env.name} up")
def _keep(cfg: RunConfig, env: EnvConfig) -> Standing:
    if env.deploy == "kubernetes":
        namespace = f"namespace {cfg.kubernetes.namespace}"
        return Standing(env.name, keep_up(cfg, env), namespace, env.options)
    return _of_kept(keep(cfg, env))


def end_environments(cfg: RunConfig) -> list[Standing]:
    """End and return all kept servers of this state folder, and the kept fleets of this run."""
    return _end.with_options(timeout_seconds=MORE_S + cfg.kubernetes.down_timeout_s)(cfg)


@retried("environments down", run_name="environments down")
def _end(cfg: RunConfig) -> list[Standing]:
    ended = [_of_kept(server) for server in end_all(cfg.state_dir)]
    namespace = f"namespace {cfg.kubernetes.namespace}"
    return ended + [Standing("fleet", name, namespace, {}) for name in end_kept(cfg)]


def _of_kept(server: KeptServer) -> Standing:
    return Standing(server.env, server.url, f"process {server.pid}", server.options)


def servers_artifact(servers: list[Standing], description: str) -> None:
    """List the servers on the flow run's page, without tokens."""
    rows = [
        {
            "environment": server.env,
            "server": server.where,
            "held by": server.held_by,
            "options": server.options,
        }
        for server in servers
    ]
    create_table_artifact(table=rows, key="environments", description=description)
