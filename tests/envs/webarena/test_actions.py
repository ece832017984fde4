"""The action grammar: valid actions, and rejected ones with their reason."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envs.webarena.actions import MAX_TEXT, Action, NoAction, parse


@pytest.mark.parametrize(
    ("reply", "action"),
    [
        ("click [12]", Action("click", 12)),
        ("I will click.\n```click [12]```", Action("click", 12)),
        ("```\n  click [12]\n``` or ```click [13]```", Action("click", 12)),
        ("The mug is there.\nclick [12]\n", Action("click", 12)),
        ("hover[3]", Action("hover", 3)),
        ("type [3] [mug] [1]", Action("type", 3, "mug", enter=True)),
        ("type [3] [mug] [0]", Action("type", 3, "mug")),
        ("type [3] [mug]", Action("type", 3, "mug", enter=True)),
        ("type [3] [mug] [7]", Action("type", 3, "mug")),
        ("type [3] [a [b] c] [0]", Action("type", 3, "a [b] c")),
        ("type [3] [a]b]", Action("type", 3, "a]b", enter=True)),
        ("type [3] [1]", Action("type", 3, "1", enter=True)),
        ("```type [3] [two\nlines] [0]```", Action("type", 3, "two\nlines")),
        ("press [Enter]", Action("press", text="Enter")),
        ("press [Ctrl+v]", Action("press", text="Control+v")),
        ("press [cmd+A]", Action("press", text="Control+A")),
        ("press [Meta+a]", Action("press", text="Control+a")),
        ("press [Esc]", Action("press", text="Escape")),
        ("press [Del]", Action("press", text="Delete")),
        ("press [Control++]", Action("press", text="Control++")),
        ("scroll [down]", Action("scroll", text="down")),
        ("scroll up", Action("scroll", text="up")),
        ("goto [http://reddit.com/f/a?b=[1]]", Action("goto", text="http://reddit.com/f/a?b=[1]")),
        ("new_tab", Action("new_tab")),
        ("close_tab", Action("close_tab")),
        ("tab_focus [1]", Action("tab_focus", 1)),
        ("page_focus [0]", Action("tab_focus", 0)),
        ("go_back", Action("go_back")),
        ("go_forward", Action("go_forward")),
        ("stop", Action("stop")),
        ("stop []", Action("stop")),
        ("stop [the [red] one]", Action("stop", text="the [red] one")),
    ],
)
def test_every_form_of_the_grammar_is_read(reply, action):
    assert parse(reply) == action


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        ("", "no action in the reply"),
        ("I think so.", "no action in the reply"),
        ("``````", "no action in the reply"),
        ("clicks [1]", "no action in the reply"),
        ("click 12", "form is ```click \\[id\\]```"),
        ("click [a]", "cannot be read"),
        ("click [1] then stop", "cannot be read"),
        ("type [1]", "cannot be read"),
        ("type [1] []", "cannot be read"),
        ("scroll [left]", "cannot be read"),
        ("scroll [down", "cannot be read"),
        ("press [Hyper+x]", "no key 'Hyper'"),
        ("press [Control+]", "no key ''"),
        ("goto []", "cannot be read"),
        ("new_tab [1]", "cannot be read"),
        (f"press [{'+'.join(['Control'] * 1_000)}]", "At most 5 keys"),
        (f"type [1] [{'a' * (MAX_TEXT + 1)}]", "At most 4000 characters"),
    ],
)
def test_what_cannot_be_read_is_refused_with_the_reason(reply, reason):
    with pytest.raises(NoAction, match=reason):
        parse(reply)


@given(st.text(alphabet="clikstopye [](){}`0123456789+\n", max_size=60))
def test_any_text_is_an_action_or_a_reason(reply):
    try:
        action = parse(reply)
    except NoAction:
        return
    assert parse(f"```{action}```") == action  # the printed form parses to the same action


def test_a_reply_without_action_is_answered_with_every_form():
    with pytest.raises(NoAction) as refused:
        parse("I think so.")
    forms = str(refused.value).partition("the forms are: ")[2]
    for form in ("click [id]", "type [id] [text] [1 or 0]", "scroll [down or up]", "stop [answer]"):
        assert form in forms
