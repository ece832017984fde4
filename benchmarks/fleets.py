"""Time and API requests to bring many fleets up and down on a cluster.

Fleets of TextCraft, one server each, in a new namespace: several threads send them, as flows do,
wait until they are ready and take them down; then every kind of object is searched for leftovers.
Measured are seconds and requests to the API server, per fleet. The cluster is that of KUBECONFIG,
or a control plane that the script AGENTGYM_TEST_CONTROL_PLANE starts; its nodes are hollow and
start no container, so that only API server, scheduler and controllers are measured.
Writes docs/results/fleets.json.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from harness import parser_of, write

from agentgym.deploy.fleets.addresses import kind_of_addresses
from agentgym.deploy.fleets.fleet_lease import acquire
from agentgym.deploy.fleets.startup import (
    KEY_VARIABLE,
    kinds_of,
    most_pods,
    send,
    take_down,
    wait_ready,
)
from agentgym.deploy.kube.client import POD, Kind, Kube, connect
from agentgym.deploy.manifests import RUN_LABEL, Fleet, rendered_fleet

ENV = "textcraft"
TIMEOUT_S = 600.0
NAMESPACE = Kind("v1", "Namespace")


@contextlib.contextmanager
def cluster() -> Iterator[Path]:
    script = os.environ.get("AGENTGYM_TEST_CONTROL_PLANE")
    if not script:
        yield Path(os.environ.get("KUBECONFIG", Path.home() / ".kube/config"))
        return
    with tempfile.TemporaryDirectory() as folder:
        try:
            subprocess.run([script, "up", folder, "3"], check=True, timeout=280)
            yield Path(folder) / "kubeconfig"
        finally:
            subprocess.run([script, "down", folder], check=False, timeout=60)


@contextlib.contextmanager
def namespace(kubeconfig: Path) -> Iterator[Kube]:
    """Yield a client in an empty namespace without a quota."""
    name = f"agentgym-fleets-{secrets.token_hex(4)}"
    with contextlib.closing(
        connect(kubeconfig=kubeconfig, namespace=name, creates_per_s=1000.0, deletes_per_s=1000.0)
    ) as kube:
        kube.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
        try:
            os.environ.setdefault(KEY_VARIABLE, secrets.token_hex(16))
            yield kube
        finally:
            kube.delete(NAMESPACE, name)


def life(kube: Kube, objects: list[Any], run: str) -> None:
    group = acquire(kube, run, ttl_s=TIMEOUT_S)
    send(kube, group, objects)
    wait_ready(kube, run, timeout_s=TIMEOUT_S, most=most_pods(objects))
    take_down(kube, run, timeout_s=TIMEOUT_S)


def left_over(kube: Kube) -> dict[str, int]:
    """Return the number of remaining objects of any run, by kind."""
    kinds = [*kinds_of(kube), POD, kind_of_addresses(kube)]
    return {k.kind: len(kube.list(k, labels={RUN_LABEL: None}).items) for k in kinds}


def measure(kubeconfig: Path, count: int, threads: int) -> dict[str, Any]:
    """Run `count` fleets, `threads` of them at a time."""
    with namespace(kubeconfig) as kube:
        newer = kube.serves(Kind("policy/v1", "PodDisruptionBudget"))
        overlay = "kind" if newer else "test"
        runs = [f"r{secrets.token_hex(6)}" for _ in range(count)]

        def rendered(run: str) -> list[Any]:
            return rendered_fleet(overlay, Fleet(ENV, run, 1), namespace=kube.namespace)

        with ThreadPoolExecutor(2) as pool:
            objects = dict(zip(runs, pool.map(rendered, runs), strict=True))
        before, began = Counter(kube.transport.calls), time.perf_counter()
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(lambda run: life(kube, objects[run], run), runs))
        wall_s = time.perf_counter() - began
        calls = Counter(kube.transport.calls) - before
        return {
            "fleets": count,
            "at_once": threads,
            "objects_per_fleet": len(next(iter(objects.values()))) + 1,  # and the lease
            "wall_s_per_fleet": round(wall_s / count, 3),
            "calls_per_fleet": {verb: round(n / count, 2) for verb, n in sorted(calls.items())},
            "all_calls_per_fleet": round(calls.total() / count, 2),
            "left_over": left_over(kube),
        }


def main() -> None:
    parser = parser_of(__doc__, "fleets.json")
    parser.add_argument("--fleets", type=int, default=50)
    parser.add_argument("--threads", type=int, default=10)
    arguments = parser.parse_args()
    with cluster() as kubeconfig:
        numbers = measure(kubeconfig, arguments.fleets, arguments.threads)
    write(arguments.out, numbers)
    print(json.dumps(numbers, indent=1))


if __name__ == "__main__":
    main()
