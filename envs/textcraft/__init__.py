"""TextCraft: craft the goal item from a list of commands, some of which lead elsewhere."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any, get_args

from pydantic import BaseModel

from envs.dialect import Dialect, Json, Place, whole
from envs.env import EnvSpec
from envs.examples import played
from envs.options import check_known, choose, one_of, whole_number
from envs.textcraft.invented import Draft
from envs.textcraft.planner import Choices, shortest
from envs.textcraft.recipes import Book, load_book, plain
from envs.textcraft.world import Options, Protocol, World
from envs.wire import Example

DEFAULTS: dict[str, Any] = {
    "recipes": "",
    "digest": "",
    "min_depth": 1,
    "max_depth": 0,
    "goals": [],
    "distractors": 10,
    "max_steps": 0,
    "protocol": "own",
}
LEAST = {"min_depth": 1, "max_depth": 0, "distractors": 0, "max_steps": 0}

INSTRUCTIONS = """\
You are given a list of crafting commands and a goal: an item that you have to craft. You start \
with nothing. Not every command is needed.
Each turn, answer with one of these actions:
get <number> <item> - take an item that no command crafts, as many as you like, for example: get 2 \
oak log
craft <number> <item> using <number> <item>, <number> <item> - one command of the list with \
exactly its numbers, for example: \
craft 4 oak planks using 1 oak log; repeat it if you need more. You must hold everything it uses
inventory - look at what you hold
Where a command uses planks, wool or another kind of thing of which the list crafts several, use \
one of these, for example: \
craft 4 stick using 2 oak planks
Anything else changes nothing. The task is over as soon as you have crafted the goal."""


class TextCraftCreate(BaseModel):
    """Body of a create request. It must exist, but the reset that follows overrides its values."""

    commands: str | None = None
    goal: str | None = None


def _turn(env: Place) -> Json:
    return {"observation": env.observation, "done": env.done, "reward": whole(env.reward)}


DIALECT = Dialect(
    greeting="This is environment TextCraft.",
    create=TextCraftCreate,
    created=lambda env: {"id": env.id, "observation": env.observation, "done": False, "reward": 0},
    shown=lambda env: {"id": env.id, **_turn(env)},
    stepped=_turn,
    looked=lambda env: env.observation,
    detailed=lambda env: {**_turn(env), "deleted": False},
    counts=True,
)

# worked examples: two goals of an invented book that no other book contains
RECIPES = (
    Draft("paper_kite", 1, (("bamboo_splint", 2), ("rice_paper", 3))),
    Draft("bamboo_splint", 4, (("bamboo_cane", 1),)),
    Draft("wind_chime", 1, (("copper_tube", 5), ("silk_cord", 1))),
    Draft("rain_barrel", 2, (("bamboo_splint", 6), ("silk_cord", 2))),
)
GOALS = ("wind chime", "paper kite")
DISTRACTORS = 1


@cache
def worked_examples() -> tuple[Example, ...]:
    book = Book(RECIPES, "the worked examples")
    options = Options(GOALS, DISTRACTORS, max_steps=0)
    return tuple(played(World(book, options), task) for task in range(len(GOALS)))


def spec(options: dict[str, Any]) -> EnvSpec:
    """Make the environment from its options: recipes, digest, min_depth, max_depth, goals,
    distractors, max_steps, protocol (see the README).
    Errors: ValueError in one line, naming the key or value and the nearest known one.
    """
    chosen = choose("textcraft", options, DEFAULTS)
    for key, minimum in LEAST.items():
        whole_number("textcraft", chosen, key, minimum)
    for key in ("recipes", "digest"):
        if not isinstance(chosen[key], str):
            raise ValueError(f"textcraft option {key}: expected text, got {chosen[key]!r}")
    protocol = one_of("textcraft", chosen, "protocol", get_args(Protocol))
    book = load_book(chosen["recipes"])
    if chosen["digest"] not in ("", book.digest):
        raise ValueError(
            f"textcraft option digest: {book.source} has digest {book.digest}, not"
            f" {chosen['digest']}: other recipes, other tasks"
        )
    parsed = Options(_goals(book, chosen), chosen["distractors"], chosen["max_steps"], protocol)
    served = EnvSpec(
        name="textcraft",
        dialect=DIALECT,
        instructions=INSTRUCTIONS,
        make=lambda: World(book, parsed),
        options={**chosen, "digest": book.digest},
        offers_hints=True,
        examples=worked_examples,
        probe_actions=("inventory", *solution(book, parsed.goals[0]))[: parsed.max_steps or None],
        # tasks with the same goal are equal, also with other distractors
        identity=lambda task_id: parsed.goals[task_id % len(parsed.goals)],
    )
    agentgym_options = replace(parsed, protocol="agentgym")
    return replace(served, agentgym=replace(served, make=lambda: World(book, agentgym_options)))


def solution(book: Book, goal: str) -> list[str]:
    """Return the expert's actions from the start to the goal."""
    return [act.text for act in shortest(goal, {}, Choices(book)).acts]


def _goals(book: Book, chosen: dict[str, Any]) -> tuple[str, ...]:
    """Return the goals that the options `goals` (empty: all), `min_depth` and `max_depth` select,
    in the book's order; task id t has goal number t modulo their count.
    Errors: ValueError if `goals` is no list of texts or names an item without a recipe, or if no
    goal is left.
    """
    wanted = chosen["goals"]
    if not isinstance(wanted, list | tuple) or not all(isinstance(name, str) for name in wanted):
        raise ValueError(
            f'textcraft option goals: expected a list of items such as ["stick"], got {wanted!r}'
        )
    wanted = [plain(name) for name in wanted]
    check_known("textcraft", "goals", "crafted item", wanted, book.by_output)
    min_depth, max_depth = chosen["min_depth"], chosen["max_depth"]
    depths = range(min_depth, (max_depth or max(book.depth.values())) + 1)
    deep = (goal for goal in book.goals if book.depth[goal] in depths)
    goals = tuple(goal for goal in deep if not wanted or goal in wanted)
    if not goals:
        deepest = book.depth[book.goals[-1]]
        raise ValueError(
            f"textcraft options min_depth {min_depth}, max_depth {max_depth}: no goal is left;"
            f" depths here go from 1 to {deepest}"
        )
    return goals
