"""The code host's pages about accounts and lists of projects. The pages of one project are in the
other modules of this package.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from sites.hub.content import WORDS
from sites.hub.records import TODAY, VISIBILITIES, File, Label, Membership, Project
from sites.hub.site import commit, me, site
from sites.web import NotFound, Refused, Request, Response, matches

PASSWORD = "ferry-at-dawn"  # noqa: S105 (of the demo account, printed on the login page)
_SORTS = {"name": "Name", "stars": "Most stars", "newest": "Newest"}


def _visible(request: Request) -> list[Project]:
    return [project for project in request.world.hub.projects if project.visibility != "Private"]


def _listing(
    request: Request, title: str, projects: Sequence[Project], tab: str, **extra: Any
) -> Response:
    hub, sort = request.world.hub, request.choice("sort", _SORTS, "name")
    keys = {
        "name": lambda project: (project.name, project.id),
        "stars": lambda project: (-hub.num_stars(project), project.id),
        "newest": lambda project: (-project.created.toordinal(), -project.id),
    }
    wanted = request.query.get("name", "").strip().lower()
    chosen = [p for p in projects if wanted in f"{p.path} {p.description}".lower()]
    page = request.paged(sorted(chosen, key=keys[sort]), 20)
    context = {"sort": sort, "sorts": _SORTS, "wanted": wanted, "tab": tab, **extra}
    return request.page("projects.html", title=title, page=page, **context)


@site.get("/", private=True)
def home(request: Request) -> Response:
    hub, name = request.world.hub, me(request).name
    ids = {member.project_id for member in hub.memberships.where("account", name)}
    projects = [project for project in hub.projects if project.id in ids]
    return _listing(request, "Your projects", projects, "yours")


@site.get("/dashboard/starred", private=True)
def starred(request: Request) -> Response:
    projects = [request.world.hub.projects[star.id] for star in request.world.hub.stars]
    return _listing(request, "Starred projects", projects, "starred")


@site.get("/explore")
def explore(request: Request) -> Response:
    return _listing(request, "Explore projects", _visible(request), "explore")


@site.get("/dashboard/issues", private=True)
def my_issues(request: Request) -> Response:
    """Show open issues, newest first, assigned to the visitor or (`by=author`) written by them."""
    hub, name = request.world.hub, me(request).name
    by = request.choice("by", ("assignee", "author"), "assignee")
    issues = [issue for issue in hub.issues.where(by, name) if issue.open]
    issues.sort(key=lambda issue: (issue.day, issue.id), reverse=True)
    rows = [(issue, hub.projects[issue.project_id]) for issue in issues]
    return request.page("my_issues.html", rows=rows, by=by)


@site.get("/dashboard/merge_requests", private=True)
def my_requests(request: Request) -> Response:
    """Show open merge requests, newest first, that the visitor wrote or (`by=reviewer`) reviews."""
    hub, name = request.world.hub, me(request).name
    by = request.choice("by", ("reviewer", "author"), "author")
    requests = [merge for merge in hub.merge_requests.where(by, name) if merge.state == "Open"]
    requests.sort(key=lambda merge: (merge.day, merge.id), reverse=True)
    rows = [(merge, hub.projects[merge.project_id]) for merge in requests]
    return request.page("my_requests.html", rows=rows, by=by)


@site.get("/search")
def search(request: Request) -> Response:
    query, hub = request.search("q"), request.world.hub

    def hit(*texts: str) -> bool:
        return bool(query) and matches(query, *texts)

    shown = {project.id: project for project in _visible(request)}
    issues = [
        (issue, shown[issue.project_id])
        for issue in hub.issues
        if issue.project_id in shown and hit(issue.title, issue.body)
    ]
    rows: dict[str, Any] = {
        "projects": [p for p in shown.values() if hit(p.path, p.description, *p.topics)],
        "issues": issues[:-31:-1],
        "accounts": [account for account in hub.accounts if hit(account.name, account.full_name)],
    }
    return request.page("search.html", query=query, num_issues=len(issues), **rows)


@site.post("/projects/new")
def create_project(request: Request) -> Response:
    hub, owner = request.world.hub, me(request)
    name = request.text("name", "Project name", 60)
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name) or name == "-":
        raise Refused(
            "Project name may hold letters, digits, dots, dashes and underscores, and begins with a"
            " letter or digit."
        )
    path = f"{owner.name}/{name}"
    if any(project.path.lower() == path.lower() for project in hub.projects):
        raise Refused(f"The project {path} exists already.")
    visibility = request.one_of("visibility", "Visibility", VISIBILITIES)
    description = request.text("description", "Description", 300, required=False)
    id = hub.projects.next_id()
    project = hub.projects.put(
        Project(id, path, description, visibility, "", (), ("main",), TODAY, 0, 0, "")
    )
    hub.memberships.put(Membership(hub.memberships.next_id(), id, owner.name, "Owner", TODAY))
    for label, color, about in WORDS.labels:
        hub.labels.put(Label(hub.labels.next_id(), id, label, color, about))
    if "readme" in request.form:
        text = f"# {name}\n\n{description}\n"
        hub.files.put(File(hub.files.next_id(), id, "README.md", text))
        commit(request, project, "Initial commit", key=name)
    return request.done(f"Project {name} was successfully created.", f"/{path}")


@site.get("/{name}")
def profile(request: Request, name: str) -> Response:
    """Show an account or group with its projects, without private ones. Errors: NotFound."""
    hub = request.world.hub
    account = hub.accounts.first("name", name)
    projects = [project for project in _visible(request) if project.namespace == name]
    if account is None and not projects:
        raise NotFound(f"There is no user or group called {name}.")
    return _listing(request, account.full_name if account else name, projects, "", profile=account)


@site.post("/profile")
def save_profile(request: Request) -> Response:
    status = request.text("status", "Status", 100, required=False)
    bio = request.text("bio", "Bio", 400, required=False)
    full_name = request.text("full_name", "Full name", 80)
    new = replace(me(request), full_name=full_name, status=status, bio=bio)
    request.world.hub.accounts.put(new)
    return request.done("Profile was successfully updated.", "/profile")


site.show("/projects/new", "new_project.html", visibilities=VISIBILITIES)
site.show("/profile", "profile.html")
site.admit(lambda _: WORDS.demo[0], PASSWORD, wrong="Invalid login or password.", after="/login")
