"""Pages for playing episodes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qs

from fastapi import FastAPI, Request
from fastapi.responses import RedirectResponse, Response
from starlette.exceptions import HTTPException

from agentgym.config import ConfigError, EnvConfig, asked_of
from agentgym.data.items import PUBLISHED_COUNTS
from agentgym.pages import Pages
from agentgym.viewer.bodies import Gone
from agentgym.viewer.drawing import drawing_of
from agentgym.viewer.live import YOU, Game, Room
from agentgym.viewer.servers import Missing, config_of
from agentgym.viewer.viewer import Viewer

MAX_FORM = 64 * 1024  # bytes
MAX_FIELDS = 20
MAX_TASK = 2**53


def add_play(app: FastAPI, viewer: Viewer, pages: Pages, room: Room) -> None:
    """Add the pages below `/play`."""

    @app.get("/play")
    def choose() -> str:
        withheld: list[str] = []
        envs = [(name, asked_of(env)) for name, env in environments(viewer, withheld).items()]
        return pages.render(
            "play.html", envs=envs, withheld=withheld, game=None, you=YOU, section="play"
        )

    @app.post("/play")
    async def begin(request: Request) -> RedirectResponse:
        form = await form_of(request)
        offered = environments(viewer)
        if form.get("env") not in offered:
            raise ConfigError(f"environment {form.get('env', '')[:60]!r} is none of those offered")
        task = form.get("task", "0")
        if not task.isdecimal() or len(task) > 16 or int(task) >= MAX_TASK:
            raise ConfigError(f"task {task[:20]!r}: expected a number, such as 0 or 17")
        player_name = (
            form.get("policy", "").strip() if form.get("who") == "policy" else form.get("who")
        )
        game = await room.begin(offered[form["env"]], int(task), player_name or YOU)
        return RedirectResponse(f"/play/{game.id}", 303)

    @app.get("/play/{game}")
    def show(game: str) -> str:
        current = _found(room, game)
        drawings = [drawing_of(shot) for shot in current.shots]
        return pages.render(
            "play.html",
            game=current,
            drawings=drawings,
            address=f"play/{current.id}",
            words="",
            section="play",
        )

    @app.post("/play/{game}")
    async def act(game: str, request: Request) -> RedirectResponse:
        current, form = _found(room, game), await form_of(request)
        if form.get("do") == "end":
            await room.end(current)
            return RedirectResponse("/play", 303)
        await room.act(current, form.get("action", "").replace("\r\n", "\n"))
        watch = "?watch=yes" if form.get("watch") else ""
        return RedirectResponse(f"/play/{current.id}{watch}#turn-{len(current.episode.turns)}", 303)

    @app.get("/play/{game}/picture/{turn}")
    def picture(game: str, turn: int) -> Response:
        current = _found(room, game)
        shot = current.shots[turn] if 0 <= turn < len(current.shots) else None
        if shot is None or shot.media_type != "image/png":
            raise HTTPException(404)
        headers = {"Content-Security-Policy": "sandbox"}
        return Response(shot.data, media_type="image/png", headers=headers)


def environments(viewer: Viewer, withheld: list[str] | None = None) -> dict[str, EnvConfig]:
    """Return the environments to choose from, by their label.

    They are the configured ones, those of runs, and this project's own with their defaults.
    withheld: receives the reasons why environments of runs are not offered.
    """
    refused = [] if withheld is None else withheld
    by_label = {env.name: viewer.servers.known(env) for env in viewer.cfg.envs}
    for step in viewer.bodies.steps().values():
        config = config_of(step["config"])
        for options in (config.get("env"), *(config.get("mix") or ())):
            try:
                env = _env(options)
                env = env and viewer.servers.known(env)
            except Missing as missing:
                env = None
                if str(missing) not in refused:
                    refused.append(str(missing))
            if env is not None and env not in by_label.values():
                by_label.setdefault(
                    f"{env.name} as in {step['name']} {(step['key'] or '')[:6]}", env
                )
    for name in PUBLISHED_COUNTS:
        by_label.setdefault(name, EnvConfig(name=name))
    return by_label


def _env(options: Any) -> EnvConfig | None:
    """Return a native environment; None for others, which need servers from a configuration."""
    if not isinstance(options, Mapping) or options.get("dialect", "native") != "native":
        return None
    try:
        return EnvConfig(name=options["name"], options=options.get("options") or {})
    except (KeyError, ValueError):
        return None


async def form_of(request: Request) -> dict[str, str]:
    """Return a form's fields. Errors: HTTPException if it is too long or has too many fields."""
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > MAX_FORM:
            raise HTTPException(413, f"a form may have {MAX_FORM} bytes")
    text = body.decode("utf-8", "replace")
    try:
        fields = parse_qs(text, keep_blank_values=True, max_num_fields=MAX_FIELDS)
    except ValueError:
        raise HTTPException(413, f"a form may have {MAX_FIELDS} fields") from None
    return {name: values[-1] for name, values in fields.items()}


def _found(room: Room, game: str) -> Game:
    current = room.find(game)
    if current is None:
        raise Gone("this game is over and put away; begin another at /play")
    return current
