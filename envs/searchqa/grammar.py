"""The tags of a reply, and documents as text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Literal

from envs.searchqa.retrievers import Document

Kind = Literal["search", "answer"]

_KINDS: tuple[Kind, ...] = ("search", "answer")
_THINK, _THOUGHT = "<think>", "</think>"


@dataclass(frozen=True, slots=True)
class Action:
    """A search or an answer in a reply, with the text between its tags."""

    kind: Kind
    text: str


def parse(reply: str, *, thoughts_act: bool = False) -> Action | None:
    """Return the first `<search>..</search>` or `<answer>..</answer>`; None if there is neither.
    thoughts_act: tags inside thoughts count, too.
    A tag that is never closed is text. Time is linear in the length of the reply.
    """
    body = reply if thoughts_act else without_thoughts(reply)
    first = [(pair, kind) for kind in _KINDS for pair in islice(_pairs(body, kind), 1)]
    if not first:
        return None
    (_, text), kind = min(first)
    return Action(kind, text)


def last_answer(reply: str, *, thoughts_act: bool = False) -> str:
    """Return the content of the last `<answer>` pair; empty if none. thoughts_act: see `parse`."""
    body = reply if thoughts_act else without_thoughts(reply)
    return max(_pairs(body, "answer"), default=(0, ""))[1]


def without_thoughts(reply: str) -> str:
    """Return the reply without `<think>..</think>`, and without the text before a leading
    `</think>` whose `<think>` is in the chat template.

    A `<think>` that is never closed hides nothing: the text after it counts.
    """
    opened, closed = reply.find(_THINK), reply.find(_THOUGHT)
    if closed >= 0 and (opened < 0 or closed < opened):
        reply = reply[closed + len(_THOUGHT) :]
    parts, position = [], 0
    while (opened := reply.find(_THINK, position)) >= 0 and (
        closed := reply.find(_THOUGHT, opened)
    ) >= 0:
        parts.append(reply[position:opened])
        position = closed + len(_THOUGHT)
    return "".join(parts) + reply[position:]


def information(documents: Sequence[Document], max_doc_chars: int = 0) -> str:
    """Return a search's answer as text, each document's text cut to max_doc_chars (0: no limit)."""
    numbered = enumerate(documents, start=1)
    lines = [f'Doc {n}(Title: "{d.title}") {cut(d.text, max_doc_chars)}' for n, d in numbered]
    return f"<information>{chr(10).join(lines) or 'No document matches.'}</information>"


def _pairs(text: str, kind: Kind) -> Iterator[tuple[int, str]]:
    """Yield (start index, content) of each pair of tags; pairs do not overlap."""
    opening, closing = f"<{kind}>", f"</{kind}>"
    end = 0
    while (start := text.find(opening, end)) >= 0 and (end := text.find(closing, start)) >= 0:
        yield start, text[start + len(opening) : end]


def cut(text: str, max_chars: int) -> str:
    """Return the text; if it is longer than max_chars, cut it after the last whole word that
    fits (a longer first word is cut, too) and append " ...", which is not counted. 0: no limit.
    """
    if not max_chars or len(text) <= max_chars:
        return text
    end = text.rfind(" ", 0, max_chars + 1)
    return text[: end if end > 0 else max_chars].rstrip() + " ..."
