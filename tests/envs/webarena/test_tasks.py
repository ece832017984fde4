"""Task files: WebArena's format, and errors that name the task and the field."""

import copy
import json

import pytest

from envs.registry import load_spec
from envs.webarena.tasks import load

ROW = {
    "sites": ["shopping", "reddit"],
    "task_id": 7,
    "require_login": True,
    "storage_state": "./.auth/shopping_state.json",
    "start_url": "__SHOPPING__ |AND| __REDDIT__/f/cats",
    "geolocation": None,
    "intent_template": "Find {{what}}",
    "instantiation_dict": {"what": "mugs"},
    "intent": "Find mugs",
    "require_reset": False,
    "eval": {
        "eval_types": ["string_match", "url_match", "program_html"],
        "reference_answers": {"must_include": ["red"], "fuzzy_match": ["red mug"]},
        "reference_url": "__SHOPPING__/a |OR| __SHOPPING__/b",
        "program_html": [
            {"url": "last", "locator": "", "required_contents": {"must_include": ["x"]}},
            {
                "url": "func:shopping_get_latest_order_url()",
                "locator": "document.title",
                "required_contents": {"exact_match": "y"},
            },
        ],
        "url_note": "GOLD in PRED",
        "string_note": "",
        "reference_answer_raw_annotation": "red mug",
    },
    "intent_template_id": 3,
}
SITES = {"shopping": "http://shop:7770", "reddit": "http://forum:9999"}


def file_of(tmp_path, *rows):
    path = tmp_path / "tasks.json"
    path.write_text(json.dumps(rows))
    return path


def test_a_published_task_is_read_with_its_placeholders_filled(tmp_path):
    (task,) = load(file_of(tmp_path, ROW), SITES, skip_missing=False).values()
    assert (task.id, task.sites, task.intent) == (7, ("shopping", "reddit"), "Find mugs")
    assert task.start_urls == ("http://shop:7770", "http://forum:9999/f/cats")
    assert task.storage_state == "shopping_state.json"
    rules = task.evaluation
    assert rules.types == ("string_match", "url_match", "program_html")
    assert (rules.must_include, rules.fuzzy, rules.exact) == (("red",), ("red mug",), None)
    assert rules.reference_url == "http://shop:7770/a |OR| http://shop:7770/b"
    assert [(t.url, t.exact, t.must_include) for t in rules.targets] == [
        ("last", None, ("x",)),
        ("func:shopping_get_latest_order_url()", "y", ()),
    ]


def test_a_folder_of_single_tasks_is_read_too(tmp_path):
    for number in (3, 12):
        (tmp_path / f"{number}.json").write_text(json.dumps({**ROW, "task_id": number}))
    (tmp_path / "test.raw.json").write_text("[]")
    assert list(load(tmp_path, SITES, skip_missing=False)) == [3, 12]


def changed(path, value):
    row = copy.deepcopy(ROW)
    place = row
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return row


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (["intent"], 3, "task 7: intent: expected a string, got 3"),
        (["sites"], "shopping", "task 7: sites: expected a list"),
        (["eval"], None, "task 7: eval: expected an object"),
        (["eval", "eval_types"], ["magic"], "task 7: eval.eval_types: expected of string_match"),
        (["eval", "eval_types"], [], "expected at least one"),
        (
            ["eval", "reference_answers"],
            None,
            "task 7: eval.reference_answers: expected one of exact_match",
        ),
        (["eval", "url_note"], "EXACT", 'url_note: expected "GOLD in PRED"'),
        (
            ["eval", "program_html", 0, "locator"],
            "alert(1)",
            r"program_html\[0\].locator: expected nothing, or",
        ),
        (
            ["eval", "program_html", 1, "required_contents"],
            {},
            r"program_html\[1\].required_contents: expected an object",
        ),
        (
            ["eval", "program_html", 1, "url"],
            "func:eval(1+1)",
            r"program_html\[1\].url: expected texts in quotes",
        ),
        (["start_url"], "__MAP__", "task 7: sites: map is not configured"),
        (["sites"], ["wikipedia"], "task 7: sites: wikipedia is not configured"),
        (["task_id"], None, "no task_id"),
    ],
)
def test_a_wrong_task_is_named_with_its_field(tmp_path, path, value, message):
    with pytest.raises(ValueError, match=message):
        load(file_of(tmp_path, changed(path, value)), SITES, skip_missing=False)


def test_tasks_of_missing_sites_can_be_left_out(tmp_path):
    path = file_of(tmp_path, ROW, {**ROW, "task_id": 8, "sites": ["map"]})
    assert list(load(path, SITES, skip_missing=True)) == [7]
    with pytest.raises(ValueError, match="no task is left"):
        load(path, {"gitlab": "http://code"}, skip_missing=True)
    with pytest.raises(ValueError, match="task 7 occurs twice"):
        load(file_of(tmp_path, ROW, ROW), SITES, skip_missing=True)


def judge(variable):
    return {"judge": {"base_url": "http://a/v1", "model": "m", "api_key_env": variable}}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"task": "x"}, "no option 'task'; did you mean 'tasks'?"),
        ({"tasks": "embeded"}, "did you mean 'embedded'?"),
        ({"sites": {"shoping": "http://a"}}, "unknown site 'shoping'; did you mean 'shopping'?"),
        ({"sites": []}, "option sites: expected"),
        (
            {"sites": {"shopping": "ftp://a", "reddit": "http://b"}},
            "expected http:// or https:// addresses",
        ),
        (
            {"browser": "/bin/false"},
            (
                "option browser: expected one of chromium-headless-shell, .*, got '/bin/false'; .*"
                " AGENTGYM_BROWSER"
            ),
        ),
        ({"browser": "false"}, "option browser: expected one of "),
        ({"viewport": [10, 10]}, "option viewport: expected"),
        ({"judge": {"model": "m"}}, "option judge: expected base_url, model"),
        (judge("AGENTGYM_SECRET_NO"), "the variable AGENTGYM_SECRET_NO is not set"),
        (
            judge("AWS_SECRET_ACCESS_KEY"),
            "may only name variables that begin with AGENTGYM_SECRET_.*got 'AWS_SECRET_ACCESS_KEY'",
        ),
        (judge("AGENTGYM_ENV_TOKEN"), "may only name variables that begin with AGENTGYM_SECRET_"),
        (judge("AGENTGYM_SECRET_"), "may only name variables that begin with AGENTGYM_SECRET_"),
        (judge(["HOME"]), "may only name variables that begin with AGENTGYM_SECRET_"),
        ({"storage_state": ""}, "option storage_state: the tasks need logins"),
        ({"concurrency": -1}, "option concurrency: expected a whole number"),
        ({"settle_s": 0}, "option settle_s: expected seconds"),
        ({"missing_sites": "drop"}, "option missing_sites: unknown value 'drop'"),
    ],
)
def test_wrong_options_are_refused_before_anything_starts(tmp_path, monkeypatch, options, message):
    monkeypatch.setenv("AGENTGYM_SECRET_SHOP_PASSWORD", "x")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "x")
    monkeypatch.setenv("AGENTGYM_ENV_TOKEN", "x")
    given = {
        "tasks": str(file_of(tmp_path, ROW)),
        "sites": SITES,
        "storage_state": "none",
        **options,
    }
    with pytest.raises(ValueError, match=message):
        load_spec("webarena", given)


def test_a_helper_that_cannot_work_is_refused_at_load(tmp_path, monkeypatch):
    monkeypatch.delenv("AGENTGYM_SECRET_SHOP_PASSWORD", raising=False)
    with pytest.raises(ValueError, match="shopping_get_latest_order_url asks the shop's REST API"):
        load_spec(
            "webarena",
            {"tasks": str(file_of(tmp_path, ROW)), "sites": SITES, "storage_state": "none"},
        )
    unknown = changed(["eval", "program_html", 1, "url"], "func:rm('x')")
    with pytest.raises(
        ValueError, match="no helper \"func:rm\\('x'\\)\"; known: reddit_get_post_url"
    ):
        load_spec(
            "webarena",
            {"tasks": str(file_of(tmp_path, unknown)), "sites": SITES, "storage_state": "none"},
        )
