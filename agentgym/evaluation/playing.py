"""Play an evaluation's missing slots: all environments at once, with a limit on episodes in flight,
or, to be repeatable to the bit, one after the other in waves of a fixed size.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from agentgym.evaluation.protocol import EnvProtocol, EvaluationProtocol
from agentgym.evaluation.record import Ledger
from agentgym.evaluation.result import Slot
from agentgym.rollouts.collect import PlaysEpisodes, in_lockstep
from agentgym.rollouts.episode import EpisodeSettings
from agentgym.types import Item


class EvaluationStopped(RuntimeError):
    """Error that ends an evaluation early. All played episodes are committed; it can be resumed."""


@dataclass(frozen=True, slots=True)
class Playing:
    """A policy opened for playing: `attempts` returns an object that plays episodes."""

    attempts: Callable[[EpisodeSettings, EnvProtocol], PlaysEpisodes]
    stopped: Callable[[], str] = lambda: ""  # why the policy cannot play more; empty: it can


@dataclass(frozen=True)
class Table:
    """Everything needed to play: protocol, opened policy, instructions and items."""

    protocol: EvaluationProtocol
    seat: Playing
    instructions: Mapping[str, str]
    items: Mapping[str, Item]  # by id
    progress: Callable[[int], None] = lambda _: None

    def attempts(self, env_protocol: EnvProtocol) -> dict[bool, PlaysEpisodes]:
        """Return the players of the greedy episodes (True) and of the samples (False)."""
        settings = env_protocol.episodes(self.protocol.seed, self.instructions)
        by_kind = {True: replace(settings, temperature=0.0), False: settings}
        return {greedy: self.seat.attempts(s, env_protocol) for greedy, s in by_kind.items()}


async def play(table: Table, ledger: Ledger) -> None:
    """Play each missing slot, a failed attempt again within the protocol's max_attempts. Commit all
    that was played, also on an error.
    Errors: EvaluationStopped if the policy stopped or too many failed; Fenced, StoreFull.
    """
    try:
        await (_in_waves if table.protocol.deterministic else _side_by_side)(table, ledger)
    finally:
        ledger.commit()
    _check(table, ledger)


async def _side_by_side(table: Table, ledger: Ledger) -> None:
    """Play all environments at once, with as many episodes in flight as their servers allow, and at
    most `concurrency` in all. A commit that is due is written in a thread.
    """
    budget = asyncio.Semaphore(table.protocol.concurrency)
    committing = asyncio.Lock()

    async def work(waiting: Iterator[Slot], attempts: Mapping[bool, PlaysEpisodes]) -> None:
        while True:
            async with budget:
                _check(table, ledger)
                slot = next(waiting, None)
                if slot is None:
                    return
                item = table.items[slot.item_id]
                player = attempts[slot.sample == 0]
                ledger.finished(await player.play(item, slot.sample, failed=ledger.failed))
                table.progress(1)
            if ledger.is_due and not committing.locked():
                async with committing:
                    await asyncio.to_thread(ledger.write, *ledger.take())

    workers = []
    for env_protocol in table.protocol.envs:
        env_slots = [slot for slot in ledger.owed if slot.env == env_protocol.env.name]
        waiting, attempts = iter(env_slots), table.attempts(env_protocol)
        num_workers = min(env_protocol.most_in_flight, table.protocol.concurrency, len(env_slots))
        workers += [work(waiting, attempts) for _ in range(num_workers)]
    await _until_stopped(workers)


async def _until_stopped(workers: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Run all workers. If one raises EvaluationStopped, wait for the others, which stop after their
    current episodes, and raise nothing; any other error cancels them and is raised.
    """
    tasks = [asyncio.create_task(worker) for worker in workers]
    try:
        waiting = set(tasks)
        while waiting:
            completed, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_EXCEPTION)
            for error in (task.exception() for task in completed):
                if error is not None and not isinstance(error, EvaluationStopped):
                    raise error
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _in_waves(table: Table, ledger: Ledger) -> None:
    """Play environments one by one in waves of a fixed size, greedy episodes first. Commit after a
    wave if that is due. A restarted evaluation plays the same waves.
    """
    for env_protocol in table.protocol.envs:
        size = min(env_protocol.most_in_flight, table.protocol.concurrency)
        for greedy, attempts in table.attempts(env_protocol).items():
            episodes = [
                (table.items[slot.item_id], slot.sample)
                for slot in ledger.owed
                if slot.env == env_protocol.env.name and (slot.sample == 0) == greedy
            ]
            for first in range(0, len(episodes), size):
                _check(table, ledger)
                wave = episodes[first : first + size]
                played = await in_lockstep(attempts, wave, table.progress, ledger.failed)
                for trajectory in played:
                    ledger.finished(trajectory)
                if ledger.is_due:
                    ledger.commit()


def _check(table: Table, ledger: Ledger) -> None:
    """Raise EvaluationStopped if the policy stopped or too many episodes failed."""
    if reason := table.seat.stopped():
        raise EvaluationStopped(reason)
    num, num_slots = ledger.num_failed, len(ledger.slots)
    if num > table.protocol.errors_allowed(num_slots):
        raise EvaluationStopped(
            f"{num} of {num_slots} episodes failed for good, and fail_on_error is"
            f" {table.protocol.fail_on_error}; last: {ledger.last_error}"
        )
