"""Changes among objects, reported without a gap even if the connection drops."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Literal, NamedTuple

from agentgym.deploy.kube.kinds import Object

What = Literal["added", "modified", "deleted", "idle"]
_WHAT: Mapping[str, What] = {"ADDED": "added", "MODIFIED": "modified", "DELETED": "deleted"}


class Change(NamedTuple):
    """One object came, changed or went; `idle`: all known changes have been reported."""

    what: What
    object: Object


IDLE = Change("idle", {})


class Known:
    """Objects as a watch last saw them."""

    def __init__(self) -> None:
        self._objects: dict[str, Object] = {}  # by uid

    def listed(self, items: Iterable[Object]) -> list[Change]:
        """Record a whole list as the current objects. Result: its differences from the
        known ones.
        """
        now = {obj["metadata"]["uid"]: obj for obj in items}
        before, self._objects = self._objects, now
        changes = [Change("deleted", obj) for uid, obj in before.items() if uid not in now]
        for uid, obj in now.items():
            if uid not in before:
                changes.append(Change("added", obj))
            elif _version(before[uid]) != _version(obj):
                changes.append(Change("modified", obj))
        return changes

    def told(self, event: Object) -> Change | None:
        """Record one event of a stream. Result: its change, or None if it brings nothing new."""
        obj, what = event["object"], _WHAT[event["type"]]
        uid = obj["metadata"]["uid"]
        before = self._objects.pop(uid, None)
        if what == "deleted":
            return Change("deleted", obj) if before is not None else None
        self._objects[uid] = obj
        if before is None:
            return Change("added", obj)
        return Change("modified", obj) if _version(before) != _version(obj) else None


def events(pieces: Iterable[bytes]) -> Iterator[Object | None]:
    """Yield the events in a stream of bytes, one JSON object a line; None for an empty piece.
    A line that a dropped connection cut is left out. Errors: ValueError for a line that is no
    event.
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


def _version(obj: Object) -> str:
    return str(obj["metadata"].get("resourceVersion"))
