"""Outcomes scored in a real browser, with login files and helpers that WebArena's sites need."""

import dataclasses
import json

import pytest

from envs.webarena.browser import BrowserLost
from envs.webarena.judge import Rules
from envs.wire import StepReply

from .conftest import task

SECOND = {"reference_url": "__SHOPPING__/second", "reference_answers": None}


def target(url, locator, prep=(), **contents):
    return {
        "url": url,
        "locator": locator,
        "required_contents": contents,
        "prep_actions": list(prep),
    }


def html(*targets, types=("program_html",)):
    return {"eval_types": list(types), "program_html": list(targets), **SECOND}


HEADING = "document.querySelector('h1').innerText"
FUZZY = task(14, reference_answers={"fuzzy_match": ["12"]})
TASKS = [
    task(0, **{"eval_types": ["url_match"], **SECOND}),
    task(
        1,
        **html(
            target("last", HEADING, exact_match="second page"),
            target("__SHOPPING__/", HEADING, must_include=["Mugs"]),
        ),
    ),
    task(
        2,
        **html(
            target("__SHOPPING__/", HEADING, exact_match="Mugs"),
            types=("url_match", "program_html"),
        ),
    ),
    task(3, **html(target("__SHOPPING__/", "document.none.x", must_include=["x"]))),
    task(4, **html(target("__SHOPPING__/", "document.querySelector('b')", exact_match="None"))),
    task(
        5,
        **html(
            target(
                "last",
                "document.title",
                prep=["document.nothing.x", "document.title = 'changed'"],
                exact_match="changed",
            )
        ),
    ),
    task(6, **html(target("last", "", must_include=["costs <b>12</b>"]))),
    task(7, **html(target("__SHOPPING__/missing-page", "document.title", exact_match="Not found"))),
    task(8, **html(target("last", "document.title + (() => { for (;;); })()", exact_match="x"))),
    task(9, **html(target("http://127.0.0.1:1/", "document.title", exact_match="x"))),
    task(10, start="__SHOPPING__/second |AND| __SHOPPING__/", eval_types=["url_match"], **SECOND),
    {
        **task(
            11, **html(target("__SHOPPING__/", "document.cookie", must_include=["session=abc"]))
        ),
        "storage_state": "./.auth/shop.json",
    },
    task(
        12,
        **html(
            target("func:reddit_get_post_url('__last_url__')", HEADING, exact_match="second page")
        ),
    ),
    task(13, reference_answers={"fuzzy_match": ["12"], "must_include": ["12"]}),
    FUZZY,
]


@pytest.fixture(scope="module")
def spec(make_spec, tmp_path_factory):
    folder = tmp_path_factory.mktemp("auth")
    cookie = {
        "name": "session",
        "value": "abc",
        "domain": "127.0.0.1",
        "path": "/",
        "expires": -1,
        "httpOnly": False,
        "secure": False,
    }
    (folder / "shop.json").write_text(
        json.dumps({"cookies": [{**cookie, "sameSite": "Lax"}], "origins": []})
    )
    return make_spec(*TASKS, storage_state=str(folder))


def end(spec, task_id, *actions):
    simulator = spec.make()
    try:
        simulator.reset(task_id)
        for action in actions:
            simulator.step(action)
        return simulator.step("stop []")
    finally:
        simulator.close()


SEE_SECOND = "goto [onestopmarket.com/second]"


@pytest.mark.parametrize(
    ("task_id", "actions", "reward"),
    [
        (0, [SEE_SECOND], 1),
        (0, [], 0),
        (1, [SEE_SECOND], 1),
        (1, [], 0),
        (2, [SEE_SECOND], 1),  # the address is checked before the other page opens
        (2, [], 0),
        (3, [], 0),
        (4, [], 1),
        (5, [], 1),
        (6, [SEE_SECOND], 1),
        (7, [], 1),
        (10, [], 1),  # the first of two tabs is current
        (10, ["tab_focus [1]"], 0),
        (11, [], 1),
        (12, [SEE_SECOND], 1),
    ],
)
def test_the_page_that_is_left_decides(spec, task_id, actions, reward):
    assert end(spec, task_id, *actions).reward == reward


def test_several_start_pages_are_tabs(spec):
    simulator = spec.make()
    try:
        assert "Tab 0 (current): Second | Tab 1: Mug shop\n" in simulator.reset(10)
    finally:
        simulator.close()


def test_a_page_of_the_task_file_that_cannot_be_judged_is_a_failure_of_the_environment(
    spec, monkeypatch
):
    monkeypatch.setattr("envs.webarena.tabs.Tabs.ask.__defaults__", (2.0,))
    with pytest.raises(BrowserLost, match="does not answer within 2 s"):
        end(spec, 8)
    with pytest.raises(BrowserLost, match="is not among the sites"):
        end(spec, 9)


@pytest.mark.parametrize("answer", ["²", "9" * 5_000, "\ud800", "\x00", "I do not know"])
def test_no_answer_escapes_its_score(spec, answer):
    simulator = spec.make()
    try:
        simulator.reset(13)
        result = simulator.step(f"stop [{answer}]")
        StepReply(turn=1, **dataclasses.asdict(result)).model_dump_json()
        assert (result.reward, result.terminated) == (0, True)
    finally:
        simulator.close()


def test_a_judge_that_breaks_on_the_text_scores_it_0_and_says_so(spec, monkeypatch, caplog):
    def broken(*_):
        raise KeyError("no such rule")

    monkeypatch.setattr(Rules, "same_answer", broken)
    result = end(spec, 14)
    assert (result.reward, result.success, result.terminated) == (0, False, True)
    assert result.info["parts"] == {"failed": "KeyError 'no such rule'"}
    assert "task 14: judging broke on the answer ''; it scores 0\nTraceback" in caplog.text


def test_a_judge_that_fails_is_a_failure_of_the_environment(make_spec):
    spec = make_spec(
        FUZZY, judge={"base_url": "http://127.0.0.1:9/v1", "model": "m", "timeout_s": 1.0}
    )
    with pytest.raises(RuntimeError, match=r"judge m at http://127\.0\.0\.1:9/v1"):
        end(spec, 14)
