"""A project's issues, labels and milestones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from sites.hub.records import TODAY, Issue, Label, Milestone, Project, Remark
from sites.hub.site import check, may, me, project, site
from sites.web import NotFound, Refused, Request, Response, paged, parse_day

_STATES = {"open": "Open", "closed": "Closed", "all": "All"}
_SORTS = {"newest": "Newest", "oldest": "Oldest", "comments": "Most comments", "due": "Due date"}
_COLORS = ("red", "blue", "teal", "orange", "green", "purple", "gray")


def _people(request: Request, repo: Project) -> list[str]:
    """Names of the accounts that can be assigned: the project's members."""
    return [member.account for member in request.world.hub.memberships.where("project_id", repo.id)]


def _labels(request: Request, repo: Project) -> list[Label]:
    return request.world.hub.labels.where("project_id", repo.id)


def _milestones(request: Request, repo: Project) -> dict[int, str]:
    return {
        milestone.id: milestone.title
        for milestone in request.world.hub.milestones.where("project_id", repo.id)
    }


@site.get("/{ns}/{name}/-/issues")
def issues(request: Request, ns: str, name: str) -> Response:
    repo, hub = project(request, ns, name), request.world.hub
    all_issues = hub.issues.where("project_id", repo.id)
    state, sort = request.choice("state", _STATES, "open"), request.choice("sort", _SORTS, "newest")
    chosen = _filtered(request, all_issues, state)
    keys: dict[str, Any] = {
        "newest": lambda issue: -issue.iid,
        "oldest": lambda issue: issue.iid,
        "comments": lambda issue: (-len(issue.remarks), issue.iid),
        "due": lambda issue: (issue.due is None, issue.due or TODAY, issue.iid),
    }
    counts = {
        "open": sum(issue.open for issue in all_issues),
        "closed": sum(not issue.open for issue in all_issues),
        "all": len(all_issues),
    }
    context: dict[str, Any] = {
        "labels": [label.name for label in _labels(request, repo)],
        "people": sorted({issue.assignee for issue in all_issues if issue.assignee}),
    }
    page = paged(sorted(chosen, key=keys[sort]), request.number("page", 1), 20)
    return request.page(
        "issues.html",
        project=repo,
        page=page,
        state=state,
        states=_STATES,
        counts=counts,
        sort=sort,
        sorts=_SORTS,
        **context,
    )


def _filtered(request: Request, issues: Sequence[Issue], state: str) -> list[Issue]:
    words = request.query.get("search", "").lower().split()
    label, assignee = request.query.get("label", ""), request.query.get("assignee", "")
    return [
        issue
        for issue in issues
        if (state == "all" or issue.open == (state == "open"))
        and (not label or label in issue.labels)
        and (not assignee or issue.assignee == ("" if assignee == "None" else assignee))
        and all(word in f"{issue.title} {issue.body}".lower() for word in words)
    ]


def _form(request: Request, repo: Project, **context: Any) -> Response:
    people, labels = _people(request, repo), [label.name for label in _labels(request, repo)]
    return request.page(
        "issue_form.html",
        project=repo,
        people=people,
        labels=labels,
        milestones=_milestones(request, repo),
        **context,
    )


def _typed(request: Request, repo: Project) -> dict[str, Any]:
    """Return the checked fields of the issue form. Errors: Refused if one is invalid."""
    assignee = request.text("assignee", "Assignee", required=False)
    milestone, due = (
        request.text("milestone", "Milestone", required=False),
        request.text("due", "Due date", required=False),
    )
    if assignee and assignee not in _people(request, repo):
        raise Refused("Assignee must be a member of the project.")
    if milestone and milestone not in map(str, _milestones(request, repo)):
        raise Refused("Milestone: please choose one of the offered values.")
    return {
        "title": request.text("title", "Title", 255),
        "body": request.text("body", "Description", 10_000, required=False),
        "assignee": assignee,
        "labels": tuple(
            label.name
            for label in _labels(request, repo)
            if label.name in request.repeated.get("labels", ())
        ),
        "milestone_id": int(milestone or 0),
        "due": parse_day(due, "Due date") if due else None,
    }


@site.get("/{ns}/{name}/-/issues/new", private=True)
def new_issue(request: Request, ns: str, name: str) -> Response:
    return _form(request, project(request, ns, name), issue=None)


@site.post("/{ns}/{name}/-/issues/new")
def create_issue(request: Request, ns: str, name: str) -> Response:
    repo, table = project(request, ns, name), request.world.hub.issues
    iid = max((issue.iid for issue in table.where("project_id", repo.id)), default=0) + 1
    new = Issue(
        table.next_id(),
        repo.id,
        iid,
        author=me(request).name,
        open=True,
        day=TODAY,
        remarks=(),
        **_typed(request, repo),
    )
    table.put(new)
    return request.done("The issue was created.", f"/{repo.path}/-/issues/{iid}")


def _issue(request: Request, repo: Project, iid: int) -> Issue:
    issues = [
        issue for issue in request.world.hub.issues.where("project_id", repo.id) if issue.iid == iid
    ]
    if not issues:
        raise NotFound(f"There is no issue #{iid} in {repo.path}.")
    return issues[0]


def _own(request: Request, repo: Project, issue: Issue) -> None:
    if issue.author != me(request).name:
        check(request, repo, "Reporter")


@site.get("/{ns}/{name}/-/issues/{id}")
def issue(request: Request, ns: str, name: str, id: int) -> Response:
    repo = project(request, ns, name)
    shown = _issue(request, repo, id)
    milestone = request.world.hub.milestones.get(shown.milestone_id)
    return request.page("issue.html", project=repo, issue=shown, milestone=milestone)


@site.get("/{ns}/{name}/-/issues/{id}/edit", private=True)
def edit_issue(request: Request, ns: str, name: str, id: int) -> Response:
    repo = project(request, ns, name)
    return _form(request, repo, issue=_issue(request, repo, id))


@site.post("/{ns}/{name}/-/issues/{id}/edit")
def save_issue(request: Request, ns: str, name: str, id: int) -> Response:
    repo = project(request, ns, name)
    old = _issue(request, repo, id)
    _own(request, repo, old)
    request.world.hub.issues.put(replace(old, **_typed(request, repo)))
    return request.done("The issue was saved.", f"/{repo.path}/-/issues/{id}")


@site.post("/{ns}/{name}/-/issues/{id}/state")
def turn_issue(request: Request, ns: str, name: str, id: int) -> Response:
    """Close an open issue, reopen a closed one."""
    repo = project(request, ns, name)
    old = _issue(request, repo, id)
    _own(request, repo, old)
    request.world.hub.issues.put(replace(old, open=not old.open))
    return request.done("The issue was closed." if old.open else "The issue was reopened.")


@site.post("/{ns}/{name}/-/issues/{id}/comment")
def comment_issue(request: Request, ns: str, name: str, id: int) -> Response:
    old = _issue(request, project(request, ns, name), id)
    remark = Remark(me(request).name, TODAY, request.text("text", "Comment", 10_000))
    request.world.hub.issues.put(replace(old, remarks=(*old.remarks, remark)))
    return request.done("Your comment was added.")


@site.get("/{ns}/{name}/-/labels")
def labels(request: Request, ns: str, name: str) -> Response:
    repo = project(request, ns, name)
    issues = request.world.hub.issues.where("project_id", repo.id)
    rows = [
        (label, sum(issue.open and label.name in issue.labels for issue in issues))
        for label in _labels(request, repo)
    ]
    return request.page(
        "labels.html",
        project=repo,
        rows=rows,
        colors=_COLORS,
        editable=may(request, repo, "Developer"),
    )


@site.post("/{ns}/{name}/-/labels")
def create_label(request: Request, ns: str, name: str) -> Response:
    repo, table = project(request, ns, name), request.world.hub.labels
    check(request, repo, "Developer")
    title = request.text("title", "Title", 40)
    if any(label.name.lower() == title.lower() for label in _labels(request, repo)):
        raise Refused("A label of this title exists already.")
    color = request.one_of("color", "Color", _COLORS)
    table.put(
        Label(
            table.next_id(),
            repo.id,
            title,
            color,
            request.text("description", "Description", 200, required=False),
        )
    )
    return request.done(f"Label {title} was created.")


@site.get("/{ns}/{name}/-/milestones")
def milestones(request: Request, ns: str, name: str) -> Response:
    repo, hub = project(request, ns, name), request.world.hub
    issues = hub.issues.where("project_id", repo.id)
    rows = []
    for milestone in hub.milestones.where("project_id", repo.id):
        inside = [issue for issue in issues if issue.milestone_id == milestone.id]
        rows.append((milestone, len(inside), sum(not issue.open for issue in inside)))
    return request.page("milestones.html", project=repo, rows=rows)


@site.get("/{ns}/{name}/-/milestones/new", private=True)
def new_milestone(request: Request, ns: str, name: str) -> Response:
    return request.page("milestone_form.html", project=project(request, ns, name))


@site.post("/{ns}/{name}/-/milestones/new")
def create_milestone(request: Request, ns: str, name: str) -> Response:
    repo, table = project(request, ns, name), request.world.hub.milestones
    check(request, repo, "Developer")
    title, description = (
        request.text("title", "Title", 100),
        request.text("description", "Description", 2000, required=False),
    )
    start, due = (
        request.text(key, label, required=False)
        for key, label in (("start", "Start date"), ("due", "Due date"))
    )
    first, last = (
        parse_day(start, "Start date") if start else None,
        (parse_day(due, "Due date") if due else None),
    )
    if first and last and first > last:
        raise Refused("Due date must not be before the start date.")
    new = table.put(Milestone(table.next_id(), repo.id, title, description, first, last, True))
    return request.done("The milestone was created.", f"/{repo.path}/-/milestones/{new.id}")


def _milestone(request: Request, repo: Project, id: int) -> Milestone:
    milestone = request.world.hub.milestones.get(id)
    if milestone is None or milestone.project_id != repo.id:
        raise NotFound("This milestone does not exist.")
    return milestone


@site.get("/{ns}/{name}/-/milestones/{id}")
def milestone(request: Request, ns: str, name: str, id: int) -> Response:
    repo = project(request, ns, name)
    issues = [
        issue
        for issue in request.world.hub.issues.where("project_id", repo.id)
        if issue.milestone_id == id
    ]
    return request.page(
        "milestone.html", project=repo, milestone=_milestone(request, repo, id), issues=issues
    )


@site.post("/{ns}/{name}/-/milestones/{id}/state")
def turn_milestone(request: Request, ns: str, name: str, id: int) -> Response:
    """Close an open milestone, reopen a closed one."""
    repo = project(request, ns, name)
    check(request, repo, "Developer")
    old = _milestone(request, repo, id)
    request.world.hub.milestones.put(replace(old, open=not old.open))
    return request.done("The milestone was closed." if old.open else "The milestone was reopened.")
