"""tasks.json and gold.json: WebArena's format, and answers that are true of the generated
content.
"""

import json
import re
from collections import Counter
from pathlib import Path

import pytest

from sites import SITES, queries
from sites.session_state import content
from sites.text import long_day, money

FOLDER = Path(queries.__file__).resolve().parents[1] / "envs/webarena"
TASKS = json.loads((FOLDER / "tasks.json").read_text())
GOLD = json.loads((FOLDER / "gold.json").read_text())
FIELDS = {
    "sites",
    "task_id",
    "require_login",
    "storage_state",
    "start_url",
    "geolocation",
    "intent_template",
    "instantiation_dict",
}
FIELDS |= {"intent", "require_reset", "intent_template_id", "eval"}
ON_THE_START_PAGE = {"How many reviews wait for approval?"}  # answered without an action
WORLD = content(0).world()
STORE, FORUM, HUB = WORLD.store, WORLD.forum, WORLD.hub
LOCATOR = re.compile(
    r"|document\..+|\[\.\.\.document.+"
    r"|func:shopping_get_sku_latest_review_(author|rating)\('[A-Z]+-\d+'\)|func:gitlab_.+"
)
ACTION = re.compile(
    r"click \[(link|button|option|radio|checkbox|textbox|spinbutton|searchbox) '.+'( #\d+)?\]"
    r"|type \[(textbox|spinbutton|searchbox) '.+'( #\d+)?\] \[.+\] \[[01]\]"
    r"|press \[.+\]|scroll \[(up|down)\]|goto \[__[A-Z_]+__(/.*)?\]|tab_focus \[\d\]|new_tab|stop"
    r" \[.*\]"
)


def urls():
    for task in TASKS:
        targets = [
            target["url"]
            for target in task["eval"]["program_html"]
            if target["url"] != "last" and "func:" not in target["url"]
        ]
        yield from task["start_url"].split(" |AND| ")
        yield from targets
        yield from filter(None, task["eval"]["reference_url"].split(" |OR| "))


def test_the_tasks_have_webarenas_fields_and_are_numbered_from_zero():
    assert [task["task_id"] for task in TASKS] == list(range(len(TASKS)))
    assert len(TASKS) >= 64
    assert all(set(task) == FIELDS for task in TASKS)
    assert len({task["intent"] for task in TASKS}) == len(TASKS)


def test_the_intent_is_its_template_filled_in():
    ids = {}
    for task in TASKS:
        filled = task["intent_template"]
        for key, value in task["instantiation_dict"].items():
            filled = filled.replace("{{" + key + "}}", value)
        assert filled == task["intent"]
        assert (
            ids.setdefault(task["intent_template"], task["intent_template_id"])
            == task["intent_template_id"]
        )
    assert len(set(ids.values())) == len(ids)


def test_every_address_is_on_one_of_the_sites():
    for url in urls():
        match = re.match(r"__([A-Z_]+)__(/|$)", url)
        assert match, url
        assert match[1].lower() in SITES, url


def test_every_kind_of_evaluation_occurs_on_both_sides_of_the_split():
    """The tasks for evaluation have task_id % 4 == 3."""
    for tasks in (
        [task for task in TASKS if task["task_id"] % 4 == 3],
        [task for task in TASKS if task["task_id"] % 4 != 3],
    ):
        rules = [task["eval"] for task in tasks]
        answers = Counter(key for rule in rules for key in rule["reference_answers"] or ())
        assert set(answers) == {"exact_match", "must_include", "fuzzy_match"}
        assert any(
            rule["reference_answers"] == {"fuzzy_match": "N/A"} and rule["string_note"]
            for rule in rules
        )
        assert any("?" in rule["reference_url"] for rule in rules)
        assert Counter(kind for rule in rules for kind in rule["eval_types"]).keys() == {
            "string_match",
            "url_match",
            "program_html",
        }
        assert any(len(rule["eval_types"]) == 2 for rule in rules)
        assert {site for task in tasks for site in task["sites"]} == set(SITES)
        assert any(len(task["sites"]) == 2 for task in tasks)


def test_the_special_forms_of_the_format_occur():
    rules = [task["eval"] for task in TASKS]
    targets = [target for rule in rules for target in rule["program_html"]]
    assert sum(len(task["sites"]) == 2 for task in TASKS) >= 6
    assert any(" |AND| " in task["start_url"] for task in TASKS)
    assert any(" |OR| " in rule["reference_url"] for rule in rules)
    assert any(
        " |OR| " in text
        for target in targets
        for text in target["required_contents"].get("must_include", ())
    )
    assert {target["locator"][:9] for target in targets} >= {
        "",
        "document.",
        "[...docum",
        "func:shop",
        "func:gitl",
    }
    assert {re.match(r"last|func:\w+|__", target["url"])[0] for target in targets} == {
        "last",
        "__",
        "func:reddit_get_post_url",
        "func:shopping_get_latest_order_url",
    }


def test_evaluations_hold_what_their_types_need():
    for task in TASKS:
        rule = task["eval"]
        assert ("string_match" in rule["eval_types"]) == bool(rule["reference_answers"])
        assert (
            ("url_match" in rule["eval_types"])
            == bool(rule["reference_url"])
            == ("url_note" in rule)
        )
        assert ("program_html" in rule["eval_types"]) == bool(rule["program_html"])
        for target in rule["program_html"]:
            assert LOCATOR.fullmatch(target["locator"]), target
            (required,) = target["required_contents"].values()
            assert required
            assert all(required), "an empty reference always passes"
            assert required not in ("none", "None")


def test_every_task_has_a_gold_that_acts_and_stops():
    assert set(GOLD) == {str(task["task_id"]) for task in TASKS}
    for task in TASKS:
        actions = GOLD[str(task["task_id"])]
        assert all(ACTION.fullmatch(action) for action in actions), actions
        assert [action.startswith("stop") for action in actions] == [False] * (len(actions) - 1) + [
            True
        ]
        assert len(actions) > 1 or task["intent"] in ON_THE_START_PAGE
        assert len(actions) <= 30
        assert bool(actions[-1] != "stop []") == ("string_match" in task["eval"]["eval_types"])


# ---- answers, computed from the records


def product(name):
    return STORE.products.first("name", name)


def orders(name="Nora Whitfield"):
    customer = next(customer for customer in STORE.customers if customer.name == name)
    return STORE.orders.where("customer_id", customer.id)


def sold(year):
    """Return (name, count) of the year's best seller, without canceled orders."""
    counted = Counter()
    for order in STORE.orders:
        if str(order.day.year) == year and order.status != "Canceled":
            counted.update(
                {
                    line.name: sum(
                        other.quantity for other in order.lines if other.name == line.name
                    )
                    for line in order.lines
                }
            )
    return only_first(counted.most_common(2))


def only_first(ranked):
    """Return the first of two pairs; assert that its count is unique."""
    assert ranked[0][1] > ranked[1][1]
    return ranked[0]


def project(path):
    return HUB.projects.first("path", path)


def text(path, name):
    return next(
        file.text
        for file in HUB.files.where("project_id", project(path).id)
        if file.path.endswith(name)
    )


def extreme(category, direction):
    slug = next(c.slug for c in STORE.categories if c.name == category)
    ranked = [(p.name, p.price * direction) for p in STORE.visible() if p.category == slug]
    return only_first(sorted(ranked, key=lambda pair: -pair[1]))[0]


def board(title):
    return FORUM.boards.first("title", title)


def top_post(title, key):
    posts = [(post, key(post)) for post in FORUM.posts.where("board", board(title).name)]
    return only_first(sorted(posts, key=lambda pair: -pair[1]))[0]


def customer(name):
    return next(customer for customer in STORE.customers if customer.name == name)


def commits(path):
    return only_first(
        Counter(c.author for c in HUB.commits.where("project_id", project(path).id)).most_common(2)
    )


def month_total(found, month):
    return sum(o.total for o in found if o.status != "Canceled" and f"{o.day:%B %Y}" == month)


FACTS = {
    "What does the {{product}} cost?": lambda product_: money(product(product_).price),
    "What is the {{detail}} of the {{product}}?": lambda detail, product_: dict(
        product(product_).details
    )[detail.capitalize()],
    "Which is the {{extreme}} product in the category {{category}}? Give its full name.": (
        lambda extreme_, category: extreme(category, -1 if extreme_ == "cheapest" else 1)
    ),
    "Who gave the {{product}} {{stars}}? Answer with the nickname.": lambda product_, stars: (
        ", ".join(
            review.nickname for review in STORE.approved(product(product_).id) if review.rating == 1
        )
    ),
    "How much did I spend in total on my orders of {{month}}, shipping included?": (
        lambda month: money(month_total(orders(), month))
    ),
    "What are the number and the status of my {{which}} order?": lambda which: (
        f"{orders()[-1].number}, {orders()[-1].status}"
    ),
    "When did I order the {{product}}?": lambda product_: ", ".join(
        long_day(order.day) for order in orders() if product_ in [line.name for line in order.lines]
    ),
    "Open the page of the most expensive {{kind}} and tell me its price.": lambda kind: money(
        max(p.price for p in STORE.visible() if p.kind.lower() == kind)
    ),
    "In which colors can I get the {{product}}?": lambda product_: ", ".join(
        product(product_).values
    ),
    "How many reviews wait for approval?": lambda: str(
        len(STORE.reviews.where("status", "Pending"))
    ),
    "What is the top search term in the shop, and how often was it used?": lambda: (
        "{0[0]}, {0[2]} times".format(max(STORE.search_terms, key=lambda term: term[2]))
    ),
    "What is the {{what}} of the customer {{name}}?": lambda what, name: (
        customer(name).email if what == "email address" else customer(name).address.phone
    ),
    "How many orders have the status {{status}}?": lambda status: str(
        len(STORE.orders.where("status", status))
    ),
    "What was the sales total of {{month}}?": lambda month: money(month_total(STORE.orders, month)),
    "Which product was sold most often in {{year}}? Give its full name.": lambda year: sold(year)[
        0
    ],
    "How many subscribers does the forum {{forum}} have?": lambda forum: str(
        board(forum).subscribers
    ),
    "Who wrote the post with the most comments in the forum {{forum}}?": (
        lambda forum: top_post(forum, FORUM.num_comments).author
    ),
    "What is the title of the best rated post in the forum {{forum}}?": (
        lambda forum: top_post(forum, FORUM.post_score).title
    ),
    "How many posts have I submitted?": lambda: str(
        len(FORUM.posts.where("author", "marlow_reads"))
    ),
    "Which rule does the forum {{forum}} have?": lambda forum: board(forum).rules.rstrip("."),
    "Which license does {{project}} have?": lambda project_: project(project_).license,
    "Which default port does {{file}} of {{project}} set?": lambda file, project_: re.search(
        r"Port = (\d+)", text(project_, file)
    )[1],
    "What is the value of MAX_RETRIES in {{file}} of {{project}}?": (
        lambda file, project_: re.search(r"MAX_RETRIES = (\d+)", text(project_, f"/{file}"))[1]
    ),
    "How many open issues of {{project}} carry the label {{label}}?": lambda project_, label: str(
        sum(
            issue.open and label in issue.labels
            for issue in HUB.issues.where("project_id", project(project_).id)
        )
    ),
    "Who has made the most commits to {{project}}, and how many? Give the user name.": (
        lambda project_: "{}, {}".format(*commits(project_))
    ),
    "How many forks does the {{which}} project on Cairn have?": lambda which: str(
        max(HUB.projects, key=HUB.num_stars).forks
    ),
    "What is {{project}} for? Answer with its description.": (
        lambda project_: project(project_).description
    ),
    "What was the grand total of my order of {{day}}?": lambda day: ", ".join(
        money(o.total) for o in orders() if long_day(o.day) == day
    ),
    "Order two pieces of the {{product}} for {{shipping}} and tell me the total of the order.": (
        lambda product_, shipping: money(2 * product(product_).price)
    ),
    "What is the grand total of the latest order of the customer {{name}}?": lambda name: money(
        orders(name)[-1].total
    ),
}


@pytest.mark.parametrize(
    "task",
    [task for task in TASKS if task["eval"]["reference_answers"]],
    ids=lambda task: task["task_id"],
)
def test_the_answer_is_true_of_the_content(task):
    """The gold answer is the fact, and the references contain it."""
    stop, references = GOLD[str(task["task_id"])][-1], task["eval"]["reference_answers"]
    if references == {"fuzzy_match": "N/A"}:
        assert stop == "stop [N/A]"
        return
    words = {
        key if key not in ("product", "project", "extreme") else f"{key}_": value
        for key, value in task["instantiation_dict"].items()
    }
    fact = FACTS[task["intent_template"]](**words)
    assert stop == f"stop [{fact}]"
    (asked,) = references.values()
    assert (
        asked == fact
        if "exact_match" in references
        else all(part.rstrip(".") in fact for part in asked)
    )


@pytest.mark.parametrize(
    "task",
    [task for task in TASKS if " |OR| " in task["eval"]["reference_url"]],
    ids=lambda task: task["task_id"],
)
def test_alternatives_are_complete(task):
    kind, battery = (task["instantiation_dict"][key] for key in ("kind", "battery"))
    fitting = [
        p for p in STORE.visible() if p.kind.lower() == kind and ("Battery", battery) in p.details
    ]
    assert task["eval"]["reference_url"] == " |OR| ".join(
        f"__SHOPPING__/product/{p.id}/{p.slug}" for p in fitting
    )
