"""Script that writes `examples.json`: two tasks that are in no list, solved by the expert in the
embedded sites. Run `python -m envs.webarena.make_examples`.

The examples are recorded, so that prompts need no browser. Observations are cut at MAX_CHARS.
"""

from __future__ import annotations

import json
import tempfile
from functools import partial
from pathlib import Path
from typing import Any, cast

from envs.env import EnvSpec
from envs.examples import Script, played, record
from envs.webarena import spec
from envs.webarena.gold import Gold
from envs.webarena.world import Episode
from envs.wire import Example

FILE = Path(__file__).with_name("examples.json")
MAX_CHARS = 900  # length limit of an observation


def _task(task_id: int, intent: str, **how: Any) -> dict[str, Any]:
    """Return a task in WebArena's format that begins in the shop. how: fields of its `eval`."""
    evaluation = {"reference_answers": None, "reference_url": "", "program_html": [], **how}
    return {
        "task_id": task_id,
        "sites": ["shopping"],
        "require_login": True,
        "storage_state": None,
        "start_url": "__SHOPPING__",
        "geolocation": None,
        "intent": intent,
        "require_reset": False,
        "eval": evaluation,
    }


TASKS = (
    _task(
        0,
        "Open my wish list. How many things are on it?",
        eval_types=["string_match"],
        reference_answers={"exact_match": "0"},
    ),
    _task(
        1,
        'Show me the search results for "desk lamp".',
        eval_types=["url_match"],
        reference_url="__SHOPPING__/search?q=desk+lamp",
    ),
)
ACTIONS = (
    ("click [link 'My Wish List (0)']", "stop [0]"),
    ("type [searchbox 'Search'] [desk lamp] [1]", "stop []"),
)


def served() -> EnvSpec:
    """Build the environment whose tasks are the examples."""
    with tempfile.NamedTemporaryFile("w", suffix=".json", encoding="utf-8") as file:
        json.dump(TASKS, file)
        file.flush()
        return spec({"tasks": file.name, "max_observation_chars": MAX_CHARS, "settle_s": 10.0})


def make(env: EnvSpec) -> tuple[Example, ...]:
    """Play each task twice, first to learn the elements' ids; return the plays with backticks."""
    examples = []
    for task, actions in enumerate(ACTIONS):
        episode = cast(Episode, env.make())
        example = played(episode, task, partial(Gold, episode, actions))
        replies = [f"```{turn.action}```" for turn in example.turns]
        examples.append(played(env.make(), task, partial(Script, replies)))
    return tuple(examples)


def main() -> None:
    env = served()
    try:
        record(FILE, make(env))
    finally:
        if env.close is not None:
            env.close()


if __name__ == "__main__":
    main()
