"""A project's merge requests."""

from __future__ import annotations

from dataclasses import replace

from sites.hub.records import TODAY, MergeRequest, Project, Remark
from sites.hub.site import check, me, project, site
from sites.web import NotFound, Refused, Request, Response, paged

_STATES = {"Open": "Open", "Merged": "Merged", "Closed": "Closed", "all": "All"}


@site.get("/{ns}/{name}/-/merge_requests")
def merge_requests(request: Request, ns: str, name: str) -> Response:
    found = project(request, ns, name)
    every = request.world.hub.merge_requests.where("project_id", found.id)
    state, words = (
        request.choice("state", _STATES, "Open"),
        request.query.get("search", "").lower().split(),
    )
    chosen = [
        one
        for one in every
        if state in ("all", one.state) and all(word in one.title.lower() for word in words)
    ]
    counts = {
        key: len(every) if key == "all" else sum(one.state == key for one in every)
        for key in _STATES
    }
    page = paged(chosen[::-1], request.number("page", 1), 20)
    return request.page(
        "merge_requests.html", project=found, page=page, state=state, states=_STATES, counts=counts
    )


def _merge_request(request: Request, found: Project, iid: int) -> MergeRequest:
    one = next(
        (
            one
            for one in request.world.hub.merge_requests.where("project_id", found.id)
            if one.iid == iid
        ),
        None,
    )
    if one is None:
        raise NotFound(f"There is no merge request !{iid} in {found.path}.")
    return one


@site.get("/{ns}/{name}/-/merge_requests/new", private=True)
def new_merge_request(request: Request, ns: str, name: str) -> Response:
    found = project(request, ns, name)
    people = [
        member.account for member in request.world.hub.memberships.where("project_id", found.id)
    ]
    return request.page("merge_form.html", project=found, people=people)


@site.post("/{ns}/{name}/-/merge_requests/new")
def create_merge_request(request: Request, ns: str, name: str) -> Response:
    found, table = project(request, ns, name), request.world.hub.merge_requests
    check(request, found, "Developer")
    title, body = (
        request.text("title", "Title", 255),
        request.text("body", "Description", 10_000, required=False),
    )
    source = request.one_of("source", "Source branch", found.branches)
    target = request.one_of("target", "Target branch", found.branches)
    if source == target:
        raise Refused("Source and target branch must differ.")
    reviewer = request.text("reviewer", "Reviewer", required=False)
    if reviewer and not request.world.hub.role(found, reviewer):
        raise Refused("Reviewer must be a member of the project.")
    iid = max((one.iid for one in table.where("project_id", found.id)), default=0) + 1
    table.put(
        MergeRequest(
            table.next_id(),
            found.id,
            iid,
            title,
            body,
            me(request).name,
            reviewer,
            source,
            target,
            "Open",
            (),
            TODAY,
            (),
        )
    )
    return request.done("The merge request was created.", f"/{found.path}/-/merge_requests/{iid}")


@site.get("/{ns}/{name}/-/merge_requests/{id}")
def merge_request(request: Request, ns: str, name: str, id: int) -> Response:
    found = project(request, ns, name)
    people = [
        member.account for member in request.world.hub.memberships.where("project_id", found.id)
    ]
    return request.page(
        "merge_request.html", project=found, merge=_merge_request(request, found, id), people=people
    )


@site.post("/{ns}/{name}/-/merge_requests/{id}/{step}")
def act(request: Request, ns: str, name: str, id: int, step: str) -> Response:
    """Comment, approve, assign a reviewer, merge, close or reopen."""
    found = project(request, ns, name)
    one = _merge_request(request, found, id)
    if step == "comment":
        new = replace(
            one,
            remarks=(
                *one.remarks,
                Remark(me(request).name, TODAY, request.text("text", "Comment", 10_000)),
            ),
        )
        message = "Your comment was added."
    else:
        check(request, found, "Developer")
        new, message = _changed(request, found, one, step)
    request.world.hub.merge_requests.put(new)
    return request.done(message)


def _changed(
    request: Request, found: Project, one: MergeRequest, step: str
) -> tuple[MergeRequest, str]:
    name = me(request).name
    if step == "reviewer":
        reviewer = request.text("reviewer", "Reviewer", required=False)
        if reviewer and not request.world.hub.role(found, reviewer):
            raise Refused("Reviewer must be a member of the project.")
        return replace(one, reviewer=reviewer), "The reviewer was saved."
    if step == "reopen" and one.state == "Closed":
        return replace(one, state="Open"), "The merge request was reopened."
    if step not in ("approve", "merge", "close"):
        raise NotFound("A merge request offers nothing of this name.")
    if one.state != "Open":
        raise Refused("This merge request is no longer open.")
    if step == "approve":
        return (
            replace(one, approved_by=tuple(dict.fromkeys((*one.approved_by, name)))),
            "You approved the merge request.",
        )
    if step == "merge":
        check(request, found, "Maintainer")
        return replace(one, state="Merged"), "The merge request was merged."
    return replace(one, state="Closed"), "The merge request was closed."
