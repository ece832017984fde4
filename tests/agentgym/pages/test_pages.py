"""Text of models and environments is safe in pages."""

import pytest

from agentgym.pages import FOLDER, STATIC, Pages, marked, moment, number, percent, shown
from agentgym.viewer.bundle import Served
from tests.agentgym.viewer.conftest import HOSTILE


def test_what_steers_a_reader_is_spelled_out_and_markup_is_text():
    assert shown("<b>&\"'") == "&lt;b&gt;&amp;&#34;&#39;"
    assert shown("a\x1b[31m\u202eb\u200bc\r\nd\te") == "a\\x1b[31m\\u202eb\\u200bc\nd\te"
    safe = shown(HOSTILE)
    assert not set("<>\x1b\x07\u202e\u2066\u200b\ud800") & set(safe)
    safe.encode()


def test_very_long_text_is_cut():
    assert len(shown("x" * 5_000_000)) == 20_000


@pytest.mark.parametrize(
    ("text", "words", "expected"),
    [
        ("a Red ball", "red", "a <mark>Red</mark> ball"),
        ("red & ball", '"red &"', "<mark>red &amp;</mark> ball"),
        ("&lt; <b>", "lt b", "&amp;lt; &lt;<mark>b</mark>&gt;"),
        ("birches", "birch*", "<mark>birch</mark>es"),
        ("nothing", "", "nothing"),
        ("a.b", "a.b", "<mark>a.b</mark>"),
        ("<script>", "<script>", "&lt;<mark>script</mark>&gt;"),
    ],
)
def test_words_of_a_search_are_marked_in_what_is_safe(text, words, expected):
    found = str(marked(text, words))
    if words == "lt b":  # an escape is never split
        assert "&<mark>" not in found
        assert "<mark>b</mark>" in found
    elif words == "<script>":
        assert "<script" not in found
    else:
        assert found == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [(None, "–"), (0.5, "0.5"), (1.0, "1"), (12345, "12,345"), (0.12345, "0.123"), (-1.5, "-1.5")],
)
def test_numbers_are_as_short_as_they_are(value, expected):
    assert number(value) == expected
    assert percent(0.5) == "50.0 %"
    assert percent(None) == moment(None) == "–"


def test_every_template_escapes_and_no_text_is_called_safe():
    for template in (FOLDER / "templates").iterdir():
        text = template.read_text()
        assert "|safe" not in text.replace(" ", "")
        assert "autoescape false" not in text
        assert " style=" not in text  # the content security policy forbids it
        assert "onclick" not in text
        assert "://" not in text
    Pages(Served(), is_live=True).prepare()


def test_script_and_style_name_no_other_host_and_no_markup():
    for name in STATIC:
        text = (FOLDER / "static" / name).read_text().replace("http://www.w3.org/2000/svg", "")
        assert "://" not in text
        assert "innerHTML" not in text
        assert "eval(" not in text
