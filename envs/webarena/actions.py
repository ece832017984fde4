"""The action grammar: it parses a policy's reply into one action, or refuses it with the reason.
It evaluates no part of the reply.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

MAX_TEXT = 4_000  # characters typed by one action
MAX_KEYS = 5  # pressed together: each costs two messages to the browser

_FENCED = re.compile(r"```(.*?)```", re.DOTALL)
_NAMED_KEYS = {
    name.lower(): name
    for name in (
        *("Backspace", "Delete", "Enter", "Escape", "Space", "Tab"),
        *("End", "Home", "Insert", "PageDown", "PageUp"),
        *("ArrowDown", "ArrowLeft", "ArrowRight", "ArrowUp"),
        *("Alt", "Control", "Meta", "Shift"),
        *(f"F{number}" for number in range(1, 13)),
    )
}
_ALIASES = {
    "ctrl": "Control",
    "cmd": "Control",
    "command": "Control",
    "meta": "Control",
    "esc": "Escape",
    "del": "Delete",
    "return": "Enter",
    "up": "ArrowUp",
    "down": "ArrowDown",
    "left": "ArrowLeft",
    "right": "ArrowRight",
    "option": "Alt",
    "pgup": "PageUp",
    "pgdn": "PageDown",
}
# kind -> its form, for the policy, and its pattern
_GRAMMAR = {
    "click": ("click [id]", r"click ?\[(?P<id>\d+)\]"),
    "hover": ("hover [id]", r"hover ?\[(?P<id>\d+)\]"),
    "type": (
        "type [id] [text] [1 or 0]",
        r"type ?\[(?P<id>\d+)\] ?\[(?P<text>.+?)\] ?\[(?P<flag>\d+)\]|type ?\[(?P<id_>\d+)\]"
        r" ?\[(?P<text_>.+)\]",
    ),
    "press": ("press [keys, such as Control+a]", r"press ?\[(?P<text>.+)\]"),
    "scroll": ("scroll [down or up]", r"scroll ?(?:\[(?P<text>up|down)\]|(?P<text_>up|down))"),
    "goto": ("goto [url]", r"goto ?\[(?P<text>.+)\]"),
    "new_tab": ("new_tab", r"new_tab"),
    "tab_focus": ("tab_focus [number]", r"(?:tab|page)_focus ?\[(?P<id>\d+)\]"),
    "close_tab": ("close_tab", r"close_tab"),
    "go_back": ("go_back", r"go_back"),
    "go_forward": ("go_forward", r"go_forward"),
    "stop": ("stop [answer]", r"stop ?(?:\[(?P<text>.*)\])?"),
}
_FORMS = {kind: form for kind, (form, _) in _GRAMMAR.items()}
_PATTERNS = {kind: re.compile(pattern, re.DOTALL) for kind, (_, pattern) in _GRAMMAR.items()}


class NoAction(ValueError):
    """The reply contains no valid action; the text, which the policy sees, gives the reason."""


@dataclass(frozen=True, slots=True)
class Action:
    """One parsed action.

    number: an element's id or a tab's index; -1 without a usable one.
    text: text to type, keys to press (Playwright's names), up or down, URL to open, or answer.
    """

    kind: str  # a key of _GRAMMAR
    number: int = -1
    text: str = ""
    enter: bool = False  # press Enter after typing

    def __str__(self) -> str:
        match self.kind:
            case "click" | "hover" | "tab_focus":
                return f"{self.kind} [{self.number}]"
            case "type":
                return f"type [{self.number}] [{self.text}] [{int(self.enter)}]"
            case "press" | "scroll" | "goto" | "stop":
                return f"{self.kind} [{self.text}]"
        return self.kind


def parse(reply: str) -> Action:
    """Parse the action between the first triple backticks, or without these the reply's last line.
    Errors: NoAction.
    """
    text = _action_text(reply)
    word = re.match(r"[A-Za-z_]*", text)
    kind = "tab_focus" if word and word[0] == "page_focus" else word[0] if word else ""
    if kind not in _PATTERNS:
        raise NoAction(
            "There is no action in the reply. Write one in triple backticks, for example ```click"
            f" [12]```; the forms are: {', '.join(_FORMS.values())}. Got: {_short(text)}"
        )
    match = _PATTERNS[kind].fullmatch(text)
    if match is None:
        raise NoAction(
            f"The action cannot be read; the form is ```{_FORMS[kind]}```. Got: {_short(text)}"
        )
    parts = {
        name.rstrip("_"): value for name, value in match.groupdict().items() if value is not None
    }
    digits = parts.get("id", "")
    number = int(digits) if 0 < len(digits) < 10 else -1
    argument = parts.get("text", "")
    if kind == "press":
        argument = keys(argument)
    if kind == "type" and len(argument) > MAX_TEXT:
        raise NoAction(f"At most {MAX_TEXT} characters can be typed at once, got {len(argument)}.")
    enter = kind == "type" and parts.get("flag", "1") == "1"
    return Action(kind, number, argument, enter=enter)


def keys(text: str) -> str:
    """Translate keys such as `ctrl+a` into Playwright's names, `Control+a`. Errors: NoAction."""
    names = text.strip().split("+")
    if names[-2:] == ["", ""]:  # the plus key itself
        names[-2:] = ["+"]
    if len(names) > MAX_KEYS:
        raise NoAction(f"At most {MAX_KEYS} keys can be pressed together, got {len(names)}.")
    return "+".join(_key(name.strip()) for name in names)


def _key(name: str) -> str:
    if len(name) == 1 and name.isprintable():
        return name
    known = _ALIASES.get(name.lower()) or _NAMED_KEYS.get(name.lower())
    if known is None:
        raise NoAction(
            f"There is no key {_short(name)}. Keys are single characters and names such as Enter,"
            " Control, ArrowDown, F5."
        )
    return known


def _action_text(reply: str) -> str:
    fenced = _FENCED.search(reply)
    if fenced is not None:
        return fenced[1].strip()
    lines = reply.strip().splitlines()
    return lines[-1].strip() if lines else ""


def _short(text: str) -> str:
    return repr(text if len(text) <= 80 else f"{text[:80]}...")
