"""Turn by turn gives the token ids of the whole conversation, or is refused."""

import copy
import functools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentgym.config import ChatConfig, ConfigError
from agentgym.models import template
from agentgym.models.chat import DEFAULT_CHAT, ChatRenderer
from agentgym.models.model import train_tokenizer
from agentgym.models.template import CHAT_TEMPLATE
from agentgym.rollouts.episode import extract_action
from tests.agentgym.families import FAMILIES

EXACT = {  # family -> the token that ends its turns
    "qwen2.5": "<|im_end|>",
    "qwen3-instruct": "<|im_end|>",
    "llama3": "<|eot_id|>",
    "llama3.1": "<|eot_id|>",
    "smollm2": "<|im_end|>",
    "phi3-mini": "<|end|>",
    "phi4": "<|im_end|>",
    "phi4-mini": "<|end|>",
    "tinyllama": "</s>",
    "mistral-v0.1": "</s>",
    "mistral-v0.3": "</s>",
    "yi": "<|im_end|>",
    "gemma2": "<end_of_turn>",
    "gemma3": "<end_of_turn>",
    "granite3": "<|end_of_text|>",
    "olmo2": "<|endoftext|>",
    "falcon3": "<|endoftext|>",
}
APPENDED = {  # family -> how its template changes an earlier turn, if that is not refused
    "qwen3": "that hold reasoning when .* '<think>.*probe thought.*' becomes ''",
    "qwen3-thinking": "when .* '<think>.*' becomes ''",
    "deepseek-r1-qwen": "when .* '<think>.*' becomes ''",
}
REFUSED = {"llama2": r"closes an assistant turn with ' </s><s>\[INST\] '; expected a special token"}
NO_INSTRUCTIONS = {
    "mistral-v0.3": "moves the instructions when the conversation grows; set rollout.instr",
    "gemma2": "refuses a conversation: .*System role not supported; set rollout.instructions false",
}
NAMES = ["tiny", *(pytest.param(name, marks=pytest.mark.integration) for name in EXACT)]
APPEND = ChatConfig(history="append")
NO_THOUGHT = "<think>\n\n</think>\n\n"


@pytest.fixture(scope="module", autouse=True)
def trusted_templates():
    """Render trusted templates in this process: starting another takes seconds."""
    with pytest.MonkeyPatch.context() as patch:
        run = functools.cache(lambda asked: json.dumps(template.answer(json.loads(asked))))
        patch.setattr(template, "_in_a_process", run)
        yield


@pytest.fixture(scope="module")
def renderer_of(tokenizer, family_of):
    """Return a function of (name, chat) that gives a renderer, cached for all tests."""
    return functools.cache(
        lambda name, chat=DEFAULT_CHAT: ChatRenderer(
            tokenizer if name == "tiny" else family_of(name), chat
        )
    )


@pytest.fixture(params=NAMES)
def named(request):
    return request.param


@pytest.fixture
def family(named, tokenizer, family_of):
    return tokenizer if named == "tiny" else family_of(named)


@pytest.fixture
def renderer(named, renderer_of):
    return renderer_of(named)


def special(tokenizer):
    return {each for each, token in tokenizer.added_tokens_decoder.items() if token.special}


def control_ids(tokenizer):
    """Return the ids of added tokens, except those of blanks."""
    return {index for token, index in tokenizer.get_added_vocab().items() if token.strip(" \n▁")}


plain_text = st.text(st.characters(codec="utf-8", exclude_characters="<|>"), max_size=30)
# actions have no blanks at the ends: after "assistant\n" a leading one is no canonical
# tokenization, and Llama's templates would trim a trailing one that was sampled
actions = st.text("abcde 0123.,", max_size=12).map(str.strip)


@given(
    first=plain_text,
    system=st.just("") | plain_text,
    turns=st.lists(st.tuples(actions, plain_text), max_size=4),
)
@settings(max_examples=30, deadline=None)
@pytest.mark.parametrize("name", NAMES)
def test_turn_by_turn_equals_the_template_over_the_whole_conversation(
    tokenizer, family_of, renderer_of, name, first, system, turns
):
    tokenizer = tokenizer if name == "tiny" else family_of(name)
    renderer = renderer_of(name)
    system = "" if name in NO_INSTRUCTIONS else system
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


def whole(tokenizer, messages, put_back=(), opening="assistant\n", **variables):
    """Return the template's ids for all messages.
    put_back: pairs (text shown of an answer, text omitted before it after the opening).
    """
    text = tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True, date_string="26 Jul 2024", **variables
    )
    for shown, left_out in put_back:
        assert text.count(f"{opening}{shown}") == 1
        text = text.replace(f"{opening}{shown}", f"{opening}{left_out}{shown}")
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


@pytest.mark.integration
def test_each_family_is_exact_or_refused_with_the_reason(family_of, renderer_of):
    assert EXACT.keys() | APPENDED.keys() | REFUSED.keys() == FAMILIES.keys()
    for name in EXACT:
        renderer_of(name)
    for name, reason in APPENDED.items():
        renderer_of(name, APPEND)
        with pytest.raises(ConfigError, match=f"(?s){reason}.* set model.chat.history append"):
            ChatRenderer(family_of(name))
    for name, reason in REFUSED.items():
        with pytest.raises(ConfigError, match=reason):
            ChatRenderer(family_of(name), APPEND)
    for name, reason in NO_INSTRUCTIONS.items():
        with pytest.raises(ConfigError, match=reason):
            renderer_of(name).start("go", "instructions")


@pytest.mark.integration
def test_what_reads_differently_than_one_expects_is_noted(renderer_of):
    noted = {name: renderer_of(name).notes for name in EXACT if renderer_of(name).notes}
    assert noted.keys() == {"llama3.1", "mistral-v0.1", "mistral-v0.3", "olmo2", "falcon3"}
    for name in ("mistral-v0.1", "mistral-v0.3"):
        assert noted[name][0].startswith("the chat template shows ' ' before an action, not at")
    for name in ("mistral-v0.1", "olmo2", "falcon3"):
        assert "begins an answer with plain text" in noted[name][-1]


def test_a_cut_action_gets_the_closing_tokens_it_did_not_sample(renderer):
    sampled = renderer.action_ids("move")
    assert sampled[-1] == renderer.stop_id
    cut = renderer.bridge("seen", stopped=False)
    assert cut[0] == renderer.stop_id
    assert sampled + renderer.bridge("seen", stopped=True) == sampled[:-1] + cut


def test_added_tokens_in_an_observation_stay_text(named, family, renderer):
    controls = control_ids(family)
    harmless, hostile = "go on", f"go {''.join(family.get_added_vocab())} on"
    rendered = [renderer.start, lambda text: renderer.bridge(text, stopped=True)]
    if named not in NO_INSTRUCTIONS:
        rendered.append(lambda text: renderer.start("x", system=text))
    for render in rendered:
        ids, expected = render(hostile), render(harmless)
        assert [i for i in ids if i in controls] == [i for i in expected if i in controls]
        assert hostile.replace("▁", " ") in family.decode(ids).replace("▁", " ")
    # negative control: the template over the whole conversation gives control tokens
    assert whole(family, [{"role": "user", "content": hostile}]) != renderer.start(hostile)


def test_an_action_that_quotes_a_turn_ends_once(family, renderer):
    quoted = [
        token for token, index in family.get_added_vocab().items() if index in special(family)
    ]
    ids = renderer.action_ids(f"say {''.join(quoted)}")
    assert [each for each in ids if each in control_ids(family)] == [renderer.stop_id]
    assert renderer.text(ids).strip() == f"say {''.join(quoted)}"


@pytest.mark.integration
def test_an_action_is_written_in_the_tokens_a_policy_samples_within_its_turn(
    family_of, renderer_of
):
    for name in ("qwen3-instruct", "deepseek-r1-qwen"):
        tokenizer = family_of(name)
        chat = APPEND if name in APPENDED else DEFAULT_CHAT
        ids = renderer_of(name, chat).action_ids("<think>\nleft?\n</think>\n\ngo <｜User｜>")
        sampled = [each for each in ids if each in control_ids(tokenizer)]
        # DeepSeek's prompt has opened the thought; `<｜User｜>` would begin a turn
        opens = ["<think>"] if name == "qwen3-instruct" else []
        expected = [*opens, "</think>", tokenizer.eos_token]
        assert tokenizer.convert_ids_to_tokens(sampled) == expected
        assert renderer_of(name, chat).text(ids).endswith("go <｜User｜>")
    tokenizer, tool = family_of("qwen2.5"), "<tool_call>\n{}\n</tool_call>"
    ids = renderer_of("qwen2.5").action_ids(tool)
    assert ids[:-1] == tokenizer(tool)["input_ids"]


def test_the_text_of_sampled_ids_has_no_special_tokens(renderer):
    assert renderer.text(renderer.action_ids("turn left")).strip() == "turn left"


@pytest.mark.integration
def test_a_thought_is_read_where_its_tokens_are_special(family_of):
    tokenizer = copy.deepcopy(family_of("qwen2.5"))
    tokenizer.add_special_tokens({"additional_special_tokens": ["<think>", "</think>"]})
    renderer = ChatRenderer(tokenizer)
    ids = renderer.action_ids("<think>\nleft?\n</think>\n\ngo")
    assert renderer.text(ids) == "<think>\nleft?\n</think>\n\ngo"


@pytest.mark.integration
@pytest.mark.parametrize("name", ["qwen2.5", "llama3.1", "tinyllama", "gemma3"])
def test_an_action_ends_with_any_stop_token_and_its_turn_with_the_templates(family_of, name):
    tokenizer = family_of(name)
    other = next(each for each in special(tokenizer) if each != tokenizer.eos_token_id)
    renderer = ChatRenderer(tokenizer, eos_ids=[other, tokenizer.eos_token_id])
    assert renderer.stop_id == tokenizer.convert_tokens_to_ids(EXACT[name])
    assert set(renderer.stop_ids) == {renderer.stop_id, tokenizer.eos_token_id, other}
    words = renderer.action_ids("go")[:-1]
    assert renderer.ends_turn([*words, renderer.stop_id])
    assert not any(map(renderer.ends_turn, ([], words, [*words, other])))
    after = [renderer.stop_id, *renderer.bridge("seen", stopped=True)]
    assert renderer.bridge("seen", stopped=False) == after
    assert renderer.text([*words, other]) == "go"


def thoughtful(renderer, *turns, system=""):
    """Return (ids, messages) of a conversation; turns: (observation, answer)."""
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
    [
        ("qwen3", "off", NO_THOUGHT),
        ("qwen3-thinking", "auto", "<think>\n</think>\n\n"),
        ("deepseek-r1-qwen", "auto", "<think>\n</think>\n\n"),
    ],
)
def test_what_opens_an_answer_stays_where_history_is_appended(family_of, name, thinking, opens):
    tokenizer = family_of(name)
    with pytest.raises(ConfigError, match=r"rewrites earlier turns when .*<think>.*history append"):
        ChatRenderer(tokenizer, ChatConfig(thinking=thinking))
    renderer = ChatRenderer(tokenizer, ChatConfig(history="append", thinking=thinking))
    ids, messages = thoughtful(renderer, ("a", "go 1"), ("b", "go 2"), system="act")
    variables = {"enable_thinking": False} if thinking == "off" else {}
    opening = "<｜Assistant｜>" if name == "deepseek-r1-qwen" else "assistant\n"
    put_back = [("go 1", opens), ("go 2", opens)]
    assert ids == whole(tokenizer, messages, put_back, opening, **variables)
    assert repr(opens) in renderer.notes[0]


@pytest.mark.integration
def test_a_demonstration_closes_the_thought_that_the_prompt_opened(family_of, renderer_of):
    tokenizer, renderer = family_of("qwen3-thinking"), renderer_of("qwen3-thinking", APPEND)
    assert renderer.opens_thought
    assert not renderer_of("qwen3", APPEND).opens_thought
    assert not ChatRenderer(
        family_of("qwen3"), ChatConfig(history="append", thinking="off")
    ).opens_thought
    prompt = renderer.start("go")
    for said, sampled in (
        ("left", "</think>\n\nleft"),
        ("<think>\nso\n</think>\n\nleft", "so\n</think>\n\nleft"),
        ("so\n</think>\n\nleft", "so\n</think>\n\nleft"),
        ("<think>\ncut", "cut"),
    ):
        ids = renderer.action_ids(said)
        assert renderer.text(ids) == sampled
        text = tokenizer.decode(prompt) + sampled + "<|im_end|>"
        assert prompt + ids == tokenizer(text)["input_ids"]
        for action_format in ("plain", "react"):
            action = extract_action(sampled, action_format, opens_thought=True)
            assert action == ("left" if action_format == "plain" and "left" in said else "")


@pytest.mark.integration
def test_history_that_is_appended_says_nothing_where_the_template_only_appends(family_of):
    for name in ("qwen2.5", "llama3"):
        exact, appended = ChatRenderer(family_of(name)), ChatRenderer(family_of(name), APPEND)
        assert appended.notes == exact.notes == []
        assert thoughtful(appended, ("a", "b")) == thoughtful(exact, ("a", "b"))


@pytest.mark.integration
def test_thinking_is_a_setting_of_templates_that_know_it(family_of):
    for thinking in ("on", "off"):
        with pytest.raises(ConfigError, match=rf"model\.chat\.thinking {thinking} is nothing to"):
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


def test_a_prompt_that_ends_within_a_token_is_refused():
    tokenizer = train_tokenizer(["say probe two"] * 9, 300)  # " p" is a token
    tokenizer.chat_template = CHAT_TEMPLATE.replace("<|assistant|>", "<|assistant|>say ")
    with pytest.raises(
        ConfigError, match=r"makes \[.*\] of a whole conversation, of which turn by"
    ):
        ChatRenderer(tokenizer)


@pytest.mark.integration
def test_an_action_that_begins_with_blanks_continues_its_prompt(family_of, renderer_of):
    tokenizer, renderer = family_of("qwen2.5"), renderer_of("qwen2.5")
    prompt, ids = renderer.start("go"), renderer.action_ids("\n\n left")
    assert tokenizer.decode(prompt + ids).endswith("<|im_start|>assistant\n\n\n left<|im_end|>")
    assert renderer.text(ids) == "\n\n left"
