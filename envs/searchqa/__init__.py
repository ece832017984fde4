"""SearchQA: answer a question with the help of a search engine."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field

from envs.dialect import Dialect
from envs.env import EnvSpec
from envs.examples import played, solved
from envs.options import choose, hint, one_of, seconds, whole_number
from envs.searchqa import questions, retrievers
from envs.searchqa.flashrag import FlashRag
from envs.searchqa.questions import Hop, Question, Questions
from envs.searchqa.retrievers import Retriever
from envs.searchqa.search_r1 import SearchR1
from envs.searchqa.world import Episode, Options
from envs.wire import Example

DEFAULTS: dict[str, Any] = {
    "mode": "strict",
    "protocol": "own",
    "topk": 3,
    "max_doc_chars": 0,
    "questions": "embedded",
    "retriever": "bm25",
    "retriever_timeout_s": 20.0,
}
_MAX_TOPK = 100
# waiting for its turn can double a query's time, and the server allows a step 120 s
_MAX_TIMEOUT_S = 50.0

_INSTRUCTIONS = """\
You are asked a question and can look things up in a collection of documents before you answer.
Think as long as you like between <think> and </think>. Then end your reply with one of these two:
<search>what to look for</search> - you are shown the {topk} best documents between <information> \
and </information>. Name the person, \
place or thing you want to read about. What one document tells may be needed for the next search.
<answer>the answer</answer> - a name, a number or a few words, without explanation. For example: \
<answer>1867</answer>
Only the first of the two that a reply contains counts."""
_ONE_ANSWER = "You can answer once."
_MANY_ANSWERS = "You are told whether your answer is right. If not, search further or answer again."

# the same requests as in the prompt of AgentGym's server, in the same order, in our own words
_AGENTGYM_INSTRUCTIONS = """\
Begin every reply with your reasoning, inside <think>...</think>. If you lack knowledge for the \
answer, write one \
<search>...</search> and end the reply there: write neither <information> nor <answer> after it, \
and wait until you are given \
<information>...</information>. When it has come, reason again inside <think>; once you are \
confident, write your final answer \
inside <answer>...</answer>. Write no <answer> before any <information> unless you are entirely \
confident. If nothing needs to be \
looked up, answer at once inside <answer> and </answer>, with the answer alone and no explanation. \
For example: \
<answer> Lisbon </answer>. Keep to this at every turn.
"""


class SearchReset(BaseModel):
    id: int = Field(validation_alias="env_idx")
    # None: the index in the create request
    data_idx: int | None = Field(default=None, validation_alias="id")


class SearchCreate(BaseModel):
    id: int


DIALECT = Dialect(
    greeting="ok",
    create=SearchCreate,
    reset=SearchReset,
    names_task=lambda body: int(body.id),
    created=lambda env: env.id,
    shown=lambda env: env.prompt,
    stepped=lambda env: {
        "observation": env.observation,
        "reward": env.reward,
        "done": env.done,
        "info": None,
    },
    polite=False,
)

# worked examples: questions over the embedded corpus that are in neither list
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
    """Play and return the worked examples over the embedded corpus. Each search shows as many and
    as long documents as these options allow.

    A question that the shown documents do not answer is left out.
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


def spec(options: dict[str, Any]) -> EnvSpec:
    """Make the environment from its options: mode, protocol, topk, max_doc_chars, questions,
    retriever, retriever_timeout_s (see the README).
    Errors: ValueError naming the key or value and the nearest known one, or the missing file.
    """
    chosen = choose("searchqa", options, DEFAULTS)
    parsed = Options(
        mode=one_of("searchqa", chosen, "mode", ("strict", "agentgym")),
        protocol=one_of("searchqa", chosen, "protocol", ("own", "agentgym")),
        topk=whole_number("searchqa", chosen, "topk", 1, _MAX_TOPK),
        max_doc_chars=whole_number("searchqa", chosen, "max_doc_chars", 0, 1_000_000),
    )
    question_set, retriever = _questions(chosen["questions"]), _retriever(chosen)
    if isinstance(question_set, FlashRag) and isinstance(retriever, retrievers.Bm25):
        raise ValueError(
            "searchqa: the embedded corpus does not answer the questions of the benchmarks; give"
            " retriever the URL of an index"
        )

    def served(options: Options) -> EnvSpec:
        return EnvSpec(
            name="searchqa",
            dialect=DIALECT,
            instructions=_instructions(options),
            make=partial(Episode, question_set, retriever, options),
            options=chosen,
            offers_hints=True,
            examples=partial(worked_examples, options),
            probe_actions=("<search>town</search>", "<answer>none</answer>"),
            # a search of the embedded corpus takes 0.1 ms and needs no thread
            blocking=not isinstance(retriever, retrievers.Bm25),
            identity=lambda task_id: " ".join(question_set[task_id].text.lower().split()),
        )

    return replace(served(parsed), agentgym=served(replace(parsed, mode="agentgym")))


def _instructions(options: Options) -> str:
    if options.protocol == "agentgym":
        return _AGENTGYM_INSTRUCTIONS
    ending = _ONE_ANSWER if options.mode == "strict" else _MANY_ANSWERS
    return f"{_INSTRUCTIONS.format(topk=options.topk)}\n{ending}"


def _questions(value: Any) -> Questions:
    if value == "embedded":
        return questions.embedded()
    if not isinstance(value, str) or not value:
        raise ValueError(
            'searchqa option questions: expected "embedded" or a folder with train.parquet and'
            f" test.parquet, got {value!r}"
        )
    folder = Path(value)
    if not folder.is_dir():
        near = hint(value, ["embedded"], cutoff=0.6)
        raise ValueError(f"searchqa option questions: there is no folder {value!r}{near}")
    flashrag = FlashRag(folder)
    flashrag[0]  # a server plays task 0 before it reports ready, so it must exist
    return flashrag


def _retriever(chosen: dict[str, Any]) -> Retriever:
    value = chosen["retriever"]
    timeout_s = seconds("searchqa", chosen, "retriever_timeout_s", _MAX_TIMEOUT_S)
    if value == "bm25":
        return retrievers.embedded()
    if not isinstance(value, str) or "://" not in value:
        near = hint(value, ["bm25"], cutoff=0.6)
        raise ValueError(
            'searchqa option retriever: expected "bm25" or a URL such as'
            f" http://127.0.0.1:8000/retrieve, got {value!r}{near}"
        )
    return SearchR1(value, timeout_s)
