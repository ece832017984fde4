"""What no policy may say to escape its score: `python benchmarks/hostile.py [ENV ...]`.

Each environment's real server gets actions that nobody means well: every Unicode category, digits
by the thousand, control and bidirectional characters, halves of surrogate pairs, NUL, a megabyte,
and the environment's own grammar filled with those.
Ordinary episodes on the same server say how long an ordinary action takes.
Fails where an action ends its session as an environment's failure, or takes over a second that no
ordinary one took.
On a busy machine any step may once wait that long, so the episode of a slow one is played again,
and the step counts where it is slow each time.
Writes docs/results/hostile.json; rows of environments that are not named stay.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import re
import sys
import tempfile
import time
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from pipeline import machine

from agentgym.config import EnvConfig
from agentgym.deploy.local import local_env
from agentgym.rollouts.client import EnvError
from agentgym.rollouts.pools import EnvPool, EnvSession
from agentgym.types import Item

ROOT = Path(__file__).parents[1]
LIMIT_S = 1.0  # of a step, where no ordinary one takes longer
REPLAYS = 3  # of the episode of a slow step
STEPS = 25  # of one episode
MEGABYTE = 1_000_000
PAIRS = (
    "\r\n",
    "\x1b[31m",
    "\u202e\u2066",
    "e\u0301\u0302",
    "\U0001f468\u200d\U0001f469",
    "&#99",
    "&amp;",
    "%ED%A0%80",
    "%00",
)
PARTS = (
    *" \t\n'\"`.,:;-_+=*/\\|()[]{}<>#%&0917aİßﷺŉ²½Ⅷ٣１一\x00\x85\xa0\u2028\ufeff\ufffe\ud800\udfff",
    *PAIRS,
)
LENGTHS = (0, 1, 2, 3, 20, 199, 201, 1_000, 4_000, 4_301, 16_000, 16_384, 16_385)


@dataclass(frozen=True)
class Case:
    """One server and what its grammar looks like: `{}` is filled with something hostile, `{id}` and
    `{thing}` with what was shown, `{key}` with a key."""

    env: str
    forms: tuple[str, ...]
    options: dict[str, Any] = field(default_factory=dict)
    # ordinary uses of what the expert does without; `{}` is a few words
    plain: tuple[str, ...] = ()
    sessions: int = 1
    num_tasks: int = 50
    ordinary_s: float = 20.0  # of the expert's episodes


_KEYS = (
    "Control",
    "Alt",
    "Shift",
    "Meta",
    "Enter",
    "Tab",
    "F5",
    "F11",
    "F12",
    "Escape",
    "ArrowLeft",
    "PageDown",
    *"awtnpofrdsuijkl1+",
)


def _forms(lines: str) -> tuple[str, ...]:
    return tuple(form for line in lines.strip().splitlines() for form in line.strip().split(" ~ "))


CASES = {
    "textcraft": Case(
        "textcraft",
        _forms("""
            {} ~ get {} oak log ~ get 1 {} ~ craft {} ~ craft {} stick using 2 oak planks ~ craft \
4 {} using {} ~ {}.
            craft 4 oak planks using {} ~ craft 1 {} using 1 {}, 2 {} ~ inventory{} ~ minecraft:{}
        """),
    ),
    "babyai": Case(
        "babyai", _forms("{} ~ turn {} ~ move forward{} ~ {} pickup ~ toggle.{} ~ drop{}")
    ),
    "babyai-high": Case(
        "babyai",
        _forms("""
            {} ~ go to {} ~ go to red ball {} ~ pickup the {} ball 1 ~ go through {} door 1
            toggle and go through {} ~ check{}
        """),
        {"actions": "high", "view": "agentgym", "levels": "agentgym", "reward": "minigrid"},
    ),
    "searchqa": Case(
        "searchqa",
        _forms("""
            {} ~ <search>{}</search> ~ <answer>{}</answer> ~ <think>{}</think><search>{}</search> \
~ <search>{}
            </answer>{}<answer> ~ <think>{}<answer>{}</answer> ~ <search>{}</answer> ~ \
<search>river {}</search>
            <answer><answer>{}</answer></answer>
        """),
    ),
    "sciworld": Case(
        "sciworld",
        _forms("""
            {} ~ look at {} ~ look in {} ~ go to {} ~ open {} ~ pick up {} ~ move {} to {} ~ pour \
{} into {} ~ use {} on {}
            focus on {} ~ connect {} to {} ~ eat {} ~ wait{} ~ read {} ~ activate {} ~ mix {} ~ \
look around {} ~ 0 ~ 1
            open door to kitchen {} ~ look at inventory in {} ~ pick up thermometer in {} in {} ~ \
move air to {}
            move {thing} to {thing} ~ pour {thing} into {thing} ~ use {thing} on {thing} ~ connect \
{thing} to {thing}
            open {thing} ~ dunk {thing} into {thing} ~ eat {thing} ~ {thing} ~ go to {thing} ~ \
pick up {thing} in {thing}
        """),
        plain=_forms("""
            look around ~ inventory ~ open {thing} ~ go to {thing} ~ pick up {thing} ~ look at \
{thing} ~ use {thing} on {thing}
            move {thing} to {thing} ~ pour {thing} into {thing} ~ wait ~ wait1 ~ task ~ 0 ~ {}
        """),
        sessions=2,
        num_tasks=4_000,
        ordinary_s=90.0,
    ),
    "webarena": Case(
        "webarena",
        _forms("""
            stop [{}] ~ stop {} ~ ```stop [{}]``` ~ type [{id}] [{}] [1] ~ type [{id}] [{}] [0] ~ \
type [{id}] [{}]
            goto [{}] ~ goto [http://onestopmarket.com/{}] ~ goto [http://reddit.com/search?q={}]
            goto [http://gitlab.com/{}/{}] ~ press [{}] ~ press [{key}] ~ press [{key}+{key}] ~ \
press [{key}+{key}+{key}]
            click [{}] ~ click [{id}] ~ click [{id}] ~ click [{id}] ~ hover [{id}] ~ tab_focus \
[{}] ~ new_tab ~ close_tab
            go_back ~ go_forward ~ scroll [{}] ~ {} ~ ```{}```
        """),
        plain=_forms("""
            click [{id}] ~ click [{id}] ~ click [{id}] ~ hover [{id}] ~ type [{id}] [{}] [1] ~ \
type [{id}] [{} {} {} {}] [0]
            new_tab ~ tab_focus [0] ~ close_tab ~ go_back ~ go_forward ~ scroll [down] ~ press \
[Tab] ~ press [Control+a]
            goto [http://onestopmarket.com] ~ goto [http://reddit.com/search?q={}] ~ goto \
[http://gitlab.com] ~ stop [{}]
        """),
        sessions=2,
        num_tasks=97,
        ordinary_s=90.0,
    ),
}


@cache
def categories() -> dict[str, list[str]]:
    """Every character by its general category; those without a name and those of private use
    are many and alike.
    """
    found = defaultdict(list)
    for code in range(sys.maxunicode + 1):
        found[unicodedata.category(chr(code))].append(chr(code))
    return dict(found)


def hostile(chance: random.Random, most: int = MEGABYTE) -> str:
    """Text of at most `most` characters."""
    kind = chance.randrange(6)
    length = chance.choice((*LENGTHS, *[chance.randrange(50)] * 12))
    if kind == 0:
        text = "".join(chance.choices(chance.choice(list(categories().values())), k=length))
    elif kind == 1:
        some = [chance.choice(characters) for characters in categories().values() for _ in range(8)]
        text = "".join(chance.choices(some, k=length))
    elif kind == 2:
        text = chance.choice(PARTS) * length
    elif kind == 3:
        text = "".join(chance.choices(PARTS, k=length))
    elif kind == 4:
        text = f"{chance.choice(PARTS)}{chance.choice(PARTS) * length}{chance.choice(PARTS)}"
    else:
        text = chance.choice("90²٣１ ½") * chance.choice(
            (4_299, 4_300, 4_301, 16_000, MEGABYTE if chance.random() < 0.05 else 17)
        )
    return text[:most]


def action(case: Case, chance: random.Random, observation: str, said: list[str]) -> str:
    """said: what the expert said, to be damaged."""
    if said and chance.random() < 0.15:
        text = chance.choice(said)
        place, rest = chance.randrange(len(text) + 1), chance.randrange(3)
        return (
            text[:place] + hostile(chance, chance.choice((1, 1, 5, 20_000))) + text[place + rest :]
        )
    return filled(chance.choice(case.forms), chance, observation, hostile)


def filled(
    form: str, chance: random.Random, observation: str, text: Callable[[random.Random], str]
) -> str:
    ids = re.findall(r"\[(\d+)\]", observation) or ["1"]
    things = re.findall(r"\b(?:an?|the) (\w[\w ]{2,30})", observation) or ["agent"]
    given = {
        "id": lambda: chance.choice(ids),
        "thing": lambda: chance.choice(things),
        "key": lambda: chance.choice(_KEYS),
    }
    return re.sub(r"\{(\w*)\}", lambda found: given.get(found[1], lambda: text(chance))(), form)


def words(chance: random.Random) -> str:
    """Half a line of plain English."""
    plain = "where is the red mug that my sister saw in your shop last week and what does it cost"
    return " ".join(chance.choices(plain.split(), k=10))


@dataclass
class Played:
    """What came of one server's episodes."""

    num_steps: int = 0
    num_episodes: int = 0
    slowest: list[tuple[float, str]] = field(default_factory=list)  # seconds and action
    # seconds over LIMIT_S, task, actions up to it
    slow: list[tuple[float, int, list[str]]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    rewards: Counter[float] = field(default_factory=Counter)  # of episodes

    def add(self, seconds: float, task: int, texts: list[str]) -> None:
        self.num_steps += 1
        if seconds > LIMIT_S:
            self.slow.append((seconds, task, list(texts)))
        text = texts[-1]
        self.slowest = sorted(
            [*self.slowest, (round(seconds, 3), f"{len(text)} characters: {text[:60]!a}")],
            reverse=True,
        )[:5]


async def episode(
    pool: EnvPool,
    case: Case,
    key: str,
    task: int,
    say: Callable[[EnvSession], Any],
    played: Played,
    until: Callable[[], bool],
) -> None:
    """One episode of what `say` says.
    An environment's failure is noted with the action it followed.
    """
    total, texts = 0.0, list[str]()
    try:
        async with pool.session(Item(case.env, task), key) as session:
            for _ in range(STEPS):
                if until():
                    break
                texts.append(await say(session))
                began = time.perf_counter()
                reply = await session.step(texts[-1])
                played.add(time.perf_counter() - began, task, texts)
                total += reply.reward
                if reply.terminated or reply.truncated:
                    break
    except EnvError as error:
        if error.kind != "expert_failed":
            played.failures.append(f"task {task}: {error} after {''.join(texts[-1:])[:200]!a}")
            print(
                json.dumps({"task": task, "error": str(error), "actions": texts}),
                file=sys.stderr,
                flush=True,
            )
    played.num_episodes += 1
    played.rewards[round(total, 3)] += 1


async def ordinary(pool: EnvPool, case: Case, seconds: float) -> tuple[Played, list[str]]:
    """Episodes of the expert and of plain uses, as many at once as there will be hostile ones;
    and what the expert said.
    """
    played, said, numbers, ends = Played(), [], itertools.count(), time.monotonic() + seconds

    def over() -> bool:
        return time.monotonic() > ends

    async def ask(session: EnvSession) -> str:
        said.append(await session.expert())
        return said[-1]

    async def player() -> None:
        while not over():
            number = next(numbers)
            chance = random.Random(f"ordinary {number}")  # noqa: S311

            async def say(session: EnvSession, chance: random.Random = chance) -> str:
                return filled(chance.choice(case.plain), chance, session.observation, words)

            expert = not case.plain or number % 2 == 0
            await episode(
                pool,
                case,
                f"ordinary {number}",
                37 * number % case.num_tasks,
                ask if expert else say,
                played,
                over,
            )

    await asyncio.gather(*(player() for _ in range(case.sessions)))
    return played, said


async def attack(
    pool: EnvPool, case: Case, said: list[str], num_steps: int, seconds: float, seed: int
) -> Played:
    played, numbers, ends = Played(), itertools.count(), time.monotonic() + seconds

    def over() -> bool:
        return played.num_steps >= num_steps or time.monotonic() > ends

    async def attacker() -> None:
        while not over():
            number = next(numbers)
            chance = random.Random(f"hostile {seed} {case.env} {number}")  # noqa: S311

            async def say(session: EnvSession, chance: random.Random = chance) -> str:
                return action(case, chance, session.observation, said)

            await episode(
                pool, case, f"hostile {number}", chance.randrange(case.num_tasks), say, played, over
            )

    await asyncio.gather(*(attacker() for _ in range(case.sessions)))
    return played


async def again(pool: EnvPool, case: Case, task: int, texts: list[str], key: str) -> float:
    """Seconds that the last of these actions takes, all of them played from the start."""
    seconds = 0.0
    async with pool.session(Item(case.env, task), key) as session:
        for text in texts:
            began = time.perf_counter()
            await session.step(text)
            seconds = time.perf_counter() - began
    return seconds


async def play(
    endpoints: list[str], case: Case, num_steps: int, seconds: float, seed: int
) -> dict[str, Any]:
    """One server's row. `problems` says what must not be."""
    async with EnvPool(endpoints, request_timeout_s=130) as pool:
        usual, said = await ordinary(pool, case, case.ordinary_s)
        came = await attack(pool, case, said, num_steps, seconds, seed)
        limit_s = max(LIMIT_S, usual.slowest[0][0])
        over = [slow for slow in came.slow if slow[0] > limit_s]
        problems = came.failures[:20]
        for number, (took, task, texts) in enumerate(sorted(over, reverse=True)[:20]):
            least = min(
                [
                    took,
                    *[
                        await again(pool, case, task, texts, f"again {number} {n}")
                        for n in range(REPLAYS)
                    ],
                ]
            )
            print(
                f"{took:.2f} s, again {least:.2f} s: {texts[-1][:60]!a}",
                file=sys.stderr,
                flush=True,
            )
            if least > limit_s:
                problems.append(
                    f"{least:.2f} s each time: task {task}, {len(texts[-1])} characters:"
                    f" {texts[-1][:200]!a}"
                )
    return {
        "options": case.options,
        "hostile": {
            "steps": came.num_steps,
            "episodes": came.num_episodes,
            "env_errors": len(came.failures),
            "over_limit_once": len(over),
            "over_limit_each_time": len(problems) - len(came.failures[:20]),
            "slowest_s": came.slowest[0][0],
            "slowest": [f"{took} s: {text}" for took, text in came.slowest],
            "rewards": {str(reward): count for reward, count in sorted(came.rewards.items())},
        },
        "ordinary": {
            "steps": usual.num_steps,
            "env_errors": len(usual.failures),
            "slowest_s": usual.slowest[0][0],
            "slowest": [f"{took} s: {text}" for took, text in usual.slowest],
        },
        "problems": problems,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "cases", nargs="*", metavar="ENV", help=f"of {', '.join(CASES)}; default: all"
    )
    parser.add_argument("--steps", type=int, default=20_000, help="hostile actions of each")
    parser.add_argument(
        "--seconds", type=float, default=600.0, help="for the hostile actions of each, at most"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=ROOT / "docs/results/hostile.json")
    chosen = parser.parse_args()
    if unknown := set(chosen.cases) - set(CASES):
        parser.error(f"no such environment: {', '.join(sorted(unknown))}")
    rows = (
        json.loads(chosen.out.read_text(encoding="utf-8"))["environments"]
        if chosen.cases and chosen.out.exists()
        else {}
    )
    for name in chosen.cases or CASES:
        case = CASES[name]
        with tempfile.TemporaryDirectory() as folder:
            env = EnvConfig(name=case.env, options=case.options, max_sessions=16)
            log = Path(folder) / "log"
            with local_env(env, expert=True, log_path=log) as endpoints:
                row = asyncio.run(play(endpoints, case, chosen.steps, chosen.seconds, chosen.seed))
            row["command"] = (
                f"python benchmarks/hostile.py {name} --steps {chosen.steps} --seconds"
                f" {chosen.seconds:g} --seed {chosen.seed}"
            )
            row["tracebacks"] = log.read_text(errors="replace", encoding="utf-8").count(
                "Traceback (most recent call last)"
            )
        rows[name] = row
        print(name, json.dumps(row, indent=1), flush=True)
    result = {"machine": machine(), "limit_s": LIMIT_S, "environments": rows}
    chosen.out.parent.mkdir(parents=True, exist_ok=True)
    chosen.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if problems := [
        f"{name}: {problem}" for name, row in rows.items() for problem in row["problems"]
    ]:
        sys.exit("\n".join(problems))


if __name__ == "__main__":
    main()
