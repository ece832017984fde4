"""What several files of tests learn from, and the processes that learn together."""

import multiprocessing
import pickle
import sys

import pytest
import torch

from agentgym.algorithms.batch import Batch

LIMIT_S = 240.0


def run(program, *arguments):
    sys.argv = ["-c", *arguments]
    exec(program, {"__name__": "__main__"})


@pytest.fixture(scope="session")
def together():
    """together(program, folder, size) -> what rank 0 of so many processes wrote to folder/told;
    each runs the program's text with the folder, its rank and the size.

    They begin with what takes seconds to import.
    """
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(
        ["agentgym.learner.learner", "agentgym.learner.sharded", "transformers.models.qwen2"]
    )

    def start(program, folder, size):
        ranks = [
            processes.Process(target=run, args=(program, str(folder), str(rank), str(size)))
            for rank in range(size)
        ]
        try:
            for rank in ranks:
                rank.start()
            for rank in ranks:
                rank.join(LIMIT_S)
            assert [rank.exitcode for rank in ranks] == [0] * size
        finally:
            for rank in ranks:
                rank.kill()
        return pickle.loads((folder / "told").read_bytes())

    return start


@pytest.fixture(scope="session")
def batch_of():
    """batch_of(lengths, vocabulary) -> random sequences of these lengths, with random rewards."""

    def make(lengths, vocabulary):
        generator = torch.Generator().manual_seed(3)
        starts = torch.cumsum(torch.tensor([0, *lengths]), 0)
        mask = torch.rand(int(starts[-1]), generator=generator) < 0.5
        mask[starts[:-1]], mask[starts[1:] - 1] = False, True
        rewards = torch.zeros(len(mask))
        rewards[starts[1:] - 1] = torch.randn(len(lengths), generator=generator)
        ids = torch.randint(vocabulary, (len(mask),), generator=generator)
        sequences = torch.arange(len(lengths))
        return Batch(
            ids,
            starts,
            mask,
            rewards,
            torch.zeros(len(mask)),
            sequences // 2,
            sequences % 2 == 1,
            1.0,
        )

    return make
