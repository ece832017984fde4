"""Plays the slots an evaluation owes: environments side by side under one budget, or, where it must
be repeatable to the bit, one after the other in waves of one size.
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
    """It ended before its last episode. What was played is committed; the same command goes on."""


@dataclass(frozen=True, slots=True)
class Playing:
    """An open policy with its environments."""

    attempts: Callable[[EpisodeSettings, EnvProtocol], PlaysEpisodes]
    stopped: Callable[[], str] = lambda: ""  # why it plays no more; empty: it goes on


@dataclass(frozen=True)
class Table:
    """Everything that plays: policy, servers, and how each environment is played."""

    protocol: EvaluationProtocol
    seat: Playing
    instructions: Mapping[str, str]
    items: Mapping[str, Item]  # by id
    progress: Callable[[int], None] = lambda _: None

    def attempts(self, asked: EnvProtocol) -> dict[bool, PlaysEpisodes]:
        """Of the greedy episodes and of the samples."""
        settings = EpisodeSettings(
            seed=self.protocol.seed,
            step=0,
            max_turns=asked.max_turns,
            temperature=asked.temperature,
            max_new_tokens=asked.max_new_tokens,
            context_tokens=asked.context_tokens,
            instructions=self.instructions if asked.instructions else {},
            action_format=asked.action_format,
        )
        return {
            greedy: self.seat.attempts(
                replace(settings, temperature=0.0) if greedy else settings, asked
            )
            for greedy in (True, False)
        }


async def play(table: Table, ledger: Ledger) -> None:
    """Until nothing is owed, committing on the way; what was finished is committed, however it
    ends. Errors: EvaluationStopped; Fenced, StoreFull.
    """
    try:
        if table.protocol.deterministic:
            await _in_waves(table, ledger)
        else:
            await _side_by_side(table, ledger)
    finally:
        ledger.commit()
    _check(table, ledger)


async def _side_by_side(table: Table, ledger: Ledger) -> None:
    """Each environment has as many episodes in flight as its servers hold, all of them together
    as many as the budget.
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
                own = attempts[slot.sample == 0]
                ledger.finished(await own.play(item, slot.sample, failed=ledger.failed))
                table.progress(1)
            if ledger.is_due and not committing.locked():
                async with committing:
                    await asyncio.to_thread(ledger.write, *ledger.take())

    workers = []
    owed = ledger.owed
    for asked in table.protocol.envs:
        own = [slot for slot in owed if slot.env == asked.env.name]
        waiting, attempts = iter(own), table.attempts(asked)
        most = min(asked.most_in_flight, table.protocol.concurrency, len(own))
        workers += [work(waiting, attempts) for _ in range(most)]
    await _until_stopped(workers)


async def _until_stopped(workers: Sequence[Coroutine[Any, Any, None]]) -> None:
    """All of them; where one says stop, the others end the episodes they are in; where one
    breaks, they are cancelled.
    """
    tasks = [asyncio.create_task(each) for each in workers]
    try:
        waiting = set(tasks)
        while waiting:
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_EXCEPTION)
            for error in (task.exception() for task in done):
                if error is not None and not isinstance(error, EvaluationStopped):
                    raise error
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _in_waves(table: Table, ledger: Ledger) -> None:
    """Waves of the canonical order: one that was committed is never played again, and the next
    ones are the same, whether or not the process is.
    """
    for asked in table.protocol.envs:
        size = min(asked.most_in_flight, table.protocol.concurrency)
        for greedy, attempts in table.attempts(asked).items():
            own = [
                (table.items[slot.item_id], slot.sample)
                for slot in ledger.owed
                if slot.env == asked.env.name and (slot.sample == 0) == greedy
            ]
            for first in range(0, len(own), size):
                _check(table, ledger)
                wave = await in_lockstep(
                    attempts, own[first : first + size], table.progress, ledger.failed
                )
                for trajectory in wave:
                    ledger.finished(trajectory)
                if ledger.is_due:
                    ledger.commit()


def _check(table: Table, ledger: Ledger) -> None:
    """Errors: EvaluationStopped."""
    if reason := table.seat.stopped():
        raise EvaluationStopped(reason)
    num, of = ledger.num_failed, len(ledger.slots)
    if num > table.protocol.errors_allowed(of):
        raise EvaluationStopped(
            f"{num} of {of} episodes failed for good, and fail_on_error is"
            f" {table.protocol.fail_on_error}; last: {ledger.last_error}"
        )
