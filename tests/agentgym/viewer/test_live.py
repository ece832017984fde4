"""Episodes played on pages, with real servers."""

import re

import pytest
from starlette.testclient import TestClient

from agentgym.types import Item
from agentgym.viewer.app import make_app
from agentgym.viewer.live import MAX_GAMES
from agentgym.viewer.query import Query
from tests.agentgym.viewer.conftest import SCRIPT, TRAINING, episode
from tests.agentgym.viewer.test_app import check
from tests.answering import Handler, http_server


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
        ({"who": "policy", "policy": "what is this"}, 400, "unknown policy"),
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


def test_a_form_with_many_fields_is_refused_and_no_fault(client):
    many = {f"x{number}": "y" for number in range(50)}
    for page in ("/play", begin(client).url.path):
        answer = client.post(page, data=many)
        assert answer.status_code == 413
        assert "a form may have 20 fields" in check(answer, 413).text


@pytest.fixture
def bystander():
    """An unconfigured service of this machine: (address, requests it received)."""
    asked = []

    class Bystander(Handler):
        def do_POST(self):
            asked.append(self.path)
            self.send_error(404)

    with http_server(Bystander) as address:
        yield f"{address}/retrieve", asked


def test_an_address_in_a_record_is_shown_and_asked_neither_to_draw_nor_to_play(
    made, view, bystander
):
    address, asked = bystander
    env = {"name": "searchqa", "options": {"retriever": address}, "dialect": "native"}
    made.add([episode(item=Item("searchqa", 0))], config={**TRAINING, "env": env})
    viewer = view()
    (row,) = viewer.lists.all(Query(), 10)
    (found,) = viewer.bodies.read([row])
    why = f"searchqa as on record would use retriever &#34;{address}&#34;"
    with TestClient(make_app(viewer)) as client:
        page = client.get(f"/e/{found.address}").text
        assert f"It cannot be drawn here: {why}" in page
        assert "draw the environment" not in page
        assert client.post(f"/e/{found.address}/replay").status_code == 200
        assert "which your configuration does not name" in viewer.replays.now(found).said
        offered = client.get("/play").text
        assert f"Not offered: {why}" in offered
        answer = client.post("/play", data={"env": "searchqa as in stage-1 aaaaaa", "task": "0"})
        assert answer.status_code == 400
    assert asked == []


def test_an_address_that_the_owner_configured_too_is_said_before_it_is_asked(made, view):
    address = "http://127.0.0.1:9/retrieve"
    env = {"name": "searchqa", "options": {"retriever": address}, "dialect": "native"}
    made.add([episode(item=Item("searchqa", 0))], config={**TRAINING, "env": env})
    viewer = view("env.name=searchqa", f"env.options.retriever={address}")
    (row,) = viewer.lists.all(Query(), 10)
    (found,) = viewer.bodies.read([row])
    uses = f"uses retriever &#34;{address}&#34;"
    with TestClient(make_app(viewer)) as client:
        assert f"it {uses}, as your configuration does" in client.get(f"/e/{found.address}").text
        assert f"({uses})" in client.get("/play").text
