"""Chat templates of models are programs: a limit stops those that do not end."""

import copy
import os
import time

import pytest

from agentgym.models import template
from agentgym.models.chat import ChatRenderer
from agentgym.models.template import CHAT_TEMPLATE

pytestmark = pytest.mark.integration

HONEST = CHAT_TEMPLATE + "{# from elsewhere #}"


def with_template(tokenizer, text):
    other = copy.deepcopy(tokenizer)
    other.chat_template = text
    return other


@pytest.mark.timeout(150)
@pytest.mark.parametrize(
    "evil",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% set x = 'a'.center(99999999999) %}",
        "{{ 'a'.center(2000000) }}",
    ],
    ids=["without end", "memory", "output"],
)
def test_a_template_without_end_is_refused_within_its_limits(tokenizer, monkeypatch, evil):
    monkeypatch.setattr(template, "DEADLINE_S", 100.0)
    began = time.monotonic()
    with pytest.raises(ValueError, match=r"chat template (met a limit|refuses a conversation)"):
        ChatRenderer(with_template(tokenizer, HONEST + evil))
    assert time.monotonic() - began < 100


def test_a_template_from_elsewhere_is_run_once_and_never_in_this_process(tokenizer, monkeypatch):
    other = with_template(tokenizer, HONEST)
    monkeypatch.setattr(other, "apply_chat_template", None)
    began = template._in_a_process.cache_info().misses
    ours, theirs = ChatRenderer(tokenizer), ChatRenderer(other)
    ChatRenderer(other)
    assert template._in_a_process.cache_info().misses - began <= 1
    assert theirs.start("a", "instructions") == ours.start("a", "instructions")
    assert theirs.bridge("b", stopped=False) == ours.bridge("b", stopped=False)


def test_a_template_that_asks_for_the_time_or_draws_says_the_same_in_every_process(tokenizer):
    drawn = "{{ range(10**5) | random }} {{ strftime_now('%d %b %Y %H:%M') }}"
    answers = []
    for _ in range(2):
        template._in_a_process.cache_clear()
        question = [{"role": "user", "content": "a"}]
        answers.append(template.render(with_template(tokenizer, drawn), [question, question], {}))
    assert answers[0] == answers[1]
    assert answers[0][1]
    assert answers[0][0][0].endswith(" 26 Jul 2024 00:00")
    assert answers[0][0][0] == answers[0][0][1]


def test_its_process_has_no_secret(tokenizer, monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    seen = {}
    run = template.subprocess.run
    monkeypatch.setattr(
        template.subprocess, "run", lambda *a, **named: seen.update(named) or run(*a, **named)
    )
    ChatRenderer(with_template(tokenizer, HONEST + "{# once more #}"))
    assert seen["env"].keys() <= set(template._KEPT)
    assert "AWS_SECRET_ACCESS_KEY" in os.environ
