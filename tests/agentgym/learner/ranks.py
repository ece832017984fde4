"""Ranks of a process group: run one function in a single process and in several."""

import os
import pickle
from datetime import timedelta

import torch
import torch.distributed as dist

from agentgym.learner.sharded import Sharded
from agentgym.models.model import set_threads
from tests.forked import FORKS

LIMIT_S = 240.0


def _rank(asked, folder, rank, size):
    with (folder / "log").open("a") as log:
        for descriptor in (1, 2):
            os.dup2(log.fileno(), descriptor)
    set_threads()
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/meeting",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=120),
    )
    work, arguments = pickle.loads(asked)
    result = work(*arguments, lambda plan: plan.build(Sharded(torch.device("cpu"))))
    if rank == 0:
        (folder / "result").write_bytes(pickle.dumps(result))
    dist.destroy_process_group()


def together(work, arguments, folder, size):
    """Return the result of work(*arguments, build) on rank 0 of `size` processes.
    work: a function of a module; build(plan) makes a learner of the process group.
    """
    asked = pickle.dumps((work, arguments))  # multiprocessing would share tensors between ranks
    ranks = [FORKS.Process(target=_rank, args=(asked, folder, each, size)) for each in range(size)]
    try:
        for each in ranks:
            each.start()
        for each in ranks:
            each.join(LIMIT_S)
        assert [each.exitcode for each in ranks] == [0] * size, (folder / "log").read_text()
    finally:
        for each in ranks:
            each.kill()
    return pickle.loads((folder / "result").read_bytes())


def alone(work, arguments):
    """Return the result of work(*arguments, build) in this process."""
    return work(*arguments, lambda plan: plan.build())


def kept_blobs(learner, like):
    """Store the files of all ranks for a commit. Return {name: blob}.
    like: stored tensors that give the store and the step.
    """
    parts = [learner.snapshot().write(like.place, like.manifest.step, like.manifest.key)]
    if learner.ranks.size > 1:
        mine, parts = parts[0], [None] * learner.ranks.size
        dist.all_gather_object(parts, mine)
    return {name: blob for part in parts for name, blob in part.items()}
