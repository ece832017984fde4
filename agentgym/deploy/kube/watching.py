"""What changes among objects, told without a gap however often the connection drops."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Literal, NamedTuple

from agentgym.deploy.kube.kinds import Object

What = Literal["added", "modified", "deleted", "idle"]
_WHAT: Mapping[str, What] = {"ADDED": "added", "MODIFIED": "modified", "DELETED": "deleted"}


class Change(NamedTuple):
    """One object came, changed or went; `idle`: all is told that is known for now."""

    what: What
    object: Object


IDLE = Change("idle", {})


class Known:
    """Objects as a watch last saw them."""

    def __init__(self) -> None:
        self._objects: dict[str, Object] = {}  # by uid

    def listed(self, items: Iterable[Object]) -> list[Change]:
        """A whole list is what there is now; what it differs by from what was known."""
        now = {each["metadata"]["uid"]: each for each in items}
        before, self._objects = self._objects, now
        changes = [Change("deleted", each) for uid, each in before.items() if uid not in now]
        for uid, each in now.items():
            if uid not in before:
                changes.append(Change("added", each))
            elif _version(before[uid]) != _version(each):
                changes.append(Change("modified", each))
        return changes

    def told(self, event: Object) -> Change | None:
        """One event of a stream; None where it says nothing new."""
        each, what = event["object"], _WHAT[event["type"]]
        uid = each["metadata"]["uid"]
        before = self._objects.pop(uid, None)
        if what == "deleted":
            return Change("deleted", each) if before is not None else None
        self._objects[uid] = each
        if before is None:
            return Change("added", each)
        return Change("modified", each) if _version(before) != _version(each) else None


def events(pieces: Iterable[bytes]) -> Iterator[Object | None]:
    """The events in a stream of bytes, one JSON object a line; None for an empty piece.
    A line that a dropped connection cut is left out. Errors: ValueError for one that is no event.
    """
    rest = b""
    for piece in pieces:
        if not piece:
            yield None
            continue
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.strip():
                event = json.loads(line)
                if not isinstance(event, dict) or "type" not in event or "object" not in event:
                    raise ValueError(f"no event of a watch: {line[:200]!r}")
                yield event


def _version(each: Object) -> str:
    return str(each["metadata"].get("resourceVersion"))
