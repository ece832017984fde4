"""Episodes played on pages, on real servers."""

import re

import pytest
from starlette.testclient import TestClient

from agentgym.viewer.app import make_app
from agentgym.viewer.play import MAX_GAMES
from tests.agentgym.viewer.conftest import SCRIPT
from tests.agentgym.viewer.test_app import check


@pytest.fixture(scope="module")
def endpoint(serving):
    with serving("babyai", offer_expert=True) as (found, _):
        yield found


@pytest.fixture
def client(view, endpoint):
    viewer = view(f"env.endpoints=[{endpoint}]", "env.options={}")
    with TestClient(make_app(viewer)) as made:
        yield made


def begin(client, **form):
    return client.post("/play", data={"env": "babyai", "task": "3", "who": "you", **form})


def actions(answer):
    return re.findall(r'class="action"><pre>([^<]*)', answer.text)


def test_a_person_plays_with_hints_and_sees_the_grid(client):
    answer = begin(client)
    page = check(answer)
    assert "your action" in page.text
    assert 'class="grid"' in answer.text
    assert '<option value="turn left">' in answer.text
    for action in ("turn left", SCRIPT, "move forward"):
        answer = client.post(str(answer.url), data={"action": action})
        check(answer)
    assert actions(answer) == ["turn left", "&lt;script&gt;alert(1)&lt;/script&gt;", "move forward"]
    assert answer.text.count('class="grid"') == 4
    assert "not carried out" in answer.text
    over = client.post(str(answer.url), data={"do": "end"})
    assert over.url.path == "/play"
    assert client.get(answer.url.path).status_code == 410


def test_a_policy_is_watched_turn_by_turn_to_its_end(client):
    answer = begin(client, who="random", task="0")
    assert "next turn" in answer.text
    for _ in range(2):
        answer = client.post(str(answer.url), data={"do": "next"})
    assert len(actions(answer)) == 2
    answer = begin(client, who="policy", policy="echo:turn left")
    for _ in range(30):
        answer = client.post(str(answer.url), data={"do": "next"})
    assert set(actions(answer)) == {"turn left"}
    assert "max_turns" in answer.text


@pytest.mark.parametrize(
    ("form", "status", "said"),
    [
        ({"env": "/etc"}, 400, "none of those offered"),
        ({"task": "-1"}, 400, "expected a number"),
        ({"task": "9" * 30}, 400, "expected a number"),
        ({"who": "policy", "policy": "what is this"}, 400, "is none"),
    ],
)
def test_what_cannot_be_played_is_told(client, form, status, said):
    assert said in check(begin(client, **form), status).text


def test_a_form_that_is_too_long_is_refused(client):
    answer = client.post("/play", content=b"a" * 100_000)
    assert answer.status_code == 413


def test_so_many_games_are_open_and_no_more(client):
    for _ in range(MAX_GAMES):
        assert begin(client).status_code == 200
    assert "end one of them" in check(begin(client), 400).text
