"""Hostile actions that no policy may use to escape its score.

Each environment's real server gets malicious actions: every Unicode category, thousands of digits,
control and bidirectional characters, halves of surrogate pairs, NUL, a megabyte, and the
environment's own grammar filled with those.
Fails if an action ends its session as an environment's failure, or takes longer than its server's
limit. On a busy machine any step may once take that long, so the episode of a slow step is
replayed, and the step counts only if it is slow each time.
Writes docs/results/hostile.json; rows of environments that are not named stay.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
import re
import sys
import tempfile
import time
import unicodedata
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from harness import origin, parser_of, read, write

from agentgym.config import EnvConfig
from agentgym.deploy.local import local_env
from agentgym.rollouts.env_client import EnvError
from agentgym.rollouts.pools import EnvPool
from agentgym.types import Item

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
    sessions: int = 1
    num_tasks: int = 50
    limit_s: float = 1.0  # of a step; ordinary ones take up to 1.2 s in SciWorld and WebArena


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
        sessions=2,
        num_tasks=4_000,
        limit_s=2.0,
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
        sessions=2,
        num_tasks=97,
        limit_s=2.0,
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
        digit, more = rng.choice("90²٣１ ½"), MEGABYTE if rng.random() < 0.05 else 17
        text = digit * rng.choice((4_299, 4_300, 4_301, 16_000, more))
    return text[:max_length]


def action(case: Case, rng: random.Random, observation: str, expert_actions: list[str]) -> str:
    """Return a hostile action. expert_actions: actions of the expert, to be damaged."""
    if expert_actions and rng.random() < 0.15:
        text = rng.choice(expert_actions)
        position, rest = rng.randrange(len(text) + 1), rng.randrange(3)
        inserted = hostile(rng, rng.choice((1, 1, 5, 20_000)))
        return text[:position] + inserted + text[position + rest :]
    ids = re.findall(r"\[(\d+)\]", observation) or ["1"]
    things = re.findall(r"\b(?:an?|the) (\w[\w ]{2,30})", observation) or ["agent"]
    fillers = {"id": ids, "thing": things, "key": _KEYS}

    def fill(match: re.Match[str]) -> str:
        return rng.choice(fillers[match[1]]) if match[1] else hostile(rng)

    return re.sub(r"\{(\w*)\}", fill, rng.choice(case.forms))


@dataclass
class Played:
    """Results of one server's episodes."""

    num_steps: int = 0
    num_episodes: int = 0
    slowest: list[tuple[float, str]] = field(default_factory=list)  # seconds and action
    # seconds over the limit, task, actions up to it
    slow: list[tuple[float, int, list[str]]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    rewards: Counter[float] = field(default_factory=Counter)  # of episodes

    def add(self, seconds: float, limit_s: float, task: int, texts: list[str]) -> None:
        self.num_steps += 1
        if seconds > limit_s:
            self.slow.append((seconds, task, list(texts)))
        said = f"{len(texts[-1])} characters: {texts[-1][:60]!a}"
        self.slowest = sorted([*self.slowest, (round(seconds, 3), said)], reverse=True)[:5]


async def expert_actions(pool: EnvPool, case: Case) -> list[str]:
    actions = list[str]()
    for task in range(8):
        with contextlib.suppress(EnvError):  # the expert cannot solve this task
            async with pool.session(
                Item(case.env, 37 * task % case.num_tasks), f"{task}"
            ) as session:
                for _ in range(STEPS):
                    actions.append(await session.expert())
                    reply = await session.step(actions[-1])
                    if reply.terminated or reply.truncated:
                        break
    return actions


async def attack(
    pool: EnvPool, case: Case, experts: list[str], num_steps: int, seconds: float, seed: int
) -> Played:
    played, numbers, ends = Played(), itertools.count(), time.monotonic() + seconds

    async def attacker() -> None:
        while not over():
            number = next(numbers)
            rng = random.Random(f"hostile {seed} {case.env} {number}")  # noqa: S311
            task, total, texts = rng.randrange(case.num_tasks), 0.0, list[str]()
            try:
                async with pool.session(Item(case.env, task), f"hostile {number}") as session:
                    for _ in range(STEPS):
                        texts.append(action(case, rng, session.observation, experts))
                        began = time.perf_counter()
                        reply = await session.step(texts[-1])
                        played.add(time.perf_counter() - began, case.limit_s, task, texts)
                        total += reply.reward
                        if reply.terminated or reply.truncated or over():
                            break
            except EnvError as error:
                last = "".join(texts[-1:])[:200]
                played.failures.append(f"task {task}: {error} after {last!a}")
                print(task, error, json.dumps(texts), file=sys.stderr, flush=True)
            played.num_episodes += 1
            played.rewards[round(total, 3)] += 1

    def over() -> bool:
        return played.num_steps >= num_steps or time.monotonic() > ends

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
        experts = await expert_actions(pool, case)
        played = await attack(pool, case, experts, num_steps, seconds, seed)
        each_time = []
        for number, (took, task, texts) in enumerate(sorted(played.slow, reverse=True)[:20]):
            keys = [f"again {number} {replay}" for replay in range(REPLAYS)]
            least = min([took, *[await again(pool, case, task, texts, key) for key in keys]])
            said = f"{took:.2f} s, again {least:.2f} s: task {task}, {len(texts[-1])} characters"
            print(said, file=sys.stderr, flush=True)
            if least > case.limit_s:
                each_time.append(f"{said}: {texts[-1][:200]!a}")
    return {
        "options": case.options,
        "limit_s": case.limit_s,
        "hostile": {
            "steps": played.num_steps,
            "episodes": played.num_episodes,
            "env_errors": len(played.failures),
            "over_limit_once": len(played.slow),
            "over_limit_each_time": len(each_time),
            "slowest_s": played.slowest[0][0],
            "slowest": [f"{took} s: {text}" for took, text in played.slowest],
            "rewards": {str(reward): count for reward, count in sorted(played.rewards.items())},
        },
        "problems": [*played.failures[:20], *each_time],
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
    write(chosen.out, {"environments": rows})
    problems = [f"{name}: {text}" for name, row in rows.items() for text in row["problems"]]
    sys.exit("\n".join(problems) or 0)


if __name__ == "__main__":
    main()
