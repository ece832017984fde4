"""The code host's site, and the parts that its pages share: account, project, role, comments."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

from sites.hub.content import sha
from sites.hub.records import ROLES, TODAY, Account, Commit, Issue, MergeRequest, Project, Remark
from sites.overlay import Table
from sites.web import Handler, NotFound, Refused, Request, Response, Site

D = TypeVar("D", Issue, MergeRequest)


def _context(request: Request) -> dict[str, Any]:
    hub = request.world.hub
    return {"hub": hub, "user": request.visitor(hub.accounts), "may": may}


site = Site("gitlab", "hub", _context)


def me(request: Request) -> Account:
    """Return the logged-in visitor's account; call it only for pages that require a login."""
    return request.me(request.world.hub.accounts)


def on_project(
    add: Callable[..., Callable[[Handler], Handler]], path: str, role: str = "", **options: bool
) -> Callable[[Handler], Handler]:
    """Return a decorator that registers handler(request, project, ...) for pages of a project.

    add: `site.get` or `site.post`, with its options. path: below the project's.
    role: the least one that may use the page (Refused), "" for all who see the project (NotFound).
    """

    def register(handler: Handler) -> Handler:
        def answer(request: Request, namespace: str, name: str, *parts: Any) -> Response:
            project = request.world.hub.projects.first("path", f"{namespace}/{name}")
            is_private = project is not None and project.visibility == "Private"
            if project is None or (is_private and not may(request, project, "Guest")):
                raise NotFound(f"There is no project {namespace}/{name}.")
            if role:
                check(request, project, role)
            return handler(request, project, *parts)

        add(f"/{{ns}}/{{name}}{path}", **options)(answer)
        return handler

    return register


def may(request: Request, project: Project, role: str) -> bool:
    """Return True if the visitor has at least this role in the project."""
    user = request.visitor(request.world.hub.accounts)
    user_role = request.world.hub.role(project, user.name) if user else ""
    return user_role != "" and ROLES.index(user_role) >= ROLES.index(role)


def check(request: Request, project: Project, role: str) -> None:
    """Raise Refused unless the visitor has at least this role in the project."""
    if not may(request, project, role):
        raise Refused(f"You need the role {role} in {project.path} for this.")


def people(request: Request, project: Project) -> list[str]:
    """Return the names of the accounts that can be assigned: the project's members."""
    members = request.world.hub.memberships.where("project_id", project.id)
    return [member.account for member in members]


def next_iid(table: Table[D], project: Project) -> int:
    return max((record.iid for record in table.where("project_id", project.id)), default=0) + 1


def commented(request: Request, record: D) -> D:
    """Return a copy of the issue or merge request with the form's comment; the caller stores it.
    Errors: Refused if the comment is empty or too long.
    """
    remark = Remark(me(request).name, TODAY, request.text("text", "Comment", 10_000))
    return replace(record, remarks=(*record.remarks, remark))


def commit(request: Request, project: Project, title: str, *, key: str | None = None) -> None:
    """Add a commit by the visitor. key: text to derive its id from; None means the title."""
    commits, author = request.world.hub.commits, me(request).name
    number = commits.next_id()
    id = sha(project.id, number, title if key is None else key)
    commits.put(Commit(number, project.id, id, title, author, TODAY))
