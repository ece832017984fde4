"""`agentgym envs list | gc`: list servers on a cluster, and remove those without a live run."""

from __future__ import annotations

import argparse
import contextlib
import json

from agentgym.commands.parser import Commands
from agentgym.config import RunConfig
from agentgym.console.ending import say


def add(commands: Commands) -> None:
    envs = commands.group("envs", "environment servers on Kubernetes")
    shown = envs.add("list", _list, "which runs have servers in kubernetes.namespace")
    shown.add_argument("--json", action="store_true")
    gc = envs.add("gc", _gc, "servers of runs that died, and kept ones whose time is over")
    gc.add_argument(
        "--remove", action="store_true", help="take them down (default: only list them)"
    )
    gc.add_argument("--json", action="store_true")


def _list(cfg: RunConfig, arguments: argparse.Namespace) -> int:
    from agentgym.deploy.fleets.fleet_lease import groups
    from agentgym.deploy.fleets.startup import num_live
    from agentgym.deploy.kubernetes import connected

    with contextlib.closing(connected(cfg.kubernetes)) as kube:
        rows = [
            {
                "run": group.run,
                "held_by": "kept" if group.is_kept else str(group.holder or "unknown"),
                "is_alive": group.is_alive(),
                "renewed": group.renewed,
                "pods": num_live(kube, group.run),
            }
            for group in groups(kube)
        ]
    if arguments.json:
        say(json.dumps(rows, indent=1))
        return 0
    for row in rows:
        state = "alive" if row["is_alive"] else "silent"
        say(f"{row['run']:<24}{state:<8}{row['pods']:>3} pods  {row['held_by']}")
    if not rows:
        say(f"no run has servers in namespace {cfg.kubernetes.namespace}")
    return 0


def _gc(cfg: RunConfig, arguments: argparse.Namespace) -> int:
    from agentgym.deploy.fleets.startup import take_down
    from agentgym.deploy.kubernetes import connected, observation_s, orphans

    with contextlib.closing(connected(cfg.kubernetes)) as kube:
        orphan_groups = orphans(kube, observe_s=observation_s(cfg))
        if arguments.remove:
            for group in orphan_groups:
                take_down(kube, group.run, timeout_s=cfg.kubernetes.down_timeout_s)
    if arguments.json:
        rows = [
            {"run": group.run, "why": group.why, "removed": arguments.remove}
            for group in orphan_groups
        ]
        say(json.dumps(rows, indent=1))
        return 0
    for group in orphan_groups:
        say(f"{'gone' if arguments.remove else 'dead':<8}{group.run:<24}{group.why}")
    if orphan_groups and not arguments.remove:
        say("agentgym envs gc --remove takes them down")
    if not orphan_groups:
        say(f"nothing in namespace {cfg.kubernetes.namespace} is left over")
    return 0
