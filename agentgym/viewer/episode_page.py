"""The page of one episode: its turns with the environment's state, and its tokens."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, RedirectResponse, Response
from starlette.exceptions import HTTPException

from agentgym.config import asked_of
from agentgym.pages import MAX_SHOWN, Pages
from agentgym.types import Turn
from agentgym.viewer.bodies import IndexedEpisode, address_of
from agentgym.viewer.drawing import accessibility, drawing_of
from agentgym.viewer.index import Address, config_of
from agentgym.viewer.names import Names
from agentgym.viewer.query import BadQuery, Query, asked
from agentgym.viewer.replay import Missing, environment_of, picture_of
from agentgym.viewer.tokens import OVERLAYS, Token, TokenView, available, spans, why_not_kept
from agentgym.viewer.viewer import Viewer

MAX_TURNS = 100  # on a page
MAX_GIVEN = 4_000  # shown tokens between two actions
PARTS = ("observation", "action", "reply")
LEGENDS = {
    "mask": "Colored: sampled by the policy, and in the loss where the episode is.",
    "engine": "The stronger, the less likely the token was to the engine that sampled it.",
    "learner": "The stronger, the less likely the token was to the learner before the update.",
    "entropy": "The stronger, the less sure the learner was before the update.",
    "ratio": "Blue: more likely after the update; orange: less likely.",
    "advantage": "Blue: above the baseline; orange: below it; strongest at the largest here.",
    "version": "One color for each version of the weights.",
}


@dataclass(frozen=True, slots=True)
class TurnView:
    """A turn, as a page shows it."""

    number: int  # from 1
    record: Turn
    info: str
    tree: list[tuple[int, str, str, str]]  # accessibility tree; empty: plain text
    before: list[Token]  # of the first prompt; empty from turn 2 on
    own: list[Token]  # of the action
    after: list[Token]  # up to the next action


def add_episode(app: FastAPI, viewer: Viewer, pages: Pages) -> None:
    """Add an episode's page, and its texts, replay and pictures, below `/e/`."""

    @app.get("/e/{address}")
    def episode(address: str, request: Request) -> str:
        entry = viewer.bodies.find(address_in(address))
        get = request.query_params.get
        mark, q, listed = (get(name, "") for name in ("overlay", "q", "list"))
        first = _whole(get("from", "1"))
        context = episode_page(viewer, entry, overlay=mark, first=first, words=q, listed=listed)
        return pages.render("episode.html", **context)

    @app.get("/e/{address}/text/{turn}/{part}")
    def text(address: str, turn: int, part: str) -> PlainTextResponse:
        """Return one text of a turn in full, as plain text; turn 0: the first observation.
        part: see PARTS. Errors: 404 for another part or turn.
        """
        record = viewer.bodies.find(address_in(address)).episode
        if part not in (PARTS if turn else PARTS[:1]) or not 0 <= turn <= len(record.turns):
            raise HTTPException(404)
        whole = getattr(record.turns[turn - 1], part) if turn else record.first_observation
        headers = {"Content-Security-Policy": "sandbox"}
        return PlainTextResponse(whole.encode("utf-8", "replace"), headers=headers)

    @app.post("/e/{address}/replay")
    def replay(address: str, request: Request) -> RedirectResponse:
        """Queue a replay of the episode, unless the queue is full, and redirect to its page."""
        viewer.replays.ask(viewer.bodies.find(address_in(address)))
        listed = request.url.query
        return RedirectResponse(f"/e/{address}{f'?{listed}' if listed else ''}", 303)

    @app.get("/e/{address}/replay")
    def replayed(address: str) -> JSONResponse:
        entry = viewer.bodies.find(address_in(address))
        return JSONResponse({"waiting": viewer.replays.is_waiting(entry)})

    @app.get("/e/{address}/picture/{turn}")
    def picture(address: str, turn: int) -> Response:
        stored = viewer.replays.find(viewer.bodies.find(address_in(address)))
        return picture_of(stored.shot(turn) if stored else None, max_age_s=3600)


def episode_page(
    viewer: Viewer,
    entry: IndexedEpisode,
    *,
    overlay: str = "",
    first: int = 1,
    words: str = "",
    listed: str = "",
    max_turns: int = MAX_TURNS,
) -> dict[str, Any]:
    """Return the template context of an episode's page.

    overlay: one of OVERLAYS, ignored if the episode lacks its numbers, or empty.
    first: number of the first turn that is shown, from 1. max_turns: the most that are shown.
    listed: query string of the list that the page was opened from; empty: no list.
    words: search words to mark; empty: those of `listed`.
    Errors: BadQuery for an unknown overlay or a bad query.
    """
    episode = entry.episode
    known = available(episode)
    if overlay and overlay not in OVERLAYS:
        raise BadQuery(f"overlay {overlay[:40]!r} is none of {', '.join(OVERLAYS)}")
    overlay = overlay if overlay in known else ""
    replay = viewer.replays.find(entry)
    turns = turn_views(viewer, entry, overlay, range(first, first + max_turns))
    query = Query.parse(parse_qsl(listed)) if listed else None
    neighbours = _neighbours(viewer, entry, query)
    path, pairs = f"/e/{entry.address}", {"list": listed, "q": words}
    last = min(first + max_turns - 1, len(episode.turns))
    shots = [replay.shot(turn) if replay else None for turn in range(len(episode.turns) + 1)]
    uses, refused = _would_use(viewer, entry)
    return {
        "uses": uses,
        "refused": refused,
        "found": entry,
        "address": entry.address,
        "facts": facts_of(entry, viewer.names),
        "turns": turns,
        "drawings": list(map(drawing_of, shots)),
        "replay": replay,
        "waiting": viewer.replays.is_waiting(entry),
        "replay_link": f"{path}/replay{asked(**pairs, overlay=overlay)}",
        "overlay": overlay,
        "overlays": [(name, OVERLAYS[name]) for name in known],
        "overlay_links": {n: f"{path}{asked(**pairs, overlay=n)}" for n in ("", *OVERLAYS)},
        "legend": LEGENDS.get(overlay, ""),
        "why_not_kept": why_not_kept(episode),
        "words": words or (query.words if query else ""),
        "preceding": neighbours[0],
        "following": neighbours[1],
        "permalink": path,
        "cut_turns": len(episode.turns) - last,
        "more_link": path + asked(**pairs, overlay=overlay, **{"from": str(last + 1)}),
        "stamp": viewer.index.stamp,
    }


def turn_views(
    viewer: Viewer, entry: IndexedEpisode, overlay: str, numbers: range
) -> list[TurnView]:
    """Return views of the turns in `numbers` (from 1).
    A view has no tokens if `overlay` is empty or the turn has none on record.
    """
    episode, shown = entry.episode, None
    if overlay:
        tokenizer = viewer.bodies.tokenizer(entry.step)

        def decode(token: int) -> str:
            if tokenizer is None:
                return f" {token}"
            return str(tokenizer.decode([token], skip_special_tokens=False))

        shown = TokenView(episode, overlay, decode)
    bounds, last = spans(episode), len(episode.turns)
    views = []
    for number in range(numbers.start, min(numbers.stop, last + 1)):
        turn = episode.turns[number - 1]
        begin, _ = bounds[number - 1]
        before, action, after = [], [], []
        if shown is not None and turn.end:
            if number == 1:
                before = shown.span(max(begin, turn.start - MAX_GIVEN), turn.start)
            action = shown.span(turn.start, turn.end)
            begin, end = bounds[number]
            end = episode.turns[number].start if number < last else end
            after = shown.span(begin, min(end, begin + MAX_GIVEN))
        is_tree = episode.item.env == "webarena"
        tree = accessibility(turn.observation[:MAX_SHOWN]) if is_tree else []
        views.append(TurnView(number, turn, _info(turn.info), tree, before, action, after))
    return views


def facts_of(entry: IndexedEpisode, names: Names) -> list[tuple[str, str]]:
    """Return an episode's known facts, for example its step and its reward, as (name, text)."""
    row, episode, step = entry.row, entry.episode, entry.step
    usage, timing = episode.usage, episode.timing
    facts = {
        "stage": f"{names.step(step)}, commit {row['seq']}",
        "optimizer step": "" if row["at"] < 0 else str(row["at"]),
        "split": row["split"],
        "family": row["family"],
        "reward": "none: it does not count" if row["reward"] is None else f"{row['reward']:g}",
        "advantage": "" if row["advantage"] is None else f"{row['advantage']:+.3f} (mean)",
        "turns": f"{row['turns']} of {row['max_turns']}",
        "tokens": f"{row['tokens']:,}, {row['said']:,} sampled" if row["tokens"] else "",
        "weights": ", ".join(str(version) for version in episode.versions if version >= 0),
        "temperature": f"{row['temperature']:g}",
        "attempts": str(row["attempts"]) if row["attempts"] > 1 else "",
        "actions not carried out": str(row["invalid"]) if row["invalid"] else "",
        "time": " · ".join(f"{name} {timing[key]:.2f} s" for name, key in _TIMES if key in timing),
        "calls": f"{usage.num_calls}, {usage.output_tokens:,} tokens out" if usage else "",
        "id": episode.id,
    }
    return [(name, value) for name, value in facts.items() if value]


_TIMES = (("policy", "generate_s"), ("environment", "env_s"), ("in all", "wall_s"))


def _would_use(viewer: Viewer, entry: IndexedEpisode) -> tuple[str, str]:
    """Return (addresses, paths and variables a replay would use, "") or ("", why it cannot run)."""
    try:
        env = environment_of(config_of(entry.step["config"]), entry.episode.item.env)
        return asked_of(viewer.servers.known(env)), ""
    except Missing as missing:
        return "", str(missing)


def _neighbours(viewer: Viewer, entry: IndexedEpisode, query: Query | None) -> list[str]:
    """Return the addresses of the previous and the next episode in a query's list; "" for none."""
    if query is None:
        return ["", ""]
    steps = viewer.bodies.steps()
    return [
        f"/e/{address_of(row, steps[row['step_id']])}{asked(list=query.text)}" if row else ""
        for row in viewer.lists.neighbours(query, entry.row)
    ]


def address_in(text: str) -> Address:
    try:
        return Address.parse(text)
    except ValueError as error:
        raise HTTPException(404) from error


def _whole(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text[:9]) < 10**9:
        raise BadQuery(f"from {text[:40]!r}: expected the number of a turn")
    return int(text)


def _info(info: Mapping[str, Any]) -> str:
    return json.dumps(dict(info), indent=1, ensure_ascii=False)[:8_000] if info else ""
