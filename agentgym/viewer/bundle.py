"""Export of episodes as JSON lines, as trajectories in AgentGym's published layout, or as a bundle:
a folder of pages that need no server.

The addresses of pages differ between a running server (`Served`) and a bundle (`Bundled`).
"""

from __future__ import annotations

import io
import json
import sqlite3
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

from fastapi import FastAPI, Request
from fastapi.responses import Response, StreamingResponse

from agentgym.data.trajectories import MAX_REPLY_CHARS
from agentgym.pages import FOLDER, STATIC, Pages
from agentgym.records import RecordError, to_json
from agentgym.store.manifest import BlobMissing, DigestMismatch
from agentgym.store.posix import write_whole
from agentgym.types import Trajectory
from agentgym.viewer.bodies import IndexedEpisode, address_of
from agentgym.viewer.episode_page import MAX_TURNS, episode_page
from agentgym.viewer.lists_page import list_page
from agentgym.viewer.query import Query, asked
from agentgym.viewer.viewer import Viewer


class Served:
    """Addresses of pages and files on a running server."""

    def home(self) -> str:
        return "/"

    def episodes(self, query: Query) -> str:
        return f"/episodes?{query.text}" if query.text else "/episodes"

    def episode(self, address: str, query: Query | None = None) -> str:
        """Return an episode's address. query: the list that its links to neighbors follow."""
        return f"/e/{address}{asked(list=query.text) if query else ''}"

    def text(self, address: str, turn: int, part: str) -> str:
        return f"/e/{address}/text/{turn}/{part}"

    def picture(self, address: str, turn: int) -> str:
        """Return the address of a turn's picture. address: an episode's, or `play/GAME`."""
        where = address if address.startswith("play/") else f"e/{address}"
        return f"/{where}/picture/{turn}"

    def group(self, address: str) -> str:
        """Return the address of the page with all samples of an episode's item in its commit."""
        return f"/e/{address}/group"

    def item(self, item: str) -> str:
        return f"/item/{quote(item)}"

    def training(self, run: str) -> str:
        return f"/training{asked(run=run)}"

    def compare(self, a: str, b: str) -> str:
        return f"/compare{asked(a=a, b=b)}"

    def page(self, name: str) -> str:
        return f"/{name}"

    def static(self, name: str) -> str:
        return f"/static/{name}"


class Bundled:
    """Relative addresses within a bundle.
    Lists and general pages lead to `index.html`. The address of any other page or picture that
    the bundle does not have is empty.
    """

    def __init__(
        self, episodes: Mapping[str, str], pictures: Mapping[tuple[str, int], str], root: str = ""
    ) -> None:
        """Map addresses of episodes, and (address, turn) of pictures, to files below `root`."""
        self._episodes, self._pictures, self._root = episodes, pictures, root

    def home(self) -> str:
        return f"{self._root}index.html"

    def episodes(self, query: Query) -> str:
        return self.home()

    def episode(self, address: str, query: Query | None = None) -> str:
        return f"{self._root}{self._episodes[address]}" if address in self._episodes else ""

    def picture(self, address: str, turn: int) -> str:
        file = self._pictures.get((address, turn))
        return f"{self._root}{file}" if file else ""

    def nothing(self, *_: object) -> str:
        """Return an empty address: no bundle has this page."""
        return ""

    text = group = item = training = compare = nothing

    def page(self, name: str) -> str:
        return self.home()

    def static(self, name: str) -> str:
        return f"{self._root}{name}"


MOST_LINES = 1_000_000  # episodes in an export
MOST_PAGES = 500  # episodes in a bundle
CHUNK = 200  # episodes read at a time


def add_export(app: FastAPI, viewer: Viewer) -> None:
    """Add `/export.jsonl` and `/bundle.zip`, downloads of the episodes that match a query."""

    @app.get("/export.jsonl")
    def lines(request: Request) -> StreamingResponse:
        query = Query.parse(request.query_params.multi_items())
        rows = viewer.lists.all(query, MOST_LINES)
        headers = {"Content-Disposition": 'attachment; filename="episodes.jsonl"'}
        return StreamingResponse(export(viewer, rows), 200, headers, "application/x-ndjson")

    @app.get("/bundle.zip")
    def bundled(request: Request) -> Response:
        query = Query.parse(request.query_params.multi_items())
        packed = io.BytesIO()
        with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as files:
            for name, content in bundle(viewer, query):
                files.writestr(f"episodes/{name}", content)
        headers = {"Content-Disposition": 'attachment; filename="episodes.zip"'}
        return Response(packed.getvalue(), media_type="application/zip", headers=headers)


def export(viewer: Viewer, rows: Sequence[sqlite3.Row]) -> Iterator[bytes]:
    """Yield a JSON line per episode: `address`, `stage` and the fields of its record.
    An episode that cannot be read has the keys `address` and `error` alone.
    The order of `rows` is kept in chunks of CHUNK; within one, the lines are in the store's order.
    """
    for first in range(0, len(rows), CHUNK):
        # in the store's order, so that a file is read once
        part = sorted(rows[first : first + CHUNK], key=lambda row: tuple(row)[:6])
        for address, entry in _read(viewer, part):
            if isinstance(entry, Exception):
                fields = {"error": str(entry)}
            else:
                fields = {"stage": entry.step["name"], **to_json(entry.episode)}
            yield json.dumps({"address": address, **fields}).encode() + b"\n"


def _read(
    viewer: Viewer, rows: Sequence[sqlite3.Row]
) -> Iterator[tuple[str, IndexedEpisode | Exception]]:
    """Yield (address, episode) in the order of `rows`; the error in place of an unreadable one."""
    steps, index = viewer.bodies.steps(), 0
    while index < len(rows):
        try:
            for entry in viewer.bodies.read(rows[index:]):
                yield entry.address, entry
                index += 1
        except (BlobMissing, DigestMismatch, RecordError) as error:
            row = rows[index]
            yield address_of(row, steps[row["step_id"]]), error
            index += 1


def conversation(episode: Trajectory) -> dict[str, Any]:
    """Return an episode in AgentGym's published layout: texts alone, up to the last action.
    `agentgym.data.trajectories` reads it.
    """
    observations = [episode.first_observation, *(turn.observation for turn in episode.turns)]
    messages = []
    for observation, turn in zip(observations, episode.turns, strict=False):
        messages += [
            {"from": "human", "loss": None, "value": observation},
            {"from": "gpt", "loss": True, "value": turn.reply or turn.action},
        ]
    return {"item_id": episode.item.item_id, "conversations": messages}


def write_conversations(viewer: Viewer, query: Query, file: Path) -> tuple[int, int]:
    """Write up to MOST_LINES episodes of a query to `file` as a JSON list of `conversation`.

    Left out are episodes that cannot be read, that have no action or too long a reply, and
    repetitions of an item with equal replies, because importing refuses them.
    Result: (number written, number left out).
    """
    rows = sorted(viewer.lists.all(query, MOST_LINES), key=lambda row: tuple(row)[:6])
    written: set[tuple[str, ...]] = set()
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("w", encoding="utf-8", errors="replace") as output:
        for _, entry in _read(viewer, rows):
            if isinstance(entry, Exception):
                continue
            row = conversation(entry.episode)
            replies = [each["value"] for each in row["conversations"][1::2]]
            identity = (row["item_id"], *replies)
            if not replies or max(map(len, replies)) > MAX_REPLY_CHARS or identity in written:
                continue
            output.write(",\n" if written else "[\n")
            output.write(json.dumps(row, ensure_ascii=False))
            written.add(identity)
        output.write("\n]\n" if written else "[]\n")
    return len(written), len(rows) - len(written)


def bundle(viewer: Viewer, query: Query) -> Iterator[tuple[str, str | bytes]]:
    """Yield (name, content) of a bundle's files: pages of a query's episodes that need no server.
    `index.html` lists the first MOST_PAGES episodes; each has a page (an error page if it cannot
    be read) and the pictures of its replay, if one is stored. Errors: BadQuery.
    """
    steps = viewer.bodies.steps()
    rows = viewer.lists.all(query, MOST_PAGES)
    names = {address_of(row, steps[row["step_id"]]): index for index, row in enumerate(rows)}
    files = {address: f"e/{index:04d}.html" for address, index in names.items()}
    for name in STATIC:
        yield name, (FOLDER / "static" / name).read_bytes()
    context = list_page(viewer, query)
    context["page"] = replace(context["page"], rows=rows, facets={})
    yield "index.html", Pages(Bundled(files, {}), is_live=False).render("episodes.html", **context)
    for row in rows:
        yield from _episode(viewer, row, files)


def _episode(
    viewer: Viewer, row: sqlite3.Row, files: dict[str, str]
) -> Iterator[tuple[str, str | bytes]]:
    """Yield (name, content) of an episode's page and pictures; if unreadable, of an error page."""
    step = viewer.bodies.steps()[row["step_id"]]
    address = address_of(row, step)
    file = files[address]
    try:
        (entry,) = viewer.bodies.read([row])
    except (BlobMissing, DigestMismatch, RecordError) as error:
        pages = Pages(Bundled(files, {}, "../"), is_live=False)
        title = "This episode cannot be read"
        yield file, pages.render("message.html", title=title, said=str(error), hint="")
        return
    replay = viewer.replays.find(entry)
    shots = [shot for shot in (replay.shots if replay else ()) if shot.media_type == "image/png"]
    pictures = {(address, s.turn): f"p/{file[2:6]}-{s.turn}.png" for s in shots}
    pages = Pages(Bundled(files, pictures, "../"), is_live=False)
    context = episode_page(viewer, entry, overlay="engine", max_turns=max(MAX_TURNS, row["turns"]))
    unlinked = {"permalink": "", "preceding": "", "following": "", "overlays": []}
    yield file, pages.render("episode.html", **{**context, **unlinked})
    for shot in shots:
        yield pictures[address, shot.turn], shot.data


def write_bundle(viewer: Viewer, query: Query, folder: Path) -> int:
    """Write the bundle of a query below `folder`. Return the number of its episodes."""
    count = 0
    for name, content in bundle(viewer, query):
        count += name.startswith("e/")
        write_whole(folder / name, content.encode() if isinstance(content, str) else content)
    return count


def write_lines(viewer: Viewer, query: Query, file: Path) -> int:
    """Write up to MOST_LINES episodes of a query to `file` as JSON lines. Return their number."""
    rows = viewer.lists.all(query, MOST_LINES)
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("wb") as output:
        output.writelines(export(viewer, rows))
    return len(rows)
