"""An expert that plays back how a task is done, written down once: elements by role and name
instead of ids.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from envs.env import ExpertFailed

if TYPE_CHECKING:
    from envs.webarena.episode import Episode

MAX_SCROLLS = 20  # to find one element
_NAMED = re.compile(r"(click|hover|type) \[(\S+) '(.*?)'(?: #(\d+))?\](.*)", re.DOTALL)


class Gold:
    """The next of the written actions, with the id that its element has; scrolls down to an
    element that is not in the window.

    It knows one way, from the start of the task: it has nothing to say once somebody went another.
    """

    def __init__(self, episode: Episode, actions: tuple[str, ...]) -> None:
        self._episode = episode
        self._actions = actions
        self._next = 0
        self._given: list[str] = []  # one for each turn
        self._page = 0  # id of its root
        # (role, name) -> ids in this page, in page order
        self._seen: dict[tuple[str, str], dict[int, None]] = {}
        self._scrolls = 0

    def next_action(self) -> str:
        """Errors: ExpertFailed where the way is not known, was left, or the page does not look
        as it should.
        """
        done = self._episode.actions
        if len(self._given) == len(done) + 1:
            return self._given[-1]  # asked twice
        if self._given != done:
            raise ExpertFailed(
                f"task {self._episode.task.id}: the way is known from the start only, and another"
                " one was taken"
            )
        if self._next >= len(self._actions):
            raise ExpertFailed(
                f"task {self._episode.task.id}: nobody wrote down what to do after {self._next}"
                " actions"
            )
        self._look()
        action = self._resolved(self._actions[self._next])
        self._given.append(action)
        return action

    def _look(self) -> None:
        shown = self._episode.shown
        if shown and shown[0].id != self._page:
            self._page, self._seen = shown[0].id, {}
        for element in shown:
            self._seen.setdefault((element.role, element.name.strip()), {})[element.id] = None

    def _resolved(self, action: str) -> str:
        found = _NAMED.fullmatch(action)
        if found is None:
            self._next += 1
            return self._episode.public(action)
        kind, role, name, place, rest = found.groups()
        same, wanted = list(self._seen.get((role, name), ())), int(place or 1)
        if len(same) >= wanted and same[wanted - 1] in self._episode.elements:
            self._next, self._scrolls = self._next + 1, 0
            return f"{kind} [{same[wanted - 1]}]{rest}"
        self._scrolls += 1
        if self._scrolls > MAX_SCROLLS:
            raise ExpertFailed(
                f"task {self._episode.task.id}: {action}: there are {len(same)} of {role} {name!r}"
                " in the page"
            )
        return "scroll [up]" if len(same) >= wanted else "scroll [down]"
