"""The tokenizer that came with a model, loaded as its tokenizer.json says."""

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

RULES = ("normalizer", "pre_tokenizer", "model", "decoder")  # of a tokenizer.json
IN_CONVERSATIONS = ("bos_token", "eos_token", "unk_token")  # a chat template may name these alone


def load_tokenizer(
    place: str | Path, revision: str | None = None, *, name: str
) -> PreTrainedTokenizerBase:
    """place: a folder, or a repository of the Hub; name: of the model, for people.

    For many a class that tokenizer_config.json declares, transformers builds anew how text is
    split, and a model would read other ids than it was trained with. So the class is used only
    where it does what tokenizer.json says. A place without tokenizer.json has nothing to compare.

    Errors: ConfigError where there is none that can be loaded as its tokenizer.json says.
    """
    from tokenizers import Tokenizer
    from transformers import AutoTokenizer, PreTrainedTokenizerFast
    from transformers.utils import cached_file

    options: dict[str, Any] = {"revision": revision, "trust_remote_code": False}
    try:
        declared = AutoTokenizer.from_pretrained(place, **options)
        path = cached_file(
            place, "tokenizer.json", revision=revision, _raise_exceptions_for_missing_entries=False
        )
        if path is None:
            return declared
        own = Tokenizer.from_file(path)
        if _follows(declared, own):
            return declared
        known = own.get_vocab()
        defaults = {  # of the declared class, where the files name none
            key: token for key, token in declared.special_tokens_map.items() if str(token) in known
        }
        plain = PreTrainedTokenizerFast.from_pretrained(place, **options, **defaults)
    except Exception as error:  # the tokenizers library raises nothing narrower
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
        raise ConfigError(f"the tokenizer of {name} cannot be loaded: {reason}") from None
    if not _follows(plain, own):
        raise ConfigError(
            f"transformers does not load the tokenizer of {name} as its tokenizer.json says; save"
            " it anew with PreTrainedTokenizerFast"
        )
    logger.warning(
        "the tokenizer of %s splits text as its tokenizer.json says, not as %s, which transformers"
        " would make of it",
        name,
        type(declared).__name__,
    )
    return plain


def require_rows(tokenizer: PreTrainedTokenizerBase, num_rows: int, name: str) -> None:
    """num_rows: of the embedding; name: of the model, for people.

    A special token beyond the rows is no fault if no conversation holds it: if the chat template
    does not use it. Text that spells it stays text. Gemma 3 has such a token, for images.

    Errors: ConfigError for an id without a row that a conversation may hold.
    """
    special = {str(each) for each in tokenizer.added_tokens_decoder.values() if each.special}
    template = str(tokenizer.chat_template)
    named = {str(tokenizer.special_tokens_map.get(each)) for each in IN_CONVERSATIONS}
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


def _follows(loaded: Any, own: Tokenizer) -> bool:
    """loaded: of transformers, which may have added tokens."""
    backend = getattr(loaded, "backend_tokenizer", None)
    return (
        backend is not None
        and own.get_vocab().items() <= backend.get_vocab().items()
        and _rules(backend) == _rules(own)
    )


def _rules(tokenizer: Tokenizer) -> Any:
    """What decides ids and their text."""
    tree = json.loads(tokenizer.to_str())
    if (tree["decoder"] or {}).get("type") == "ByteLevel":  # it has settings, and heeds none
        tree["decoder"] = {"type": "ByteLevel"}
    return _without_idle({name: tree[name] for name in RULES})


def _without_idle(tree: Any) -> Any:
    """Without empty settings and without those of offsets, which nobody reads."""
    if isinstance(tree, dict):
        return {
            key: value if key in ("vocab", "merges") else _without_idle(value)
            for key, value in tree.items()
            if key != "trim_offsets" and value not in (None, "")
        }
    return [_without_idle(each) for each in tree] if isinstance(tree, list) else tree
