"""60 episodes recorded on AgentGym's BabyAI server, replayed on our `/agentgym` routes; `-s` prints
the differences by kind.

`recorded.json` contains facts only; `actions` is a table.

    episode  [data_idx, goal, told, turns]
    turn     [action, reward, score, done, *told]
    told     [available actions, objects, faced, carried]
    objects  [[object, steps ahead, steps to the side (left: negative)], ...]
    faced    [object in front, steps]

A response without the view has no objects, no faced object and no carried one.
"""

import asyncio
import json
import re
from collections import Counter
from pathlib import Path

import httpx

from envs.registry import load_spec
from envs.server import ServerSettings, make_app

RECORDED = json.loads(Path(__file__).with_name("recorded.json").read_text())
ACTIONS = RECORDED["actions"]
ANSWER = re.compile(
    r"(?:Your goal: (?P<goal>.*)\n)?(?P<told>(?:.*\n)*)Available actions: (?P<offered>\[.*\])"
)
OBJECT = re.compile(
    r"There is a ([a-z ]+ \d+) "
    r"(?:right in front of you (\d+) steps away|(\d+) steps in front of you and (\d+) steps to your"
    r" (left|right))\."
)
FACED = re.compile(r"You are facing a (\w+) (\d+) steps away\.")
CARRIED = re.compile(r"You are carrying a (\w+ \w+)\.")
FACTS = ("offered", "objects", "facing", "carrying")


def read_answer(text):
    """Parse AgentGym's sentences. Return (goal, facts)."""
    answer = ANSWER.fullmatch(text)
    objects = []
    for name, straight, ahead, aside, side in OBJECT.findall(answer["told"]):
        objects.append(
            [name, int(straight or ahead), int(aside or 0) * (-1 if side == "left" else 1)]
        )
    faced = FACED.search(answer["told"])
    carried = CARRIED.search(answer["told"])
    facing = [faced[1], int(faced[2])] if faced else None
    return answer["goal"], dict(
        zip(
            FACTS,
            (json.loads(answer["offered"]), objects, facing, carried and carried[1]),
            strict=True,
        )
    )


def recorded_facts(told):
    offered, *rest = told
    return dict(zip(FACTS, ([ACTIONS[number] for number in offered], *rest), strict=True))


async def replay(post, episode, differences):
    """Replay one episode to its recorded end and count the differences.
    Return its number of turns.
    """
    data_idx, goal, told, turns = episode
    number = (await post("/create"))["id"]
    our_goal, ours = read_answer(
        (await post("/reset", id=number, data_idx=data_idx))["observation"]
    )
    if our_goal != goal:
        assert our_goal.replace("then", "and").replace("after you", "and") == goal
        differences["a goal keeps its order"] += 1
    theirs = recorded_facts(told)
    differences.update(f"{fact} at reset" for fact in FACTS if ours[fact] != theirs[fact])
    for action, reward, score, done, *told in turns:
        text = ACTIONS[action]
        reply = await post("/step", id=number, action=text)
        if "error" in reply:
            differences["action refused"] += 1
            break
        ours, theirs = read_answer(reply["observation"])[1], recorded_facts(told)
        differences.update(fact for fact in FACTS if ours[fact] != theirs[fact])
        differences.update(
            kind
            for kind, value in (("reward", reward), ("score", score), ("done", done))
            if reply[kind] != value
        )
    await post("/close", id=number)
    return len(turns)


def test_recorded_play_carries_over():
    async def main():
        app = make_app(load_spec("babyai", {}), ServerSettings(drain_timeout_s=0.1))
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(
                transport=httpx.ASGITransport(app), base_url="http://env/agentgym"
            ) as client,
        ):

            async def post(route, **body):
                reply = await client.post(route, json=body)
                assert reply.status_code == 200, reply.text
                return reply.json()

            return sum(
                [await replay(post, episode, differences) for episode in RECORDED["episodes"]]
            )

    differences = Counter()
    num_turns = asyncio.run(main())
    print(
        f"{len(RECORDED['episodes'])} episodes, {num_turns} turns; differences: {dict(differences)}"
    )
    assert (len(RECORDED["episodes"]), num_turns) == (60, 558)
    assert differences == {"a goal keeps its order": 5}
