"""One question behind the `Simulator` protocol, and the expert that knows which documents answer
it.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from envs.env import Expert, ExpertFailed, StepResult
from envs.searchqa.grammar import cut, information, last_answer, parse
from envs.searchqa.questions import Question, Questions
from envs.searchqa.retrievers import Document, Retriever
from envs.wire import FAMILY, INVALID, PARTS

_WITHOUT_PUNCTUATION = str.maketrans("", "", string.punctuation)
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]")
MAX_QUERY_CHARS = 1_000  # the rest of a longer query is ignored

EMPTY_QUERY = "Your query is empty. Write what you look for between <search> and </search>."
OVER = "The episode is over."


@dataclass(frozen=True, slots=True)
class Protocol:
    """Rules for reading a reply, and the wording of the answers."""

    right: str
    wrong: str
    try_again: str  # wrong, and the episode continues
    neither: str  # no complete tag
    thoughts_act: bool  # tags inside <think>..</think> count, too
    searches_nothing: bool  # an empty query is sent to the retriever like any other


# agentgym: the cases of AgentGym's server, in our own words
PROTOCOLS = {
    "own": Protocol(
        right="Your answer is right.",
        wrong="Your answer is not right.",
        try_again="Your answer is not right. Search further or try again.",
        neither=(
            "Your reply has neither a complete <search> nor a complete <answer>. To look something"
            " up, write <search>your query</search>; to finish, write <answer>your answer</answer>."
        ),
        thoughts_act=False,
        searches_nothing=False,
    ),
    "agentgym": Protocol(
        right="Well done! That is the right answer.",
        wrong="Unfortunately that is not the right answer.",
        try_again="Unfortunately that is not the right answer. Have another try.",
        neither=(
            "That was not a valid action. A query belongs between <search> and </search>, a final"
            " answer between <answer> and </answer>. Have another try."
        ),
        thoughts_act=True,
        searches_nothing=True,
    ),
}


@dataclass(frozen=True, slots=True)
class Options:
    mode: Literal["strict", "agentgym"]
    topk: int  # documents per search
    max_doc_chars: int  # characters shown of each document; 0: no limit
    protocol: Literal["own", "agentgym"] = "own"


@dataclass(frozen=True, slots=True)
class Searched:
    query: str
    documents: tuple[Document, ...]


class Episode:
    """One episode: a question, the searches made for it and the answers given."""

    def __init__(self, questions: Questions, retriever: Retriever, options: Options) -> None:
        self._questions = questions
        self._retriever = retriever
        self.options = options
        self._protocol = PROTOCOLS[options.protocol]
        self.question = Question("", (), "")
        self.searched: list[Searched] = []
        self.answers: list[tuple[str, bool]] = []  # (answer, True if right)
        self.ended = False

    def reset(self, task_id: int) -> str:
        """Start a question and return it as text. Errors: ValueError if no question has this id."""
        self.question = self._questions[task_id]
        self.searched, self.answers, self.ended = [], [], False
        return f"Question: {self.question.text}"

    def step(self, action: str) -> StepResult:
        """Carry out the first search or answer in a reply; in mode agentgym, if that is an answer,
        the last answer. After the episode's end do and pay nothing. Errors: RetrieverError.
        """
        if self.ended:
            return self._result(OVER)
        thoughts_act = self._protocol.thoughts_act
        parsed = parse(action, thoughts_act=thoughts_act)
        if parsed is None:
            return self._result(self._protocol.neither, **{INVALID: True})
        if parsed.kind == "search":
            return self._search(_CONTROL.sub(" ", parsed.text).strip()[:MAX_QUERY_CHARS])
        if self.options.mode == "strict":
            return self._answer(parsed.text)
        return self._answer(last_answer(action, thoughts_act=thoughts_act))

    def render(self) -> tuple[str, bytes]:
        lines = [f"Question ({self.question.data_source}): {self.question.text}"]
        for number, search in enumerate(self.searched, start=1):
            lines += ["", f"Search {number}: {search.query}"]
            lines += [f"  {d.title}: {d.text}" for d in search.documents] or ["  nothing found"]
        graded = ((answer, "right" if right else "wrong") for answer, right in self.answers)
        lines += ["", *(f"Answer: {answer} ({grade})" for answer, grade in graded)]
        return "text/plain", "\n".join(lines).rstrip().encode()

    def expert(self) -> Expert:
        return Researcher(self)

    def hints(self) -> list[str]:
        """Return searches for the question and for found titles, and these titles as answers."""
        titles = dict.fromkeys(
            document.title for search in self.searched for document in search.documents
        )
        searches = [f"<search>{text}</search>" for text in (self.question.text, *titles)]
        return [*searches, *(f"<answer>{title}</answer>" for title in titles)]

    def close(self) -> None:
        self.searched = []

    def _search(self, query: str) -> StepResult:
        if not query and not self._protocol.searches_nothing:
            return self._result(EMPTY_QUERY, **{INVALID: True})
        documents = tuple(self._retriever.search(query, self.options.topk))
        self.searched.append(Searched(query, documents))
        return self._result(information(documents, self.options.max_doc_chars))

    def _answer(self, answer: str) -> StepResult:
        """Grade and store an answer. An exact match pays 1.
        A right answer ends the episode, in mode strict also a wrong one.
        """
        answer = answer.strip()
        right = exact_match(answer, self.question.answers)
        self.answers.append((answer, right))
        self.ended = right or self.options.mode == "strict"
        wording = self._protocol
        text = wording.right if right else wording.wrong if self.ended else wording.try_again
        parts = {"em": float(right), "f1": round(f1(answer, self.question.answers), 4)}
        return self._result(text, right=right, **{PARTS: parts})

    def _result(self, text: str, *, right: bool = False, **more: Any) -> StepResult:
        info = {FAMILY: self.question.data_source, "num_searches": len(self.searched), **more}
        return StepResult(text, float(right), terminated=self.ended, success=right, info=info)


class Researcher:
    """An expert that searches for each hop in turn and then answers.

    A question's hops name the documents with the facts.
    For a question without hops it searches for the question itself, and gives a golden answer only
    if a returned document contains it.
    It can continue from any state, because it looks only at the documents shown so far.
    """

    def __init__(self, episode: Episode) -> None:
        self._episode = episode

    def next_action(self) -> str:
        question = self._episode.question
        if not question.hops:
            shown_answer = next((answer for answer in question.answers if self._shown(answer)), "")
            answered = f"<answer>{shown_answer}</answer>"
            return answered if shown_answer else self._query([question.text])
        for hop in question.hops:
            if not self._shown(hop.finds, hop.title):
                return self._query([hop.query, hop.title])
        return f"<answer>{question.hops[-1].finds}</answer>"

    def _query(self, queries: Sequence[str]) -> str:
        """Return a search for the first of these queries that was not tried.
        Errors: ExpertFailed if all were tried.
        """
        tried = [search.query for search in self._episode.searched]
        for query in queries:
            if query not in tried:
                return f"<search>{query}</search>"
        raise ExpertFailed(
            f"no document contains what {self._episode.question.text!r} needs; searched for:"
            f" {'; '.join(tried)}"
        )

    def _shown(self, answer: str, title: str = "") -> bool:
        """Return True if a shown document, of this title unless empty, contains the answer."""
        limit = self._episode.options.max_doc_chars
        for search in self._episode.searched:
            for document in search.documents:
                text = normalise(f"{document.title} {cut(document.text, limit)}")
                if title in ("", document.title) and f" {normalise(answer)} " in f" {text} ":
                    return True
        return False


def normalise(text: str) -> str:
    """Return the text in lower case without ASCII punctuation, articles and extra white space."""
    text = text.lower().translate(_WITHOUT_PUNCTUATION)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def exact_match(prediction: str, golden: Iterable[str]) -> bool:
    """Return True if the prediction equals a golden answer after normalisation; an empty one never
    does. Source: SQuAD, arXiv:1606.05250, section 6.1.

    If normalisation leaves nothing of a golden answer ("A"), the unnormalised texts are compared in
    lower case.
    """
    plain, normal = prediction.strip().lower(), normalise(prediction)
    return bool(plain) and any(
        normal == normalise(answer) if normalise(answer) else plain == answer.strip().lower()
        for answer in golden
    )


def f1(prediction: str, golden: Iterable[str]) -> float:
    """Best harmonic mean of word precision and recall over the golden answers, 0 to 1.
    Source: as `exact_match`.
    """
    predicted, best = Counter(normalise(prediction).split()), 0.0
    for answer in golden:
        expected = Counter(normalise(answer).split())
        common = (predicted & expected).total()
        best = max(best, 2 * common / (predicted.total() + expected.total()) if common else 0.0)
    return best
