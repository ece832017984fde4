"""Text of pages never yields control tokens; other text has the tokenizer's own ids."""

import pytest
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from agentgym.config import ConfigError
from agentgym.models.tokenizer import Piece, PieceTokenizer
from tests.agentgym.families import FAMILIES, tokenizer_of

KINDS = {family.kind: name for name, family in FAMILIES.items()}
HARMLESS = "  two blanks, 12.5%\n\n\t- Ä 你 🙂 ▁ x \n"


@pytest.fixture(scope="module", params=KINDS.values(), ids=KINDS)
def tokenizer(request):
    made = tokenizer_of(request.param)
    tokens = [AddedToken("<left>", lstrip=True), AddedToken("<right>", rstrip=True), "<tool>"]
    made.add_tokens(tokens)
    made.add_special_tokens({"additional_special_tokens": [AddedToken("<end>", rstrip=True)]})
    return made


@pytest.fixture(scope="module")
def pieces(tokenizer):
    return PieceTokenizer(tokenizer)


def own(tokenizer, text):
    return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])


def test_pieces_have_the_ids_of_the_text_they_make(tokenizer, pieces):
    any_token = pieces.pattern(pieces.controls)
    for token in ("<left>", "<right>", "<tool>", "<end>"):
        parts = [Piece(f"a {token}", any_token), Piece(HARMLESS), Piece(f"{token} b", any_token)]
        assert pieces.encode(parts) == own(tokenizer, "".join(part.text for part in parts))


def test_no_control_token_is_made_of_text_that_may_not_spell_it(tokenizer, pieces):
    any_token = pieces.pattern(pieces.controls)
    for token, index in pieces.controls.items():
        ids = pieces.encode([Piece("<end>", any_token), Piece(f"go {token} on"), Piece("b")])
        assert pieces.controls["<end>"] == ids[0]
        assert not set(ids[1:]) & set(pieces.controls.values())
        assert token in tokenizer.decode(ids[1:])
        # negative control: the tokenizer alone yields the control token
        assert index in own(tokenizer, f"go {token} on")


def test_the_allowed_tokens_of_a_piece_stand_beside_those_it_only_quotes(tokenizer, pieces):
    ids = pieces.encode(
        [
            Piece("<end>", pieces.pattern(["<end>"])),
            Piece("<tool>a<end>", pieces.pattern(["<tool>"])),
        ]
    )
    controls = [each for each in ids if each in pieces.controls.values()]
    assert controls == [pieces.controls["<end>"], pieces.controls["<tool>"]]
    assert tokenizer.decode(ids).endswith("<end>")


def test_a_harmless_text_costs_no_second_tokenizer(pieces):
    fresh = PieceTokenizer(pieces._tokenizer)
    fresh.encode([Piece(HARMLESS), Piece("<tool>", fresh.pattern(["<tool>"]))])
    assert "_renamed" not in vars(fresh)


def test_options_of_other_calls_change_no_ids(tokenizer, pieces):
    parts = [Piece("<end>", pieces.pattern(["<end>"])), Piece("a long text for two tokens")]
    expected = pieces.encode(parts)
    tokenizer("a b c d", truncation=True, max_length=2, split_special_tokens=True)
    assert tokenizer.backend_tokenizer.truncation
    assert pieces.encode(parts) == expected


def of_words(**vocab):
    inner = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>", eos_token="</s>")


def test_a_tokenizer_whose_model_makes_a_control_token_of_text_is_refused():
    with pytest.raises(
        ConfigError, match="makes its control token '</s>' of plain text, so that an"
    ):
        PieceTokenizer(of_words(**{"<unk>": 0, "</s>": 1, "go": 2}))


def test_a_word_that_the_vocabulary_lacks_is_no_control_token():
    pieces = PieceTokenizer(of_words(**{"<unk>": 0, "go": 1}))
    assert pieces.encode([Piece("go on")]) == (1, 0)
    assert pieces.controls["<unk>"] == 0


def test_a_token_that_the_tokenizer_itself_does_not_find_is_text():
    other = tokenizer_of("qwen2.5")
    other.add_tokens([AddedToken("<word>", single_word=True)])
    pieces = PieceTokenizer(other)
    word = pieces.pattern(["<word>"])
    for quoted in ("", "<tool_call>"):
        ids = pieces.encode([Piece("<word>", word), Piece(f"s{quoted} "), Piece("<word>", word)])
        assert [each for each in ids if each in pieces.controls.values()] == [ids[-1]]
        assert other.decode(ids) == f"<word>s{quoted} <word>"
