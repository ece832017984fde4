"""An expert that plays back a recorded solution of a task, in which elements have a role and a name
instead of an id.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from envs.env import ExpertFailed

if TYPE_CHECKING:
    from envs.webarena.world import Episode

MAX_SCROLLS = 20  # to find one element
_NAMED = re.compile(r"(click|hover|type) \[(\S+) '(.*?)'(?: #(\d+))?\](.*)", re.DOTALL)


class Gold:
    """Playback of the recorded actions, with the current ids of their elements.

    `actions` name an element by role, name and its number among equals: `click [link 'Edit' #2]`.
    It works from the start of the task only, and fails after any action that is not its own.
    """

    def __init__(self, episode: Episode, actions: tuple[str, ...]) -> None:
        self._episode = episode
        self._actions = actions
        self._next = 0
        self._given: list[str] = []  # one action for each turn
        self._page = 0  # id of the page's root element
        # (role, name) -> ids in this page, in page order
        self._seen: dict[tuple[str, str], dict[int, None]] = {}
        self._scrolls = 0

    def next_action(self) -> str:
        """Return the next recorded action, or a scroll if its element is outside the window; the
        same one until it is played.
        Errors: ExpertFailed if another action was played, no recorded action is left, or
        MAX_SCROLLS scrolls did not show the element.
        """
        played, task = self._episode.actions, f"task {self._episode.task.id}"
        if len(self._given) == len(played) + 1:
            return self._given[-1]  # it was not played yet
        if self._given != played:
            raise ExpertFailed(
                f"{task}: the recorded solution works from the start only, and another action was"
                " played"
            )
        if self._next >= len(self._actions):
            raise ExpertFailed(f"{task}: the recorded solution ends after {self._next} actions")
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
        match = _NAMED.fullmatch(action)
        if match is None:
            self._next += 1
            return self._episode.public(action)
        kind, role, name, ordinal, rest = match.groups()
        ids, count = list(self._seen.get((role, name), ())), int(ordinal or 1)
        if len(ids) >= count and ids[count - 1] in self._episode.elements:
            self._next, self._scrolls = self._next + 1, 0
            return f"{kind} [{ids[count - 1]}]{rest}"
        self._scrolls += 1
        if self._scrolls > MAX_SCROLLS:
            raise ExpertFailed(
                f"task {self._episode.task.id}: {action}: there are {len(ids)} of {role} {name!r}"
                " in the page"
            )
        return "scroll [up]" if len(ids) >= count else "scroll [down]"
