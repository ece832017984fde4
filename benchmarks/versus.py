"""Four results of `agentgym compare` for real policies.

Writes docs/results/versus.json and docs/results/versus/*.html.
Two tiny runs of one recipe are trained with two seeds; the first one's warm start and last stage,
and the second one's last stage, are evaluated under one protocol. It compares two checkpoints of
one run, two seeds of one recipe, a policy with itself, and all of them with the warm start.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from harness import RESULTS, config_in, kept, last_stage, parser_of, write

from agentgym.comparison.versus import PAGE, NamedResult, files, lines, versus
from agentgym.config import RunConfig
from agentgym.models.checkpoint import save_pretrained
from agentgym.pipeline.contenders import EvaluationRequest
from agentgym.pipeline.policy_evaluation import evaluate_policy
from agentgym.pipeline.run import run_with_parents
from agentgym.pipeline.table import open_store
from agentgym.store.posix import write_whole

RECIPE = (
    *("env.options.levels=[GoToRedBallNoDists]", "horizon.max_turns=[5, 7]"),
    *("model.hidden_size=32", "model.num_heads=1", "model.num_kv_heads=1", "model.mlp_size=64"),
    *("model.context_tokens=512", "warm_start.num_demos=60", "warm_start.steps=80"),
    *("warm_start.batch_size=16", "warm_start.optimizer.lr=0.005", "rollout.items_per_step=4"),
    *("rollout.group_size=4", "rollout.concurrency=16", "validation.num_items=4"),
    *("evaluation.num_items=100", "deterministic=true"),
)


def lists(folder: Path) -> Path:
    """Write item lists whose train ids differ from those of the evaluation."""
    for name, ids in (("train/babyai_train", range(300)), ("eval/babyai_test", range(1000, 1200))):
        path, rows = folder / f"{name}.json", [{"item_id": f"babyai_{task}"} for task in ids]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(rows), encoding="utf-8")
    return folder


def trained(folder: Path, seed: int, steps: int) -> RunConfig:
    """Train a run to its last stage in a separate store."""
    settings = [f"seed={seed}", f"data.path={lists(folder.parent / 'data')}"]
    settings += [f"horizon.stage_steps=[{steps}, {steps}]", f"validation.every={steps}"]
    cfg = config_in(folder, *RECIPE, *settings)
    run_with_parents(last_stage(cfg), cfg)
    return cfg


def evaluated(cfg: RunConfig, step: str, name: str, num_items: int) -> NamedResult:
    """Evaluate the step's weights, exported to a folder like any external model."""
    store, policy = open_store(cfg), str(cfg.state_dir / f"model-{step}")
    head = next(head for head in store.heads() if head.step == step and head.done)
    if not Path(policy).exists():
        save_pretrained(Path(policy), store, head)
    changes = {"items": {"num": num_items}, "num_samples": 2, "greedy": False}
    changes |= {"max_turns": 9, "seed": 1}
    request = EvaluationRequest(policy=policy, envs=("babyai",), changes=changes)
    evaluation = evaluate_policy(cfg, request)
    print(f"{name}: {evaluation.how}, {evaluation.folder}", file=sys.stderr)
    return NamedResult(name, evaluation.result, evaluation.folder)


def main() -> int:
    parser = parser_of(__doc__, state=True)
    parser.add_argument("--steps", type=int, default=6, help="optimizer steps of each stage")
    parser.add_argument("--items", type=int, default=60)
    parser.add_argument("--out", type=Path, default=RESULTS)
    chosen = parser.parse_args()
    with kept(chosen.state) as state:
        runs = {seed: trained(state / f"seed-{seed}", seed, chosen.steps) for seed in (1, 2)}
        warm, last, other = (
            evaluated(runs[seed], policy, name, chosen.items)
            for seed, policy, name in (
                (1, "warm-start", "warm start"),
                (1, "stage-2", "after reinforcement learning"),
                (2, "stage-2", "another seed"),
            )
        )
        comparisons = {
            "two-checkpoints": (warm, last),
            "two-seeds": (last, other),
            "itself": (last, last),
            "against-the-warm-start": (warm, last, other),
        }
        result: dict[str, Any] = {}
        for name, named in comparisons.items():
            comparison = versus(named)
            write_whole(chosen.out / "versus" / f"{name}.html", files(comparison)[PAGE])
            result[name] = {"said": lines(comparison), "contrasts": comparison["contrasts"]}
            print("\n".join([f"{name}:", *result[name]["said"]]))
    write(chosen.out / "versus.json", result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
