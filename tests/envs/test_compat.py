"""AgentGym's routes, called as its clients do: a POST without a key, an id, status 200."""

import asyncio
import base64
from contextlib import asynccontextmanager
from dataclasses import replace

import httpx
import pytest

from envs.registry import load_spec
from envs.searchqa.world import PROTOCOLS
from envs.server import ServerSettings, make_app


@asynccontextmanager
async def serving(name, options=None, **settings):
    """Yield (client, sessions). name: an environment's name, or an `EnvSpec`."""
    spec = load_spec(name, options or {}) if isinstance(name, str) else name
    app = make_app(spec, ServerSettings(**{"drain_timeout_s": 0.1, **settings}))
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url="http://env/agentgym"
        ) as client,
    ):
        yield client, app.state.sessions


async def post(client, route, status=200, **body):
    reply = await client.post(route, json=body)
    assert reply.status_code == status, reply.text
    return reply.json()


async def test_a_babyai_client_creates_resets_plays_looks_and_closes():
    async with serving("babyai") as (client, sessions):  # independent of the server's options
        assert (await client.get("/")).json() == "This is environment BabyAI."
        reply = await client.post("/create")  # without a body, as the client sends it
        number = reply.json()["id"]
        assert 0 < number < 2**53
        shown = await post(client, "/reset", id=number, data_idx=0)
        assert shown.keys() == {"observation", "reward", "score", "deleted", "done"}
        assert shown["observation"].startswith(
            "Your goal: go to the red ball\nIn front of you in this room"
        )
        assert 'Available actions: ["turn left"' in shown["observation"]
        assert (await client.get(f"/observation?id={number}")).json() == shown
        won = await post(client, "/step", id=number, action="go to red ball 1")
        assert won.keys() == {"observation", "reward", "score", "done"}
        assert won["done"] is True
        assert won["reward"] == won["score"] > 0.5
        assert "The task is completed." in won["observation"]
        over = await post(client, "/step", id=number, action="turn left")
        assert over == {"error": f"The task with environment {number} has finished."}
        again = await post(client, "/reset", id=number, data_idx=0)
        assert again == shown  # no state of the first episode is left
        picture = await post(client, "/render", id=number)
        assert base64.b64decode(picture.removeprefix("data:image/png;base64,"))[:4] == b"\x89PNG"
        assert await post(client, "/close", id=number) is True
        assert await post(client, "/close", id=number) is False
        assert sessions.info().active_sessions == 0


async def test_an_environment_of_ones_own_has_the_routes_of_agentgyms_servers_too():
    served = load_spec("babyai", {"levels": ["GoToRedBallNoDists"]})
    mine = replace(served, name="mine", dialect=None, agentgym=None)

    async with serving(mine) as (client, _):
        assert (await client.get("/")).json() == "This is environment mine."
        number = (await client.post("/create")).json()["id"]
        shown = await post(client, "/reset", id=number, data_idx=3)
        assert shown["observation"]
        assert (shown["done"], shown["reward"]) == (False, 0.0)
        turned = await post(client, "/step", id=number, action="turn left")
        assert turned.keys() == {"observation", "reward", "score", "done"}
        assert await post(client, "/close", id=number) is True


async def test_errors_have_the_style_its_servers_have():
    async with serving("babyai") as (client, _):
        assert await post(client, "/step", id=99, action="turn left") == {
            "error": "The id 99 is not valid."
        }
        number = (await client.post("/create")).json()["id"]
        assert (
            "has not been reset"
            in (await post(client, "/step", id=number, action="turn left"))["error"]
        )
        assert (await client.get(f"/observation?id={number}")).json() == {
            "error": "Environment not initialized"
        }
        assert (
            "data_idx must be at least 0"
            in (await post(client, "/reset", id=number, data_idx=-1))["error"]
        )
        detail = (await post(client, "/step", status=422, id="x"))["detail"]
        assert [(row["loc"], row["type"]) for row in detail] == [
            (["body", "id"], "int_parsing"),
            (["body", "action"], "missing"),
        ]
        assert (
            await client.post("/reset", content=b"{", headers={"Content-Type": "application/json"})
        ).status_code == 422


async def test_the_server_limits_and_forgets_ids_like_sessions():
    async with serving("babyai", max_sessions=2, session_ttl_s=0.2) as (client, sessions):
        ids = [(await client.post("/create")).json()["id"] for _ in range(2)]
        full = await client.post("/create")
        assert (full.status_code, full.headers["Retry-After"]) == (503, "1")
        await post(client, "/reset", id=ids[0], data_idx=1)
        await asyncio.sleep(0.5)
        assert sessions.info().active_sessions == 0  # the idle session is closed
        fresh = (await client.post("/create")).json()["id"]
        assert fresh not in ids
        assert await post(client, "/step", id=ids[0], action="turn left") == {
            "error": f"The id {ids[0]} is not valid."
        }


async def test_requests_at_once_on_one_id_take_turns():
    async with serving("babyai") as (client, _):
        number = (await client.post("/create")).json()["id"]
        await post(client, "/reset", id=number, data_idx=2)
        replies = await asyncio.gather(
            *(post(client, "/step", id=number, action="turn left") for _ in range(8))
        )
        assert all("error" not in reply for reply in replies)
        # eight quarter turns to the left: the last view equals the first one
        first = (await post(client, "/reset", id=number, data_idx=2))["observation"]
        assert first.split("\n", 1)[1] in [reply["observation"] for reply in replies]


@pytest.mark.parametrize("key", ["id", "env_idx"])
async def test_an_id_may_have_either_of_its_two_names(key):
    async with serving("babyai") as (client, _):
        number = (await client.post("/create")).json()["id"]
        await post(client, "/reset", **{key: number}, data_idx=3)
        assert "observation" in await post(client, "/step", **{key: number}, action="turn left")


async def test_a_textcraft_client_creates_with_a_body_and_plays_the_index_it_resets_to():
    async with serving("textcraft") as (client, _):
        assert (await client.get("/")).json() == "This is environment TextCraft."
        assert (await client.post("/create")).status_code == 422  # AgentGym requires a body
        created = await post(
            client, "/create", minecraft_dir="agentenv_textcraft/", commands=None, goal=None
        )
        second = await post(client, "/create")
        assert created.keys() == {"id", "observation", "done", "reward"}
        assert created["observation"] != second["observation"]  # every creation increments the id
        number = created["id"]
        shown = await post(client, "/reset", id=number, data_idx=36)
        assert (shown["id"], shown["reward"], shown["done"]) == (number, 0, False)
        assert shown["observation"].startswith("Crafting commands:\n")
        assert (await client.get(f"/observation?id={number}")).json() == shown["observation"]
        goal = shown["observation"].rpartition("Goal: craft ")[2].rstrip(".")
        assert goal == "emerald block"
        assert await post(client, "/step", id=number, action="get 9 emerald") == {
            "observation": "Got 9 emerald",
            "reward": 0,
            "done": False,
        }
        won = await post(client, "/step", id=number, action="craft 1 emerald block using 9 emerald")
        assert won == {
            "observation": "Crafted 1 minecraft:emerald_block",
            "reward": 1,
            "done": True,
        }
        assert (await client.get(f"/detail?id={number}")).json() == {**won, "deleted": False}
        fresh = await post(client, "/reset", id=number, data_idx=36)
        del fresh["id"]
        assert (await client.get(f"/detail?id={number}")).json() == {**fresh, "deleted": False}
        assert (await client.get("/detail?id=99")).json() == {"error": "The id 99 is not valid."}


async def test_a_searchqa_client_names_its_item_at_creation_and_may_try_again():
    # our routes are strict, AgentGym's under /agentgym are not
    async with serving("searchqa") as (client, sessions):
        assert (await client.get("/")).json() == "ok"
        number = await post(client, "/create", id=0)
        assert isinstance(number, int)
        prompt = await post(client, "/reset", env_idx=number, id=3)
        assert "<search>" in prompt.partition("Question: ")[0]
        assert (await client.get(f"/observation?env_idx={number}")).json() == prompt
        found = await post(client, "/step", env_idx=number, action="<search>a town</search>")
        assert found.keys() == {"observation", "reward", "done", "info"}
        assert found["observation"].strip().startswith('<information>Doc 1(Title: "')
        wrong = await post(client, "/step", env_idx=number, action="<answer>nonsense</answer>")
        assert (wrong["reward"], wrong["done"]) == (0.0, False)  # AgentGym allows another guess
        assert (await post(client, "/step", status=404, env_idx=5, action="x")) == {
            "error": "The id 5 is not valid."
        }
        assert await post(client, "/close", env_idx=number) is True
        assert sessions.info().active_sessions == 0


async def test_searchqa_speaks_agentgyms_protocol_there_where_it_is_asked_to():
    async with serving("searchqa", {"protocol": "agentgym"}) as (client, _):
        number = await post(client, "/create", id=0)
        prompt = await post(client, "/reset", env_idx=number, id=3)
        instructions, question = prompt.split("\n\n")
        assert instructions.startswith(
            "Begin every reply with your reasoning, inside <think>...</think>."
        )
        assert question.startswith("Question: ")
        wrong = await post(client, "/step", env_idx=number, action="<answer>nonsense</answer>")
        assert wrong == {
            "observation": PROTOCOLS["agentgym"].try_again,
            "reward": 0.0,
            "done": False,
            "info": None,
        }


@pytest.mark.usefixtures("java")
async def test_a_sciworld_client_plays_by_score_and_asks_the_further_routes():
    # our routes normalize rewards, AgentGym's under /agentgym do not
    async with serving("sciworld", max_sessions=2) as (client, sessions):
        assert (await client.get("/")).json() == "This is environment ScienceWorld."
        number = (await client.post("/create")).json()["id"]
        shown = await post(client, "/reset", id=number, data_idx=3000)
        assert shown.keys() == {
            "task_name",
            "var_num",
            "task_description",
            "observation",
            "reward",
            "score",
            "deleted",
            "done",
        }
        assert (shown["task_name"], shown["var_num"], shown["score"]) == (
            "find-living-thing",
            64,
            0,
        )
        assert shown["task_description"].startswith("Your task is to find a(n) living thing.")
        assert shown["observation"].startswith("This room is called the bathroom.")
        assert (await client.get(f"/observation?id={number}")).json() == shown["observation"]
        hint = (await client.get(f"/action_hint?id={number}")).json()
        assert "open OBJ" in hint["possible_actions"]
        assert "bathtub" in hint["possible_objects"]
        assert "GoalFocusOnLiving" in (await client.get(f"/goals?id={number}")).json()["goals"]
        assert (await client.get(f"/detail?id={number}")).json() == shown
        assert (await client.get(f"/task_description?id={number}")).json() == {
            "task_description": shown["task_description"]
        }
        assert (await client.get(f"/object_tree?id={number}")).json()["object_tree"][
            "name"
        ] == "universe"
        state = (await client.get(f"/state?id={number}")).json()
        assert (state["observation"].strip(), state["current_moves"]) == (shown["observation"], 0)
        seen = await post(client, "/step_visual", id=number, action="open door to kitchen")
        assert (seen["observation"], seen["moves"], seen["info"]["taskName"]) == (
            "The door is now open.",
            1,
            "find-living-thing",
        )
        assert seen["reward"] == seen["score"] > 0
        lost = await post(client, "/step", id=number, action="focus on agent")
        assert lost == {
            "observation": "You focus on the agent.",
            "reward": -100 - seen["score"],
            "score": -100,
            "done": True,
        }
        over = {"error": f"The task with environment {number} has finished."}
        assert await post(client, "/step", id=number, action="look around") == over
        assert (await client.get(f"/detail?id={number}")).json() == over
        # the first look scores 8 points there
        scored = await post(client, "/reset", id=number, data_idx=2936 + 150)
        assert (scored["reward"], scored["score"], scored["done"]) == (8, 8, False)
        assert (await client.get(f"/detail?id={number}")).json() == scored
        lost = await post(client, "/step", id=number, action="focus on agent")
        assert (lost["reward"], lost["score"], lost["done"]) == (-108, -100, True)
        assert await post(client, "/close", id=number) is True
        assert sessions.info().active_sessions == 0


@pytest.mark.usefixtures("chromium")
async def test_a_webarena_client_gets_blocks_sites_and_the_objective():
    async with serving("webarena") as (client, sessions):
        assert (await client.get("/")).json() == "ok"
        number = (await client.post("/create")).json()["env_idx"]
        shown = await post(client, "/reset", env_idx=number, seed=0, idx=0)
        assert shown.keys() == {"observation", "sites", "object"}
        assert (shown["sites"], shown["object"]) == (
            ["shopping"],
            "What does the Halden Ember Enamel Mug cost?",
        )
        assert (await client.get(f"/observation?env_idx={number}")).json() == shown["observation"]
        lines = shown["observation"].splitlines()
        assert lines[0] == "OBSERVATION:"
        assert [line.partition(":")[0] for line in lines[-3:]] == [
            "URL",
            "OBJECTIVE",
            "PREVIOUS ACTION",
        ]
        step = await post(client, "/step", env_idx=number, action="I look.\n```scroll [down]```")
        assert step.keys() == {"observation", "reward", "terminated", "truncated", "info"}
        assert (step["reward"], step["terminated"], step["truncated"]) == (0.0, False, False)
        end = await post(client, "/step", env_idx=number, action="```stop [$12.50]```")
        assert (end["reward"], end["terminated"]) == (1.0, True)
        assert await post(client, "/reset", env_idx=number, seed=0, idx=5000) == {
            "observation": "TimeoutError",
            "sites": "Error",
            "object": "Error",
        }
        assert await post(client, "/close", env_idx=number) == {"closed": "closed"}
        assert await post(client, "/close", env_idx=number) == {"closed": "no such environment"}
        assert sessions.info().active_sessions == 0
