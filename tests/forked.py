"""Processes that begin with what takes seconds to import, by the standard library's forkserver."""

import multiprocessing

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    ["agentgym.evaluation.registry", "agentgym.learner.sharded", "agentgym.tracking.mlflow"]
)
