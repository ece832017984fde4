"""Pages of a project's merge requests."""

from __future__ import annotations

from dataclasses import replace

from sites.hub.records import TODAY, MergeRequest, Project
from sites.hub.site import check, commented, me, next_iid, on_project, people, site
from sites.web import NotFound, Refused, Request, Response, existing, matches

_STATES = {"Open": "Open", "Merged": "Merged", "Closed": "Closed", "all": "All"}


@on_project(site.get, "/-/merge_requests")
def merge_requests(request: Request, repo: Project) -> Response:
    requests = request.world.hub.merge_requests.where("project_id", repo.id)
    state, search = request.choice("state", _STATES, "Open"), request.query.get("search", "")
    shown = [merge for merge in requests if state in ("all", merge.state)]
    chosen = [merge for merge in shown if matches(search, merge.title)]
    counts = {
        key: len(requests) if key == "all" else sum(merge.state == key for merge in requests)
        for key in _STATES
    }
    page = request.paged(chosen[::-1], 20)
    return request.page(
        "merge_requests.html", project=repo, page=page, state=state, states=_STATES, counts=counts
    )


def _merge_request(request: Request, repo: Project, iid: int) -> MergeRequest:
    merge = request.world.hub.merge_requests.first("project_id", repo.id, iid=iid)
    return existing(merge, f"There is no merge request !{iid} in {repo.path}.")


def _reviewer(request: Request, repo: Project) -> str:
    """Return the form's reviewer, "" for none. Errors: Refused if no member of the project."""
    reviewer = request.text("reviewer", "Reviewer", required=False)
    if reviewer and not request.world.hub.role(repo, reviewer):
        raise Refused("Reviewer must be a member of the project.")
    return reviewer


@on_project(site.get, "/-/merge_requests/new", private=True)
def new_merge_request(request: Request, repo: Project) -> Response:
    return request.page("merge_form.html", project=repo, people=people(request, repo))


@on_project(site.post, "/-/merge_requests/new", "Developer")
def create_merge_request(request: Request, repo: Project) -> Response:
    table = request.world.hub.merge_requests
    title = request.text("title", "Title", 255)
    body = request.text("body", "Description", 10_000, required=False)
    source = request.one_of("source", "Source branch", repo.branches)
    target = request.one_of("target", "Target branch", repo.branches)
    if source == target:
        raise Refused("Source and target branch must differ.")
    reviewer = _reviewer(request, repo)
    id, iid, author = table.next_id(), next_iid(table, repo), me(request).name
    fields = (title, body, author, reviewer, source, target)
    table.put(MergeRequest(id, repo.id, iid, *fields, "Open", (), TODAY, ()))
    return request.done("The merge request was created.", f"/{repo.path}/-/merge_requests/{iid}")


@on_project(site.get, "/-/merge_requests/{id}")
def merge_request(request: Request, repo: Project, id: int) -> Response:
    merge = _merge_request(request, repo, id)
    return request.page(
        "merge_request.html", project=repo, merge=merge, people=people(request, repo)
    )


@on_project(site.post, "/-/merge_requests/{id}/{step}")
def act(request: Request, repo: Project, id: int, step: str) -> Response:
    """Change a merge request; `step`: comment, approve, reviewer, merge, close or reopen.
    Errors: NotFound for another step; Refused if the visitor's role or the state forbids it.
    """
    merge = _merge_request(request, repo, id)
    if step == "comment":
        new, message = commented(request, merge), "Your comment was added."
    else:
        check(request, repo, "Developer")
        new, message = _changed(request, repo, merge, step)
    request.world.hub.merge_requests.put(new)
    return request.done(message)


def _changed(
    request: Request, repo: Project, merge: MergeRequest, step: str
) -> tuple[MergeRequest, str]:
    if step == "reviewer":
        return replace(merge, reviewer=_reviewer(request, repo)), "The reviewer was saved."
    if step == "reopen" and merge.state == "Closed":
        return replace(merge, state="Open"), "The merge request was reopened."
    if step not in ("approve", "merge", "close"):
        raise NotFound("A merge request offers nothing of this name.")
    if merge.state != "Open":
        raise Refused("This merge request is no longer open.")
    if step == "approve":
        approved = tuple(dict.fromkeys((*merge.approved_by, me(request).name)))
        return replace(merge, approved_by=approved), "You approved the merge request."
    if step == "merge":
        check(request, repo, "Maintainer")
        return replace(merge, state="Merged"), "The merge request was merged."
    return replace(merge, state="Closed"), "The merge request was closed."
