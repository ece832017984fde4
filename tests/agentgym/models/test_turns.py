"""Chat templates that do not extend a conversation by appending are refused."""

import copy
import json

import pytest

from agentgym.config import ConfigError
from agentgym.models import template
from agentgym.models.chat import ChatRenderer


@pytest.fixture(autouse=True)
def trusted_templates(monkeypatch):
    """Render trusted templates in this process: starting another takes seconds."""
    monkeypatch.setattr(
        template, "_in_a_process", lambda asked: json.dumps(template.answer(json.loads(asked)))
    )


def with_template(tokenizer, template):
    other = copy.deepcopy(tokenizer)
    other.chat_template = template
    return other


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
    # the unchanged template is accepted
    ChatRenderer(
        with_template(tokenizer, WRAP.replace("PIECE", PIECE.replace("TEXT", "m['content']")))
    )
    with pytest.raises(ConfigError, match=message):
        ChatRenderer(with_template(tokenizer, WRAP.replace("PIECE", PIECE.replace("TEXT", text))))


@pytest.mark.integration
def test_what_cannot_be_extended_is_refused_by_name(tokenizer):
    with pytest.raises(ConfigError, match="has no chat template"):
        ChatRenderer(with_template(tokenizer, None))
    with pytest.raises(ConfigError, match="expected a special token the policy can sample"):
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
    with pytest.raises(ConfigError, match="changes blanks around a message"):
        ChatRenderer(with_template(tokenizer, WRAP.replace("PIECE", blanks)))
    # the instructions come before the last message, not the first
    moved = (
        "{% for m in messages if m['role'] != 'system' %}{% if loop.last %}{{"
        " messages[0]['content'] if messages[0]['role'] == 'system' }}{% endif %}PIECE"
        "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    ).replace("PIECE", PIECE.replace("TEXT", "m['content']"))
    with pytest.raises(
        ConfigError, match=r"moves the instructions when .*; set rollout\.instructions"
    ):
        ChatRenderer(with_template(tokenizer, moved)).start("x", system="instructions")
    deaf = (
        "{% for m in messages %}{% if m['role'] == 'assistant' %}<|assistant|>{{ m['content']"
        " }}<|end|>{% elif m['role'] == 'user' %}"
    )
    deaf += (
        "<|user|>{{ m['content'] }}{% endif %}{% endfor %}{% if add_generation_prompt"
        " %}<|assistant|>{% endif %}"
    )
    with pytest.raises(ConfigError, match="does not show the message 'probe system'"):
        ChatRenderer(with_template(tokenizer, deaf)).start("x", system="instructions")


def test_a_template_that_changes_the_middle_of_a_message_is_refused(tokenizer):
    lines = PIECE.replace("TEXT", "m['content']").replace(
        "m['content'] }}{", "m['content'].replace('\\n\\n', '\\n') }}{"
    )
    with pytest.raises(ConfigError, match=r"shows '12\.5% .*' in a whole conversation, and '\\n12"):
        ChatRenderer(with_template(tokenizer, WRAP.replace("PIECE", lines)))
