"""The served environment: embedded sites and tasks, many sessions, and hours of use."""

import asyncio
import itertools
import json
import os
import random
import signal
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

import envs.webarena
from agentgym.config import EnvConfig
from agentgym.deploy.local import local_env
from agentgym.rollouts.env_client import EnvError
from agentgym.rollouts.pools import EnvPool
from agentgym.types import Item
from envs.registry import load_spec
from envs.wire import CreateReply, CreateRequest

pytestmark = pytest.mark.usefixtures("chromium")

FOLDER = Path(envs.webarena.__file__).parent
GOLD = {
    int(task): actions for task, actions in json.loads((FOLDER / "gold.json").read_text()).items()
}
SHORT = (2, 12, 24, 35, 53, 74, 89)  # cover all sites and all evaluators
FEW = pytest.param(SHORT, id="few")
ALL = pytest.param(tuple(GOLD), id="all", marks=[pytest.mark.slow, pytest.mark.timeout(1800)])


@pytest.fixture(scope="module")
def spec():
    served = load_spec("webarena", {"settle_s": 10.0})  # sixteen browsers share two cores
    yield served
    served.close()


def play(spec, task, end=None, left_out=0):
    """Follow the expert but for the last `left_out` actions, then send `end`.
    Return the last result.
    """
    simulator = spec.make()
    try:
        simulator.reset(task)
        expert = simulator.expert()
        while True:
            if end is not None and expert._next >= len(expert._actions) - left_out:
                return simulator.step(end)
            step = simulator.step(expert.next_action())
            assert "error" not in step.info, step.observation[:200]
            if step.terminated:
                return step
    finally:
        simulator.close()


def each(spec, tasks, **how):
    with ThreadPoolExecutor(3) as pool:
        return dict(zip(tasks, pool.map(lambda task: play(spec, task, **how), tasks), strict=True))


@pytest.mark.parametrize("tasks", [FEW, ALL])
def test_whoever_follows_the_expert_succeeds(spec, tasks):
    ends = each(spec, tasks)
    assert [task for task, end in ends.items() if not (end.success and end.reward == 1.0)] == []


@pytest.mark.parametrize("tasks", [FEW, ALL])
def test_an_episode_without_its_last_act_and_with_a_wrong_answer_fails(spec, tasks):
    ends = each(spec, tasks, end="stop [nonsense]", left_out=2)
    assert [task for task, end in ends.items() if end.reward != 0.0 or end.success] == []


@pytest.mark.parametrize("tasks", [FEW, ALL])
def test_junk_is_worth_nothing(spec, tasks):
    def junk(task):
        simulator = spec.make()
        try:
            simulator.reset(task)
            for action in (
                "",
                "```click [99999]```",
                "press [Hyper]",
                "scroll [down]",
                "goto [http://example.com]",
            ):
                step = simulator.step(action)
                assert (step.reward, step.terminated) == (0.0, False)
            return simulator.step("stop []").reward
        finally:
            simulator.close()

    with ThreadPoolExecutor(3) as pool:
        assert [
            task for task, reward in zip(tasks, pool.map(junk, tasks), strict=True) if reward
        ] == []


def test_the_first_observation_of_task_0_is_what_the_readme_shows(spec):
    simulator = spec.make()
    try:
        shown = simulator.reset(0)
    finally:
        simulator.close()
    readme = (FOLDER / "README.md").read_text()
    for line in shown.splitlines()[:8]:
        assert line.strip() in readme, line


def test_sixteen_sessions_that_change_the_same_site_at_once_do_not_see_each_other(spec):
    together = threading.Barrier(16, timeout=120)

    def one(number):
        simulator = spec.make()

        def click(role, name):
            found = next(
                element.id
                for element in simulator.shown
                if (element.role, element.name) == (role, name)
            )
            return simulator.step(f"click [{found}]").observation

        try:
            simulator.reset(51)
            click("link", "What did you read in one sitting?")
            box = next(
                element.id
                for element in simulator.shown
                if (element.role, element.name) == ("textbox", "Comment")
            )
            simulator.step(f"type [{box}] [this is number {number}.] [0]")
            together.wait()
            click("button", "Post")
            together.wait()
            pages = [simulator.step("goto [reddit.com/f/books/287/]").observation]
            pages += [simulator.step("scroll [down]").observation for _ in range(3)]
            return "".join(pages)
        finally:
            simulator.close()

    with ThreadPoolExecutor(16) as pool:
        shown = list(pool.map(one, range(16)))
    for number, text in enumerate(shown):
        assert [other for other in range(16) if f"this is number {other}." in text] == [number]


class Server:
    """Processes of a served environment."""

    def __init__(self, pid):
        self._server = psutil.Process(pid)

    def chromium(self, kind):
        """Return the processes of a kind: renderer, gpu-process, utility; "" is the browser."""
        return [p for p in self._server.children(recursive=True) if self._kind(p) == kind]

    @staticmethod
    def _kind(process):
        try:
            words = process.cmdline()
        except psutil.Error:
            return None
        if not words or "chrom" not in Path(words[0]).name:
            return None
        return next((word.partition("=")[2] for word in words if word.startswith("--type=")), "")

    def held(self):
        """Return the MiB of all processes, their number, and the open files of the server."""
        processes = [self._server, *self._server.children(recursive=True)]
        total = 0.0
        for process in processes:
            try:
                total += process.memory_full_info().pss / 2**20
            except psutil.Error:
                continue
        return total, len(processes), self._server.num_fds()


async def soak(endpoints, num_sessions, num_abandoned, num_crashes, num_kills, ttl_s):
    """Return the usage after the first sessions and at the end, and the sessions' outcomes."""
    ends, numbers, slots = Counter(), itertools.count(), asyncio.Semaphore(6)
    randomly = random.Random(0)
    async with EnvPool(endpoints, request_timeout_s=120) as pool:
        server = Server((await pool.info())[0].pid)

        async def visit():
            number = next(numbers)
            async with slots:
                try:
                    async with pool.session(
                        Item("webarena", number % len(GOLD)), f"key {number}"
                    ) as session:
                        for _ in range(2 if num_sessions < 100 else 4):
                            reply = await session.step(await session.expert())
                            if reply.terminated:
                                break
                    ends["played"] += 1
                except EnvError as error:
                    ends[error.kind] += 1

        async def harm():
            for number in range(num_crashes + num_kills):
                await asyncio.sleep(2.0 if num_crashes + num_kills < 4 else 6.0)
                found = server.chromium("renderer" if number < num_crashes else "")
                if found:
                    randomly.choice(found).kill()

        first = max(6, num_sessions // 5)  # at least as many as play at once
        await asyncio.gather(*(visit() for _ in range(first)))
        await asyncio.sleep(1)
        plateau = server.held()
        harming = asyncio.create_task(harm())
        await asyncio.gather(*(visit() for _ in range(num_sessions - first)))
        await harming
        for number in range(num_abandoned):
            request = CreateRequest(request_key=f"abandoned {number}", task_id=number)
            await pool.client.ask(endpoints[0], "/create", CreateReply, request)
        deadline = time.monotonic() + 20 * ttl_s
        while (await pool.info())[0].active_sessions:
            assert time.monotonic() < deadline, "abandoned sessions are not reaped"
            await asyncio.sleep(0.5)
        ends_before = ends.total()
        await asyncio.gather(*(visit() for _ in range(6)))
        assert ends.total() == ends_before + 6
        await asyncio.sleep(2)
        return (
            plateau,
            server.held(),
            ends,
            {p.pid for p in server._server.children(recursive=True)},
        )


@pytest.mark.parametrize(
    ("num_sessions", "num_abandoned", "num_crashes", "num_kills"),
    [
        pytest.param(12, 2, 1, 0, marks=pytest.mark.slow),
        pytest.param(300, 30, 5, 1, marks=[pytest.mark.slow, pytest.mark.timeout(2400)]),
    ],
)
def test_what_sessions_took_is_given_back(
    tmp_path, num_sessions, num_abandoned, num_crashes, num_kills
):
    ttl_s = 8.0
    settings = EnvConfig(name="webarena", max_sessions=64, session_ttl_s=ttl_s)
    with local_env(settings, expert=True, log_path=tmp_path / "log") as endpoints:
        plateau, end, ends, children = asyncio.run(
            soak(endpoints, num_sessions, num_abandoned, num_crashes, num_kills, ttl_s)
        )
    print(
        f"MiB, processes, files: {plateau} after the first sessions, {end} at the end; {dict(ends)}"
    )
    lost = ends.total() - ends["played"]
    assert ends.total() == num_sessions + 6
    assert set(ends) <= {"played", "env_crashed", "session_gone"}
    # a killed renderer costs one session, a killed browser all sessions in it
    assert lost <= 3 * num_crashes + 8 * num_kills
    assert end[0] <= 1.2 * plateau[0] + 60
    assert end[1] <= plateau[1] + 3
    assert end[2] <= plateau[2] + 3
    deadline = time.monotonic() + 15
    while alive := [
        pid
        for pid in children
        if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    ]:
        assert time.monotonic() < deadline, alive
        time.sleep(0.1)


def test_nothing_survives_the_server_being_killed(tmp_path):
    async def children(endpoints):
        async with (
            EnvPool(endpoints, request_timeout_s=60) as pool,
            pool.session(Item("webarena", 0), "k") as session,
        ):
            await session.step("scroll [down]")
            pid = (await pool.info())[0].pid
            found = psutil.Process(pid).children(recursive=True)
            os.kill(pid, signal.SIGKILL)
            return found

    settings = EnvConfig(name="webarena")
    with local_env(settings, expert=False, log_path=tmp_path / "log") as endpoints:
        found = asyncio.run(children(endpoints))
        assert len(found) > 5
        _, alive = psutil.wait_procs(found, timeout=15)
        assert [process for process in alive if process.status() != psutil.STATUS_ZOMBIE] == []
