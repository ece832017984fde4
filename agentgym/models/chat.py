"""Text to token ids and back for one append-only conversation.

The policy's own tokens are never decoded and encoded again: `bridge` returns the ids that follow
them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from agentgym.config import ChatConfig, ConfigError
from agentgym.models.pieces import Piece, PieceTokenizer
from agentgym.models.turns import END_THINK, THINK, Conversation, Turns

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


# environments often repeat answers, and tokenizing takes longer than a step of some environments
NUM_REMEMBERED, LONGEST_REMEMBERED = 4096, 512  # texts; characters (or tokens) of one text

DEFAULT_CHAT = ChatConfig()


class ChatRenderer:
    """Renders conversations exactly as the tokenizer's own chat template would.

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
        stopped: the action `ends_turn`; after any other stop token the turn's end is still added.
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
        before, stop = self._turns.before_action(), self._turns.stop
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
        """Raise ConfigError unless probe conversations have the same ids turn by turn as their
        whole text.
        """
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
        """Return the ids of a conversation as an episode would append them."""
        ids: list[int] = []
        for message in messages:
            content = message["content"]
            if message["role"] == "assistant":
                ids += self.action_ids(content)
            else:
                ids += self.bridge(content, stopped=True) if ids else self.start(content, system)
        return ids
