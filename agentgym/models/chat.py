"""Text to token ids and back for one append-only conversation.

A chat template is a program that came with the model, so no episode should wait for it: its way of
writing turns is derived once, from a few probe conversations.

Sampled tokens are never decoded and encoded again: `bridge` returns the ids that follow them.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from agentgym.config import ChatConfig, ConfigError
from agentgym.models.template import TODAY, render
from agentgym.models.tokenizer import Piece, PieceTokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


# environments often repeat answers, and tokenizing takes longer than a step of some environments
NUM_REMEMBERED, LONGEST_REMEMBERED = 4096, 512  # texts; characters (or tokens) of one text

DEFAULT_CHAT = ChatConfig()
Conversation = list[dict[str, str]]


class ChatRenderer:
    """Renderer of conversations as token ids, exactly as the tokenizer's own chat template would.

    A template may rewrite history: strip thoughts of earlier turns, number turns, ... Ids appended
    turn by turn then differ from the ids of the whole conversation. If `chat.history` is append
    and the template changes only earlier actions, `notes` reports it.
    Errors: ConfigError for every other template that rewrites history, and if the tokenizer makes
    other ids of a whole conversation than of its turns.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        chat: ChatConfig = DEFAULT_CHAT,
        eos_ids: Iterable[int] = (),
    ) -> None:
        """Analyze the chat template.
        tokenizer: a fast transformers tokenizer whose chat template ends a turn with a special
        token. eos_ids: the model's stop tokens, in addition to that token and the tokenizer's.
        """
        self._tokenizer = tokenizer
        self._pieces = PieceTokenizer(tokenizer)
        self._known = lru_cache(NUM_REMEMBERED)(self._pieces.encode)
        self._said = lru_cache(NUM_REMEMBERED)(self._decoded)
        controls = self._pieces.controls
        self._turns = Turns(tokenizer, chat, self._pieces.pattern(controls))
        self.notes = self._turns.notes
        self.opens_thought = self._turns.opens_thought  # the prompt ends within a thought
        # stop_id ends a turn and every demonstration; each of stop_ids ends an action
        self.stop_id: int = controls[self._turns.stop.text]
        ends = (self.stop_id, tokenizer.eos_token_id, *eos_ids)
        self.stop_ids = tuple(dict.fromkeys(token_id for token_id in ends if token_id is not None))
        thoughts = controls.keys() & {THINK, END_THINK}
        added = tokenizer.added_tokens_decoder.items()
        special = {index: token.content for index, token in added if token.special}
        self._silent = {index for index, token in special.items() if token not in thoughts}
        words = controls.keys() - special.values() - self._turns.written()
        self._in_actions = self._pieces.pattern(words | thoughts)
        self._check_ids()

    def start(self, observation: str, system: str = "") -> list[int]:
        """Return the ids of the whole prompt up to the first action.
        system: the task instructions, if any.
        Errors: ConfigError if the template cannot show instructions.
        """
        return list(self._encode(self._turns.start(observation, system)))

    def bridge(self, observation: str, *, stopped: bool) -> list[int]:
        """Return the ids between a sampled action and the next one, with the observation.
        stopped: True if the action `ends_turn`; otherwise the ids begin with the turn's end.
        """
        ids = self._encode(self._turns.bridge(observation))
        return list(ids[1:] if stopped else ids)

    def ends_turn(self, ids: Sequence[int]) -> bool:
        """Return True if an action ended with the stop token that ends the template's turns."""
        return bool(ids) and ids[-1] == self.stop_id

    def action_ids(self, action: str) -> list[int]:
        """Return the ids of a demonstrator's action as a policy would sample it, with stop token.

        `<think>`, `<tool_call>` and other tokens that a policy samples within its turn are tokens
        here, too: spelled in letters, they would teach replies that no model of this kind gives.
        Special tokens and those the template uses between turns stay plain text, as in an
        observation: an action may quote a page.
        """
        text = Piece(self._turns.spoken(action), self._in_actions)
        # the ids may depend on what precedes them
        before, stop = self._turns.bridge(_CONTENTS[0]), self._turns.stop
        prompt, ids = self._encode(before), self._encode((*before, text, stop))
        if ids[: len(prompt)] == prompt:
            return list(ids[len(prompt) :])
        # the action begins with blanks, which the tokenizer joins with the end of the prompt
        return list(self._encode((stop, text, stop))[1:])

    def text(self, ids: tuple[int, ...] | list[int]) -> str:
        """Return the text of sampled ids without special tokens; those of a thought are kept."""
        decode = self._said if len(ids) <= LONGEST_REMEMBERED else self._decoded
        return decode(tuple(ids))

    def _decoded(self, ids: tuple[int, ...]) -> str:
        visible = [token_id for token_id in ids if token_id not in self._silent]
        return str(self._tokenizer.decode(visible, skip_special_tokens=False))

    def _encode(self, pieces: tuple[Piece, ...]) -> tuple[int, ...]:
        is_short = sum(len(piece.text) for piece in pieces) <= LONGEST_REMEMBERED
        return self._known(pieces) if is_short else self._pieces.encode(pieces)

    def _check_ids(self) -> None:
        """Raise ConfigError unless probe conversations have the same ids turn by turn and whole."""
        probes = self._turns.probes()
        texts = [text for _, _, text in probes]
        wholes = self._tokenizer(texts, add_special_tokens=False)["input_ids"]
        for (messages, system, _), whole in zip(probes, wholes, strict=True):
            ids = self._turn_by_turn(messages, system)
            if ids != list(whole):
                pairs = enumerate(itertools.zip_longest(ids, whole))
                same = next(at for at, (one, other) in pairs if one != other)
                ours, its = (
                    self._tokenizer.convert_ids_to_tokens(sequence[max(0, same - 1) : same + 3])
                    for sequence in (ids, whole)
                )
                raise ConfigError(
                    f"the tokenizer makes {its} of a whole conversation, of which turn by turn it"
                    f" makes {ours}; use a chat template whose prompt ends where a token does"
                )

    def _turn_by_turn(self, messages: Conversation, system: str) -> list[int]:
        """Return the ids of a conversation, appended turn by turn as in an episode."""
        ids: list[int] = []
        for message in messages:
            content = message["content"]
            if message["role"] == "assistant":
                ids += self.action_ids(content)
            else:
                ids += self.bridge(content, stopped=True) if ids else self.start(content, system)
        return ids


THINK, END_THINK = "<think>", "</think>"

_CONTENTS = ("probe one", "probe two", "probe three", "probe four", "probe five")
_ROLES = ("user", "assistant")
_SYSTEM = "probe system"
_THOUGHT = "<think>\nprobe thought\n</think>\n\n"  # some templates strip it from earlier turns
_BLANKS = " \n\t{}\n "  # some templates trim them
# adjacent words, digits, blanks and newlines: a tokenizer may join or split them
_LINES = "A  page,\n\n12.5% {}\n\t- Ä 你 (x)"
_REASON = "Thought: 12 + 3?\n\nAction: "


def _probe(count: int, before: str = "", system: str = "", user: str = "{}") -> Conversation:
    """Make a conversation of `count` (odd) messages, the first and the last a user's, after the
    instructions `system`, if any. before: text at the beginning of each action. user: format of
    each observation, with {} for its text.
    """
    roles = zip(itertools.cycle(_ROLES), _CONTENTS[:count], strict=False)
    messages = [
        {"role": role, "content": user.format(text) if role == "user" else before + text}
        for role, text in roles
    ]
    return [*([{"role": "system", "content": system}] if system else []), *messages]


_ASKED = (
    *(_probe(count, thought) for thought in ("", _THOUGHT) for count in (1, 3, 5)),
    _probe(3, user=_BLANKS),
    _probe(5, _REASON, user=_LINES),
    *(_probe(count, system=_SYSTEM) for count in (1, 3)),
    _probe(1, system=_BLANKS.format(_SYSTEM)),
    _probe(3, _REASON, _LINES.format(_SYSTEM), _LINES),
)


class Turns:
    """The texts with which a chat template surrounds instructions, observations and actions.
    Errors: ConfigError if it does not extend a conversation by appending; see `ChatRenderer`.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, chat: ChatConfig, controls: re.Pattern[str] | None
    ) -> None:
        """Render probe conversations and derive the texts around their messages.
        controls: matches the control tokens; None if the tokenizer has none.
        """
        self._controls = controls
        self.notes: list[str] = []  # surprising properties of conversations, for the user
        self._texts = self._render(tokenizer, chat)
        before, after = _around(self._text_of(_probe(1)), _CONTENTS[0])
        self._opening, self._next_opening = (before, after), after
        _, opened, thought = after.rpartition(THINK)
        # True if an action begins within a thought, which it has to close
        self.opens_thought = bool(opened) and END_THINK not in thought
        self._blanks = self._blanks_before_actions()
        self._rewrites = False
        self._turn_end = self._check_history(chat)
        stop = controls.match(self._turn_end) if controls else None
        if stop is None:
            raise ConfigError(
                f"chat template closes an assistant turn with {self._turn_end[:20]!r}; expected a"
                " special token the policy can sample"
            )
        self.stop = Piece(stop.group(), controls)  # ends an action
        self._trims_user = self._trims(_probe(3), _probe(3, user=_BLANKS))
        self._system = self._with_system()
        if not (controls and controls.search(after)):
            self.notes.append(
                f"the chat template begins an answer with plain text, {after!r}, which an"
                " observation may spell, too"
            )

    def start(self, observation: str, system: str = "") -> tuple[Piece, ...]:
        """Return the pieces of the whole prompt of the first action. system: instructions, if any.
        Errors: ConfigError if the template cannot show instructions.
        """
        if not system:
            return self._around_observation(self._opening[0], observation, self._opening[1])
        if isinstance(self._system, ConfigError):
            raise self._system
        before, middle, after, is_trimmed = self._system
        return (
            Piece(before, self._controls),
            Piece(system.strip() if is_trimmed else system),
            *self._around_observation(middle, observation, after),
        )

    def bridge(self, observation: str) -> tuple[Piece, ...]:
        """Return the pieces from the stop token of an action, included, to the next action."""
        return self._around_observation(self._turn_end, observation, self._next_opening)

    def spoken(self, action: str) -> str:
        """Return a demonstrator's action as a policy writes it: after the blanks that the template
        shows before actions. If the prompt opened a thought, the result ends it.
        """
        if self.opens_thought:
            if action.startswith(THINK):
                action = action.removeprefix(THINK).lstrip("\n")
            elif END_THINK not in action:
                action = f"{END_THINK}\n\n{action}"
        return self._blanks + action

    def written(self) -> set[str]:
        """Return the control tokens that occur in the template's texts of the probes."""
        return {
            token
            for text in self._texts.values()
            if isinstance(text, str) and self._controls
            for token in self._controls.findall(text)
        }

    def probes(self) -> list[tuple[Conversation, str, str]]:
        """Return (messages, instructions or "", text turn by turn) of the probes that the template
        accepts. Errors: ConfigError if the template's text of a whole probe differs from that text,
        unless it rewrites earlier actions and `chat` allows that.
        """
        probes = []
        for messages in _ASKED:
            rendered = self._texts[repr(messages)]
            system = messages[0]["content"] if messages[0]["role"] == "system" else ""
            if isinstance(rendered, ValueError) or (
                system and isinstance(self._system, ConfigError)
            ):
                continue
            dialog = messages[bool(system) :]
            text = "".join(piece.text for piece in self.start(dialog[0]["content"], system))
            for action, observation in zip(dialog[1::2], dialog[2::2], strict=True):
                text += self.spoken(action["content"])
                text += "".join(piece.text for piece in self.bridge(observation["content"]))
            if text != rendered and not (self._rewrites and len(dialog) > 1):
                one, other = _apart(text, rendered)
                raise ConfigError(
                    f"the chat template shows {other[:40]!r} in a whole conversation, and"
                    f" {one[:40]!r} turn by turn; use a template that shows messages as they are"
                )
            probes.append((dialog, system, text))
        return probes

    def _around_observation(self, before: str, text: str, after: str) -> tuple[Piece, ...]:
        text = text.strip() if self._trims_user else text
        return Piece(before, self._controls), Piece(text), Piece(after, self._controls)

    def _render(
        self, tokenizer: PreTrainedTokenizerBase, chat: ChatConfig
    ) -> dict[str, str | ValueError]:
        """Return `repr` of each probe -> its text, or the error with which the template refuses it.
        Add to `notes` if the template shows a date.
        Errors: ConfigError without a template, for unknown settings or if it exceeds a limit.
        """
        if not tokenizer.chat_template:
            raise ConfigError(
                "the tokenizer has no chat template; use an instruction-tuned model or set one"
            )
        variables = {} if chat.thinking == "auto" else {"enable_thinking": chat.thinking == "on"}
        if variables and "enable_thinking" not in tokenizer.get_chat_template():
            raise ConfigError(
                f"model.chat.thinking {chat.thinking} is nothing to this chat template, which does"
                " not know enable_thinking; use auto"
            )
        try:
            texts, is_dated = render(tokenizer, _ASKED, variables)
        except ValueError as error:  # the template exceeded a limit
            raise ConfigError(str(error)) from error
        if is_dated:
            self.notes.append(
                f"the chat template shows the date; it is {TODAY:%d %b %Y} on every day, so that"
                " results do not change with it"
            )
        return dict(zip(map(repr, _ASKED), texts, strict=True))

    def _text_of(self, messages: Conversation) -> str:
        """Return the text of a probe conversation.
        Errors: ConfigError if the template refuses it.
        """
        text = self._texts[repr(messages)]
        if isinstance(text, ValueError):
            raise ConfigError(str(text))
        return text

    def _blanks_before_actions(self) -> str:
        """Return the blanks that the template shows between a prompt and an action, and add them to
        `notes`, as the policy must write them; "" if there are none or the prompt opens a thought.
        """
        between = _around(self._text_of(_probe(3)), *_CONTENTS[:2])[1]
        blanks = between.removeprefix(self._next_opening)
        if self.opens_thought or not between.startswith(self._next_opening) or blanks.strip():
            return ""
        if blanks:
            self.notes.append(
                f"the chat template shows {blanks!r} before an action, not at the end of a prompt;"
                " demonstrations begin with it"
            )
        return blanks

    def _check_history(self, chat: ChatConfig) -> str:
        """Return the text between an action and the next observation. Add to `notes` if the
        template rewrites earlier actions. Errors: ConfigError if `chat` does not allow that, or if
        the template rewrites anything else.
        """
        turn_ends, changed = set(), []
        for thought, count in itertools.product(("", _THOUGHT), (3, 5)):
            text = self._text_of(_probe(count, thought))
            before, *between, after = _around(text, *_CONTENTS[:count])
            turn_ends.update(between[1::2])
            if (before, after) != self._opening or len(turn_ends) > 1:
                raise ConfigError(
                    "the chat template rewrites earlier turns when the conversation grows, not only"
                    " their thoughts; use a template that only appends"
                )
            sampled = self._next_opening + self.spoken(thought)
            changed += [
                (rendered, sampled, thought) for rendered in between[::2] if rendered != sampled
            ]
        self._rewrites = bool(changed)
        if changed:
            rendered, sampled, thought = changed[0]
            rendered, sampled = _apart(rendered, sampled)
            which = " that hold reasoning" if thought else ""
            if chat.history == "exact":
                raise ConfigError(
                    f"the chat template rewrites earlier turns{which} when the conversation"
                    f" grows: {sampled!r} becomes {rendered!r}. Training ids"
                    " would differ from sampled ids; set model.chat.history append, which keeps"
                    " every turn as it was sampled, or use a template that only appends"
                )
            self.notes.append(
                "model.chat.history append: every turn stays as it was sampled and counts for"
                f" model.context_tokens; the chat template would turn {sampled!r} of earlier turns"
                f" into {rendered!r}"
            )
        return turn_ends.pop()

    def _with_system(self) -> tuple[str, str, str, bool] | ConfigError:
        """Return the texts before, between and after instructions and first observation, and True
        if the template trims instructions. Return an error, which `start` raises, if the template
        cannot show instructions at the beginning and leave them there.
        """
        plain = _probe(1, system=_SYSTEM)
        try:
            before, middle, after = _around(self._text_of(plain), _SYSTEM, _CONTENTS[0])
            grown = self._text_of(_probe(3, system=_SYSTEM))
            stays = grown.startswith(before + _SYSTEM + middle + _CONTENTS[0])
            if not stays or after != self._next_opening:
                raise ConfigError(
                    "the chat template moves the instructions when the conversation grows"
                )
            padded = _probe(1, system=_BLANKS.format(_SYSTEM))
            return before, middle, after, self._trims(plain, padded)
        except ConfigError as error:
            return ConfigError(f"{error}; set rollout.instructions false")

    def _trims(self, plain: Conversation, padded: Conversation) -> bool:
        """Return True if the template trims the blanks that `padded` adds to `plain` contents.
        Errors: ConfigError if it does something else with blanks.
        """
        text, padded_text = self._text_of(plain), self._text_of(padded)
        if padded_text == text:
            return True
        for plain_message, padded_message in zip(plain, padded, strict=True):
            text = text.replace(plain_message["content"], padded_message["content"])
        if padded_text != text:
            raise ConfigError(
                "the chat template changes blanks around a message otherwise than by trimming both"
                " sides; use a template that shows messages as they are"
            )
        return False


def _around(text: str, *contents: str) -> list[str]:
    """Return the texts before, between and after the contents.
    Errors: ConfigError if the contents do not appear in this order.
    """
    pieces = []
    for content in contents:
        before, separator, text = text.partition(content)
        if not separator:
            raise ConfigError(
                f"chat template does not show the message {content!r} as it is; it cannot be"
                " extended turn by turn"
            )
        pieces.append(before)
    return [*pieces, text]


def _apart(one: str, other: str) -> tuple[str, str]:
    """Return both texts without their common beginning."""
    while one and one[:1] == other[:1]:
        one, other = one[1:], other[1:]
    return one, other
