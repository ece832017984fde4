"""A project's members and their roles."""

from __future__ import annotations

from dataclasses import replace

from sites.hub.records import ROLES, TODAY, Membership, Project
from sites.hub.site import check, may, project, site
from sites.web import NotFound, Refused, Request, Response


@site.get("/{ns}/{name}/-/project_members")
def members(request: Request, ns: str, name: str) -> Response:
    repo = project(request, ns, name)
    rows = request.world.hub.memberships.where("project_id", repo.id)
    return request.page(
        "members.html",
        project=repo,
        rows=rows,
        roles=ROLES,
        manages=may(request, repo, "Maintainer"),
    )


@site.post("/{ns}/{name}/-/project_members")
def invite(request: Request, ns: str, name: str) -> Response:
    repo, hub = project(request, ns, name), request.world.hub
    check(request, repo, "Maintainer")
    account = request.text("username", "Username", 60).removeprefix("@")
    role = request.one_of("role", "Role", ROLES)
    if hub.accounts.first("name", account) is None:
        raise Refused(f"There is no user called {account}.")
    if hub.role(repo, account):
        raise Refused(f"@{account} is a member already.")
    hub.memberships.put(Membership(hub.memberships.next_id(), repo.id, account, role, TODAY))
    return request.done(f"@{account} was added as {role}.")


def _member(request: Request, repo: Project, id: int) -> Membership:
    """Return the project's membership `id`, whose role the visitor may change.
    Errors: Refused for an owner, or if the visitor is no maintainer; NotFound.
    """
    check(request, repo, "Maintainer")
    member = request.world.hub.memberships.get(id)
    if member is None or member.project_id != repo.id:
        raise NotFound("This member does not exist.")
    if member.role == "Owner":
        raise Refused("The owner's role cannot be changed.")
    return member


@site.post("/{ns}/{name}/-/project_members/{id}/role")
def change_role(request: Request, ns: str, name: str, id: int) -> Response:
    member = _member(request, project(request, ns, name), id)
    role = request.one_of("role", "Role", ROLES)
    request.world.hub.memberships.put(replace(member, role=role))
    return request.done(f"@{member.account} is now {role}.")


@site.post("/{ns}/{name}/-/project_members/{id}/remove")
def remove(request: Request, ns: str, name: str, id: int) -> Response:
    member = _member(request, project(request, ns, name), id)
    request.world.hub.memberships.remove(member.id)
    return request.done(f"@{member.account} was removed from the project.")
