"""Terminal control characters in foreign text are escaped."""

import io
import logging
import sys

from envs.plain import PlainFormatter, plain, whole

# window title, cleared screen, link, bell, C1 control sequence, text that is displayed backwards,
# overwritten line
HOSTILE = "ok\x1b]0;owned\x07\x1b[2J\x1b]8;;http://evil\x1b\\x\x9b31m\u202ekcab\u2028\rfailed"
STEERING = set("\x1b\x07\x9b\u202e\u2028\r")


def assert_harmless(shown):
    assert not STEERING & set(shown), shown
    assert "\\x1b]0;owned\\x07" in shown.replace("\n", "")
    assert "\\u202ekcab" in shown.replace("\n", "")


def test_steering_is_spelled_out_and_text_of_any_language_stays():
    assert_harmless(plain(HOSTILE))
    for text in ("两个红球\n\tdéjà vu 😀", "שלום עולם", "a\u200db"):
        assert plain(text) == text
    assert plain("one\r\ntwo") == "one\ntwo"
    assert plain("\x1b") == "\\x1b"
    assert plain("\ud800").encode() == b"\\ud800"


def test_a_log_line_and_its_traceback_are_plain():
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(PlainFormatter("%(levelname)s %(message)s"))
    record = logging.LogRecord("x", logging.WARNING, "", 0, "server: %s", (HOSTILE,), None)
    handler.handle(record)
    try:
        raise ValueError(HOSTILE)
    except ValueError:
        record.exc_info = sys.exc_info()
    handler.handle(record)
    assert_harmless(stream.getvalue())
    assert "Traceback" in stream.getvalue()


def test_half_a_surrogate_pair_is_replaced_and_whole_characters_stay():
    assert whole("wall \ud83d, \ude00") == "wall \ufffd, \ufffd"
    assert whole("déjà vu 😀") == "déjà vu 😀"
