"""The small web framework of the embedded sites: routes, forms, pages.
Every page is rendered on the server and escaped by default.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date, datetime
from pathlib import Path
from typing import Any, Generic, TypeVar
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from starlette.responses import HTMLResponse, PlainTextResponse
from starlette.responses import Response as Response  # the sites' modules import it from here

from sites.overlay import R, Table
from sites.session_state import DEMO, Note, World
from sites.text import long_day, money, paragraphs

T = TypeVar("T")
_FOLDER = Path(__file__).resolve().parent / "templates"
_KINDS = {"int": r"\d{1,9}", "str": r"[^/]+", "path": r".+"}
_MAX_FIELDS = 100
_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; style-src 'self'; img-src 'self' data:; form-action 'self'; base-uri"
        " 'none'"
    ),
    "referrer-policy": "same-origin",
    "x-content-type-options": "nosniff",
    "cache-control": "no-store",
}


class NotFound(Exception):
    """A page or record that does not exist; the text, for the user, names it."""


class Refused(Exception):
    """A request with invalid values, or by a user without the role. The text is shown to the user;
    a form keeps the typed values.
    """


@dataclass(frozen=True)
class Page(Generic[T]):
    """A slice of a long list; pages and `first_index` count from 1 (0 if the list is empty)."""

    items: Sequence[T]
    number: int
    last: int
    total: int
    first_index: int


@dataclass(frozen=True)
class Request:
    world: World
    site: Site
    method: str
    host: str
    path: str
    query: dict[str, str]
    form: dict[str, str]
    referer: str
    # all values of each form field, for checkboxes
    repeated: dict[str, list[str]] = field(default_factory=dict)

    def page(self, template: str, /, http_status: int = 200, **context: Any) -> Response:
        note = self.world.notes.pop(self.site.name, None)
        shared = {"request": self, "note": note, "old": note.typed if note else {}}
        page = TEMPLATES.get_template(f"{self.site.folder}/{template}")
        text = page.render({**shared, **self.site.context(self), **context})
        return HTMLResponse(text, http_status, _HEADERS)

    def done(self, message: str, to: str | None = None) -> Response:
        """Store the message for the site's next page, and return a redirect to `to`, by default
        the form's page.
        """
        self.world.notes[self.site.name] = Note("success", message)
        return redirect(self.back() if to is None else to)

    def refused(self, message: str) -> Response:
        self.world.notes[self.site.name] = Note("error", message, self.form)
        return redirect(self.back())

    def back(self) -> str:
        """Return path and query of the referring page, "/" if unknown or of another site."""
        referer = urlsplit(self.referer)
        is_here = referer.netloc.partition(":")[0] == self.host
        if not is_here or not referer.path.startswith("/") or referer.path.startswith("//"):
            return "/"
        return referer.path + (f"?{referer.query}" if referer.query else "")

    def visitor(self, users: Table[R]) -> R | None:
        """Return the logged-in visitor's record in `users`; None when logged out."""
        login = self.world.logins[self.site.name]
        return None if login is None else users[login]

    def me(self, users: Table[R]) -> R:
        """Return the visitor's record in `users`; call it only for pages that require a login."""
        user = self.visitor(users)
        assert user is not None
        return user

    def search(self, name: str) -> str:
        return self.query.get(name, "").strip()[:100]

    def paged(self, items: Sequence[T], size: int) -> Page[T]:
        """Return the page of the items that the query's `page` names, by default the first; for a
        number out of range the nearest page. size: items per page.
        """
        last = max(1, -(-len(items) // size))
        number = min(max(self.number("page", 1), 1), last)
        start = (number - 1) * size
        return Page(
            items[start : start + size], number, last, len(items), start + 1 if items else 0
        )

    def number(self, name: str, default: int) -> int:
        value = self.query.get(name, "")
        return int(value) if re.fullmatch(r"[0-9]{1,9}", value) else default

    def choice(self, name: str, among: Iterable[str], default: str) -> str:
        value = self.query.get(name, "")
        return value if value in among else default

    def day(self, name: str, label: str) -> date | None:
        """Parse the query's date `name`; None if empty. Errors: Refused, naming `label`."""
        return parse_day(self.query.get(name, "").strip(), label)

    def changed(self, **changes: Any) -> str:
        """Return path and query of this page, with these query values changed or added."""
        query = {**self.query, **{key: str(value) for key, value in changes.items()}}
        return f"{quote(self.path)}?{urlencode(query)}" if query else quote(self.path)

    def text(self, name: str, label: str, max_chars: int = 200, required: bool = True) -> str:
        """Return the form field `name`, stripped. label: its name in messages.
        Errors: Refused if it is too long, or required and empty.
        """
        value = self.form.get(name, "").replace("\r\n", "\n").replace("\x00", "").strip()
        if required and not value:
            raise Refused(f"{label} is a required field.")
        if len(value) > max_chars:
            raise Refused(
                f"{label} may have {max_chars} characters at most; this has {len(value)}."
            )
        return value

    def whole(self, name: str, label: str, low: int, high: int) -> int:
        value = self.text(name, label, 20)
        if not re.fullmatch(r"[0-9]{1,9}", value) or not low <= int(value) <= high:
            raise Refused(f"{label} must be a whole number from {low} to {high}.")
        return int(value)

    def one_of(self, name: str, label: str, among: Iterable[str]) -> str:
        value = self.text(name, label)
        if value not in among:
            raise Refused(f"{label}: please choose one of the offered values.")
        return value


Handler = Callable[..., Response]


@dataclass(frozen=True)
class Site:
    """The routes of one site."""

    name: str
    folder: str  # of its templates
    context: Callable[[Request], dict[str, Any]]  # the values that all its pages show
    closed: bool = False  # it requires a login
    routes: list[tuple[str, re.Pattern[str], Handler, bool]] = field(default_factory=list)

    def get(self, pattern: str, private: bool = False) -> Callable[[Handler], Handler]:
        return self._route("GET", pattern, private)

    def post(self, pattern: str, private: bool = True) -> Callable[[Handler], Handler]:
        return self._route("POST", pattern, private)

    def show(self, pattern: str, template: str, **context: Any) -> None:
        """Add a page of the logged-in visitor that only renders a template."""
        self.get(pattern, private=True)(lambda request: request.page(template, **context))

    def admit(
        self,
        user: Callable[[World], str],
        password: str,
        *,
        form_field: str = "username",
        wrong: str,
        welcome: Callable[[World], str] = lambda _: "You are signed in.",
        goodbye: str = "You are signed out.",
        after: str = "/",
    ) -> None:
        """Add the pages /login and /logout of the demo user.

        user: returns the name that `form_field` must have; case does not matter in `email`.
        wrong, welcome, goodbye: messages. after: the page to show after the logout.
        """

        @self.get("/login")
        def login(request: Request) -> Response:
            there = local(request.query.get("next", "/"))
            return request.page(
                "login.html", demo=user(request.world), password=password, next=there
            )

        @self.post("/login", private=False)
        def log_in(request: Request) -> Response:
            typed = request.form.get(form_field, "").strip()
            typed = typed.lower() if form_field == "email" else typed
            if typed != user(request.world) or request.form.get("password") != password:
                raise Refused(wrong)
            request.world.logins[self.name] = DEMO
            return request.done(welcome(request.world), local(request.form.get("next", "/")))

        @self.post("/logout", private=False)
        def log_out(request: Request) -> Response:
            request.world.logins[self.name] = None
            return request.done(goodbye, after)

    def answer(self, request: Request) -> Response:
        """Return the response to a request: an error page for Refused and NotFound, but for a
        refused form a redirect to its page.
        """
        try:
            return self._answer(request)
        except Refused as refused:
            if request.method == "POST":
                return request.refused(str(refused))
            return request.page("error.html", 400, title="Invalid request", message=str(refused))
        except NotFound as missing:
            return request.page("error.html", 404, title="Page not found", message=str(missing))

    def _answer(self, request: Request) -> Response:
        allowed = set()
        for method, pattern, handler, private in self.routes:
            match = pattern.fullmatch(request.path)
            if match is None:
                continue
            allowed.add(method)
            if method == request.method:
                needs_login = (private or self.closed) and request.path != "/login"
                if needs_login and request.world.logins.get(self.name) is None:
                    here = request.changed() if method == "GET" else "/"
                    return redirect(f"/login?{urlencode({'next': here})}")
                groups = match.groupdict().items()
                return handler(
                    request,
                    *(int(text) if name.startswith("id") else text for name, text in groups),
                )
        if allowed:
            return plain(405, f"{request.method} is not possible here")
        raise NotFound(f"There is nothing at {request.path}.")

    def _route(self, method: str, pattern: str, private: bool) -> Callable[[Handler], Handler]:
        """Return a decorator that registers a handler for the path pattern. private: needs a login.

        `{id}` and `{id_...}` match a whole number, `{name}` a path segment, `{name:path}` the rest.
        """

        def part(match: re.Match[str]) -> str:
            kind = match[2] or ("int" if match[1].startswith("id") else "str")
            return f"(?P<{match[1]}>{_KINDS[kind]})"

        compiled = re.compile(re.sub(r"\{(\w+)(?::(\w+))?\}", part, pattern) + "/?")

        def register(handler: Handler) -> Handler:
            self.routes.append((method, compiled, handler, private))
            # fixed paths before those with parameters
            self.routes.sort(key=lambda route: route[1].groups)
            return handler

        return register


def redirect(to: str) -> Response:
    location = quote(to, safe="/?&=#%+-._~:@,;!'()*$")
    return Response(b"", 303, {"location": location, "cache-control": "no-store"})


def plain(status: int, text: str) -> Response:
    return PlainTextResponse(f"{text}\n", status, {"cache-control": "no-store"})


def parse_fields(raw: str) -> tuple[dict[str, str], dict[str, list[str]]]:
    """Parse a query or form. Return the last value of each name, and all values of each name.
    Errors: ValueError for more than _MAX_FIELDS fields.
    """
    repeated: dict[str, list[str]] = {}
    for name, value in parse_qsl(
        raw, keep_blank_values=True, max_num_fields=_MAX_FIELDS, errors="replace"
    ):
        repeated.setdefault(name, []).append(value)
    return {name: values[-1] for name, values in repeated.items()}, repeated


def parse_day(value: str, label: str) -> date | None:
    """Parse a date; None if `value` is empty. Errors: Refused, naming `label`."""
    try:
        return datetime.strptime(value, "%Y-%m-%d").date() if value else None
    except ValueError:
        raise Refused(f"{label} must be a date such as 2024-03-15.") from None


def existing(record: T | None, missing: str) -> T:
    """Return the record. Errors: NotFound with the text `missing` if there is none."""
    if record is None:
        raise NotFound(missing)
    return record


def look_up(table: Table[R], id: int, noun: str, **fields: Any) -> R:
    """Return the record of an id. Errors: NotFound, naming `noun`, if absent or `fields` differ."""
    return existing(table.get(id, **fields), f"This {noun} does not exist.")


def matches(search: str, *texts: str) -> bool:
    """Return True if each word of the search occurs in the texts; case does not matter."""
    text = " ".join(texts).lower()
    return all(word in text for word in search.lower().split())


def local(address: str) -> str:
    """Return the address if it is a path on the same site, else "/"."""
    return address if re.match(r"/(?![/\\])", address) else "/"


def pairs(options: Mapping[Any, Any] | Sequence[Any]) -> list[tuple[Any, Any]]:
    """Return (value, text) of each option.

    options: a mapping to texts, or to tuples that begin with a text, or a list of texts.
    """
    if isinstance(options, Mapping):
        return [
            (key, text[0] if isinstance(text, tuple) else text) for key, text in options.items()
        ]
    return [(option, option) for option in options]


TEMPLATES = Environment(
    loader=FileSystemLoader(_FOLDER),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
TEMPLATES.filters.update(money=money, long_day=long_day, paragraphs=paragraphs, pairs=pairs)
