"""Text to token ids and back for one conversation that only ever grows.

The policy's own tokens are never decoded and encoded again: `bridge` gives the ids that follow
them.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import TYPE_CHECKING

from agentgym.models.template import render

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


# environments answer alike again and again, and the tokenizer takes longer than a step of some
NUM_REMEMBERED, LONGEST_REMEMBERED = 4096, 512  # texts, and characters (or tokens) of one

_PROBE = [
    {"role": "user", "content": "probe one"},
    {"role": "assistant", "content": "probe two"},
    {"role": "user", "content": "probe three"},
    {"role": "assistant", "content": "probe four"},
    {"role": "user", "content": "probe five"},
]
_WITH_SYSTEM = [{"role": "system", "content": "probe system"}, _PROBE[0]]
_REASONING = "<think>\nprobe thought\n</think>\n\n"  # what some templates strip from earlier turns


def _probe(reasoning: str) -> list[dict[str, str]]:
    return [
        {**m, "content": reasoning + m["content"]} if m["role"] == "assistant" else m
        for m in _PROBE
    ]


class ChatRenderer:
    """Renders conversations exactly as the tokenizer's own chat template would.

    Errors: ValueError where the template rewrites history (strips reasoning, numbers turns, ...),
    because ids appended turn by turn would then differ from what the model was trained on.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """tokenizer: a fast transformers tokenizer with a chat template and an EOS token that
        ends a turn.
        """
        self._tokenizer = tokenizer
        self._known = lru_cache(NUM_REMEMBERED)(self._encoded)
        self._said = lru_cache(NUM_REMEMBERED)(self._decoded)
        self._render()
        self._check_append_only()
        specials = sorted(map(re.escape, tokenizer.get_added_vocab()), key=len, reverse=True)
        if not specials:
            raise ValueError(
                "the tokenizer has no special tokens; an assistant turn must end with one that the"
                " policy can sample"
            )
        self._special = re.compile(f"({'|'.join(specials)})")
        opening = self._text_of(_PROBE[:1])
        following = self._text_of(_PROBE[:3])[len(opening) :]
        self._opening = self._around(opening, "probe one")
        self._turn_end, self._next_opening = self._around(
            following.removeprefix("probe two"), "probe three"
        )
        stop_text = self._special.match(self._turn_end)
        if stop_text is None:
            raise ValueError(
                f"chat template closes an assistant turn with {self._turn_end[:20]!r}; expected a"
                " special token the policy can sample"
            )
        self.stop_id: int = tokenizer.convert_tokens_to_ids(stop_text.group())
        self._after_stop = self._turn_end[stop_text.end() :]

    def start(self, observation: str, system: str = "") -> list[int]:
        """Ids of the whole prompt up to where the first action begins; `system` is the task
        instructions, if any.
        """
        if not system:
            before, after = self._opening
            return self._encode(before, observation, after)
        before, rest = self._around(self._text_of(_WITH_SYSTEM), "probe system")
        middle, after = self._around(rest, "probe one")
        return [*self._encode(before, system, ""), *self._encode(middle, observation, after)]

    def bridge(self, observation: str, *, stopped: bool) -> list[int]:
        """Ids between a sampled action and the next one.
        `stopped`: the action ended with the stop token itself.
        """
        before = self._after_stop if stopped else self._turn_end
        return self._encode(before, observation, self._next_opening)

    def action_ids(self, action: str) -> list[int]:
        """Ids a demonstrator's action would have been sampled as, stop token included."""
        return [*self._plain(action), self.stop_id]

    def text(self, ids: tuple[int, ...] | list[int]) -> str:
        """What sampled ids say, without special tokens."""
        asked = self._said if len(ids) <= LONGEST_REMEMBERED else self._decoded
        return asked(tuple(ids))

    def _decoded(self, ids: tuple[int, ...]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))

    def _encode(self, before: str, observation: str, after: str) -> list[int]:
        """Special tokens of the template become ids; an observation that spells one stays plain
        text.
        """
        asked = self._known if len(observation) <= LONGEST_REMEMBERED else self._encoded
        return list(asked(before, observation, after))

    def _encoded(self, before: str, observation: str, after: str) -> tuple[int, ...]:
        pieces = [*self._split(before), ("text", observation), *self._split(after)]
        ids: list[int] = []
        pending = ""
        for kind, piece in pieces:
            if kind == "text":
                pending += piece
                continue
            ids += [*self._plain(pending), self._tokenizer.convert_tokens_to_ids(piece)]
            pending = ""
        return (*ids, *self._plain(pending))

    def _split(self, template_text: str) -> list[tuple[str, str]]:
        parts = self._special.split(template_text)
        return [
            ("special" if index % 2 else "text", part) for index, part in enumerate(parts) if part
        ]

    def _plain(self, text: str) -> list[int]:
        if not text:
            return []
        return list(
            self._tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        )

    def _render(self) -> None:
        """Ask the chat template for all that is ever needed of it: it came with the model, and
        no episode should wait for it.
        """
        if not self._tokenizer.chat_template:
            raise ValueError(
                "the tokenizer has no chat template; use an instruction-tuned model or set one"
            )
        asked = [
            _probe(reasoning)[:count] for reasoning in ("", _REASONING) for count in (1, 3, 5)
        ] + [_WITH_SYSTEM]
        self._texts = dict(zip(map(repr, asked), render(self._tokenizer, asked), strict=True))

    def _text_of(self, messages: list[dict[str, str]]) -> str:
        """Of a conversation that `_render` asked for.
        Errors: ValueError where the template refuses it.
        """
        text = self._texts[repr(messages)]
        if isinstance(text, ValueError):
            raise text
        return text

    @staticmethod
    def _around(text: str, content: str) -> tuple[str, str]:
        before, found, after = text.partition(content)
        if not found:
            raise ValueError(
                f"chat template does not show the message {content!r} as it is; it cannot be"
                " extended turn by turn"
            )
        return before, after

    def _check_append_only(self) -> None:
        for reasoning in ("", _REASONING):
            probe = _probe(reasoning)
            for count in (1, 3):
                if not self._text_of(probe[: count + 2]).startswith(
                    self._text_of(probe[:count]) + probe[count]["content"]
                ):
                    raise ValueError(
                        "the chat template rewrites earlier"
                        f" turns{' that hold reasoning' if reasoning else ''} when the conversation"
                        " grows; training ids would differ from sampled ids. Use a template that"
                        " only appends"
                    )
