"""Generated content of the code host: accounts, projects, files, issues and merge requests of one
seed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import date, timedelta

from sites.dice import Dice, load_words
from sites.hub.records import (
    TODAY,
    Account,
    Commit,
    File,
    Hub,
    Issue,
    Label,
    Membership,
    MergeRequest,
    Milestone,
    Project,
    Remark,
    Star,
)
from sites.overlay import Seed, Table
from sites.text import slug

WORDS = load_words(__file__)
_NAMES = tuple(name for name, _ in WORDS.people)
_DEMO = WORDS.demo[0]


@dataclass(frozen=True)
class Plan:
    """Template of a generated project: path, description, language, license, topics, and the parts
    that its issues mention.
    """

    path: str
    description: str
    language: str  # python, go or js
    license: str
    topics: tuple[str, ...]
    parts: tuple[str, ...]


_PLANS = tuple(Plan(**row) for row in WORDS.plans)


@dataclass
class _Draft:
    """Records of the projects generated so far, in the order of Hub's tables."""

    projects: list[Project] = field(default_factory=list)
    files: list[File] = field(default_factory=list)
    commits: list[Commit] = field(default_factory=list)
    labels: list[Label] = field(default_factory=list)
    milestones: list[Milestone] = field(default_factory=list)
    issues: list[Issue] = field(default_factory=list)
    merge_requests: list[MergeRequest] = field(default_factory=list)
    memberships: list[Membership] = field(default_factory=list)


def generate(seed: int) -> Hub:
    dice = Dice(seed, "accounts")
    accounts = [
        Account(
            id,
            name,
            full,
            dice.pick(WORDS.bios),
            "" if id == 1 else dice.pick(WORDS.statuses),
            TODAY - timedelta(days=dice.between(500, 2400)),
        )
        for id, (name, full) in enumerate((WORDS.demo, *WORDS.people), 1)
    ]
    draft = _Draft()
    for plan in _PLANS:
        _project(draft, plan, Dice(seed, plan.path))
    starred = ("lanternworks/lantern", "openquay/crane")
    stars = [Star(project.id) for project in draft.projects if project.path in starred]
    return Hub(*(Table(Seed(rows)) for rows in (accounts, *vars(draft).values(), stars)))


def _project(draft: _Draft, plan: Plan, dice: Dice) -> None:
    id = len(draft.projects) + 1
    created = TODAY - timedelta(days=dice.between(420, 1500))
    members = _members(draft, id, plan, created, dice)
    milestones = _milestones(draft, id, dice)
    for name, color, description in WORDS.labels:
        draft.labels.append(Label(len(draft.labels) + 1, id, name, color, description))
    requests = _merge_requests(draft, id, plan, members, dice)
    open_branches = (request.source for request in requests if request.state == "Open")
    branches = ("main", *open_branches, "docs-refresh")
    stars, forks = 3 + dice.skewed(1800), dice.skewed(160)
    about = (plan.path, plan.description, "Public", plan.license, plan.topics)
    draft.projects.append(Project(id, *about, branches, created, stars, forks, ""))
    _files(draft, id, plan, dice)
    _commits(draft, id, plan, members, created, dice)
    _issues(draft, id, plan, members, milestones, dice)


def _members(draft: _Draft, id: int, plan: Plan, created: date, dice: Dice) -> list[str]:
    owner = plan.path.partition("/")[0]
    if owner not in (_DEMO, *_NAMES):
        owner = dice.pick(_NAMES)
    others = [name for name in dice.some(_NAMES, dice.between(3, 6)) if name != owner]
    offered = ("Maintainer", "Developer", "Developer", "Reporter")
    roles = {owner: "Owner", **{name: dice.pick(offered) for name in others}}
    if owner != _DEMO and plan.path.startswith(("lanternworks/", "openquay/")):
        roles[_DEMO] = "Maintainer" if plan.path.startswith("lanternworks/") else "Developer"
    for name, role in roles.items():
        since = created + timedelta(days=0 if name == owner else dice.between(1, 400))
        draft.memberships.append(Membership(len(draft.memberships) + 1, id, name, role, since))
    return list(roles)


def _milestones(draft: _Draft, id: int, dice: Dice) -> list[Milestone]:
    first = len(draft.milestones)
    for index, title in enumerate(("1.0", "1.1", "2.0")[: dice.between(2, 3)]):
        start = date(2023, 5, 1) + timedelta(days=150 * index + dice.between(0, 20))
        due = start + timedelta(days=dice.between(90, 140))
        number, text = len(draft.milestones) + 1, f"What has to be done for {title}."
        draft.milestones.append(Milestone(number, id, title, text, start, due, due >= TODAY))
    return draft.milestones[first:]


def _merge_requests(
    draft: _Draft, id: int, plan: Plan, members: Sequence[str], dice: Dice
) -> list[MergeRequest]:
    first = len(draft.merge_requests)
    days = sorted(TODAY - timedelta(days=dice.between(1, 300)) for _ in range(dice.between(4, 7)))
    titles = dice.some(WORDS.merge_titles, len(days))
    for iid, (title, day) in enumerate(zip(titles, days, strict=True), 1):
        part, version = dice.pick(plan.parts), f"{dice.between(1, 2)}.{dice.between(0, 9)}.0"
        text = _sentence(title, part=part, version=version)
        author = dice.pick(members)
        others = [name for name in members if name != author]
        state = dice.pick(("Open", "Merged", "Merged", "Closed")) if iid < len(days) else "Open"
        approved = (others[0],) if state == "Merged" else ()
        body = f"{text}. Part of the work for the next milestone; see the discussion in the issue."
        remarks = _remarks(day, members, dice, 3)
        branch = f"{iid}-{slug(text)}"[:40].rstrip("-")
        reviewer = dice.pick(others) if dice.chance(0.6) else ""
        fields = (text, body, author, reviewer, branch, "main", state, approved, day, remarks)
        draft.merge_requests.append(MergeRequest(len(draft.merge_requests) + 1, id, iid, *fields))
    return draft.merge_requests[first:]


def _files(draft: _Draft, id: int, plan: Plan, dice: Dice) -> None:
    name = plan.path.partition("/")[2]
    major, second = dice.between(1, 2), dice.between(1, 9)
    words = {
        "name": name,
        "path": plan.path,
        "module": name.replace("-", "_"),
        "description": plan.description,
        "license": plan.license,
        "version": f"{major}.{second}.{dice.between(0, 4)}",
        "before": f"{major}.{second - 1}.0",
        "port": dice.pick((3000, 4100, 5050, 7070, 8008, 8081, 9009)),
        "retries": dice.between(2, 9),
        "timeout": dice.pick((5, 10, 15, 20, 30, 45)),
        "minor": dice.between(18, 22) if plan.language != "python" else dice.between(9, 12),
        "color": dice.pick(("#2f6f4f", "#b5532a", "#2b5d8a", "#7a4a8c")),
        "part": dice.pick(plan.parts).capitalize(),
        "word": plan.topics[0],
    }
    texts = [
        ("README.md", WORDS.readme),
        ("CONTRIBUTING.md", WORDS.contributing),
        ("CHANGELOG.md", WORDS.changelog),
        ("LICENSE", "{license}\n\nCopyright 2024 the authors of {name}\n"),
        (".gitignore", "build/\n*.log\n"),
        *WORDS.sources[plan.language],
    ]
    for path, text in texts:
        number = len(draft.files) + 1
        draft.files.append(File(number, id, path.format(**words), text.format(**words)))


def _commits(
    draft: _Draft, id: int, plan: Plan, members: Sequence[str], created: date, dice: Dice
) -> None:
    span = (TODAY - created).days
    for day in sorted(
        created + timedelta(days=dice.between(0, span - 1)) for _ in range(dice.between(18, 40))
    ):
        version = f"{dice.between(1, 2)}.{dice.between(0, 9)}.{dice.between(0, 4)}"
        title = _sentence(dice.pick(WORDS.commits), part=dice.pick(plan.parts), version=version)
        number = len(draft.commits) + 1
        author = dice.pick(members)
        draft.commits.append(Commit(number, id, sha(id, number, title), title, author, day))


def _issues(
    draft: _Draft,
    id: int,
    plan: Plan,
    members: Sequence[str],
    milestones: Sequence[Milestone],
    dice: Dice,
) -> None:
    pairs = [(title, label, part) for title, label in WORDS.issue_titles for part in plan.parts]
    days = sorted(TODAY - timedelta(days=dice.between(1, 400)) for _ in range(dice.between(14, 22)))
    drawn = zip(dice.some(pairs, len(days)), days, strict=True)
    for iid, ((title, label, part), day) in enumerate(drawn, 1):
        words = {"part": part, "version": f"1.{dice.between(1, 9)}"}
        labels = [label] + [
            name for name in ("needs triage", "documentation") if name != label and dice.chance(0.1)
        ]
        body = "\n\n".join(
            _sentence(text, **words) for text in dice.pick(WORDS.issue_bodies).split("\n\n")
        )
        is_open = dice.chance(0.55 if (TODAY - day).days > 60 else 0.85)
        author = dice.pick((*members, *_NAMES[:6]))
        assignee = dice.pick(members) if dice.chance(0.55) else ""
        milestone = dice.pick(milestones).id if dice.chance(0.4) else 0
        due = TODAY + timedelta(days=dice.between(5, 90)) if is_open and dice.chance(0.15) else None
        remarks = _remarks(day, members, dice, 4)
        fields = (_sentence(title, **words), body, author, assignee, tuple(labels), milestone)
        number = len(draft.issues) + 1
        draft.issues.append(Issue(number, id, iid, *fields, due, is_open, day, remarks))


def _remarks(day: date, members: Sequence[str], dice: Dice, max_count: int) -> tuple[Remark, ...]:
    days = sorted(
        min(TODAY, day + timedelta(days=dice.between(0, 20)))
        for _ in range(dice.skewed(max_count, 1.3))
    )
    return tuple(
        Remark(dice.pick(members), day, text)
        for day, text in zip(days, dice.some(WORDS.remarks, len(days)), strict=True)
    )


def _sentence(template: str, **words: str) -> str:
    text = template.format(**words)
    return text[:1].upper() + text[1:]


def sha(*parts: object) -> str:
    """Return a commit's id: 8 hex digits, derived from `parts` alone."""
    return hashlib.sha256("/".join(map(str, parts)).encode()).hexdigest()[:8]
