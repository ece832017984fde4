"""A model's tokenizer, loaded as its tokenizer.json defines it, and the ids of a text made of
pieces, of which only some may spell control tokens.

A tokenizer finds its added tokens (ends of turns, `<think>`, `<tool_call>`) wherever a text spells
them, special or not: a page could forge a turn. Encoding piece by piece would prevent that but
give other ids: SentencePiece puts a blank before a text, and tokens with `rstrip` absorb the
following blanks. So all pieces are encoded as one text. If a piece spells a token that it may not
spell, the text is encoded again with secret names of the control tokens, which no piece can know.
"""

from __future__ import annotations

import json
import logging
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence, Set
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from agentgym.config import ConfigError

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

RULES = ("normalizer", "pre_tokenizer", "model", "decoder")  # sections of a tokenizer.json
IN_CONVERSATIONS = ("bos_token", "eos_token", "unk_token")  # a chat template may name only these


def load_tokenizer(
    source: str | Path, revision: str | None = None, *, name: str
) -> PreTrainedTokenizerBase:
    """Load a tokenizer that follows its tokenizer.json.

    source: a folder or a repository of the Hub, at `revision`. name: of the model, for messages.
    For many classes that tokenizer_config.json may declare, transformers rebuilds the rules that
    split text, and a model would read other ids than it was trained with. So the declared class is
    used only if it follows tokenizer.json or there is none; else PreTrainedTokenizerFast, logged.
    Errors: ConfigError if no tokenizer can be loaded that follows its tokenizer.json.
    """
    from tokenizers import Tokenizer
    from transformers import AutoTokenizer, PreTrainedTokenizerFast
    from transformers.utils import cached_file

    options: dict[str, Any] = {"revision": revision, "trust_remote_code": False}
    try:
        declared = AutoTokenizer.from_pretrained(source, **options)
        path = cached_file(
            source, "tokenizer.json", revision=revision, _raise_exceptions_for_missing_entries=False
        )
        if path is None:
            return declared
        original = Tokenizer.from_file(path)
        if _follows(declared, original):
            return declared
        known = original.get_vocab()
        defaults = {  # special tokens of the declared class that the files do not name
            key: token for key, token in declared.special_tokens_map.items() if str(token) in known
        }
        plain = PreTrainedTokenizerFast.from_pretrained(source, **options, **defaults)
    except Exception as error:  # the tokenizers library raises nothing narrower
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
        raise ConfigError(f"the tokenizer of {name} cannot be loaded: {reason}") from None
    if not _follows(plain, original):
        raise ConfigError(
            f"transformers does not load the tokenizer of {name} according to its tokenizer.json;"
            " save it again with PreTrainedTokenizerFast"
        )
    logger.warning(
        "the tokenizer of %s splits text according to its tokenizer.json, not as %s, which"
        " transformers would load",
        name,
        type(declared).__name__,
    )
    return plain


def require_rows(tokenizer: PreTrainedTokenizerBase, num_rows: int, name: str) -> None:
    """Raise ConfigError if a conversation may contain an id without an embedding row.

    num_rows: of the embedding; name: of the model, for messages.

    A special token beyond the rows is accepted if the chat template does not spell it and it is not
    the tokenizer's bos, eos or unk token, because text that spells it stays text. Gemma 3 has such
    a token, for images.
    """
    special = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
    template = str(tokenizer.chat_template)
    named = {str(tokenizer.special_tokens_map.get(key)) for key in IN_CONVERSATIONS}
    beyond = {
        id: token
        for token, id in tokenizer.get_vocab().items()
        if id >= num_rows and (token not in special or token in template or token in named)
    }
    if beyond:
        id = max(beyond)
        raise ConfigError(
            f"the tokenizer of {name} has more ids than its embedding has rows: {beyond[id]!r} is"
            f" id {id} of {num_rows} rows; use the model's own tokenizer, or resize the embedding"
        )


def _follows(loaded: Any, original: Tokenizer) -> bool:
    """Return True if a loaded tokenizer follows tokenizer.json; it may have added tokens."""
    backend = getattr(loaded, "backend_tokenizer", None)
    return (
        backend is not None
        and original.get_vocab().items() <= backend.get_vocab().items()
        and _rules(backend) == _rules(original)
    )


def _rules(tokenizer: Tokenizer) -> Any:
    """Return the settings of a tokenizer that determine ids and their text, for a comparison."""
    tree = json.loads(tokenizer.to_str())
    if (tree["decoder"] or {}).get("type") == "ByteLevel":  # this decoder ignores its settings
        tree["decoder"] = {"type": "ByteLevel"}
    return _without_idle({name: tree[name] for name in RULES})


def _without_idle(tree: Any) -> Any:
    """Return a JSON tree without settings that change no ids: empty ones, and `trim_offsets`."""
    if isinstance(tree, dict):
        return {
            key: value if key in ("vocab", "merges") else _without_idle(value)
            for key, value in tree.items()
            if key != "trim_offsets" and value not in (None, "")
        }
    return [_without_idle(item) for item in tree] if isinstance(tree, list) else tree


BLANKS = " \n\t\r▁"
NO_NAMES: Mapping[str, str] = MappingProxyType({})
Span = tuple[int, int, int]  # id of a control token, its first character, the one after its last


class Piece(NamedTuple):
    text: str
    tokens: re.Pattern[str] | None = None  # matches the control tokens it may spell; None: none


class PieceTokenizer:
    """An encoder of joined pieces; control tokens that a piece may not spell stay plain text."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Collect the control tokens. tokenizer: a fast one.
        Errors: ConfigError if its model can produce a control token from plain text.
        """
        self._tokenizer = tokenizer
        # tokens for runs of blanks (Gemma, GPT-NeoX) control nothing
        self.controls: dict[str, int] = {
            token: index
            for token, index in tokenizer.get_added_vocab().items()
            if token.strip(BLANKS)
        }
        self._token_of = {index: token for token, index in self.controls.items()}
        model = tokenizer.backend_tokenizer.model
        self._unknown: str | None = getattr(model, "unk_token", None)  # for unknown characters
        for token in self.controls:
            if model.token_to_id(token) is not None and self._is_made_of_text(token):
                raise ConfigError(
                    f"the tokenizer makes its control token {token!r} of plain text, so that an"
                    " observation could forge it; use a tokenizer whose control tokens are no"
                    " words of its model"
                )

    @staticmethod
    def pattern(tokens: Iterable[str]) -> re.Pattern[str] | None:
        """Return a pattern that matches tokens like a tokenizer: leftmost, then longest.
        None if there are no tokens.
        """
        ordered = sorted(tokens, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, ordered))) if ordered else None

    def encode(self, pieces: Sequence[Piece]) -> tuple[int, ...]:
        """Return the ids of the joined pieces.
        Errors: ValueError if allowed and forbidden control tokens cannot be distinguished; no
        accepted tokenizer is known to do so.
        """
        text, allowed = self._written(pieces)
        encoding = self._encoding(text)
        spans = self._found(encoding, encoding.ids, text)
        meant = _among(allowed, spans)
        if len(meant) == len(spans):
            return tuple(encoding.ids)
        tokenizer, names, own_ids = self._renamed
        text, allowed = self._written(pieces, names, {start for _, start, _ in meant})
        encoding = tokenizer.encode(text, add_special_tokens=False)
        ids = [own_ids.get(index, index) for index in encoding.ids]
        spans = self._found(encoding, ids, text, names)
        if not len(_among(allowed, spans)) == len(allowed) == len(spans):
            plain, _ = self._written(pieces)
            raise ValueError(
                f"the tokenizer does not keep its control tokens apart from the text {plain[:80]!r}"
                " that spells them; use another tokenizer"
            )
        return tuple(ids)

    def _encoding(self, text: str) -> Encoding:
        """Encode as the tokenizer's own call does, in a quarter of the time. Truncation and padding
        that an earlier call set are switched off.
        """
        backend: Tokenizer = self._tokenizer.backend_tokenizer
        if backend.truncation or backend.padding or backend.encode_special_tokens:
            backend.no_truncation()  # an earlier call with other options has set it
            backend.no_padding()
            backend.encode_special_tokens = False
        return backend.encode(text, add_special_tokens=False)

    def _written(
        self,
        pieces: Sequence[Piece],
        names: Mapping[str, str] = NO_NAMES,
        meant: Set[int] = frozenset(),
    ) -> tuple[str, list[Span]]:
        """Return (the joined text, the spans of allowed tokens in it).
        names: control token -> secret name. If they are given, only the tokens that begin at
        `meant` in the plain text are renamed and counted.
        """
        text, spans, num_before = "", [], 0
        for piece in pieces:
            end = 0
            for match in piece.tokens.finditer(piece.text) if piece.tokens else ():
                if names and num_before + match.start() not in meant:
                    continue
                text += piece.text[end : match.start()]
                name = names.get(match.group(), match.group())
                spans.append((self.controls[match.group()], len(text), len(text) + len(name)))
                text += name
                end = match.end()
            text += piece.text[end:]
            num_before += len(piece.text)
        return text, spans

    def _found(
        self, encoding: Encoding, ids: Sequence[int], text: str, names: Mapping[str, str] = NO_NAMES
    ) -> list[Span]:
        """Return the spans of the control tokens among the ids. If one is the unknown token, too,
        it counts only where the text spells it. ids: the encoding's, as without `names`.
        """
        spans = []
        for at, index in enumerate(ids):
            token = self._token_of.get(index)
            if token is None:
                continue
            start, end = encoding.token_to_chars(at) or (0, 0)
            if token != self._unknown or names.get(token, token) in text[start:end]:
                spans.append((index, start, end))
        return spans

    @cached_property
    def _renamed(self) -> tuple[Tokenizer, dict[str, str], dict[int, int]]:
        """Return the tokenizer with other names for its control tokens, these names, and a map of
        its token ids to the original ones. Takes a second or two for a large vocabulary.
        """
        from tokenizers import Tokenizer

        # no text spells them by chance or on purpose, and no id depends on them
        key = secrets.token_hex(16)
        names = {token: f"\ufdd0{key}.{index}\ufdd1" for token, index in self.controls.items()}
        state: dict[str, Any] = json.loads(self._tokenizer.backend_tokenizer.to_str())
        original = {entry["content"]: entry["id"] for entry in state["added_tokens"]}
        for entry in state["added_tokens"]:
            entry["content"] = names.get(entry["content"], entry["content"])
        state.update(truncation=None, padding=None, post_processor=None)
        renamed = Tokenizer.from_str(json.dumps(state))
        vocab = renamed.get_vocab()
        ids = {vocab[names.get(token, token)]: index for token, index in original.items()}
        return renamed, names, ids

    def _is_made_of_text(self, token: str) -> bool:
        backend = self._tokenizer.backend_tokenizer
        text = backend.normalizer.normalize_str(token) if backend.normalizer else token
        splitter = backend.pre_tokenizer
        words = [word for word, _ in splitter.pre_tokenize_str(text)] if splitter else [text]
        return any(
            part.id in self._token_of and part.value != self._unknown
            for word in words
            for part in backend.model.tokenize(word)
        )


def _among(allowed: Sequence[Span], spans: Sequence[Span]) -> list[Span]:
    """Return the allowed spans within a span of the same id, which may include blanks around it."""
    return [
        (index, start, end)
        for index, start, end in allowed
        if any(index == span[0] and span[1] <= start and end <= span[2] for span in spans)
    ]
