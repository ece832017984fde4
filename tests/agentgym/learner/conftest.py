"""What several files of tests learn from, and the processes that learn together."""

import contextlib
import pickle

import pytest
import torch

from agentgym.algorithms.batch import Batch

LIMIT_S = 240.0


@pytest.fixture(scope="session")
def together(forks):
    """together(program, folder, size) -> what rank 0 of so many processes wrote to folder/told;
    each runs the program's text with the folder, its rank and the size.
    """

    def start(program, folder, size):
        with contextlib.ExitStack() as stack, (folder / "log").open("w") as log:
            ranks = [
                forks.start(["python", "-c", program, folder, rank, size], stdout=log)
                for rank in range(size)
            ]
            for rank in ranks:
                stack.callback(rank.kill)
            codes = [rank.wait(LIMIT_S) for rank in ranks]
            assert codes == [0] * size, (folder / "log").read_text()
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
