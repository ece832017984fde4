"""A tokenizer gives the ids of its tokenizer.json, for any declared class."""

import json

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.trainers import BpeTrainer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from agentgym.config import ConfigError
from agentgym.models.model import tokenizer_files, tokenizer_from_files
from agentgym.models.tokenizer import load_tokenizer, require_rows

END, IMAGE = "<|im_end|>", "<image>"
TEXTS = ["a  12 b", "1212 12", " x\n\n\ty  ", "é漢字😀", "for i in range(10):\n    print(i)"]


def splitting_digits():
    """Return a byte-level tokenizer that splits digits, like SmolLM2's."""
    own = Tokenizer(models.BPE())
    own.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    own.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        vocab_size=300,
        show_progress=False,
    )
    own.train_from_iterator(["a  12 b  12 c  12", "12 12 12", "    print print"] * 9, trainer)
    return own


def saved(folder, own, declared, **options):
    """Save the tokenizer with this declared class. Return the folder."""
    wrapped = PreTrainedTokenizerFast(tokenizer_object=own, eos_token=END, **options)
    wrapped.chat_template = "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
    wrapped.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "tokenizer_class": declared}))
    return folder


def ids_of(tokenizer, text):
    return tokenizer(text, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("declared", ["GPT2Tokenizer", "Qwen2Tokenizer", "LlamaTokenizerFast"])
def test_a_declared_class_that_splits_otherwise_gives_way_to_tokenizer_json(
    tmp_path, declared, caplog
):
    own = splitting_digits()
    folder = saved(tmp_path, own, declared)
    theirs = AutoTokenizer.from_pretrained(folder)
    assert any(ids_of(theirs, text) != own.encode(text).ids for text in TEXTS)
    loaded = load_tokenizer(folder, name="tiny")
    again = tokenizer_from_files(tokenizer_files(loaded))
    for tokenizer in (loaded, again):
        for text in TEXTS:
            assert ids_of(tokenizer, text) == own.encode(text).ids
            assert tokenizer.decode(ids_of(tokenizer, text)) == text
        assert (tokenizer.eos_token, tokenizer.chat_template) == (END, theirs.chat_template)
        assert len(tokenizer) == own.get_vocab_size()
    (told,) = caplog.messages  # the reloaded tokenizer warns no more: it declares its class
    assert told.startswith(
        "the tokenizer of tiny splits text according to its tokenizer.json, not as"
    )


def test_a_declared_class_that_does_as_tokenizer_json_says_stays(tokenizer, tmp_path, caplog):
    tokenizer.save_pretrained(tmp_path)
    loaded = load_tokenizer(tmp_path, name="tiny")
    assert type(loaded) is type(tokenizer)
    assert not caplog.messages


def test_special_tokens_that_only_the_class_names_are_kept_where_they_exist(tmp_path):
    own = splitting_digits()
    own.add_special_tokens(["<|endoftext|>"])
    folder = saved(tmp_path, own, "GPT2Tokenizer")
    path = folder / "tokenizer_config.json"
    told = {key: value for key, value in json.loads(path.read_text()).items() if "eos" not in key}
    path.write_text(json.dumps(told))
    assert load_tokenizer(folder, name="tiny").eos_token == "<|endoftext|>"  # GPT-2's default


def test_a_normalizer_or_decoder_counts_as_much_as_the_splitting(tmp_path):
    own = splitting_digits()
    own.pre_tokenizer = pre_tokenizers.ByteLevel(False)  # like GPT2Tokenizer
    own.normalizer = normalizers.Lowercase()
    loaded = load_tokenizer(saved(tmp_path, own, "GPT2Tokenizer"), name="tiny")
    assert ids_of(loaded, "A B") == own.encode("A B").ids == own.encode("a b").ids


@pytest.mark.parametrize("text", ["{}", '{"model": {"type": "BPE"}}', "[]"])
def test_what_is_no_tokenizer_is_refused_in_one_line(tmp_path, text):
    saved(tmp_path, splitting_digits(), "PreTrainedTokenizerFast")
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(ConfigError, match=r"^the tokenizer of tiny cannot be loaded: .+$"):
        load_tokenizer(tmp_path, name="tiny")


def test_a_folder_without_a_tokenizer_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"^the tokenizer of tiny cannot be loaded: .+$"):
        load_tokenizer(tmp_path, name="tiny")


def test_a_tokenizer_with_more_ids_than_the_embedding_is_refused_and_padding_is_not():
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=splitting_digits(), eos_token=END)
    for rows in (len(tokenizer), len(tokenizer) + 64):
        require_rows(tokenizer, rows, "tiny")
    last = tokenizer.convert_ids_to_tokens(len(tokenizer) - 1)
    with pytest.raises(ConfigError) as refused:
        require_rows(tokenizer, len(tokenizer) - 1, "tiny")
    assert str(refused.value).startswith(
        f"the tokenizer of tiny has more ids than its embedding has rows: {last!r} is id"
        f" {len(tokenizer) - 1} of {len(tokenizer) - 1} rows; "
    )


def test_a_special_token_that_no_conversation_holds_needs_no_row():
    own = splitting_digits()
    rows = own.get_vocab_size()
    own.add_special_tokens([IMAGE])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=own, eos_token=END)
    tokenizer.chat_template = "{{ messages[0].content }}" + END
    require_rows(tokenizer, rows, "gemma")
    tokenizer.chat_template = "{{ messages[0].content }}" + IMAGE
    with pytest.raises(ConfigError, match=f"'{IMAGE}' is id {rows} of {rows} rows"):
        require_rows(tokenizer, rows, "gemma")
    ends = PreTrainedTokenizerFast(tokenizer_object=own, eos_token=IMAGE)
    with pytest.raises(ConfigError, match=f"'{IMAGE}' is id {rows} of {rows} rows"):
        require_rows(ends, rows, "gemma")
