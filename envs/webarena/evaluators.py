"""WebArena's three evaluators: rules for the answer (a judge for free text), for the final URL,
and for the contents of pages.

Each part is 0 or 1 and the score is their product.
Source: evaluation_harness of web-arena-x/webarena, including its special cases: substrings count, a
one-character reference must be a whole token, ` |OR| ` separates alternatives in pages and URLs but
not in answers.
"""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import parse_qs, urlsplit

from envs.webarena.tasks import LAST_URL, Target, Task, parse_call

if TYPE_CHECKING:
    from envs.webarena.world import FinalPage

OR = " |OR| "
# no character has such a number, and `html.unescape` raises above 4,300 digits
_LONG_REFERENCE = re.compile(r"&#\d{100,};?")
NOT_ACHIEVABLE = "n/a"


class ScriptFailed(Exception):
    """A task file's script threw in the page; its text then counts as empty, as in WebArena."""


class Judge(Protocol):
    @property
    def name(self) -> str: ...

    def same_answer(self, question: str, reference: str, answer: str) -> bool: ...

    def same_reason(self, question: str, reason: str, answer: str) -> bool:
        """Return True if the answer states that the task cannot be done, for this reason."""


class Helpers(Protocol):
    """The helper functions that a task file may name."""

    def call(self, name: str, arguments: Sequence[str], page: FinalPage) -> str: ...


@dataclass(slots=True)
class Verdict:
    score: float
    parts: dict[str, Any] = field(default_factory=dict)  # evaluator -> its result, for `info`
    judge: str = ""  # name of the judge of free text; empty if none was used


def evaluate(task: Task, answer: str, page: FinalPage, helpers: Helpers, judge: Judge) -> Verdict:
    """Return the verdict on a task; its score is the product of its parts. answer: text of `stop`.
    The parts are judged in the task file's order, because program_html opens other pages.
    Errors: GraderFailed, BrowserLost, TimeoutError or playwright's Error without a verdict.
    """
    rules, verdict = task.evaluation, Verdict(1.0)
    for kind in rules.types:
        if kind == "string_match":
            part, verdict.parts[kind] = _string(task, answer, judge)
            if "fuzzy_match" in verdict.parts[kind]:
                verdict.judge = judge.name
        elif kind == "url_match":
            part = verdict.parts[kind] = url_match(page.url, rules.reference_url)
        else:
            verdict.parts[kind] = [_target(target, page, helpers) for target in rules.targets]
            part = float(all(verdict.parts[kind]))
        verdict.score *= part
    return verdict


def clean(text: str) -> str:
    """Return the text in lower case without outer white space and one pair of outer quotes."""
    text = text.strip()
    if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"":
        text = text[1:-1]
    return text.lower()


def exact_match(reference: str, prediction: str) -> float:
    return float(clean(reference) == clean(prediction))


def must_include(reference: str, prediction: str, *, whole_token: bool = False) -> float:
    """Return 1 if the prediction contains the reference, both after `clean`, else 0.

    whole_token: a reference of one character must be a whole token.
    """
    expected, actual = clean(reference), clean(prediction)
    return float(expected in (tokens(actual) if whole_token and len(expected) == 1 else actual))


def url_match(url: str, references: str) -> float:
    """Return 1 if the page's address matches the references (URLs separated by OR), else 0.

    The page's host and path must contain those of some reference.
    For every query key of any reference, the page's query must have one of its values.
    """
    base, query = _split(url)
    pooled: dict[str, set[str]] = {}
    bases = []
    for reference in references.split(OR):
        reference_base, reference_query = _split(reference)
        bases.append(reference_base)
        for key, values in reference_query.items():
            pooled.setdefault(key, set()).update(values)
    in_query = all(values & set(query.get(key, ())) for key, values in pooled.items())
    return float(in_query and any(reference in base for reference in bases))


def _split(url: str) -> tuple[str, dict[str, list[str]]]:
    parts = urlsplit(url.rstrip("/"))
    return parts.netloc + parts.path, parse_qs(parts.query)


def _string(task: Task, answer: str, judge: Judge) -> tuple[float, dict[str, float]]:
    rules, parts = task.evaluation, {}
    prediction, score = clean(answer), 1.0
    if rules.exact is not None:
        parts["exact_match"] = exact_match(rules.exact, prediction)
        score *= parts["exact_match"]
    if rules.must_include is not None:
        whole = len(rules.must_include) == 1
        included = (must_include(t, prediction, whole_token=whole) for t in rules.must_include)
        parts["must_include"] = float(all(included))
        score *= parts["must_include"]
    if isinstance(rules.fuzzy, str) and clean(rules.fuzzy) == NOT_ACHIEVABLE:
        if clean(prediction) == NOT_ACHIEVABLE:
            parts["not_achievable"] = 1.0
            return score, parts
        # WebArena replaces the score of the other rules here
        is_same = judge.same_reason(task.intent, rules.string_note, prediction)
        score = parts["fuzzy_match"] = float(is_same)
    elif rules.fuzzy is not None:
        references = [rules.fuzzy] if isinstance(rules.fuzzy, str) else rules.fuzzy
        answered = (judge.same_answer(task.intent, text, prediction) for text in references)
        parts["fuzzy_match"] = float(all(answered))
        score *= parts["fuzzy_match"]
    return score, parts


def _target(target: Target, page: FinalPage, helpers: Helpers) -> float:
    url = _called(target.url, page, helpers)
    if not url and target.url:
        return 0.0  # the policy did not create the thing that the helper looked for
    if url != "last":
        page.open(url)
    content = html.unescape(_LONG_REFERENCE.sub("\ufffd", _located(target, page, helpers)))
    if target.exact is not None:
        return exact_match(target.exact, content)
    entries = (entry.split(OR) for entry in target.must_include)
    return float(all(any(must_include(text, content) for text in texts) for texts in entries))


def _located(target: Target, page: FinalPage, helpers: Helpers) -> str:
    if not target.locator:
        return page.content()
    if target.locator.startswith("func:"):
        return _called(target.locator, page, helpers)
    for script in target.prep_actions:
        run_script(page, script)
    return run_script(page, target.locator)


def run_script(page: FinalPage, script: str) -> str:
    """Run a script. Return its value as Python prints it (null is "None"), "" if it throws."""
    try:
        return str(page.evaluate(f"() => {script}"))
    except ScriptFailed:
        return ""


def _called(text: str, page: FinalPage, helpers: Helpers) -> str:
    if not text.startswith("func:"):
        return text
    call = parse_call(text)
    arguments = [argument.replace(LAST_URL, page.url) for argument in call.arguments]
    return helpers.call(call.name, arguments, page)


_SPLITS = (
    (re.compile(r"([,:])([^\d])"), r" \1 \2"),
    (re.compile(r"([,:])$"), r" \1 "),
    (re.compile(r"\.\.\."), " ... "),
    (re.compile(r"([;@#$%&?!\[\](){}<>\"`])"), r" \1 "),
    # possessive quantifiers keep the time linear in the number of blanks
    (re.compile(r"([^.])(\.)([\])}>\"'”’ ]*+)\s*+$"), r"\1 \2\3 "),
    (re.compile(r"--"), " -- "),
    (re.compile(r"([^' ])('s|'m|'d|'ll|'re|'ve|n't|') "), r"\1 \2 "),
)


def tokens(text: str) -> list[str]:
    """Split English text into words and punctuation like the Penn Treebank.
    A number keeps its point and comma; `$` and `%` are separate tokens.
    """
    text = f" {text} "
    for pattern, replacement in _SPLITS:
        text = pattern.sub(replacement, text)
    return text.split()
