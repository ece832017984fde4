"""Records of the code host. All records are frozen; ids count from 1, iids within a project."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date

from sites.overlay import Table

TODAY = date(2024, 3, 15)  # the sites' date, which never changes
ROLES = ("Guest", "Reporter", "Developer", "Maintainer", "Owner")
VISIBILITIES = ("Private", "Internal", "Public")


@dataclass(frozen=True, slots=True)
class Account:
    id: int
    name: str
    full_name: str
    bio: str
    status: str
    since: date


@dataclass(frozen=True, slots=True)
class Project:
    id: int
    path: str  # namespace/name
    description: str
    visibility: str
    license: str
    topics: tuple[str, ...]
    branches: tuple[str, ...]  # the first is the default one
    created: date
    stars: int  # without the session's account
    forks: int
    forked_from: str

    @property
    def namespace(self) -> str:
        return self.path.partition("/")[0]

    @property
    def name(self) -> str:
        return self.path.partition("/")[2]


@dataclass(frozen=True, slots=True)
class File:
    id: int
    project_id: int
    path: str
    text: str


@dataclass(frozen=True, slots=True)
class Commit:
    id: int
    project_id: int
    sha: str
    title: str
    author: str
    day: date


@dataclass(frozen=True, slots=True)
class Label:
    id: int
    project_id: int
    name: str
    color: str
    description: str


@dataclass(frozen=True, slots=True)
class Milestone:
    id: int
    project_id: int
    title: str
    description: str
    start: date | None
    due: date | None
    open: bool


@dataclass(frozen=True, slots=True)
class Remark:
    author: str
    day: date
    text: str


@dataclass(frozen=True, slots=True)
class Issue:
    id: int
    project_id: int
    iid: int
    title: str
    body: str
    author: str
    assignee: str  # "" for none
    labels: tuple[str, ...]
    milestone_id: int  # 0 for none
    due: date | None
    open: bool
    day: date
    remarks: tuple[Remark, ...]


@dataclass(frozen=True, slots=True)
class MergeRequest:
    id: int
    project_id: int
    iid: int
    title: str
    body: str
    author: str
    reviewer: str  # "" for none
    source: str
    target: str
    state: str  # Open, Merged or Closed
    approved_by: tuple[str, ...]
    day: date
    remarks: tuple[Remark, ...]


@dataclass(frozen=True, slots=True)
class Membership:
    id: int
    project_id: int
    account: str
    role: str
    since: date


@dataclass(frozen=True, slots=True)
class Star:
    id: int  # of the project


@dataclass
class Hub:
    """One session's records of the code host; `stars` are those of the session's account."""

    accounts: Table[Account]
    projects: Table[Project]
    files: Table[File]
    commits: Table[Commit]
    labels: Table[Label]
    milestones: Table[Milestone]
    issues: Table[Issue]
    merge_requests: Table[MergeRequest]
    memberships: Table[Membership]
    stars: Table[Star]

    def role(self, project: Project, account: str) -> str:
        """Return the account's role in the project, "" for none."""
        member = self.memberships.first("project_id", project.id, account=account)
        return member.role if member else ""

    def num_stars(self, project: Project) -> int:
        return project.stars + (self.stars.get(project.id) is not None)
