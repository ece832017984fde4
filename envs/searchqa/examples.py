"""Worked examples: two questions over the embedded corpus that are in neither list."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial

from envs.examples import played, solved
from envs.searchqa import retrievers
from envs.searchqa.questions import Hop, Question
from envs.searchqa.world import Episode, Options
from envs.wire import Example

QUESTIONS = (
    Question(
        "In what year was the Skarn Observatory opened?",
        ("1809",),
        "example",
        (Hop("Skarn Observatory opened", "Skarn Observatory", "1809"),),
    ),
    Question(
        "Whom did the founder of the Ziskix Foundry marry?",
        ("Drolard Daevdell",),
        "example",
        (
            Hop("Ziskix Foundry founder", "Ziskix Foundry", "Krarith Glildall"),
            Hop("Krarith Glildall married", "Krarith Glildall", "Drolard Daevdell"),
        ),
    ),
)


@cache
def worked_examples(options: Options) -> tuple[Example, ...]:
    """Return the worked examples, with documents of the embedded corpus, as many and as long as
    these options show.

    A question that these documents do not answer is left out.
    """
    options = replace(options, mode="strict")
    reply = _thoughtful if options.protocol == "agentgym" else str
    return solved(
        partial(played, Episode(QUESTIONS, retrievers.embedded(), options), task, reply=reply)
        for task in range(len(QUESTIONS))
    )


def _thoughtful(action: str) -> str:
    """Return the action after a thought: AgentGym's protocol wants one in every reply."""
    thought = "I have to look this up." if "<search>" in action else "The documents tell it."
    return f"<think>{thought}</think>\n{action}"
