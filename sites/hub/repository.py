"""Pages of a project: home, files, commits, branches, members, stars and forks."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace

from sites.hub.records import ROLES, TODAY, File, Membership, Project, Star
from sites.hub.site import check, commit, may, me, on_project, site
from sites.web import NotFound, Refused, Request, Response, existing, look_up

_MAX_FILE = 100_000


def _entries(request: Request, repo: Project, folder: str) -> list[tuple[str, str, bool]]:
    """Return (name, path, is a folder) of the entries of `folder` ("" or "x/"), folders first."""
    entries = set()
    for file in request.world.hub.files.where("project_id", repo.id):
        if file.path.startswith(folder):
            name, slash, _ = file.path[len(folder) :].partition("/")
            entries.add((name, folder + name, bool(slash)))
    return sorted(entries, key=lambda entry: (not entry[2], entry[0]))


def _file(request: Request, repo: Project, path: str) -> File:
    file = request.world.hub.files.first("project_id", repo.id, path=path)
    return existing(file, f"There is no file {path} in {repo.path}.")


@on_project(site.get, "")
def home(request: Request, repo: Project) -> Response:
    hub = request.world.hub
    return request.page(
        "project.html",
        project=repo,
        entries=_entries(request, repo, ""),
        readme=hub.files.first("project_id", repo.id, path="README.md"),
        commits=hub.commits.where("project_id", repo.id),
    )


@on_project(site.get, "/-/tree/main/{path:path}")
def tree(request: Request, repo: Project, path: str) -> Response:
    entries = _entries(request, repo, path.rstrip("/") + "/")
    if not entries:
        raise NotFound(f"There is no folder {path} in {repo.path}.")
    return request.page("tree.html", project=repo, folder=path.rstrip("/"), entries=entries)


@on_project(site.get, "/-/blob/main/{path:path}")
def blob(request: Request, repo: Project, path: str) -> Response:
    return request.page("blob.html", project=repo, file=_file(request, repo, path))


@on_project(site.get, "/-/edit/main/{path:path}", private=True)
def edit(request: Request, repo: Project, path: str) -> Response:
    return request.page("edit_file.html", project=repo, file=_file(request, repo, path))


@on_project(site.post, "/-/edit/main/{path:path}", "Developer")
def save(request: Request, repo: Project, path: str) -> Response:
    file = _file(request, repo, path)
    message = request.text("message", "Commit message", 200)
    request.world.hub.files.put(replace(file, text=_content(request)))
    commit(request, repo, message)
    return request.done("Your changes have been committed.", f"/{repo.path}/-/blob/main/{path}")


@on_project(site.get, "/-/new/main", private=True)
def new_file(request: Request, repo: Project) -> Response:
    return request.page("edit_file.html", project=repo, file=None)


@on_project(site.post, "/-/new/main", "Developer")
def create_file(request: Request, repo: Project) -> Response:
    files = request.world.hub.files
    path = request.text("path", "File name", 120)
    if not re.fullmatch(r"[A-Za-z0-9._/-]+", path) or any(
        part in ("", ".", "..") for part in path.split("/")
    ):
        raise Refused("File name must be a path such as docs/notes.md.")
    if any(
        f"{path}/".startswith(f"{file.path}/") or f"{file.path}/".startswith(f"{path}/")
        for file in files.where("project_id", repo.id)
    ):
        raise Refused("A file or folder of this name exists already.")
    message = request.text("message", "Commit message", 200)
    files.put(File(files.next_id(), repo.id, path, _content(request)))
    commit(request, repo, message)
    return request.done("The file has been created.", f"/{repo.path}/-/blob/main/{path}")


def _content(request: Request) -> str:
    text = request.text("text", "Content", _MAX_FILE, required=False)
    return text + "\n" if text else ""


@on_project(site.get, "/-/commits/main")
def commits(request: Request, repo: Project) -> Response:
    page = request.paged(request.world.hub.commits.where("project_id", repo.id)[::-1], 20)
    return request.page("commits.html", project=repo, page=page)


@on_project(site.get, "/-/graphs/main")
def contributors(request: Request, repo: Project) -> Response:
    counted = Counter(row.author for row in request.world.hub.commits.where("project_id", repo.id))
    rows = sorted(counted.items(), key=lambda row: (-row[1], row[0]))
    return request.page("contributors.html", project=repo, rows=rows)


@on_project(site.get, "/-/branches")
def branches(request: Request, repo: Project) -> Response:
    return request.page("branches.html", project=repo)


@on_project(site.post, "/-/branches", "Developer")
def create_branch(request: Request, repo: Project) -> Response:
    branch = request.text("branch", "Branch name", 60)
    if branch in repo.branches or not re.fullmatch(r"[A-Za-z0-9._/-]+", branch):
        raise Refused(
            "Branch name must be new, of letters, digits, dots, dashes, slashes and underscores."
        )
    request.world.hub.projects.put(replace(repo, branches=(*repo.branches, branch)))
    return request.done(f"Branch {branch} was created from main.")


@on_project(site.post, "/star")
def star(request: Request, repo: Project) -> Response:
    """Star the project; if the visitor has starred it, remove the star."""
    stars = request.world.hub.stars
    if stars.get(repo.id) is None:
        stars.put(Star(repo.id))
        return request.done(f"You starred {repo.path}.")
    stars.remove(repo.id)
    return request.done(f"You removed your star from {repo.path}.")


@on_project(site.post, "/fork")
def fork(request: Request, repo: Project) -> Response:
    """Copy the project, its files, labels and last commit to the visitor, who becomes the owner.
    The copy has the branch `main` alone; the project's number of forks grows by one.
    Errors: Refused if the visitor has a project of this name.
    """
    hub, owner = request.world.hub, me(request)
    path = f"{owner.name}/{repo.name}"
    if hub.projects.first("path", path) is not None:
        raise Refused(f"The project {path} exists already.")
    copy = replace(repo, id=hub.projects.next_id(), path=path, branches=("main",), created=TODAY)
    copy = hub.projects.put(replace(copy, stars=0, forks=0, forked_from=repo.path))
    hub.projects.put(replace(repo, forks=repo.forks + 1))
    hub.memberships.put(Membership(hub.memberships.next_id(), copy.id, owner.name, "Owner", TODAY))
    for file in hub.files.where("project_id", repo.id):
        hub.files.put(replace(file, id=hub.files.next_id(), project_id=copy.id))
    for label in hub.labels.where("project_id", repo.id):
        hub.labels.put(replace(label, id=hub.labels.next_id(), project_id=copy.id))
    for last in hub.commits.where("project_id", repo.id)[-1:]:
        hub.commits.put(replace(last, id=hub.commits.next_id(), project_id=copy.id))
    return request.done(f"You forked {repo.path}.", f"/{path}")


@on_project(site.get, "/-/project_members")
def members(request: Request, repo: Project) -> Response:
    rows = request.world.hub.memberships.where("project_id", repo.id)
    manages = may(request, repo, "Maintainer")
    return request.page("members.html", project=repo, rows=rows, roles=ROLES, manages=manages)


@on_project(site.post, "/-/project_members", "Maintainer")
def invite(request: Request, repo: Project) -> Response:
    hub = request.world.hub
    account = request.text("username", "Username", 60).removeprefix("@")
    role = request.one_of("role", "Role", ROLES)
    if hub.accounts.first("name", account) is None:
        raise Refused(f"There is no user called {account}.")
    if hub.role(repo, account):
        raise Refused(f"@{account} is a member already.")
    hub.memberships.put(Membership(hub.memberships.next_id(), repo.id, account, role, TODAY))
    return request.done(f"@{account} was added as {role}.")


def _member(request: Request, repo: Project, id: int) -> Membership:
    """Return the project's membership `id` if the visitor may change it.
    Errors: Refused for an owner, or if the visitor is no maintainer; NotFound if there is none.
    """
    check(request, repo, "Maintainer")
    member = look_up(request.world.hub.memberships, id, "member", project_id=repo.id)
    if member.role == "Owner":
        raise Refused("The owner's role cannot be changed.")
    return member


@on_project(site.post, "/-/project_members/{id}/role")
def change_role(request: Request, repo: Project, id: int) -> Response:
    member = _member(request, repo, id)
    role = request.one_of("role", "Role", ROLES)
    request.world.hub.memberships.put(replace(member, role=role))
    return request.done(f"@{member.account} is now {role}.")


@on_project(site.post, "/-/project_members/{id}/remove")
def remove(request: Request, repo: Project, id: int) -> Response:
    member = _member(request, repo, id)
    request.world.hub.memberships.remove(member.id)
    return request.done(f"@{member.account} was removed from the project.")
