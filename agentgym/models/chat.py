"""Text to token ids and back for one conversation that only ever grows.

The policy's own tokens are never decoded and encoded again: `bridge` gives the ids that follow
them.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from agentgym.config import ChatConfig, ConfigError
from agentgym.models.template import TODAY, render

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


# environments answer alike again and again, and the tokenizer takes longer than a step of some
NUM_REMEMBERED, LONGEST_REMEMBERED = 4096, 512  # texts, and characters (or tokens) of one

DEFAULT_CHAT = ChatConfig()
Conversation = list[dict[str, str]]

_CONTENTS = ("probe one", "probe two", "probe three", "probe four", "probe five")
_ROLES = ("user", "assistant")
_SYSTEM = "probe system"
_THOUGHT = "<think>\nprobe thought\n</think>\n\n"  # what some templates strip from earlier turns
_BLANKS = " \n\t{}\n "  # what some templates trim


def _probe(count: int, thought: str = "", system: str = "", user: str = "{}") -> Conversation:
    """count: of messages, the first and the last a user's. user: what stands around their text."""
    roles = zip(itertools.cycle(_ROLES), _CONTENTS[:count], strict=False)
    messages = [
        {"role": role, "content": user.format(text) if role == "user" else thought + text}
        for role, text in roles
    ]
    return [*([{"role": "system", "content": system}] if system else []), *messages]


_ASKED = (
    *(_probe(count, thought) for thought in ("", _THOUGHT) for count in (1, 3, 5)),
    _probe(3, user=_BLANKS),
    *(_probe(count, system=_SYSTEM) for count in (1, 3)),
    _probe(1, system=_BLANKS.format(_SYSTEM)),
)


def _apart(one: str, other: str) -> tuple[str, str]:
    """Both without what they begin with alike."""
    while one and one[:1] == other[:1]:
        one, other = one[1:], other[1:]
    return one, other


class ChatRenderer:
    """Renders conversations exactly as the tokenizer's own chat template would.

    A template may rewrite history: strip thoughts of earlier turns, number turns, ... Ids appended
    turn by turn then differ from what it would make of the whole conversation. With
    `chat.history` append that is said in `notes` where it is earlier actions that it changes.
    Errors: ValueError for every other template that does so.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        chat: ChatConfig = DEFAULT_CHAT,
        eos_ids: Iterable[int] = (),
    ) -> None:
        """tokenizer: a fast transformers tokenizer with a chat template that ends a turn with a
        special token. eos_ids: the model's own, beside that and the tokenizer's.
        """
        self._tokenizer = tokenizer
        self._known = lru_cache(NUM_REMEMBERED)(self._encoded)
        self._said = lru_cache(NUM_REMEMBERED)(self._decoded)
        self.notes: list[str] = []  # how conversations differ from what a reader would expect
        self._render(chat)
        specials = sorted(map(re.escape, tokenizer.get_added_vocab()), key=len, reverse=True)
        if not specials:
            raise ValueError(
                "the tokenizer has no special tokens; an assistant turn must end with one that the"
                " policy can sample"
            )
        self._special = re.compile(f"({'|'.join(specials)})")
        before, after = self._around(self._text_of(_probe(1)), _CONTENTS[0])
        self._opening, self._next_opening = (before, after), after
        self._turn_end = self._check_history(chat)
        self._trims_user = self._trims(_probe(3), _probe(3, user=_BLANKS))
        stop_text = self._special.match(self._turn_end)
        if stop_text is None:
            raise ValueError(
                f"chat template closes an assistant turn with {self._turn_end[:20]!r}; expected a"
                " special token the policy can sample"
            )
        self._after_stop = self._turn_end[stop_text.end() :]
        # the one that ends a turn, which demonstrations end with; then all that end an action
        self.stop_id: int = tokenizer.convert_tokens_to_ids(stop_text.group())
        ends = (self.stop_id, tokenizer.eos_token_id, *eos_ids)
        self.stop_ids = tuple(dict.fromkeys(each for each in ends if each is not None))

    def start(self, observation: str, system: str = "") -> list[int]:
        """Ids of the whole prompt up to where the first action begins; `system` is the task
        instructions, if any. Errors: ValueError where the template cannot show instructions.
        """
        if self._trims_user:
            observation = observation.strip()
        if not system:
            before, after = self._opening
            return self._encode(before, observation, after)
        before, middle, after, system = self._with_system(system)
        return [*self._encode(before, system, ""), *self._encode(middle, observation, after)]

    def bridge(self, observation: str, *, stopped: bool) -> list[int]:
        """Ids between a sampled action and the next one.
        `stopped`: the action `ends_turn`; after any other stop token the turn ends as after none.
        """
        before = self._after_stop if stopped else self._turn_end
        text = observation.strip() if self._trims_user else observation
        return self._encode(before, text, self._next_opening)

    def ends_turn(self, ids: Sequence[int]) -> bool:
        """Whether an action ended with the stop token that the template ends a turn with."""
        return bool(ids) and ids[-1] == self.stop_id

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

    def _render(self, chat: ChatConfig) -> None:
        """Ask the chat template for all that is ever needed of it: it came with the model, and
        no episode should wait for it.
        """
        if not self._tokenizer.chat_template:
            raise ValueError(
                "the tokenizer has no chat template; use an instruction-tuned model or set one"
            )
        variables = {} if chat.thinking == "auto" else {"enable_thinking": chat.thinking == "on"}
        if variables and "enable_thinking" not in self._tokenizer.get_chat_template():
            raise ConfigError(
                f"model.chat.thinking {chat.thinking} is nothing to this chat template, which does"
                " not know enable_thinking; use auto"
            )
        rendered = render(self._tokenizer, _ASKED, variables)
        self._texts = dict(zip(map(repr, _ASKED), rendered.texts, strict=True))
        if rendered.is_dated:
            self.notes.append(
                f"the chat template shows the date; it is {TODAY:%d %b %Y} on every day, so that"
                " results do not change with it"
            )

    def _text_of(self, messages: Conversation) -> str:
        """Of a conversation that `_render` asked for.
        Errors: ValueError where the template refuses it.
        """
        text = self._texts[repr(messages)]
        if isinstance(text, ValueError):
            raise text
        return text

    @staticmethod
    def _around(text: str, *contents: str) -> list[str]:
        """What stands before, between and after the contents."""
        pieces = []
        for content in contents:
            before, found, text = text.partition(content)
            if not found:
                raise ValueError(
                    f"chat template does not show the message {content!r} as it is; it cannot be"
                    " extended turn by turn"
                )
            pieces.append(before)
        return [*pieces, text]

    def _check_history(self, chat: ChatConfig) -> str:
        """Result: what stands between an action and the next observation.
        Errors: ValueError where the template rewrites more than `chat` allows.
        """
        turn_ends, changed = set(), []
        for thought, count in itertools.product(("", _THOUGHT), (3, 5)):
            text = self._text_of(_probe(count, thought))
            before, *between, after = self._around(text, *_CONTENTS[:count])
            turn_ends.update(between[1::2])
            if (before, after) != self._opening or len(turn_ends) > 1:
                raise ValueError(
                    "the chat template rewrites earlier turns when the conversation grows, not only"
                    " their thoughts; use a template that only appends"
                )
            sampled = self._next_opening + thought
            changed += [(shown, sampled, thought) for shown in between[::2] if shown != sampled]
        if changed:
            shown, sampled, thought = changed[0]
            shown, sampled = _apart(shown, sampled)
            which = " that hold reasoning" if thought else ""
            if chat.history == "exact":
                raise ConfigError(
                    f"the chat template rewrites earlier turns{which} when the conversation"
                    f" grows: {sampled!r} becomes {shown!r}. Training ids"
                    " would differ from sampled ids; set model.chat.history append, which keeps"
                    " every turn as it was sampled, or use a template that only appends"
                )
            self.notes.append(
                "model.chat.history append: every turn stays as it was sampled and counts for"
                f" model.context_tokens; the chat template would turn {sampled!r} of earlier turns"
                f" into {shown!r}"
            )
        return turn_ends.pop()

    def _with_system(self, system: str) -> tuple[str, str, str, str]:
        """What stands around instructions and first observation, and the instructions themselves.
        Errors: ValueError where the template cannot show them at the beginning and leave them.
        """
        plain = _probe(1, system=_SYSTEM)
        before, middle, after = self._around(self._text_of(plain), _SYSTEM, _CONTENTS[0])
        grown = self._text_of(_probe(3, system=_SYSTEM))
        stays = grown.startswith(before + _SYSTEM + middle + _CONTENTS[0])
        if not stays or after != self._next_opening:
            raise ValueError(
                "the chat template moves the instructions when the conversation grows; use a"
                " template that only appends, or rollout.instructions false"
            )
        padded = _probe(1, system=_BLANKS.format(_SYSTEM))
        return before, middle, after, system.strip() if self._trims(plain, padded) else system

    def _trims(self, plain: Conversation, padded: Conversation) -> bool:
        """Whether the template trims what is between `plain` and `padded` contents.
        Errors: ValueError where it does something else with blanks.
        """
        text, shown = self._text_of(plain), self._text_of(padded)
        if shown == text:
            return True
        for less, more in zip(plain, padded, strict=True):
            text = text.replace(less["content"], more["content"])
        if shown != text:
            raise ValueError(
                "the chat template changes blanks around a message otherwise than by trimming both"
                " sides; use a template that shows messages as they are"
            )
        return False
