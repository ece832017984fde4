"""An expert that plays back how a task is done, written down once: elements by role and name instead of ids."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING

from envs.env import ExpertFailed

if TYPE_CHECKING:
    from envs.webarena.episode import Episode

_NAMED = re.compile(r"(click|hover|type) \[(\S+) '(.*?)'(?: #(\d+))?\](.*)", re.DOTALL)


class Gold:
    """The next of the written actions, with the id that its element has in the last observation."""

    def __init__(self, episode: Episode, actions: tuple[str, ...], public: Callable[[str], str]) -> None:
        self._episode = episode
        self._actions = actions
        self._public = public

    def next_action(self) -> str:
        """Errors: ExpertFailed where the way is not known, or the page does not look as it should."""
        turn = self._episode.turn
        if turn >= len(self._actions):
            raise ExpertFailed(f"nobody wrote down how task {self._episode.task.id} is done after turn {turn}")
        action = self._actions[turn]
        found = _NAMED.fullmatch(action)
        if found is None:
            return self._public(action)
        kind, role, name, place, rest = found.groups()
        same = [element for element in self._episode.shown if (element.role, element.name.strip()) == (role, name)]
        wanted = int(place or 1)
        if len(same) < wanted:
            shown = ", ".join(dict.fromkeys(e.name for e in self._episode.shown if e.role == role))[:300]
            raise ExpertFailed(f"{action}: there are {len(same)} of {role} {name!r} in the page; of this role: {shown}")
        return f"{kind} [{same[wanted - 1].id}]{rest}"
