"""Multi-turn reinforcement learning on growing horizons (ScalingInter-RL), from the library's
parts: no flow, no store of results, no tracking server.

python examples/rl_loop.py [key.path=value ...]    settings as in params.yaml, which it reads
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Sequence

from agentgym.algorithms.advantages import with_advantages
from agentgym.algorithms.batch import learnable, to_batch
from agentgym.config import OptimizerConfig, RunConfig, load_config
from agentgym.data.check import load_data
from agentgym.data.items import Splits, train_stream
from agentgym.deploy.environment import environment_servers
from agentgym.learner.learner import LocalLearner
from agentgym.learner.process_group import ProcessGroup
from agentgym.models.checkpoint import Checkpoint
from agentgym.models.model import load_weights, set_threads
from agentgym.rollouts.collect import success_share
from agentgym.rollouts.engine import LocalEngine, RolloutRequest, open_engine
from agentgym.rollouts.players import ExpertPlayer
from agentgym.steps.step import max_turns
from agentgym.training.demonstrations import demonstrate, expert_items, tokenized
from agentgym.training.initial import first_checkpoint
from agentgym.training.rl import with_limit
from agentgym.training.sft import demo_indices
from agentgym.types import Item


def main() -> int:
    set_threads()
    cfg = load_config("params.yaml", sys.argv[1:])
    splits = load_data(cfg)
    checkpoint = imitate(cfg, splits)
    with (
        environment_servers(cfg, False) as endpoints,
        open_engine(cfg, checkpoint, endpoints, version=0) as engine,
    ):
        before = evaluate(cfg, engine, splits.test)
        print(f"after imitation: success {before:.3f}", flush=True)
        reinforce(cfg, splits, checkpoint, engine)
        after = evaluate(cfg, engine, splits.test)
        print(f"after reinforcement learning: success {after:.3f} ({after - before:+.3f})")
    return 0


def reinforce(cfg: RunConfig, splits: Splits, checkpoint: Checkpoint, engine: LocalEngine) -> None:
    """Run the paper's loop: generate, prepare experience, train."""
    algorithm = with_limit(cfg, checkpoint)
    learner = learner_of(cfg, checkpoint, cfg.optimizer, sum(cfg.horizon.stage_steps))
    stream = train_stream(cfg, splits, {})
    for step in range(1, sum(cfg.horizon.stage_steps) + 1):
        # generate: groups of episodes, no longer than the horizon of this step
        turns = max_turns(cfg.horizon, step)
        request = RolloutRequest(
            stream.next(cfg.rollout.items_per_step),
            num_samples=cfg.rollout.group_size,
            step=step,
            max_turns=turns,
            temperature=cfg.rollout.temperature,
            seed=cfg.seed,
        )
        episodes = engine.collect(request)
        # prepare experience: the learner's log-probability and advantage of each token
        batch = to_batch(learnable(episodes, truncated=algorithm.truncated or "zero"))
        experience = with_advantages(learner.prepare(batch, algorithm, step=step), algorithm)
        # train
        experience, metrics = learner.update(experience, algorithm, step=step, seed=cfg.seed)
        # publish the new weights to the engine, which verifies them
        engine.publish(learner, step)
        print(
            f"step {step:3}  max_turns {turns:2}  success {success_share(episodes):.2f}"
            f"  KL of the update {metrics.get('actor/ratio_kl', 0.0):.1e}",
            flush=True,
        )


def imitate(cfg: RunConfig, splits: Splits) -> Checkpoint:
    """Train a small model to imitate an expert; it stands in for a pretrained one."""
    samples = [(item, 0) for item in expert_items(cfg, splits)]
    with environment_servers(cfg, True) as endpoints:
        trajectories, settings = demonstrate(
            cfg, endpoints, samples, lambda item, sample: ExpertPlayer(), allow_expert=True
        )
    checkpoint = first_checkpoint(cfg, trajectories)
    demos = [
        tokenized(trajectory, checkpoint.renderer, settings)
        for trajectory in trajectories
        if trajectory.success
    ]
    start = cfg.warm_start
    learner = learner_of(cfg, checkpoint, start.optimizer, start.steps)
    for step in range(1, start.steps + 1):
        chosen = demo_indices(cfg.seed, step, len(demos), start.batch_size)
        learner.sft_step(to_batch([demos[index] for index in chosen]), step=step)
    load_weights(checkpoint.model, learner.weights())
    return checkpoint


def learner_of(
    cfg: RunConfig, checkpoint: Checkpoint, optimizer: OptimizerConfig, total_steps: int
) -> LocalLearner:
    """Return a learner with its own copy of the weights; the engine keeps the checkpoint's."""
    model, ranks = copy.deepcopy(checkpoint.model), ProcessGroup(cfg.compute_device)
    return LocalLearner(model, optimizer, total_steps=total_steps, ranks=ranks)


def evaluate(cfg: RunConfig, engine: LocalEngine, items: Sequence[Item]) -> float:
    """Mean success on test items, one sample per item."""
    settings = cfg.evaluation
    request = RolloutRequest(
        items[: settings.num_items],
        num_samples=1,
        step=0,
        max_turns=settings.max_turns,
        temperature=settings.temperature,
        seed=settings.seed,
    )
    return success_share(engine.collect(request))


if __name__ == "__main__":
    sys.exit(main())
