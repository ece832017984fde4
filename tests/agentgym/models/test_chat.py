"""Turn by turn gives the ids of the whole conversation, or is refused."""

import copy

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentgym.config import ChatConfig
from agentgym.models.chat import ChatRenderer

EXACT = {  # family -> the special token that ends its turns
    "qwen2.5": "<|im_end|>",
    "qwen3-instruct": "<|im_end|>",
    "llama3": "<|eot_id|>",
    "llama3.1": "<|eot_id|>",
}
NAMES = ["tiny", *(pytest.param(name, marks=pytest.mark.integration) for name in EXACT)]
APPEND = ChatConfig(history="append")
NO_THOUGHT = "<think>\n\n</think>\n\n"


@pytest.fixture(params=NAMES)
def family(request, tokenizer, family_of):
    return tokenizer if request.param == "tiny" else family_of(request.param)


def special_ids(tokenizer):
    return {each for each, token in tokenizer.added_tokens_decoder.items() if token.special}


def with_template(tokenizer, template):
    other = copy.deepcopy(tokenizer)
    other.chat_template = template
    return other


plain_text = st.text(st.characters(codec="utf-8", exclude_characters="<|>"), max_size=30)
# an action never begins with white space: after "assistant\n" that would not tokenize canonically;
# nor does it end with some, which Llama's templates would trim from what was sampled
actions = st.text("abcde 0123.,", max_size=12).map(str.strip)


@given(
    first=plain_text,
    system=st.just("") | plain_text,
    turns=st.lists(st.tuples(actions, plain_text), max_size=4),
)
@settings(max_examples=60, deadline=None)
@pytest.mark.parametrize("name", NAMES)
def test_turn_by_turn_equals_the_template_over_the_whole_conversation(
    tokenizer, family_of, name, first, system, turns
):
    tokenizer = tokenizer if name == "tiny" else family_of(name)
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
    assert ids == whole(tokenizer, messages)
    if tokenizer.bos_token_id is not None:
        assert ids.count(tokenizer.bos_token_id) == 1


def whole(tokenizer, messages, put_back=(), **variables):
    """Ids of the template over all messages. put_back: pairs of what it shows of an answer and
    what it left out before that.
    """
    text = tokenizer.apply_chat_template(
        messages,
        tokenize=False,
        add_generation_prompt=True,
        date_string="26 Jul 2024",
        **variables,
    )
    for shown, left_out in put_back:
        assert text.count(f"assistant\n{shown}") == 1
        text = text.replace(f"assistant\n{shown}", f"assistant\n{left_out}{shown}")
    return tokenizer(text, add_special_tokens=False)["input_ids"]


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
    assert sampled[-1] == renderer.stop_id
    cut = renderer.bridge("seen", stopped=False)
    assert cut[0] == renderer.stop_id
    assert sampled + renderer.bridge("seen", stopped=True) == sampled[:-1] + cut


def test_special_text_in_an_observation_stays_text(family):
    renderer = ChatRenderer(family)
    specials = special_ids(family)
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
    assert whole(family, [{"role": "user", "content": hostile}]) != renderer.start(hostile)


def test_the_text_of_sampled_ids_has_no_special_tokens(family):
    renderer = ChatRenderer(family)
    assert renderer.text(renderer.action_ids("turn left")) == "turn left"


@pytest.mark.integration
@pytest.mark.parametrize(("name", "token"), EXACT.items())
def test_an_action_ends_with_any_stop_token_and_its_turn_with_the_templates(family_of, name, token):
    tokenizer = family_of(name)
    other = next(each for each in special_ids(tokenizer) if each != tokenizer.eos_token_id)
    renderer = ChatRenderer(tokenizer, eos_ids=[other, tokenizer.eos_token_id])
    assert renderer.stop_id == tokenizer.convert_tokens_to_ids(token)
    assert set(renderer.stop_ids) == {renderer.stop_id, tokenizer.eos_token_id, other}
    words = renderer.action_ids("go")[:-1]
    assert renderer.ends_turn([*words, renderer.stop_id])
    assert not any(map(renderer.ends_turn, ([], words, [*words, other])))
    after = [renderer.stop_id, *renderer.bridge("seen", stopped=True)]
    assert renderer.bridge("seen", stopped=False) == after
    assert renderer.text([*words, other]) == "go"


def thoughtful(renderer, *turns, system=""):
    """(ids, messages) of a conversation; turns: (observation, answer)."""
    messages = [{"role": "system", "content": system}] if system else []
    ids = []
    for observation, answer in turns:
        messages += [
            {"role": "user", "content": observation},
            {"role": "assistant", "content": answer},
        ]
        ids += (
            renderer.bridge(observation, stopped=True)
            if ids
            else renderer.start(observation, system)
        )
        ids += renderer.action_ids(answer)
    messages.append({"role": "user", "content": "and now?"})
    return [*ids, *renderer.bridge("and now?", stopped=True)], messages


@pytest.mark.integration
def test_thoughts_of_earlier_turns_stay_where_history_is_appended(family_of):
    tokenizer = family_of("qwen3")
    with pytest.raises(
        ValueError,
        match=r"earlier turns that hold reasoning .*'<think>.* becomes ''.*set model\.chat\.history"
        " append",
    ):
        ChatRenderer(tokenizer)
    renderer = ChatRenderer(tokenizer, APPEND)
    (note,) = renderer.notes
    assert "would turn '<think>\\nprobe thought\\n</think>\\n\\n' of earlier turns into ''" in note
    thoughts = ["<think>\nfirst\n</think>\n\n", "<think>\nsecond ö\n</think>\n\n"]
    said = ["go 1", "go 2"]
    ids, messages = thoughtful(
        renderer, *zip(["a <|im_end|>?", "b"], map(str.__add__, thoughts, said), strict=True)
    )
    plain = [{**each, "content": each["content"].replace("<|im_end|>", "X")} for each in messages]
    mine = thoughtful(renderer, ("a X?", thoughts[0] + "go 1"), ("b", thoughts[1] + "go 2"))[0]
    assert mine == whole(tokenizer, plain, zip(said, thoughts, strict=True))
    assert mine != whole(tokenizer, plain)
    assert "a <|im_end|>?" in tokenizer.decode(ids)
    assert ids.count(renderer.stop_id) == mine.count(renderer.stop_id)
    thought = tokenizer.convert_tokens_to_ids("<think>")
    assert ids.count(thought) == 2


@pytest.mark.integration
@pytest.mark.parametrize(
    ("name", "thinking", "opens"),
    [("qwen3", "off", NO_THOUGHT), ("qwen3-thinking", "auto", "<think>\n")],
)
def test_what_opens_an_answer_stays_where_history_is_appended(family_of, name, thinking, opens):
    tokenizer = family_of(name)
    with pytest.raises(ValueError, match=r"rewrites earlier turns when .*<think>.*history append"):
        ChatRenderer(tokenizer, ChatConfig(thinking=thinking))
    renderer = ChatRenderer(tokenizer, ChatConfig(history="append", thinking=thinking))
    ids, messages = thoughtful(renderer, ("a", "go 1"), ("b", "go 2"), system="act")
    variables = {"enable_thinking": False} if thinking == "off" else {}
    assert ids == whole(tokenizer, messages, [("go 1", opens), ("go 2", opens)], **variables)
    assert repr(opens) in renderer.notes[0]


@pytest.mark.integration
def test_history_that_is_appended_says_nothing_where_the_template_only_appends(family_of):
    for name in ("qwen2.5", "llama3"):
        exact, appended = ChatRenderer(family_of(name)), ChatRenderer(family_of(name), APPEND)
        assert appended.notes == exact.notes == []
        assert thoughtful(appended, ("a", "b")) == thoughtful(exact, ("a", "b"))


@pytest.mark.integration
def test_thinking_is_a_setting_of_templates_that_know_it(family_of):
    for thinking in ("on", "off"):
        with pytest.raises(ValueError, match=rf"model\.chat\.thinking {thinking} is nothing to"):
            ChatRenderer(family_of("qwen2.5"), ChatConfig(thinking=thinking))
    auto, on = (
        ChatRenderer(family_of("qwen3"), ChatConfig(history="append", thinking=thinking))
        for thinking in ("auto", "on")
    )
    assert auto.start("a") == on.start("a")


@pytest.mark.integration
def test_a_template_that_asks_for_the_date_gets_one_that_stays_and_says_so(family_of):
    renderer = ChatRenderer(family_of("llama3.1"))
    assert "Today Date: 26 Jul 2024\n" in family_of("llama3.1").decode(renderer.start("a"))
    assert renderer.notes == [
        "the chat template shows the date; it is 26 Jul 2024 on every day, so that results do not"
        " change with it"
    ]


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
            "does not show the message 'probe two'",
        ),
        ("''", "does not show the message 'probe two'"),
        ("m['content'] ~ loop.revindex", "rewrites earlier turns when .*, not only their thoughts"),
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
    blanks = PIECE.replace("TEXT", "m['content']").replace(
        "m['content'] }}{", "m['content'].lstrip() }}{"
    )
    with pytest.raises(ValueError, match="changes blanks around a message"):
        ChatRenderer(with_template(tokenizer, WRAP.replace("PIECE", blanks)))
    # the instructions stand before the last message, not the first
    moved = (
        "{% for m in messages if m['role'] != 'system' %}{% if loop.last %}{{"
        " messages[0]['content'] if messages[0]['role'] == 'system' }}{% endif %}PIECE"
        "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    ).replace("PIECE", PIECE.replace("TEXT", "m['content']"))
    with pytest.raises(ValueError, match="moves the instructions when"):
        ChatRenderer(with_template(tokenizer, moved)).start("x", system="instructions")
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
