"""Loading of a model's tokenizer so that it follows its tokenizer.json."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentgym.config import ConfigError

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

RULES = ("normalizer", "pre_tokenizer", "model", "decoder")  # sections of a tokenizer.json
IN_CONVERSATIONS = ("bos_token", "eos_token", "unk_token")  # a chat template may name only these


def load_tokenizer(
    source: str | Path, revision: str | None = None, *, name: str
) -> PreTrainedTokenizerBase:
    """Load a tokenizer that follows its tokenizer.json.

    source: a folder or a repository of the Hub; name: of the model, for messages.
    For many classes that tokenizer_config.json may declare, transformers rebuilds the rules that
    split text, and a model would read other ids than it was trained with. So the declared class is
    used only if it follows tokenizer.json. Without a tokenizer.json there is nothing to compare.

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
    A special token beyond the rows is accepted if the chat template does not use it, because text
    that spells it stays text. Gemma 3 has such a token, for images.
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
    """Return the settings that determine ids and their text."""
    tree = json.loads(tokenizer.to_str())
    if (tree["decoder"] or {}).get("type") == "ByteLevel":  # this decoder ignores its settings
        tree["decoder"] = {"type": "ByteLevel"}
    return _without_idle({name: tree[name] for name in RULES})


def _without_idle(tree: Any) -> Any:
    """Return a tree without empty settings and the setting of offsets, which is not used here."""
    if isinstance(tree, dict):
        return {
            key: value if key in ("vocab", "merges") else _without_idle(value)
            for key, value in tree.items()
            if key != "trim_offsets" and value not in (None, "")
        }
    return [_without_idle(item) for item in tree] if isinstance(tree, list) else tree
