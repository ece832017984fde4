"""Success of the expert and the random policy on all five environments.

Both run through the command that evaluates every other policy. Items on which `expert` fails are
listed by name. Writes docs/results/baselines.json.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from harness import ROOT, config_in, kept, parser_of, write

from agentgym.defaults import set_process_defaults

set_process_defaults()

from agentgym.evaluation.protocol import EvaluationRequest  # noqa: E402
from agentgym.pipeline.policy_evaluation import evaluate_policy  # noqa: E402

# environment -> test items, turns of `expert`, of `random` (the published rounds), in flight
PLAYED = {
    "babyai": (90, 60, 20, 16),
    "textcraft": (100, 60, 30, 16),
    "sciworld": (60, 120, 30, 4),
    "searchqa": (100, 30, 30, 16),
    "webarena": (40, 40, 15, 2),
}
DATA = ROOT / "data/AgentGym-RL-Data-ID"


def main() -> int:
    parser = parser_of(__doc__, "baselines.json", state=True)
    parser.add_argument("--items", type=int, help="most items per environment")
    parser.add_argument("--env", action="append", choices=PLAYED, help="may be repeated")
    arguments = parser.parse_args()
    table: dict[str, Any] = {}
    with kept(arguments.state) as folder:
        for env in arguments.env or PLAYED:
            for policy in ("expert", "random"):
                row = played(policy, env, arguments.items, folder)
                table.setdefault(env, {})[policy] = row
                print(f"{env} {policy}: {json.dumps(row)}", flush=True)
    write(arguments.out, {"environments": table})
    fell_short = [env for env, row in table.items() if row["expert"]["exceptions"]]
    print(f"experts with exceptions: {', '.join(fell_short) or 'none'}")
    return 0


def played(policy: str, env: str, limit: int | None, folder: Path) -> dict[str, Any]:
    num_items, turns, rounds, in_flight = PLAYED[env]
    changes = {
        "items": {"num": min(num_items, limit or num_items)},
        "num_samples": 1,
        "greedy": False,
        "max_turns": turns if policy == "expert" else rounds,
        "concurrency": in_flight,
        "episode_timeout_s": 900.0,
        "min_coverage": 0.0,
    }
    # default options: `env` of params.yaml is BabyAI with custom levels
    cfg = config_in(folder, "env.options={}", f"data.path={DATA}")
    request = EvaluationRequest(policy=policy, envs=(env,), changes=changes)
    evaluation = evaluate_policy(cfg, request)
    numbers = evaluation.result.numbers[env]
    exceptions = [
        f"{slot.item_id}: {slot.outcome}{f' {slot.failed[-1].error}' if slot.failed else ''}"
        for slot in evaluation.result.slots
        if not slot.success
    ]
    return {
        "items": numbers["num_items"],
        "max_turns": changes["max_turns"],
        "coverage": numbers["coverage"],
        "success": numbers["summary"].get("avg_at_1"),
        "failed_as_failures": numbers["failed_as_failures"].get("avg_at_1"),
        "by_family": numbers["by_family"],
        "invalid_actions": numbers["invalid_actions"],
        "exceptions": exceptions if policy == "expert" else [],
    }


if __name__ == "__main__":
    sys.exit(main())
