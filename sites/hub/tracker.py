"""Pages of a project's issues, labels and milestones."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from sites.hub.records import TODAY, Issue, Label, Milestone, Project
from sites.hub.site import check, commented, may, me, next_iid, on_project, people, site
from sites.web import Refused, Request, Response, existing, look_up, matches, parse_day

_STATES = {"open": "Open", "closed": "Closed", "all": "All"}
_SORTS = {"newest": "Newest", "oldest": "Oldest", "comments": "Most comments", "due": "Due date"}
_COLORS = ("red", "blue", "teal", "orange", "green", "purple", "gray")


def _labels(request: Request, repo: Project) -> list[Label]:
    return request.world.hub.labels.where("project_id", repo.id)


def _label_names(request: Request, repo: Project) -> list[str]:
    return [label.name for label in _labels(request, repo)]


def _milestones(request: Request, repo: Project) -> dict[int, str]:
    rows = request.world.hub.milestones.where("project_id", repo.id)
    return {milestone.id: milestone.title for milestone in rows}


@on_project(site.get, "/-/issues")
def issues(request: Request, repo: Project) -> Response:
    hub = request.world.hub
    all_issues = hub.issues.where("project_id", repo.id)
    state, sort = request.choice("state", _STATES, "open"), request.choice("sort", _SORTS, "newest")
    search, label = request.query.get("search", ""), request.query.get("label", "")
    assignee = request.query.get("assignee", "")
    chosen = [
        issue
        for issue in all_issues
        if (state == "all" or issue.open == (state == "open"))
        and (not label or label in issue.labels)
        and (not assignee or issue.assignee == ("" if assignee == "None" else assignee))
        and matches(search, issue.title, issue.body)
    ]
    keys: dict[str, Any] = {
        "newest": lambda issue: -issue.iid,
        "oldest": lambda issue: issue.iid,
        "comments": lambda issue: (-len(issue.remarks), issue.iid),
        "due": lambda issue: (issue.due is None, issue.due or TODAY, issue.iid),
    }
    num_open, total = sum(issue.open for issue in all_issues), len(all_issues)
    counts = {"open": num_open, "closed": total - num_open, "all": total}
    return request.page(
        "issues.html",
        project=repo,
        page=request.paged(sorted(chosen, key=keys[sort]), 20),
        state=state,
        states=_STATES,
        counts=counts,
        sort=sort,
        sorts=_SORTS,
        labels=_label_names(request, repo),
        people=sorted({issue.assignee for issue in all_issues if issue.assignee}),
    )


def _form(request: Request, repo: Project, **context: Any) -> Response:
    context |= {"labels": _label_names(request, repo), "milestones": _milestones(request, repo)}
    return request.page("issue_form.html", project=repo, people=people(request, repo), **context)


def _typed(request: Request, repo: Project) -> dict[str, Any]:
    """Return the form's fields as keyword arguments of Issue. Errors: Refused if one is invalid."""
    assignee = request.text("assignee", "Assignee", required=False)
    milestone = request.text("milestone", "Milestone", required=False)
    chosen = request.repeated.get("labels", ())
    due = parse_day(request.text("due", "Due date", required=False), "Due date")
    if assignee and assignee not in people(request, repo):
        raise Refused("Assignee must be a member of the project.")
    if milestone and milestone not in map(str, _milestones(request, repo)):
        raise Refused("Milestone: please choose one of the offered values.")
    return {
        "title": request.text("title", "Title", 255),
        "body": request.text("body", "Description", 10_000, required=False),
        "assignee": assignee,
        "labels": tuple(name for name in _label_names(request, repo) if name in chosen),
        "milestone_id": int(milestone or 0),
        "due": due,
    }


@on_project(site.get, "/-/issues/new", private=True)
def new_issue(request: Request, repo: Project) -> Response:
    return _form(request, repo, issue=None)


@on_project(site.post, "/-/issues/new")
def create_issue(request: Request, repo: Project) -> Response:
    table = request.world.hub.issues
    iid = next_iid(table, repo)
    fields = _typed(request, repo) | {"author": me(request).name, "open": True}
    table.put(Issue(table.next_id(), repo.id, iid, day=TODAY, remarks=(), **fields))
    return request.done("The issue was created.", f"/{repo.path}/-/issues/{iid}")


def _issue(request: Request, repo: Project, iid: int) -> Issue:
    record = request.world.hub.issues.first("project_id", repo.id, iid=iid)
    return existing(record, f"There is no issue #{iid} in {repo.path}.")


def _own(request: Request, repo: Project, issue: Issue) -> None:
    if issue.author != me(request).name:
        check(request, repo, "Reporter")


@on_project(site.get, "/-/issues/{id}")
def issue(request: Request, repo: Project, id: int) -> Response:
    shown = _issue(request, repo, id)
    milestone = request.world.hub.milestones.get(shown.milestone_id)
    return request.page("issue.html", project=repo, issue=shown, milestone=milestone)


@on_project(site.get, "/-/issues/{id}/edit", private=True)
def edit_issue(request: Request, repo: Project, id: int) -> Response:
    return _form(request, repo, issue=_issue(request, repo, id))


@on_project(site.post, "/-/issues/{id}/edit")
def save_issue(request: Request, repo: Project, id: int) -> Response:
    old = _issue(request, repo, id)
    _own(request, repo, old)
    request.world.hub.issues.put(replace(old, **_typed(request, repo)))
    return request.done("The issue was saved.", f"/{repo.path}/-/issues/{id}")


@on_project(site.post, "/-/issues/{id}/state")
def turn_issue(request: Request, repo: Project, id: int) -> Response:
    """Close an open issue; reopen a closed one.
    Errors: Refused unless the visitor wrote the issue or has the role Reporter.
    """
    old = _issue(request, repo, id)
    _own(request, repo, old)
    request.world.hub.issues.put(replace(old, open=not old.open))
    return request.done("The issue was closed." if old.open else "The issue was reopened.")


@on_project(site.post, "/-/issues/{id}/comment")
def comment_issue(request: Request, repo: Project, id: int) -> Response:
    old = _issue(request, repo, id)
    request.world.hub.issues.put(commented(request, old))
    return request.done("Your comment was added.")


@on_project(site.get, "/-/labels")
def labels(request: Request, repo: Project) -> Response:
    issues = request.world.hub.issues.where("project_id", repo.id)
    rows = [
        (label, sum(issue.open and label.name in issue.labels for issue in issues))
        for label in _labels(request, repo)
    ]
    may_edit = may(request, repo, "Developer")
    return request.page("labels.html", project=repo, rows=rows, colors=_COLORS, editable=may_edit)


@on_project(site.post, "/-/labels", "Developer")
def create_label(request: Request, repo: Project) -> Response:
    table = request.world.hub.labels
    title = request.text("title", "Title", 40)
    if any(label.name.lower() == title.lower() for label in _labels(request, repo)):
        raise Refused("A label of this title exists already.")
    color = request.one_of("color", "Color", _COLORS)
    description = request.text("description", "Description", 200, required=False)
    table.put(Label(table.next_id(), repo.id, title, color, description))
    return request.done(f"Label {title} was created.")


@on_project(site.get, "/-/milestones")
def milestones(request: Request, repo: Project) -> Response:
    hub = request.world.hub
    issues = hub.issues.where("project_id", repo.id)
    rows = []
    for milestone in hub.milestones.where("project_id", repo.id):
        inside = [issue for issue in issues if issue.milestone_id == milestone.id]
        rows.append((milestone, len(inside), sum(not issue.open for issue in inside)))
    return request.page("milestones.html", project=repo, rows=rows)


@on_project(site.get, "/-/milestones/new", private=True)
def new_milestone(request: Request, repo: Project) -> Response:
    return request.page("milestone_form.html", project=repo)


@on_project(site.post, "/-/milestones/new", "Developer")
def create_milestone(request: Request, repo: Project) -> Response:
    table = request.world.hub.milestones
    title = request.text("title", "Title", 100)
    description = request.text("description", "Description", 2000, required=False)
    start = parse_day(request.text("start", "Start date", required=False), "Start date")
    due = parse_day(request.text("due", "Due date", required=False), "Due date")
    if start and due and start > due:
        raise Refused("Due date must not be before the start date.")
    new = table.put(Milestone(table.next_id(), repo.id, title, description, start, due, True))
    return request.done("The milestone was created.", f"/{repo.path}/-/milestones/{new.id}")


def _milestone(request: Request, repo: Project, id: int) -> Milestone:
    return look_up(request.world.hub.milestones, id, "milestone", project_id=repo.id)


@on_project(site.get, "/-/milestones/{id}")
def milestone(request: Request, repo: Project, id: int) -> Response:
    shown = _milestone(request, repo, id)
    issues = request.world.hub.issues.where("milestone_id", id)
    return request.page("milestone.html", project=repo, milestone=shown, issues=issues)


@on_project(site.post, "/-/milestones/{id}/state", "Developer")
def turn_milestone(request: Request, repo: Project, id: int) -> Response:
    """Close an open milestone; reopen a closed one. Errors: Refused below the role Developer."""
    old = _milestone(request, repo, id)
    request.world.hub.milestones.put(replace(old, open=not old.open))
    return request.done("The milestone was closed." if old.open else "The milestone was reopened.")
