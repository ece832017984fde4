"""Export of episodes as JSON lines, or as a bundle: a folder of pages that need no server.

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

from agentgym.pages import FOLDER, STATIC, Pages
from agentgym.records import RecordError, to_json
from agentgym.store.manifest import BlobMissing, DigestMismatch
from agentgym.store.posix import write_whole
from agentgym.viewer.bodies import address_of
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
        return StreamingResponse(
            export(viewer, rows), media_type="application/x-ndjson", headers=headers
        )

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
        yield from _lines(viewer, part)


def _lines(viewer: Viewer, rows: Sequence[sqlite3.Row]) -> Iterator[bytes]:
    steps, index = viewer.bodies.steps(), 0
    while index < len(rows):
        try:
            for entry in viewer.bodies.read(rows[index:]):
                origin = {"address": entry.address, "stage": entry.step["name"]}
                yield json.dumps({**origin, **to_json(entry.episode)}).encode() + b"\n"
                index += 1
        except (BlobMissing, DigestMismatch, RecordError) as error:
            row = rows[index]
            address = address_of(row, steps[row["step_id"]])
            yield json.dumps({"address": address, "error": str(error)}).encode() + b"\n"
            index += 1


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


def write_conversations(viewer: Viewer, query: Query, file: Path) -> tuple[int, int]:
    """Write up to MOST_LINES episodes of a query to `file` in AgentGym's published layout, which
    `agentgym data import-trajectories` reads. Return (number written, number left out).
    It holds replies and observations alone. Left out are episodes without a turn or that cannot be
    read, and repeated ones.
    """
    rows = viewer.lists.all(query, MOST_LINES)
    written: dict[bytes, None] = {}
    for line in export(viewer, rows):
        row = json.loads(line)
        if row.get("turns"):
            item_id = f"{row['item']['env']}_{row['item']['task_id']}"
            conversation = {"item_id": item_id, "conversations": [*_messages(row)]}
            written[json.dumps(conversation).encode()] = None
    write_whole(file, b"[" + b",\n ".join(written) + b"]\n")
    return len(written), len(rows) - len(written)


def _messages(row: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the messages of an episode's record, the first observation first."""
    yield {"from": "human", "loss": None, "value": row["first_observation"]}
    for turn in row["turns"]:
        yield {"from": "gpt", "loss": True, "value": turn.get("reply") or turn["action"]}
        yield {"from": "human", "loss": None, "value": turn["observation"]}
