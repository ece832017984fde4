"""Processes that start with slow modules already imported, by Python's forkserver."""

import multiprocessing

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    ["agentgym.evaluation.registry", "agentgym.learner.sharded", "agentgym.tracking.mlflow"]
)
