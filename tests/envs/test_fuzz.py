"""Invalid requests made from the served OpenAPI document, while another client plays."""

import asyncio
import sys
import urllib.request

import pytest

from agentgym.config import EnvConfig
from agentgym.deploy.local import local_env
from agentgym.rollouts.pools import EnvPool
from agentgym.types import Item
from tests.completed import completed

pytestmark = pytest.mark.integration

NATIVE_CHECKS = ",".join(
    (
        "not_a_server_error",
        "negative_data_rejection",
        "response_schema_conformance",
        "content_type_conformance",
    )
)
STEPS = 6


def fuzz(endpoint, folder, checks, *chosen, examples):
    """Run Schemathesis on the chosen operations, with its files in `folder`.
    Return its report; raise if a check failed.
    """
    command = [
        sys.executable,
        "-m",
        "schemathesis.cli",
        "run",
        f"{endpoint}/openapi.json",
        "--phases",
        "fuzzing",
        "--checks",
        checks,
    ]
    command += ["--header", f"Authorization: Bearer {endpoint.token}"]
    command += [
        "--max-examples",
        str(examples),
        "--seed",
        "1",
        "--request-timeout",
        "10",
        "--no-color",
        "--continue-on-failure",
        *chosen,
    ]
    done = completed(*command, cwd=folder, timeout=280)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    return done.stdout


def num_refused(endpoint):
    text = urllib.request.urlopen(f"{endpoint}/metrics", timeout=5).read().decode()
    return sum(
        float(line.rpartition(" ")[2])
        for line in text.splitlines()
        if line.startswith("env_errors_total")
    )


@pytest.mark.parametrize(
    ("env", "examples", "least"),  # per operation; least number of refusals
    [
        ("textcraft", 20, 130),
        *(
            pytest.param(env, 150, 1000, marks=pytest.mark.slow)
            for env in ("textcraft", "babyai", "sciworld", "searchqa")
        ),
    ],
)
def test_malformed_requests_break_nothing(env, examples, least, tmp_path):
    async def expert_actions(pool, task, number):
        """Play an undisturbed episode. Return its actions and observations."""
        async with pool.session(Item(env, task), f"alone {number}") as session:
            told = [session.observation]
            for _ in range(STEPS):
                reply = await session.step(await session.expert())
                told.append(reply.observation)
                if reply.terminated:
                    break
            return told

    async def play(endpoints):
        async with EnvPool(endpoints, request_timeout_s=10) as pool:
            expected = await expert_actions(pool, 3, 0)
            async with pool.session(Item(env, 3), "beside the storm") as session:
                told = [session.observation]
                storm = asyncio.create_task(
                    asyncio.to_thread(
                        fuzz,
                        endpoints[0],
                        tmp_path,
                        NATIVE_CHECKS,
                        "--exclude-path-regex",
                        "agentgym",
                        examples=examples,
                    )
                )
                while len(told) < len(expected):
                    told.append((await session.step(await session.expert())).observation)
                    await asyncio.sleep(1)
                await storm
            assert told == expected
            await asyncio.to_thread(
                fuzz,
                endpoints[0],
                tmp_path,
                "not_a_server_error",
                "--include-path-regex",
                "agentgym",
                examples=examples,
            )
            assert await expert_actions(pool, 3, 1) == expected
            return num_refused(endpoints[0])

    log = tmp_path / "log"
    with local_env(EnvConfig(name=env, max_sessions=4096), expert=True, log_path=log) as endpoints:
        assert asyncio.run(play(endpoints)) >= least
    assert "Traceback" not in log.read_text()
