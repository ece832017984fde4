"""The evaluators against WebArena's rules, computed by hand."""

import time

import pytest

from envs.webarena.evaluators import ScriptFailed, clean, evaluate, must_include, tokens, url_match
from envs.webarena.helpers import post_url
from envs.webarena.judge import Rules
from envs.webarena.tasks import Evaluation, Target, Task, parse_call


class Browser:
    """Fake browser: `pages` are HTML by URL, `scripts` are values by script."""

    def __init__(self, url="http://h/", pages=None, scripts=None):
        self.url, self.pages, self.scripts, self.opened = url, pages or {}, scripts or {}, []

    def content(self):
        return self.pages[self.url]

    def open(self, url):
        self.opened.append(url)
        self.url = url

    def evaluate(self, script):
        value = self.scripts[script.removeprefix("() => ")]
        if isinstance(value, Exception):
            raise value
        return value


class Named:
    """Helpers that return their name and arguments."""

    def call(self, name, arguments, page):
        return f"{name}({', '.join(arguments)})"


class Asked:
    name = "asked"

    def __init__(self, says):
        self.says, self.questions = says, []

    def same_answer(self, question, reference, answer):
        self.questions.append((question, reference, answer))
        return self.says

    same_reason = same_answer


def score(answer="", page=None, judge=None, types=("string_match",), **rules):
    task = Task(0, ("shopping",), ("http://h/",), "How many?", Evaluation(types, **rules))
    return evaluate(task, answer, page or Browser(), Named(), judge or Rules())


@pytest.mark.parametrize(
    ("text", "cleaned"),
    [
        (" 'Red Mug' ", "red mug"),
        ('"a"', "a"),
        ("'a\"", "'a\""),
        ("''a''", "'a'"),
        ("  ", ""),
        ("'", "'"),
    ],
)
def test_cleaning_drops_space_one_pair_of_quotes_and_capitals(text, cleaned):
    assert clean(text) == cleaned


@pytest.mark.parametrize(
    ("reference", "answer", "expected"),
    [('"4"', "4 ", 1), ("4", "4.0", 0), ("Red Mug", "''red mug''", 1), ("a", "", 0)],
)
def test_exact_answers_are_compared_clean(reference, answer, expected):
    assert score(answer, exact=reference).score == expected


@pytest.mark.parametrize(
    ("references", "answer", "expected"),
    [
        (["blue", "12"], "Blue, 3120 g", 1),
        (["blue", "12"], "Blue, 3130 g", 0),
        (["0"], "10 items", 0),
        (["0"], "0 items", 1),
        (["0"], "$0.00", 0),
        (["0"], "it is 0. so there", 0),
        (["0"], "it is 0.", 1),
        (["0", "a"], "10 a", 1),  # with two references: substrings
        (["65 |OR| 3"], "65", 0),  # |OR| does not split here
        ([], "anything", 1),
    ],
)
def test_required_words_are_substrings_except_a_single_character(references, answer, expected):
    assert score(answer, must_include=tuple(references)).score == expected


def test_tokens_split_signs_but_not_numbers():
    assert tokens("it's $1,200.50, (10%) done: a 3:30.") == [
        "it",
        "'s",
        "$",
        "1,200.50",
        ",",
        "(",
        "10",
        "%",
        ")",
        "done",
        ":",
        "a",
        "3:30",
        ".",
    ]
    assert must_include("5", "5", whole_token=True) == 1


@pytest.mark.parametrize(
    ("reference", "url", "expected"),
    [
        ("http://h/cat", "http://h/cat", 1),
        ("http://h/cat/", "https://h/cat/#x", 1),
        ("http://h/cat", "http://h/category/x", 1),  # a substring
        ("http://h/cat", "http://h/dog", 0),
        ("http://h/cat", "http://h:81/cat", 0),
        ("http://h/s?q=a", "http://h/s?p=1&q=a", 1),
        ("http://h/s?q=a", "http://h/s?q=b", 0),
        ("http://h/s?q=a", "http://h/s", 0),
        ("http://h/s?q=", "http://h/s", 1),  # blank values are ignored
        # key p of the second URL is required
        ("http://h/s?q=a |OR| http://h/s?q=b&p=2", "http://h/s?q=b", 0),
        ("http://h/s?q=a |OR| http://h/s?q=b&p=2", "http://h/s?q=a&p=2", 1),
        ("http://h/x |OR| http://h/y", "http://h/y", 1),
    ],
)
def test_addresses_match_by_substring_of_the_path_and_pooled_query(reference, url, expected):
    assert url_match(url, reference) == expected


def test_the_score_is_the_product_in_the_order_of_the_file():
    pages = {"http://h/": "start", "http://h/cart": "<b>Tea &amp; mug</b>"}
    rules = {
        "reference_url": "http://h/",
        "targets": (
            Target("last", "", None, ("start",)),
            Target("http://h/cart", "", None, ("tea & mug |OR| tea", "<b>")),
        ),
    }
    page = Browser(pages=pages)
    assert score(page=page, types=("url_match", "program_html"), **rules).score == 1
    assert page.opened == ["http://h/cart"]
    verdict = score(page=Browser(pages=pages), types=("program_html", "url_match"), **rules)
    # the other page's address still contains h/
    assert verdict.parts == {"program_html": [1.0, 1.0], "url_match": 1.0}
    left = Browser(pages=pages)
    assert (
        score(
            page=left,
            types=("program_html", "url_match"),
            reference_url="http://h/ |OR| x",
            targets=rules["targets"][::-1],
        ).score
        == 0
    )


@pytest.mark.parametrize(
    ("value", "exact", "included", "expected"),
    [
        (None, None, ("no",), 1),  # null becomes the text "None"
        (True, "true", (), 1),
        (["a", "b"], "['a', 'b']", (), 1),
        (ScriptFailed("boom"), "", (), 1),  # a failed script gives the empty text
        (ScriptFailed("boom"), None, ("x",), 0),
        ("&lt;3", "<3", (), 1),
        ("B and C", None, ("a |OR| b", "c"), 1),
        ("B", None, ("a |OR| b", "c"), 0),
        ("10", None, ("0",), 1),  # in pages one character may match within a word
        (3, "3", (), 1),
    ],
)
def test_what_a_locator_finds_is_compared_as_python_prints_it(value, exact, included, expected):
    page = Browser(scripts={"document.x": value})
    assert (
        score(
            page=page,
            types=("program_html",),
            targets=(Target("last", "document.x", exact, included),),
        ).score
        == expected
    )


def test_actions_before_a_locator_may_fail():
    page = Browser(scripts={"document.open()": ScriptFailed("no"), "document.x": "yes"})
    assert (
        score(
            page=page,
            types=("program_html",),
            targets=(Target("last", "document.x", "yes", (), ("document.open()",)),),
        ).score
        == 1
    )


def test_helpers_get_the_address_and_literal_texts():
    page = Browser(url="http://h/f/cats/12/a-title", scripts={"document.x": "y"})
    targets = (Target("func:reddit_get_post_url('__last_url__')", "document.x", "y", ()),)
    assert score(page=page, types=("program_html",), targets=targets).score == 1
    assert page.opened == ["reddit_get_post_url(http://h/f/cats/12/a-title)"]
    role = Target(
        "last",
        "func:gitlab_get_project_memeber_role(__page__, 'abi')",
        "gitlab_get_project_memeber_role(__page__, abi)",
        (),
    )
    assert score(page=page, types=("program_html",), targets=(role,)).score == 1


@pytest.mark.parametrize(
    "text",
    [
        "func:f(open('/etc/passwd'))",
        "func:f('a' + 'b')",
        "func:a.b('x')",
        "func:f('a\\'b')",
        "func:f",
        "func:f('a') or 1",
    ],
)
def test_a_helper_call_is_read_and_never_evaluated(text):
    with pytest.raises(ValueError, match="expected"):
        parse_call(text)


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://h/f/cats/12/a-title", "http://h/f/cats/12/"),
        ("http://h/f/cats/12", "http://h/f/cats/12/"),
        ("http://h/f/cats", "http://h/f/cats"),
        ("http://h/user/12", "http://h/user/12"),
    ],
)
def test_a_post_is_named_without_its_title(url, expected):
    assert post_url(url) == expected


def test_free_answers_go_to_the_judge_one_reference_at_a_time():
    judge = Asked(True)
    verdict = score("'About Three'", judge=judge, fuzzy=("3", "three"))
    assert (verdict.score, verdict.judge) == (1, "asked")
    assert judge.questions == [
        ("How many?", "3", "about three"),
        ("How many?", "three", "about three"),
    ]
    assert score("three", judge=Asked(False), fuzzy=("3",)).score == 0


def test_a_task_that_cannot_be_done_is_passed_by_saying_so():
    nobody = Asked(False)
    assert (
        score("N/A", judge=nobody, fuzzy="N/A", string_note="no phone number is given").score == 1
    )
    assert nobody.questions == []
    judge = Asked(True)
    assert (
        score(
            "no number there", judge=judge, fuzzy="N/A", string_note="no phone number is given"
        ).score
        == 1
    )
    assert judge.questions == [("How many?", "no phone number is given", "no number there")]


@pytest.mark.parametrize(
    ("reference", "answer", "expected"),
    [
        ("3,120 grams", "It weighs 3120.0 grams", True),
        ("3,120 grams", "It weighs 312 grams", False),
        ("12", "12 or 13", False),  # a number that is not in the reference
        ("The blue mug", "blue mug", True),
        ("The blue mug", "the mug", False),
        ("It is in stock", "It is not in stock", False),
        ("yes", "yes", True),
        ("1:30 pm", "at 1:30 PM", True),
        ("12", "²", False),  # digits by str.isdigit that `int` cannot read
        ("3", "3²", False),
        ("50 m²", "50 m²", True),
        ("12", "007 12", False),
        ("12", "٠١٢", True),
        ("12", "1" * 5_000, False),  # more digits than `int` accepts
        ("1" * 5_000, "0" * 5_000 + "1" * 5_000 + ".00", True),
        # a whole page is no answer
        ("Ann", "Ann " + " ".join(f"word{chr(97 + i)}" for i in range(26)), False),
    ],
)
def test_the_rules_compare_numbers_and_words(reference, answer, expected):
    assert Rules().same_answer("How much?", reference, answer) is expected


def test_the_rules_want_a_reason_and_a_no():
    reason = "the account has no phone number on file"
    assert Rules().same_reason(
        "What is her phone number?", reason, "There is no phone number in the account"
    )
    assert not Rules().same_reason(
        "What is her phone number?", reason, "the phone number of the account is on file"
    )
    assert not Rules().same_reason("What is her phone number?", reason, "No.")


@pytest.mark.parametrize("digits", ["9" * 5_000, "0" * 5_000 + "65"])
def test_a_character_reference_of_thousands_of_digits_is_no_character(digits):
    page = Browser(scripts={"document.x": f"a &#{digits}; b &amp; c"})
    assert (
        score(
            page=page,
            types=("program_html",),
            targets=(Target("last", "document.x", None, ("b & c",)),),
        ).score
        == 1
    )


def test_a_helper_that_finds_nothing_leaves_nothing_to_look_at():
    class Nothing:
        def call(self, name, arguments, page):
            return ""

    page = Browser()
    task = Task(
        0,
        (),
        (),
        "",
        Evaluation(
            ("program_html",), targets=(Target("func:shopping_get_latest_order_url()", "", "", ()),)
        ),
    )
    assert evaluate(task, "", page, Nothing(), Rules()).score == 0
    assert page.opened == []


@pytest.mark.parametrize(
    "text",
    [
        " " * 160_000 + "x",
        "." + " " * 160_000 + "x",
        "a. " * 50_000 + "x",
        "." * 160_000,
        "'" * 160_000,
    ],
    ids=["spaces", "spaces after a point", "sentences", "points", "quotes"],
)
def test_no_answer_takes_an_evaluator_long(text):
    began = time.perf_counter()
    tokens(text)
    assert time.perf_counter() - began < 2.0  # 0.01 s; a quadratic algorithm takes a minute
