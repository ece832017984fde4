"""A small part of `benchmarks/hostile.py`, and text that it cannot send because no message can
encode it.
"""

import contextlib
import dataclasses
import random
import re
import time
from pathlib import Path
from urllib.parse import quote

import pytest
from pydantic import ValidationError

from envs.registry import load_spec
from envs.wire import StepReply, StepRequest
from tests.benched import benchmark

pytestmark = pytest.mark.integration
FOLDER = Path(__file__).parents[2]
SLOW_S = 1.5  # for a busy machine; a quadratic algorithm takes minutes


@pytest.fixture(scope="module")
def bench():
    return benchmark("hostile")


def storm(bench, name, number):
    """Send hostile actions; assert that each gets a result in time that fits into a message."""
    case = bench.CASES[name]
    spec = load_spec(case.env, case.options)
    chance = random.Random(name)
    simulator, observation, ended = spec.make(), "", True
    try:
        for _ in range(number):
            if ended:
                observation = simulator.reset(chance.randrange(case.num_tasks))
            said = bench.action(
                case,
                chance,
                observation,
                ["craft 4 oak planks using 1 oak log", "go to red ball 1"],
            )
            # JSON that the server reads cannot contain half a surrogate pair
            said = said.encode("utf-8", "replace").decode()
            began = time.perf_counter()
            result = simulator.step(said)
            StepReply(turn=1, **dataclasses.asdict(result)).model_dump_json()
            assert time.perf_counter() - began < SLOW_S, ascii(said[:200])
            observation, ended = result.observation, result.terminated or result.truncated
        simulator.render()
    finally:
        simulator.close()
        if spec.close:
            spec.close()


def test_half_a_surrogate_pair_is_refused_before_it_is_an_action():
    for text in (r"\ud800", r"\udfff", r"\ud800\ud800"):
        with pytest.raises(ValidationError, match="Invalid JSON"):
            StepRequest.model_validate_json(f'{{"session_id": "s", "turn": 1, "action": "{text}"}}')


@pytest.mark.parametrize("name", ["textcraft", "babyai", "babyai-high", "searchqa"])
def test_no_action_breaks_a_simulator_or_holds_it_up(bench, name):
    storm(bench, name, 400)


def test_no_action_breaks_the_laboratory_or_holds_it_up(bench, java):
    storm(bench, "sciworld", 40)


class Left:
    """Page that shows the policy's text in every part."""

    def __init__(self, url, text):
        self.url, self._text = url, text

    def content(self):
        return self._text

    def evaluate(self, script):
        return self._text

    def open(self, url):
        pass


def test_no_answer_and_no_page_breaks_an_evaluator_or_holds_it_up(bench):
    from envs.webarena.evaluators import evaluate
    from envs.webarena.helpers import StateHelpers
    from envs.webarena.judge import Rules
    from envs.webarena.tasks import load
    from sites import queries
    from sites.local_server import SiteServer

    server = SiteServer()
    helpers = StateHelpers(server.state(server.open_tenant()), queries)
    sites = {
        name: f"http://{name}.test" for name in ("shopping", "shopping_admin", "reddit", "gitlab")
    }
    chance = random.Random("evaluators")
    for task in load(FOLDER / "envs/webarena/tasks.json", sites, skip_missing=False).values():
        for _ in range(4):
            answer, text = bench.hostile(chance), bench.hostile(chance)
            url = f"http://reddit.test/f/{quote(bench.hostile(chance, 4_000), errors='replace')}"
            began = time.perf_counter()
            verdict = evaluate(task, answer, Left(url, text), helpers, Rules())
            assert time.perf_counter() - began < SLOW_S, ascii((task.id, answer[:100], text[:100]))
            assert verdict.score in (0, 1)


@pytest.mark.parametrize("length", [16_000, 1_000_000])
def test_no_repeated_part_holds_up_an_evaluator(bench, length):
    from envs.searchqa import grammar
    from envs.searchqa import world as scoring
    from envs.webarena import actions, evaluators
    from envs.webarena.judge import Rules

    def parsed(text):
        for form in bench.CASES["webarena"].forms:
            with contextlib.suppress(actions.NoAction):
                actions.parse(re.sub(r"\{\w*\}", lambda _: text, form))

    looks = (
        lambda text: Rules().same_answer("How many?", "3", text),
        lambda text: Rules().same_reason("How many?", "none is given", text),
        lambda text: evaluators.must_include("0", text, whole_token=True),
        lambda text: scoring.f1(text, ["the river"]),
        lambda text: grammar.parse(f"<think>{text}<search>{text}"),
    ) + ((parsed,) if length < 100_000 else ())  # longer actions are truncated
    for part in bench.PARTS if length < 100_000 else " 9²İ'":
        for text in (part * (length // len(part)), f".{part * (length // len(part))}x"):
            for look in looks:
                began = time.perf_counter()
                look(text)
                assert time.perf_counter() - began < 5 * SLOW_S, ascii(
                    (text[:20], looks.index(look))
                )


def test_no_form_or_address_breaks_an_embedded_site(bench):
    from sites.local_server import _BY_HOST, TENANT_HEADER, SiteServer

    server, chance = SiteServer(), random.Random("sites")
    names = sorted(
        {
            name
            for file in (FOLDER / "sites/templates").rglob("*.html")
            for name in re.findall(r'name="(\w+)"', file.read_text())
        }
    )
    token = server.open_tenant()
    for host, site in _BY_HOST.items():
        for method, pattern, _, _ in site.routes:
            for _ in range(2):
                path = re.sub(
                    r"\(\?P<(\w+)>[^)]*\)",
                    lambda found: "1" if found[1].startswith("id") else bench.hostile(chance, 300),
                    pattern.pattern,
                )
                fields = "&".join(
                    f"{name}={quote(bench.hostile(chance, 2_000), errors='replace')}"
                    for name in chance.sample(names, 8)
                )
                path = path.removesuffix("/?").encode("utf-8", "replace").decode()
                scope = {"method": method, "path": path, "query_string": fields.encode()}
                began = time.perf_counter()
                response = server._respond(
                    scope,
                    {"host": host, TENANT_HEADER: token, "referer": f"http://{host}/"},
                    fields.encode(),
                )
                assert time.perf_counter() - began < SLOW_S
                for value in response.headers.values():
                    value.encode("latin-1")
