"""Nodes for tests: `python tests/k8s/node NAME ... --kubeconfig FILE --folder FOLDER`.

Each node is a process (`agent.py`) that ends with this one; kill it to lose the node.
FOLDER/nodes.json contains {"gateway": this machine's address for pods, "nodes": {name:
process}}; soon after, the nodes are Ready. Ends on SIGTERM, or when its standard input is closed.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import signal
import sys
import threading
from pathlib import Path

from agent import STOP_TIMEOUT_S, Settings, in_process
from containers import bridge, missing

from agentgym.deploy.owned import end_with_owner


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="+", metavar="NAME")
    parser.add_argument("--kubeconfig", type=Path, required=True)
    parser.add_argument("--folder", type=Path, required=True, help="logs and volumes")
    parser.add_argument("--app", type=Path, default=Path(__file__).parents[3], help="at /app")
    parser.add_argument("--labels", type=json.loads, default={}, help="JSON, of each node")
    parser.add_argument("--capacity", type=json.loads, default={}, help='{"nvidia.com/gpu": "1"}')
    parser.add_argument("--backoff", type=float, default=10.0, help="seconds after a second crash")
    parser.add_argument("--absent-images", default="(?!)", help="expression; they are not pulled")
    return parser


def run(arguments: argparse.Namespace) -> None:
    told = arguments.folder / "nodes.json"
    told.unlink(missing_ok=True)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    processes = multiprocessing.get_context("spawn")
    with bridge() as made:
        nodes = {}
        for number, name in enumerate(arguments.names, 1):
            settings = Settings(
                name=name,
                number=number,
                bridge=made,
                kubeconfig=arguments.kubeconfig,
                folder=arguments.folder / name,
                app=arguments.app,
                labels=arguments.labels,
                capacity=arguments.capacity,
                backoff_s=arguments.backoff,
                absent_images=arguments.absent_images,
            )
            nodes[name] = processes.Process(target=in_process, args=(settings,), name=name)
            nodes[name].start()
        told.write_text(
            json.dumps(
                {"gateway": made.gateway, "nodes": {name: p.pid for name, p in nodes.items()}}
            )
        )
        while not stop.wait(0.5) and any(each.is_alive() for each in nodes.values()):
            pass
        for each in nodes.values():
            each.terminate()
        for each in nodes.values():
            each.join(STOP_TIMEOUT_S)
            each.kill()
            each.join()
    told.unlink(missing_ok=True)


if __name__ == "__main__":
    if reason := missing():
        sys.exit(reason)
    asked = parser().parse_args()
    asked.folder.mkdir(parents=True, exist_ok=True)
    end_with_owner(grace_s=2 * STOP_TIMEOUT_S)
    run(asked)
