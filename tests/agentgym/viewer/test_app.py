"""Every page, over HTTP without a browser."""

import html.parser
import json
import re

import pytest
from starlette.testclient import TestClient

from agentgym.evaluation.gate import Judgement, Ruling
from agentgym.evaluation.history import RECORD, STEP, Entry, Version
from agentgym.types import Learned, Status, Turn
from agentgym.viewer.app import make_app
from tests.agentgym.viewer.conftest import HOSTILE, KEPT, SCRIPT, TRAINING, episode, failed

FOLDER = f"stage-1-{'a' * 16}"
FIRST = f"/e/{FOLDER}.0.t0"
RESULT = {
    "policy": {"kind": "weights", "model": HOSTILE.encode("utf-8", "replace").decode()},
    "protocol": {"name": "p", "envs": [{"env": {"name": "babyai", "options": {}}}]},
}


@pytest.fixture
def client(view):
    return TestClient(make_app(view()))


class Reader(html.parser.HTMLParser):
    """Collects tags, and attributes that run code or set styles."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.acting, self.text = set(), [], ""
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.add(tag)
        for name, value in attributes:
            if name.startswith("on") or name == "style" or "javascript:" in (value or "").lower():
                self.acting.append((tag, name, value))

    def handle_data(self, data):
        self.text += data


def check(answer, status=200):
    """Return a response's page after checking that it contains no active content."""
    assert answer.status_code == status, answer.text[:500]
    page = Reader(answer.text)
    assert page.acting == []
    assert not {"iframe", "object", "embed", "base"} & page.tags
    assert answer.text.count("<script") == 1  # the page's own script
    assert not set("\x1b\x07\u202e\u2066\u200b") & set(answer.text)
    return page


@pytest.mark.parametrize("path", ["/", "/episodes", "/training", "/compare", "/decisions", "/play"])
def test_an_empty_store_has_pages_that_say_what_to_do(client, path):
    text = check(client.get(path)).text
    command = {"/compare": "agentgym evaluate expert", "/play": "begin"}.get(path, "make pipeline")
    assert command in text


def test_hostile_text_is_text_on_every_page(made, view):
    turn = Turn(HOSTILE, HOSTILE, 0.0, 3, 5, 4, reply=f"think {HOSTILE}", info={HOSTILE: HOSTILE})
    told = {"family": HOSTILE[:60].encode("utf-8", "replace").decode()}
    bad = episode(
        0,
        turns=(turn, Turn(HOSTILE, HOSTILE, 0.0, 6, 8, 4, info=told)),
        first_observation=HOSTILE,
        learned=Learned(excluded=f"why {SCRIPT}"),
        error=f"{HOSTILE}\nmore",
    )
    other = failed(0, 1, first_observation=HOSTILE, error=HOSTILE, learned=KEPT)
    made.add([bad, other])
    rules = [{"rule": SCRIPT, "verdict": SCRIPT, "why": SCRIPT}]
    decision = {"verdict": SCRIPT, "rules": rules, "evidence": {"pairs": {SCRIPT: 1}}}
    version = Version(SCRIPT, "", run_key=SCRIPT)
    entry = Entry(SCRIPT, "", version, None, version, SCRIPT, 1.0, SCRIPT, decision)
    about = {"model": SCRIPT, "alias": SCRIPT}
    made.add([], step=STEP, key="d", records={RECORD: entry.to_bytes()}, config=about)
    for key in "bc":
        made.add([failed(0, step=0)], step="evaluation", key=key, config=RESULT)
    client = TestClient(make_app(view()))
    results = [f"evaluation-{key * 16}" for key in "bc"]
    for path in (
        "/",
        "/episodes",
        f"/episodes?q={SCRIPT}",
        "/episodes?item=<script>&family=<script>",
        FIRST,
        f"{FIRST}?q=<script>alert&overlay=engine",
        f"/e/{FOLDER}.0.t1?overlay=ratio",
        f"{FIRST}/group",
        f"/beside?e={FIRST[3:]}&e={FOLDER}.0.t1",
        "/item/babyai_0",
        "/training",
        f"/compare?a={results[0]}&b={results[1]}",
        "/decisions",
        "/play",
    ):
        check(client.get(path))
    text = check(client.get(FIRST)).text
    assert SCRIPT in text  # escaped as text
    assert "\\x1b[31mred" in text
    assert "user\\u202egnp.exe\\u2066\\u200bhidden" in text
    for path in (
        "/e/<script>",
        "/item/<script>",
        f"/compare?a={SCRIPT}",
        f"/training?run={SCRIPT}",
    ):
        assert client.get(path).status_code in (400, 404, 410)
        check(client.get(path), client.get(path).status_code)


def test_an_observation_of_5_mb_is_cut_and_whole_at_an_address_of_its_own(made, view):
    huge = f"{SCRIPT}{'long ' * 1_000_000}end"
    made.add([episode(0, turns=(Turn("go", huge, 0.0),), input_ids=(), action_mask=())])
    client = TestClient(make_app(view()))
    answer = client.get(FIRST)
    page = check(answer)
    assert len(answer.text) < 60_000
    assert f"all {len(huge):,} characters" in page.text
    whole = client.get(f"{FIRST}/text/1/observation")
    assert whole.text == huge
    assert whole.headers["content-type"] == "text/plain; charset=utf-8"
    assert whole.headers["content-security-policy"] == "sandbox"
    for path in ("2/observation", "1/error", "0/action", "-1/action"):
        assert client.get(f"{FIRST}/text/{path}").status_code in (404, 422)


def test_an_episode_shows_what_is_recorded_of_it(made, view):
    made.add([episode(0, learned=KEPT), failed(0, 1, learned=Learned(excluded="cut short"))])
    client = TestClient(make_app(view()))
    text = " ".join(check(client.get(f"{FIRST}?overlay=learner")).text.split())
    assert "optimizer step5" in text
    assert "8, 4 sampled" in text
    assert "The stronger, the less likely the token was to the learner" in text
    assert client.get(f"{FIRST}?overlay=learner").text.count('class="t own s1"') == 3
    other = check(client.get(f"/e/{FOLDER}.0.t1?overlay=ratio")).text
    assert "Not in the loss: cut short" in other
    assert "ratio" not in other.split("tokens:")[1].split("draw")[0]  # not recorded


def test_a_list_leads_to_episodes_that_know_their_neighbours(made, view):
    made.add([episode(0), episode(1), episode(2)])
    client = TestClient(make_app(view()))
    link = re.search(r'href="(/e/[^"]+t1\?list=[^"]+)"', client.get("/episodes?sort=item").text)[1]
    page = client.get(link.replace("&amp;", "&")).text
    assert re.search(r'href="/e/[^"]+t2[^"]*" rel="prev"', page)
    assert re.search(r'href="/e/[^"]+t0[^"]*" rel="next"', page)


def test_a_long_episode_is_shown_a_hundred_turns_at_a_time(made, view):
    turns = tuple(Turn(f"act {n}", f"see {n}", 0.0) for n in range(1, 231))
    made.add([episode(0, turns=turns, input_ids=(), action_mask=())])
    client = TestClient(make_app(view()))
    assert "130 more turns" in check(client.get(FIRST)).text
    last = check(client.get(f"{FIRST}?from=201")).text
    assert "act 201" in last
    assert "act 230" in last
    assert "more turns" not in last
    assert client.get(f"{FIRST}?from=0").status_code == 400


def test_addresses_lead_to_no_file(client):
    for path in (
        "/static/../pages.py",
        "/static/%2e%2e%2fpages.py",
        "/static/..%2f..%2f..%2fparams.yaml",
        "/static//etc/passwd",
        "/e/..%2f..%2fetc/text/0/observation",
        f"/e/{FOLDER}%2f..%2f..0.t0",
        "/params.yaml",
    ):
        assert client.get(path).status_code == 404
    assert client.get("/static/view.css").headers["content-type"].startswith("text/css")


def test_what_is_gone_damaged_or_unknown_has_a_page_and_a_status(made, view):
    manifest = made.add([episode(0)])
    viewer = view()
    client = TestClient(make_app(viewer))
    check(client.get(f"/e/{FOLDER}.7.t0"), 410)
    check(client.get("/nowhere"), 404)
    digest = manifest.records["trajectories.jsonl.gz"].digest
    blob = made.folder / "store/steps" / FOLDER / "blobs" / digest
    data = blob.read_bytes()
    blob.write_bytes(data[:-1] + b"x")
    assert "is damaged" in check(client.get(FIRST), 500).text
    blob.unlink()
    check(client.get(FIRST), 410)
    blob.write_bytes(data)
    check(client.get(FIRST))


def test_an_index_that_breaks_under_a_page_is_built_anew(made, view):
    made.add([episode(n) for n in range(300)])
    viewer = view()
    client = TestClient(make_app(viewer))
    check(client.get("/episodes"))
    viewer.index.reader.execute("PRAGMA query_only = 0")
    viewer.index._connect("rw").execute("PRAGMA wal_checkpoint(TRUNCATE)")
    with viewer.index.path.open("r+b") as file:
        file.truncate(8192)
    assert client.get("/episodes").status_code == 503
    viewer.refresh()
    assert "300" in check(client.get("/episodes")).text


def test_decisions_lead_to_the_episodes_that_made_them(made, view):
    def version(number, key):
        return Version(number, key, {"step": "evaluation", "key": key * 64, "digest": "0" * 64})

    candidate, before = version("2", "c"), version("1", "b")
    judged = Judgement("PROMOTE", (Ruling("gain", "PROMOTE", "better by 10 points"),))
    entry = Entry(
        *("judged", "asked", candidate, before, candidate, "somebody", 5.0, judged.why),
        decision=judged.to_json(),
        number=3,
    )
    about = {"model": "agentgym-babyai", "alias": "champion"}
    made.add([], step=STEP, key="d", records={RECORD: entry.to_bytes()}, config=about)
    for key in "bc":
        made.add([failed(0, step=0)], step="evaluation", key=key, config=RESULT)
    client = TestClient(make_app(view()))
    page = client.get("/decisions")
    text = check(page).text
    assert "PROMOTE" in text
    assert "better by 10 points" in text
    assert "agentgym-babyai version 2" in text
    assert "champion beforeversion 1" in text
    assert "gain: PROMOTE" in " ".join(text.split())
    link = f"/compare?a=evaluation-{'b' * 16}&amp;b=evaluation-{'c' * 16}"
    assert f'href="{link}"' in page.text


def test_two_evaluations_of_runs_are_compared_by_what_their_plans_ask(made, view):
    """Ignore settings of their steps on which no episode depends."""
    for key, steps, num_items in (("a", 10, 2), ("b", 20, 2), ("c", 20, 4)):
        plan = {"about": {}, "identity": {"num_items": num_items}, "slots": []}
        config = {"env": TRAINING["env"], "evaluation": {"steps": steps}}
        records = {"plan.json": json.dumps(plan).encode()}
        made.add([episode(0)], step="evaluate-stage-1", key=key, config=config, records=records)
    client = TestClient(make_app(view()))

    def compared(a, b):
        folders = (f"evaluate-stage-1-{key * 16}" for key in (a, b))
        return check(client.get("/compare?a={}&b={}".format(*folders))).text

    assert "different questions" not in compared("a", "b")
    assert "num_items: 2 and 4" in compared("b", "c")


def test_left_out_episodes_are_counted_and_never_a_failure(made, view):
    made.add([episode(0), failed(1, status=Status.ENV_ERROR, reward=None, error="it broke")])
    client = TestClient(make_app(view()))
    page = client.get("/").text
    assert "100.0 %" not in page  # training episodes give no success rate of the run
    found = check(client.get("/episodes?status=env_error"))
    assert "no outcome" in found.text


def test_the_success_of_a_run_is_that_of_its_final_evaluation_with_its_coverage(made, view):
    """Show the final evaluation only, not all episodes of all steps."""
    evaluated = {"env": TRAINING["env"], "evaluation": {"num_items": 2}}
    parents = {"stage-1": made.add([episode(0), episode(1)], done=True).digest}
    for step, share, at in (("evaluate-initialize", 0.125, 0), ("evaluate-stage-1", 0.75, 5)):
        parents[step] = made.add(
            [failed(0)],
            step=step,
            key="b",
            config=evaluated,
            parents=dict(parents),
            done=True,
            results={
                "global_step": at,
                "coverage": 0.9,
                "summary": {
                    "greedy": {"mean": 1.0},
                    "avg_at_4": {"mean": share},
                    "pass_at_1": {"mean": share},
                },
            },
        ).digest
    text = check(TestClient(make_app(view())).get("/")).text
    assert "75.0 %" in text
    assert "coverage 90.0 %" in text
    assert "12.5 %" not in text


def test_an_evaluation_whose_episodes_failed_tells_how_few_count(made, view):
    made.add(
        [episode(0)],
        step="evaluation",
        key="b",
        config={"policy": {"kind": "expert"}, "protocol": {}},
        done=True,
        results={
            "coverage": 5 / 48,
            "outcomes": {},
            "envs": {"babyai": {"greedy": None, "avg_at_1": {"mean": 1.0}}},
        },
    )
    text = check(TestClient(make_app(view())).get("/")).text
    assert "100.0 %" in text
    assert "coverage 10.4 %" in text


def test_state_tells_that_there_is_news(made, view):
    made.add([episode(0)])
    viewer = view()
    client = TestClient(make_app(viewer))
    before = client.get("/state").json()
    assert client.get("/state").json() == before
    made.add([episode(1)])
    viewer.refresh()
    assert client.get("/state").json()["stamp"] != before["stamp"]
    assert client.get("/healthz").text == "ok"


def test_runs_evaluations_and_those_of_the_gate_are_listed_apart(made, view):
    run = made.add([episode(0)], done=True)
    made.add([episode(1)], step="stage-2", key="e", parents={"stage-1": run.digest}, done=True)
    for key, policy in (("b", "the expert"), ("c", "models:/m/3")):
        plan = json.dumps({"about": {"policy": policy}, "identity": {}, "slots": []}).encode()
        made.add([failed(0)], step="evaluation", key=key, records={"plan.json": plan})
    decision = {"evidence": {"questions": ["c" * 64, ""]}}
    entry = Entry("judged", "", Version("3", ""), None, None, "", 5.0, "", decision)
    made.add([], step=STEP, key="d", records={RECORD: entry.to_bytes()})
    text = check(TestClient(make_app(view())).get("/")).text
    runs, evaluations, gate = re.split(r"Evaluations(?: that the gate played[^1]*)? 1", text)
    assert "Runs 1" in runs
    assert "grpo, max_turns 4, seed 7" in runs
    assert "the expert" in evaluations
    assert "models:/m/3" in gate


def test_compare_begins_with_the_two_newest_results_of_one_question(made, view):
    for key, items, played in (("a", 3, failed), ("b", 3, episode), ("c", 4, episode)):
        plan = {
            "about": {"policy": f"policy {key}"},
            "identity": {
                "items": {"babyai": {"num": items}},
                "protocol": {"envs": [{"env": {"name": "babyai"}, "max_turns": 4}]},
                "policy": {"kind": key},
            },
            "slots": [],
        }
        records = {"plan.json": json.dumps(plan).encode()}
        config = plan["identity"]
        own = [played(n, step=0) for n in range(items)]
        made.add(own, step="evaluation", key=key, config=config, records=records, done=True)
    client = TestClient(make_app(view()))
    page = client.get("/compare")
    assert "3 episodes count in both; 3 were won and 0 lost" in check(page).text
    chosen = re.findall(r'value="evaluation-(\w)\w*" selected>([^<·]*) ·', page.text)
    assert chosen == [("a", "policy a"), ("b", "policy b")]
    assert page.text.count('<optgroup label="babyai, 3 items, 4 turns">') == 2
    folders = [f"evaluation-{key * 16}" for key in "abc"]
    after = check(client.get(f"/compare?a={folders[1]}")).text
    assert "0 were won and 3 lost" in after  # the only other result of its question
    alone = check(client.get(f"/compare?b={folders[2]}")).text
    assert "no two finished ones here answer the same question" in alone
