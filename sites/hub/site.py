"""The code host's site, and what all its pages ask: who is here, which project, what may be
done.
"""

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
    """The account on a page that asks for a login."""
    found = account(request)
    assert found is not None
    return found


def project(request: Request, namespace: str, name: str) -> Project:
    found = request.world.hub.projects.first("path", f"{namespace}/{name}")
    if found is None or (found.visibility == "Private" and not may(request, found, "Guest")):
        raise NotFound(f"There is no project {namespace}/{name}.")
    return found


def may(request: Request, project: Project, role: str) -> bool:
    """Whether the visitor has at least this role in the project."""
    here = account(request)
    own = request.world.hub.role(project, here.name) if here else ""
    return own != "" and ROLES.index(own) >= ROLES.index(role)


def check(request: Request, project: Project, role: str) -> None:
    """Errors: Refused without the role."""
    if not may(request, project, role):
        raise Refused(f"You need the role {role} in {project.path} for this.")
