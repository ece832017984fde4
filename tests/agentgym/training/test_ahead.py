"""Batches come in order, within the limit of batches ahead, and the thread ends with its owner."""

import contextlib
import threading

import pytest

from agentgym.training import ahead as module
from agentgym.training.ahead import Ahead

PATIENCE_S = 30.0


class Filler:
    """Fills batches that are lists; tests can wait for them."""

    def __init__(self, fails_at=None, holds_at=None):
        self.fails_at, self.holds_at = fails_at, holds_at
        self.filled, self.threads, self.hold = [], set(), threading.Event()
        self._changed = threading.Condition()

    def __call__(self, batch):
        (number,) = batch
        self.threads.add(threading.get_ident())
        if number == self.holds_at:
            assert self.hold.wait(PATIENCE_S)
        if number == self.fails_at:
            raise OSError("the environment is gone")
        with self._changed:
            self.filled.append(number)
            self._changed.notify_all()

    def wait_for(self, count):
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.filled) >= count, PATIENCE_S)


def batches(count=20):
    return ([number] for number in range(count))


@pytest.mark.parametrize("most", [1, 4])
def test_so_many_are_filled_ahead_and_not_one_more(most):
    filler = Filler()
    with Ahead(most) as ahead:
        ahead.begin(batches(), filler)
        for learned in range(10):
            # one to learn from now, and `most` for later updates
            filler.wait_for(learned + 1 + most)
            assert len(filler.filled) == learned + 1 + most
            assert ahead.begun == [[n] for n in range(learned, learned + 1 + most)]
            assert ahead.take() == [learned]
            assert ahead.begun == [[n] for n in range(learned + 1, learned + 1 + most)]
            ahead.admit()
    assert filler.threads.isdisjoint({threading.get_ident()})
    assert filler.filled == sorted(filler.filled)


def test_with_none_ahead_a_batch_is_filled_by_whoever_takes_it():
    filler = Filler()
    with Ahead(0) as ahead:
        ahead.begin(batches(), filler)
        for learned in range(3):
            assert filler.filled == list(range(learned))
            assert ahead.take() == [learned]
            assert ahead.begun == []
            ahead.admit()
    assert filler.threads == {threading.get_ident()}


def test_what_was_filled_before_an_error_is_taken_first_and_nothing_is_begun_after_it():
    filler = Filler(fails_at=2)
    with Ahead(4) as ahead:
        ahead.begin(batches(), filler)
        assert [ahead.take(), ahead.take()] == [[0], [1]]
        with pytest.raises(OSError, match="the environment is gone"):
            ahead.take()
    assert filler.filled == [0, 1]


def test_one_that_is_being_filled_stands_among_those_begun():
    filler = Filler(holds_at=1)
    with Ahead(4) as ahead:
        ahead.begin(batches(), filler)
        assert ahead.take() == [0]
        while ahead.begun != [[1]]:
            threading.Event().wait(0.001)
        assert filler.filled == [0]
        filler.hold.set()


@pytest.mark.parametrize("holds_at", [None, 0])
def test_the_thread_ends_with_its_owner_whatever_it_waits_for(holds_at):
    filler = Filler(holds_at=holds_at)
    with contextlib.suppress(KeyError), Ahead(2) as ahead:
        ahead.begin(batches(), filler)
        if holds_at is None:
            filler.wait_for(3)  # it is waiting for admission
        filler.hold.set()  # otherwise closing an engine ends it
        raise KeyError
    assert not ahead._thread.is_alive()
    assert len(filler.filled) <= 3


def test_a_thread_that_does_not_end_is_told_of_and_kept_waiting_for_no_longer(monkeypatch, caplog):
    monkeypatch.setattr(module, "CLOSE_TIMEOUT_S", 0.01)
    filler = Filler(holds_at=0)
    with Ahead(2) as ahead:
        ahead.begin(batches(), filler)
    assert "generation ahead did not end within 0.01 s" in caplog.text
    filler.hold.set()
    ahead._thread.join(PATIENCE_S)
    assert filler.filled == [0]
