"""One ScienceWorld episode over a slot of the pool."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from typing import Any, Literal

from envs.env import Expert, StepResult
from envs.sciworld.gold import Recording
from envs.sciworld.jvm import GameFailed
from envs.sciworld.slots import Place, Pool
from envs.sciworld.tasks import Task, find_task
from envs.wire import FAMILY, INVALID

logger = logging.getLogger(__name__)

# characters of an action passed to the engine: it needs seconds for 16,000 of some letters
LONGEST = 1_000
UNREADABLE = "No known action matches that input."  # the engine's whole answer
GRAMMAR = (
    "look around | inventory | task | wait | wait1 | go to ROOM | look at, look in, read, open,"
    " close, pick up, put down, activate, deactivate, use, mix, eat, flush, disconnect or focus on"
    " OBJECT | move OBJECT to OBJECT | pour or dunk OBJECT into OBJECT | use OBJECT on OBJECT |"
    " connect OBJECT to OBJECT"
)
BROKEN = "The laboratory broke on this action. The episode is over."
Reward = Literal["normalised", "agentgym"]
Protocol = Literal["own", "agentgym"]

SOLVED = 100  # full score
NOT_SHOWN = ("terminal ", "air", "sewer")  # parts of every object, and objects in every room
STATES = {"solid", "liquid", "gas"}


@dataclass(frozen=True, slots=True)
class Options:
    tasks: tuple[str, ...]
    max_moves: int
    reward: Reward
    # True: the score of the first observation is reported with it; False: the first turn pays it
    paid_at_reset: bool = False
    # own: the answer to a malformed action ends with the grammar; agentgym: the engine's answer
    protocol: Protocol = "own"


class World:
    """One episode. Methods may raise JvmLost or, except in a step, GameFailed; either ends it."""

    def __init__(self, pool: Pool, options: Options) -> None:
        self._pool = pool
        self._options = options
        self._slot: Place | None = None
        self._played: list[str] = []
        self.task = Task("", 0)
        self.description = ""
        self.room = ""  # the first look around
        # 0..100, may be positive at the first look; below 0 if the task failed for good
        self.score = 0
        self.moves = 0
        self._paid = 0.0  # sum of the rewards so far

    def reset(self, task_id: int) -> str:
        """Start a task and return its description and the first look.
        Errors: UnknownTask for an index beyond the last.
        """
        self.task = find_task(self._options.tasks, task_id)
        self._slot = self._slot or self._pool.acquire()
        self.description, self.room, score, *_ = self._slot.call(
            "l", self.task.name, str(self.task.variation)
        )
        self._played, self.score, self.moves = [], _points(score), 0
        self._paid = self._value() if self._options.paid_at_reset else 0.0
        return f"{self.description}\n{self.room}"

    def step(self, action: str) -> StepResult:
        """Take an action, cut to LONGEST characters. If the engine raises, the episode ends with
        outcome 0 (`_broken`). Errors: JvmLost.
        """
        try:
            return self._stepped(action, self._ours().call("s", action[:LONGEST]))
        except GameFailed as error:
            return self._broken(action, error)

    async def step_async(self, action: str) -> StepResult:
        """Take an action, see `step`."""
        try:
            return self._stepped(action, await self._ours().call_async("s", action[:LONGEST]))
        except GameFailed as error:
            return self._broken(action, error)

    def _broken(self, action: str, error: GameFailed) -> StepResult:
        """Log the engine's error and return the step's result: the episode ends with outcome 0, so
        that a crash does not pay more than a lost episode.
        """
        message = "task %s %d: the engine raised on %.200r; the episode scores 0"
        logger.error(message, self.task.name, self.task.variation, action, exc_info=error)
        info = {**self._info(score=0), "failed": str(error)[:200]}
        return StepResult(BROKEN, -self._paid, terminated=True, info=info)

    def _stepped(self, action: str, answer: list[str]) -> StepResult:
        observation, score, completed, moves = answer
        self._played.append(action)
        self.score, self.moves = _points(score), int(moves)
        before, self._paid = self._paid, self._value()
        failed, solved = self.score < 0, self.score >= SOLVED
        over = failed or completed == "true"
        malformed = observation == UNREADABLE
        if malformed and self._options.protocol == "own":
            observation = f"{UNREADABLE}\nExpected: {GRAMMAR}"
        return StepResult(
            observation,
            self._paid - before,
            terminated=over,
            truncated=not over and self.moves > self._options.max_moves,
            success=solved,
            info=self._info(self.score) | ({INVALID: True} if malformed else {}),
        )

    def _info(self, score: int) -> dict[str, Any]:
        numbers = {"variation": self.task.variation, "score": score, "moves": self.moves}
        return {FAMILY: self.task.name, **numbers}

    def _value(self) -> float:
        """Return the outcome so far: the score with reward `agentgym`, else a share from 0 to 1."""
        agentgym = self._options.reward == "agentgym"
        return float(self.score) if agentgym else max(self.score, 0) / SOLVED

    def render(self) -> tuple[str, bytes]:
        """Return (media type, JSON): the task, the agent's room and inventory, and all rooms."""
        rooms = self.tree()["contents"].values()
        inside = next((room for room in rooms if _agent(room)), None)
        carried = _contents(_agent(inside)) if inside else []
        inventory = (thing["contents"] for thing in carried if thing["name"] == "inventory")
        picture = {
            "task": f"{self.task.name}, variation {self.task.variation}",
            "description": self.description,
            "score": self.score,
            "moves": self.moves,
            "room": inside["name"] if inside else "",
            "inventory": next(inventory, []),
            "rooms": [
                {"name": room["name"], "objects": _contents(room, but="agent")}
                for room in filter(_is_shown, rooms)
            ],
        }
        return "application/json", json.dumps(picture).encode()

    def expert(self) -> Expert:
        return Recording(self.task, self._played)

    def hints(self) -> list[str]:
        """Return all actions possible now; hundreds to thousands, and slow."""
        return self._ours().call("a", "getValidActionObjectCombinations")[0].splitlines()

    def ask(self, *names: str) -> list[str]:
        """Call these methods of the engine; return each answer as a text, a list as lines."""
        return self._ours().call("a", *names)

    def tree(self) -> Any:
        """Return the engine's tree of all objects, parsed from JSON."""
        return json.loads(self._ours().call("u")[0])

    def close(self) -> None:
        if self._slot is not None:
            slot, self._slot = self._slot, None
            self._pool.release(slot)

    def _ours(self) -> Place:
        assert self._slot is not None, "reset first"
        return self._slot


def _points(score: str) -> int:
    """Return the engine's score of 0..1 as 0..100, the usual scale; -100 for a failure."""
    return round(100 * float(score))


def _agent(room: dict[str, Any]) -> Any:
    """Return the agent if it is in the room, also on or inside another object; else None."""
    for thing in room["contents"].values():
        agent = thing if thing["name"] == "agent" else _agent(thing)
        if agent:
            return agent
    return None


def _contents(thing: dict[str, Any], but: str = "") -> list[dict[str, Any]]:
    inner = [part for part in thing["contents"].values() if _is_shown(part) and part["name"] != but]
    return [
        {"name": part["name"], **_matter(part), "contents": _contents(part, but)} for part in inner
    ]


def _matter(thing: dict[str, Any]) -> dict[str, Any]:
    matter = thing.get("propMaterial") or {}
    shown = {"temperature_c": round(matter["temperatureC"], 1)} if "temperatureC" in matter else {}
    state = matter.get("stateOfMatter")
    return {**shown, "state": state} if state in STATES else shown


def _is_shown(thing: dict[str, Any]) -> bool:
    return not thing["name"].startswith(NOT_SHOWN)
