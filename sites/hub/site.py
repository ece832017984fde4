"""The code host's site, and the checks that all its pages share: account, project and role."""

from __future__ import annotations

from typing import Any

from sites.hub.records import ROLES, Account, Project
from sites.web import NotFound, Refused, Request, Site


def _context(request: Request) -> dict[str, Any]:
    return {"hub": request.world.hub, "user": account(request), "may": may}


site = Site("gitlab", "hub", _context)


def account(request: Request) -> Account | None:
    login = request.world.logins["gitlab"]
    return None if login is None else request.world.hub.accounts[login]


def me(request: Request) -> Account:
    """The logged-in visitor's account; only for pages that require a login."""
    user = account(request)
    assert user is not None
    return user


def project(request: Request, namespace: str, name: str) -> Project:
    record = request.world.hub.projects.first("path", f"{namespace}/{name}")
    if record is None or (record.visibility == "Private" and not may(request, record, "Guest")):
        raise NotFound(f"There is no project {namespace}/{name}.")
    return record


def may(request: Request, project: Project, role: str) -> bool:
    """Return True if the visitor has at least this role in the project."""
    user = account(request)
    user_role = request.world.hub.role(project, user.name) if user else ""
    return user_role != "" and ROLES.index(user_role) >= ROLES.index(role)


def check(request: Request, project: Project, role: str) -> None:
    """Raise Refused unless the visitor has at least this role in the project."""
    if not may(request, project, role):
        raise Refused(f"You need the role {role} in {project.path} for this.")
