"""Hostile actions that no policy may use to escape its score.

Each environment's real server gets malicious actions: every Unicode category, thousands of digits,
control and bidirectional characters, halves of surrogate pairs, NUL, a megabyte, and the
environment's own grammar filled with those.
Ordinary episodes on the same server measure how long an ordinary action takes.
Fails if an action ends its session as an environment's failure, or takes over a second and longer
than every ordinary one.
On a busy machine any step may once take that long, so the episode of a slow step is replayed, and
the step counts only if it is slow each time.
Writes docs/results/hostile.json; rows of environments that are not named stay.
"""

from __future__ import annotations

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

from harness import origin, parser_of, read, write

from agentgym.config import EnvConfig
from agentgym.deploy.local import local_env
from agentgym.rollouts.env_client import EnvError, EnvSession
from agentgym.rollouts.pools import EnvPool
from agentgym.types import Item

LIMIT_S = 1.0  # of a step, unless an ordinary one takes longer
REPLAYS = 3  # of the episode of a slow step
STEPS = 25  # of one episode
MEGABYTE = 1_000_000
PAIRS = ("\r\n", "\x1b[31m", "\u202e\u2066", "e\u0301\u0302", "\U0001f468\u200d\U0001f469")
ESCAPES = ("&#99", "&amp;", "%ED%A0%80", "%00")
PARTS = (
    *" \t\n'\"`.,:;-_+=*/\\|()[]{}<>#%&0917aİßﷺŉ²½Ⅷ٣１一\x00\x85\xa0\u2028\ufeff\ufffe\ud800\udfff",
    *PAIRS,
    *ESCAPES,
)
LENGTHS = (0, 1, 2, 3, 20, 199, 201, 1_000, 4_000, 4_301, 16_000, 16_384, 16_385)


@dataclass(frozen=True)
class Case:
    """One server and the forms of its grammar: `{}` is filled with a hostile text, `{id}` and
    `{thing}` with parts of the observation, `{key}` with a key.
    """

    env: str
    forms: tuple[str, ...]
    options: dict[str, Any] = field(default_factory=dict)
    # ordinary actions that the expert does not use; `{}` is a few words
    plain: tuple[str, ...] = ()
    sessions: int = 1
    num_tasks: int = 50
    ordinary_s: float = 20.0  # of the expert's episodes


_KEYS = (
    *("Control", "Alt", "Shift", "Meta", "Enter", "Tab", "F5", "F11", "F12", "Escape"),
    *("ArrowLeft", "PageDown", *"awtnpofrdsuijkl1+"),
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
    """Return all characters by general category, because some categories are huge."""
    by_category = defaultdict(list)
    for code in range(sys.maxunicode + 1):
        by_category[unicodedata.category(chr(code))].append(chr(code))
    return dict(by_category)


def hostile(rng: random.Random, max_length: int = MEGABYTE) -> str:
    kind = rng.randrange(6)
    length = rng.choice((*LENGTHS, *[rng.randrange(50)] * 12))
    if kind == 0:
        text = "".join(rng.choices(rng.choice(list(categories().values())), k=length))
    elif kind == 1:
        some = [rng.choice(characters) for characters in categories().values() for _ in range(8)]
        text = "".join(rng.choices(some, k=length))
    elif kind == 2:
        text = rng.choice(PARTS) * length
    elif kind == 3:
        text = "".join(rng.choices(PARTS, k=length))
    elif kind == 4:
        text = f"{rng.choice(PARTS)}{rng.choice(PARTS) * length}{rng.choice(PARTS)}"
    else:
        text = rng.choice("90²٣１ ½") * rng.choice(
            (4_299, 4_300, 4_301, 16_000, MEGABYTE if rng.random() < 0.05 else 17)
        )
    return text[:max_length]


def action(case: Case, rng: random.Random, observation: str, expert_actions: list[str]) -> str:
    """Return a hostile action. expert_actions: actions of the expert, to be damaged."""
    if expert_actions and rng.random() < 0.15:
        text = rng.choice(expert_actions)
        position, rest = rng.randrange(len(text) + 1), rng.randrange(3)
        return (
            text[:position] + hostile(rng, rng.choice((1, 1, 5, 20_000))) + text[position + rest :]
        )
    return filled(rng.choice(case.forms), rng, observation, hostile)


def filled(
    form: str, rng: random.Random, observation: str, text: Callable[[random.Random], str]
) -> str:
    ids = re.findall(r"\[(\d+)\]", observation) or ["1"]
    things = re.findall(r"\b(?:an?|the) (\w[\w ]{2,30})", observation) or ["agent"]
    fillers = {
        "id": lambda: rng.choice(ids),
        "thing": lambda: rng.choice(things),
        "key": lambda: rng.choice(_KEYS),
    }
    return re.sub(r"\{(\w*)\}", lambda match: fillers.get(match[1], lambda: text(rng))(), form)


def words(rng: random.Random) -> str:
    plain = "where is the red mug that my sister saw in your shop last week and what does it cost"
    return " ".join(rng.choices(plain.split(), k=10))


@dataclass
class Played:
    """Results of one server's episodes."""

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
    """Play one episode with the actions of `say`; record an environment's failure."""
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
            report = {"task": task, "error": str(error), "actions": texts}
            print(json.dumps(report), file=sys.stderr, flush=True)
    played.num_episodes += 1
    played.rewards[round(total, 3)] += 1


async def ordinary(pool: EnvPool, case: Case, seconds: float) -> tuple[Played, list[str]]:
    """Play episodes of the expert and of plain actions, with the attack's concurrency.
    Return (results, the expert's actions).
    """
    played, numbers, ends = Played(), itertools.count(), time.monotonic() + seconds
    expert_actions: list[str] = []

    def over() -> bool:
        return time.monotonic() > ends

    async def ask(session: EnvSession) -> str:
        expert_actions.append(await session.expert())
        return expert_actions[-1]

    async def player() -> None:
        while not over():
            number = next(numbers)
            rng = random.Random(f"ordinary {number}")  # noqa: S311

            async def say(session: EnvSession, rng: random.Random = rng) -> str:
                return filled(rng.choice(case.plain), rng, session.observation, words)

            player = ask if not case.plain or number % 2 == 0 else say
            task = 37 * number % case.num_tasks
            await episode(pool, case, f"ordinary {number}", task, player, played, over)

    await asyncio.gather(*(player() for _ in range(case.sessions)))
    return played, expert_actions


async def attack(
    pool: EnvPool, case: Case, expert_actions: list[str], num_steps: int, seconds: float, seed: int
) -> Played:
    played, numbers, ends = Played(), itertools.count(), time.monotonic() + seconds

    def over() -> bool:
        return played.num_steps >= num_steps or time.monotonic() > ends

    async def attacker() -> None:
        while not over():
            number = next(numbers)
            rng = random.Random(f"hostile {seed} {case.env} {number}")  # noqa: S311

            async def say(session: EnvSession, rng: random.Random = rng) -> str:
                return action(case, rng, session.observation, expert_actions)

            task = rng.randrange(case.num_tasks)
            await episode(pool, case, f"hostile {number}", task, say, played, over)

    await asyncio.gather(*(attacker() for _ in range(case.sessions)))
    return played


async def again(pool: EnvPool, case: Case, task: int, texts: list[str], key: str) -> float:
    """Replay these actions from the start; return the seconds of the last one."""
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
    """Play one server's episodes; return its row. `problems` lists the failures."""
    async with EnvPool(endpoints, request_timeout_s=130) as pool:
        usual, expert_actions = await ordinary(pool, case, case.ordinary_s)
        attacked = await attack(pool, case, expert_actions, num_steps, seconds, seed)
        limit_s = max(LIMIT_S, usual.slowest[0][0])
        over = [slow for slow in attacked.slow if slow[0] > limit_s]
        problems = attacked.failures[:20]
        for number, (took, task, texts) in enumerate(sorted(over, reverse=True)[:20]):
            least = took
            for replay in range(REPLAYS):
                key = f"again {number} {replay}"
                least = min(least, await again(pool, case, task, texts, key))
            said = f"{took:.2f} s, again {least:.2f} s: {texts[-1][:60]!a}"
            print(said, file=sys.stderr, flush=True)
            if least > limit_s:
                problems.append(
                    f"{least:.2f} s each time: task {task}, {len(texts[-1])} characters:"
                    f" {texts[-1][:200]!a}"
                )
    return {
        "options": case.options,
        "hostile": {
            "steps": attacked.num_steps,
            "episodes": attacked.num_episodes,
            "env_errors": len(attacked.failures),
            "over_limit_once": len(over),
            "over_limit_each_time": len(problems) - len(attacked.failures[:20]),
            "slowest_s": attacked.slowest[0][0],
            "slowest": [f"{took} s: {text}" for took, text in attacked.slowest],
            "rewards": {str(reward): count for reward, count in sorted(attacked.rewards.items())},
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
    parser = parser_of(__doc__, "hostile.json")
    parser.add_argument("cases", nargs="*", metavar="ENV", help=f"of {', '.join(CASES)}")
    parser.add_argument("--steps", type=int, default=20_000, help="hostile actions per environment")
    parser.add_argument("--seconds", type=float, default=600.0, help="the most, per environment")
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    if unknown := set(chosen.cases) - set(CASES):
        parser.error(f"no such environment: {', '.join(sorted(unknown))}")
    rows = read(chosen.out)["environments"] if chosen.cases and chosen.out.exists() else {}
    for name in chosen.cases or CASES:
        case = CASES[name]
        with tempfile.TemporaryDirectory() as folder:
            env = EnvConfig(name=case.env, options=case.options, max_sessions=16)
            log = Path(folder) / "log"
            with local_env(env, expert=True, log_path=log) as endpoints:
                row = asyncio.run(play(endpoints, case, chosen.steps, chosen.seconds, chosen.seed))
            row["command"] = origin()["command"]
            logged = log.read_text(errors="replace", encoding="utf-8")
            row["tracebacks"] = logged.count("Traceback (most recent call last)")
        rows[name] = row
        print(name, json.dumps(row, indent=1), flush=True)
    write(chosen.out, {"limit_s": LIMIT_S, "environments": rows})
    if problems := [
        f"{name}: {problem}" for name, row in rows.items() for problem in row["problems"]
    ]:
        sys.exit("\n".join(problems))


if __name__ == "__main__":
    main()
