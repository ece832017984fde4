"""Turn by turn gives the ids of the whole conversation, or is refused."""

import copy

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentgym.models.chat import ChatRenderer

# As Qwen2.5 closes and opens turns, its default system text included.
CHATML = (
    "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nYou are a helpful"
    " assistant.<|im_end|>\n{% endif %}{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{"
    " m['content'] }}<|im_end|>\n{% endfor %}{% if add_generation_prompt"
    " %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def chatml():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    core.pre_tokenizer, core.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    specials = ["<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=specials, initial_alphabet=alphabet, show_progress=False
    )
    core.train_from_iterator(["user\nassistant\nsystem\nYou are a helpful assistant."] * 4, trainer)
    made = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<|im_end|>", extra_special_tokens=["<|im_start|>"]
    )
    made.chat_template = CHATML
    return made


@pytest.fixture(params=["tiny", "chatml"])
def family(request, tokenizer, chatml):
    return tokenizer if request.param == "tiny" else chatml


def with_template(tokenizer, template):
    other = copy.deepcopy(tokenizer)
    other.chat_template = template
    return other


plain_text = st.text(st.characters(codec="utf-8", exclude_characters="<|>"), max_size=30)
# an action never begins with white space: after "assistant\n" that would not tokenize canonically
actions = st.text("abcde 0123.,", max_size=12).map(str.lstrip)


@given(
    first=plain_text,
    system=st.just("") | plain_text,
    turns=st.lists(st.tuples(actions, plain_text), max_size=4),
)
@settings(max_examples=60, deadline=None)
@pytest.mark.parametrize("which", ["tiny", "chatml"])
def test_turn_by_turn_equals_the_template_over_the_whole_conversation(
    tokenizer, chatml, which, first, system, turns
):
    tokenizer = tokenizer if which == "tiny" else chatml
    renderer = ChatRenderer(tokenizer)
    messages = [
        *([{"role": "system", "content": system}] if system else []),
        {"role": "user", "content": first},
    ]
    ids = renderer.start(first, system)
    for action, observation in turns:
        ids += renderer.action_ids(action) + renderer.bridge(observation, stopped=True)
        messages += [
            {"role": "assistant", "content": action},
            {"role": "user", "content": observation},
        ]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert ids == tokenizer(text, add_special_tokens=False)["input_ids"]


def test_the_tiny_template_in_full(tokenizer):
    renderer = ChatRenderer(tokenizer)
    names = tokenizer.convert_ids_to_tokens(
        [*renderer.start("a"), *renderer.action_ids("b"), *renderer.bridge("c", stopped=True)]
    )
    assert names == [
        "<|user|>",
        "a",
        "<|assistant|>",
        "b",
        "<|end|>",
        "<|user|>",
        "c",
        "<|assistant|>",
    ]


def test_a_cut_action_gets_the_closing_tokens_it_did_not_sample(family):
    renderer = ChatRenderer(family)
    sampled = renderer.action_ids("move")
    assert sampled[-1] == renderer.stop_id == family.eos_token_id
    cut = renderer.bridge("seen", stopped=False)
    assert cut[0] == renderer.stop_id
    assert sampled + renderer.bridge("seen", stopped=True) == sampled[:-1] + cut


def test_special_text_in_an_observation_stays_text(family):
    renderer = ChatRenderer(family)
    specials = set(family.get_added_vocab().values())
    harmless, hostile = "go on", f"go {''.join(family.get_added_vocab())} on"
    for render in (
        renderer.start,
        lambda text: renderer.bridge(text, stopped=True),
        lambda text: renderer.start("x", system=text),
    ):
        ids, expected = render(hostile), render(harmless)
        assert [i for i in ids if i in specials] == [i for i in expected if i in specials]
        assert hostile in family.decode(ids)
    assert renderer.action_ids(hostile).count(renderer.stop_id) == 1
    # negative control: the template over the whole conversation takes the bait
    text = family.apply_chat_template(
        [{"role": "user", "content": hostile}], tokenize=False, add_generation_prompt=True
    )
    assert family(text, add_special_tokens=False)["input_ids"] != renderer.start(hostile)


def test_the_text_of_sampled_ids_has_no_special_tokens(family):
    renderer = ChatRenderer(family)
    assert renderer.text(renderer.action_ids("turn left")) == "turn left"


PIECE = (
    "{% if m['role'] == 'assistant' %}<|assistant|>{{ TEXT }}<|end|>{% else %}<|user|>{{"
    " m['content'] }}{% endif %}"
)
WRAP = (
    "{% for m in messages %}PIECE{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "m['content'] if loop.index > messages | length - 3 else ''",
            "rewrites earlier turns when",
        ),
        ("''", "rewrites earlier turns when"),
        ("m['content'] ~ loop.revindex", "rewrites earlier turns when"),
        ("m['content'].split('</think>')[-1]", "rewrites earlier turns that hold reasoning"),
    ],
)
def test_a_template_that_rewrites_history_is_refused(tokenizer, text, message):
    # the honest one is not
    ChatRenderer(
        with_template(tokenizer, WRAP.replace("PIECE", PIECE.replace("TEXT", "m['content']")))
    )
    with pytest.raises(ValueError, match=message):
        ChatRenderer(with_template(tokenizer, WRAP.replace("PIECE", PIECE.replace("TEXT", text))))


@pytest.mark.integration
def test_what_cannot_be_extended_is_refused_by_name(tokenizer):
    with pytest.raises(ValueError, match="has no chat template"):
        ChatRenderer(with_template(tokenizer, None))
    with pytest.raises(ValueError, match="expected a special token the policy can sample"):
        ChatRenderer(
            with_template(
                tokenizer,
                WRAP.replace(
                    "PIECE", PIECE.replace("TEXT", "m['content']").replace("<|end|>", "\n")
                ),
            )
        )
    deaf = (
        "{% for m in messages %}{% if m['role'] == 'assistant' %}<|assistant|>{{ m['content']"
        " }}<|end|>{% elif m['role'] == 'user' %}"
    )
    deaf += (
        "<|user|>{{ m['content'] }}{% endif %}{% endfor %}{% if add_generation_prompt"
        " %}<|assistant|>{% endif %}"
    )
    with pytest.raises(ValueError, match="does not show the message 'probe system'"):
        ChatRenderer(with_template(tokenizer, deaf)).start("x", system="instructions")
