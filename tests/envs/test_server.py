"""The HTTP contract, on the real app and a simulator that counts its calls."""

import asyncio

import httpx
import pytest

from envs.babyai import spec as babyai
from envs.env import EnvSpec, UnknownTask
from envs.server import ServerSettings, make_app
from envs.wire import BatchReply, ErrorReply, InfoReply, StepReply
from tests.envs.counter import Counter, create, refusal, serving, step


async def test_an_episode_from_create_to_close():
    async with serving() as (client, _, simulator):
        info = InfoReply.model_validate_json((await client.get("/info")).content)
        assert (info.env, info.options, info.offers_expert, info.active_sessions) == (
            "counter",
            {"x": 1},
            False,
            0,
        )
        session = await create(client, task_id=5)
        reply = StepReply.model_validate_json((await step(client, session, 1)).content)
        assert (reply.turn, reply.observation, reply.reward, reply.terminated) == (
            1,
            "go 1",
            0.0,
            False,
        )
        assert (await client.get("/observation", params={"session_id": session})).json() == {
            "turn": 1,
            "observation": "go 1",
        }
        assert (await client.get("/render", params={"session_id": session})).json() == {
            "media_type": "image/png",
            "data": "cG5n",
        }
        await step(client, session, 2)
        last = StepReply.model_validate_json((await step(client, session, 3)).content)
        assert (last.reward, last.terminated, last.success) == (1.0, True, True)
        assert (await client.post("/close", json={"session_id": session})).json() == {
            "closed": True
        }
        assert (await client.post("/close", json={"session_id": session})).json() == {
            "closed": False
        }
        assert (await client.post("/close", json={"session_id": "never"})).json() == {
            "closed": False
        }
        assert simulator.closed == simulator.made == 2  # one of them played the scripted episode


async def test_a_batch_is_answered_as_its_requests_would_be_alone():
    async with serving() as (client, sessions, simulator):
        good, bad = [await create(client, key) for key in ("good", "bad")]
        asked = [
            {"session_id": good, "turn": 1, "action": "go"},
            {"session_id": bad, "turn": 1, "action": "crash"},
            {"session_id": good, "turn": 1, "action": "go"},  # repeated: the stored response
            {"request_key": "new", "task_id": 5},
            {"request_key": "unlucky", "task_id": 13},
            {"session_id": good, "turn": 3, "action": "go"},
            {"session_id": good},
            {"session_id": good, "turn": 2, "action": "go"},
        ]
        reply = await client.post("/batch", json={"requests": asked})
        assert reply.status_code == 200
        replies = BatchReply.model_validate_json(reply.content).replies
        assert [getattr(each, "kind", type(each).__name__) for each in replies] == [
            "StepReply",
            "env_crashed",
            "StepReply",
            "CreateReply",
            "env_crashed",
            "turn_mismatch",
            "CloseReply",
            "session_gone",
        ]
        assert replies[0] == replies[2]
        assert simulator.acted == 1 + 2  # one action of the scripted episode, and one per session
        assert sessions.metrics.steps._value.get() == 1


@pytest.mark.parametrize("kind", [{"blocking": True}, {"awaited": True}])
async def test_slow_environments_take_no_batches(kind):
    async with serving(**kind) as (client, _, _):
        assert not (await client.get("/info")).json()["takes_batches"]
        assert (await client.post("/batch", json={"requests": []})).status_code == 404


async def test_a_batch_has_an_end_and_one_bad_request_refuses_it():
    async with serving() as (client, _, _):
        assert (await client.get("/info")).json()["takes_batches"]
        close = {"session_id": "nobody's"}
        for asked in ([close] * 257, [close, {"session_id": ""}], [{"turn": 1}], [close, None]):
            reply = await client.post("/batch", json={"requests": asked})
            assert refusal(reply) == (422, "bad_request")


async def test_the_expert_exists_only_where_it_was_asked_for():
    async with serving() as (client, _, _):
        reply = await client.post("/expert", json={"session_id": await create(client)})
        assert refusal(reply) == (404, "bad_request")


async def test_an_expert_that_fails_or_hangs_costs_an_error_and_not_the_session():
    async with serving(offer_expert=True) as (client, _, _):
        good, lost, hung = (
            await create(client, "a", 1),
            await create(client, "b", 7),
            await create(client, "c", 8),
        )
        assert (await client.post("/expert", json={"session_id": good})).json() == {
            "action": "onward"
        }
        reply = await client.post("/expert", json={"session_id": lost})
        assert refusal(reply) == (500, "expert_failed")
        assert "no idea" in reply.json()["message"]
        asked = asyncio.create_task(client.post("/expert", json={"session_id": hung}))
        await asyncio.sleep(0.05)
        # the server answers other requests meanwhile
        assert (await step(client, good, 1)).status_code == 200
        reply = await asked
        assert refusal(reply) == (500, "expert_failed")
        assert "no answer within 0.2 s (task 8, turn 0)" in reply.json()["message"]
        assert (await step(client, hung, 1)).status_code == 200


@pytest.mark.parametrize(
    ("route", "body", "status"),
    [
        ("/create", b"", 422),
        ("/create", b"{", 422),
        ("/create", b'{"request_key": "k", "task_id": -1}', 422),
        ("/create", b'{"request_key": "k", "task_id": true}', 422),
        ("/create", b'{"request_key": "k", "task_id": "1"}', 422),
        ("/create", b'{"request_key": "k", "task_id": 0, "taskid": 1}', 422),
        ("/create", b'{"request_key": "", "task_id": 0}', 422),
        ("/step", b'{"session_id": "x", "turn": 0, "action": "a"}', 422),
        ("/step", b'{"session_id": "x", "turn": true, "action": "a"}', 422),
        ("/step", b'{"session_id": "x", "turn": 1}', 422),
        ("/step", b'{"session_id": "x", "turn": 1, "action": "\\ud800"}', 422),
        ("/step", b" " * 300_000, 422),
        ("/close", b"[]", 422),
        ("/nowhere", b"{}", 404),
        ("/info", b"{}", 405),
    ],
)
async def test_every_bad_request_gets_a_typed_error(route, body, status):
    async with serving() as (client, _, _):
        assert refusal(
            await client.post(route, content=body, headers={"Content-Type": "application/json"})
        ) == (status, "bad_request")


async def test_unknown_sessions_and_missing_parameters_are_told_apart():
    async with serving() as (client, _, _):
        assert refusal(await step(client, "nobody", 1)) == (404, "unknown_session")
        assert refusal(await client.get("/observation", params={"session_id": "nobody"})) == (
            404,
            "unknown_session",
        )
        assert refusal(await client.get("/render")) == (422, "bad_request")


async def test_metrics_count_what_happened():
    async with serving() as (client, _, _):
        session = await create(client)
        await step(client, session, 1)
        await step(client, session, 1)
        await step(client, session, 9)
        text = (await client.get("/metrics")).text
        for line in (
            "env_sessions_active 1.0",
            "env_sessions_created_total 1.0",
            "env_steps_total 1.0",
            'env_errors_total{kind="turn_mismatch"} 1.0',
        ):
            assert line in text.splitlines()
        assert "env_step_seconds_bucket" in text


async def test_a_fault_in_the_server_itself_is_not_a_success(monkeypatch):
    async with serving() as (client, sessions, _):
        monkeypatch.setattr(sessions, "info", lambda: 1 / 0)
        assert refusal(await client.get("/info")) == (500, "env_crashed")


async def test_babyai_is_served_with_its_options():
    app = make_app(
        babyai({"actions": "high"}), ServerSettings(drain_timeout_s=0.1, offer_expert=True)
    )
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://env") as client,
    ):
        info = InfoReply.model_validate_json((await client.get("/info")).content)
        assert info.options["actions"] == "high"
        session = await create(client)
        action = (await client.post("/expert", json={"session_id": session})).json()["action"]
        assert action == "go to green key 1"
        assert (await step(client, session, 1, action)).json()["success"] is True


async def test_a_token_is_asked_for_where_there_is_one_but_not_by_probes():
    async with serving(token="secret") as (client, _, _):
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "secret"}):
            reply = await client.get("/info", headers=headers)
            assert (reply.status_code, reply.headers["WWW-Authenticate"]) == (401, "Bearer")
            failure = ErrorReply.model_validate_json(reply.content)
            assert failure.kind == "unauthorized"
            assert "AGENTGYM_ENV_TOKEN" in failure.message
            assert "secret" not in reply.text
        assert (
            await client.get("/info", headers={"Authorization": "Bearer secret"})
        ).status_code == 200
        assert [
            (await client.get(path)).status_code for path in ("/healthz", "/readyz", "/metrics")
        ] == [200] * 3
        assert 'env_errors_total{kind="unauthorized"} 3.0' in (await client.get("/metrics")).text


async def test_the_openapi_document_names_every_route_and_its_messages():
    async with serving(offer_expert=True, token="t") as (client, _, _):
        document = (await client.get("/openapi.json", headers={"Authorization": "Bearer t"})).json()
        routes = {
            (method, path) for path, methods in document["paths"].items() for method in methods
        }
        assert {("post", f"/{name}") for name in ("create", "step", "close", "expert")} < routes
        assert {
            ("get", f"/{name}")
            for name in ("info", "observation", "render", "healthz", "readyz", "metrics")
        } < routes
        schemas = document["components"]["schemas"]
        assert schemas["StepRequest"]["properties"]["turn"]["minimum"] == 1
        assert document["paths"]["/observation"]["get"]["parameters"][0]["name"] == "session_id"
        assert document["security"] == [{"token": []}]
    async with serving() as (client, _, _):
        document = (await client.get("/openapi.json")).json()
        assert "/expert" not in document["paths"]
        assert "security" not in document


async def test_what_an_environment_offers_beside_episodes_is_served():
    """An environment can serve hints, add metrics, refuse unknown tasks, and clean up what its
    sessions share.
    """

    class Hinting(Counter):
        def reset(self, task_id):
            if task_id > 9:
                raise UnknownTask(f"there is no task {task_id}")
            return super().reset(task_id)

        def hints(self):
            return ["one", "two"]

    ended = []
    gauges = {"env_engines": ("engines that run", lambda: 3)}
    spec = EnvSpec(
        "counter",
        "",
        Hinting,
        {},
        (),
        offers_hints=True,
        gauges=gauges,
        close=lambda: ended.append(True),
    )
    app = make_app(spec, ServerSettings(drain_timeout_s=0.1))
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://env") as client,
    ):
        session = await create(client)
        assert (await client.get(f"/hints?session_id={session}")).json() == {
            "actions": ["one", "two"]
        }
        assert "\nenv_engines 3.0\n" in (await client.get("/metrics")).text
        assert "/hints" in (await client.get("/openapi.json")).json()["paths"]
        assert await create(client, "other", 10) == (422, "bad_request")
        assert not ended
    assert ended == [True]


async def test_hints_are_no_route_of_an_environment_without_them():
    async with serving() as (client, _, _):
        assert (await client.get(f"/hints?session_id={await create(client)}")).status_code == 404
