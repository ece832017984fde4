"""Generated content of the forum: boards, members, posts and comments of one seed."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import date, timedelta
from typing import Any

from sites.dice import Dice, load_words
from sites.forum.records import TODAY, Board, Comment, Forum, Member, Post, Subscription
from sites.overlay import Seed, Table
from sites.text import slug

WORDS = load_words(__file__)
DEMO = "marlow_reads"
_POSTS_PER_BOARD = 30
_DAYS = 420
_SUBSCRIBED = ("books", "cooking", "homelab")


@dataclass(frozen=True)
class Topic:
    """Template of a generated board: titles with {a} and {b}, drawn from its word lists, and the
    texts of its posts and comments.
    """

    name: str
    title: str
    description: str
    rules: str
    titles: tuple[str, ...]
    a: tuple[str, ...]
    b: tuple[str, ...]
    bodies: tuple[str, ...]
    comments: tuple[str, ...]


_TOPICS = tuple(Topic(**row) for row in WORDS.topics)


def generate(seed: int) -> Forum:
    dice = Dice(seed, "boards")
    boards = [
        Board(id, t.name, t.title, t.description, t.rules, dice.between(120, 4800))
        for id, t in enumerate(_TOPICS, 1)
    ]
    dice = Dice(seed, "members")
    names = (DEMO, *WORDS.names)
    members = [
        Member(id, name, dice.pick(WORDS.bios), TODAY - timedelta(days=dice.between(430, 2200)))
        for id, name in enumerate(names, 1)
    ]
    posts = _posts(Dice(seed, "posts"))
    comments = _comments(posts, Dice(seed, "comments"))
    subscribed = [Subscription(board.id) for board in boards if board.name in _SUBSCRIBED]
    tables: tuple[Iterable[Any], ...] = (boards, members, posts, comments, (), (), subscribed)
    return Forum(*(Table(Seed(rows)) for rows in tables))


def _posts(dice: Dice) -> list[Post]:
    """Generate the posts of all boards, sorted by day; titles are unique on a board."""
    drafts: list[tuple[date, float, Topic, str, str, str]] = []
    for topic in _TOPICS:
        words = itertools.product(topic.titles, topic.a, topic.b)
        titles = sorted({f"{title.format(a=a, b=b)}\n{a}\n{b}" for title, a, b in words})
        taken: set[str] = set()
        for draft in dice.shuffled(titles):
            title, a, b = draft.split("\n")
            if title in taken:
                continue
            taken.add(title)
            day = TODAY - timedelta(days=dice.between(0, _DAYS))
            drafts.append((day, dice.between(0, 10**6), topic, title, a, b))
            if len(taken) == _POSTS_PER_BOARD:
                break
    drafts.sort(key=lambda draft: draft[:2])
    return [
        _post(id, topic, title, a, b, day, dice)
        for id, (day, _, topic, title, a, b) in enumerate(drafts, 1)
    ]


def _post(id: int, topic: Topic, title: str, a: str, b: str, day: date, dice: Dice) -> Post:
    title = title[0].upper() + title[1:]
    body = f"{dice.pick(topic.bodies).format(a=a, b=b)}\n\n{dice.pick(WORDS.closers)}".strip()
    url = ""
    if dice.chance(0.12):
        url, body = f"https://{dice.pick(WORDS.domains)}/{slug(title)}", ""
    author = DEMO if dice.chance(0.03) else dice.pick(WORDS.names)
    body, score = body[:1].upper() + body[1:], dice.skewed(420, 3) + dice.between(-4, 6)
    return Post(id, topic.name, author, title, url, body, day, score)


def _comments(posts: list[Post], dice: Dice) -> list[Comment]:
    """Generate up to 14 comments under each post, some of them replies to comments."""
    topics = {topic.name: topic for topic in _TOPICS}
    comments: list[Comment] = []
    for post in posts:
        thread: list[Comment] = []
        lines = dice.shuffled(topics[post.board].comments) + dice.shuffled(WORDS.replies)
        for line in lines[: dice.skewed(14, 1.5)]:
            is_reply = thread and (line in WORDS.replies or dice.chance(0.2))
            parent = dice.pick(thread) if is_reply else None
            day = min(TODAY, (parent or post).day + timedelta(days=dice.skewed(5, 2)))
            others = [name for name in WORDS.names if parent is None or name != parent.author]
            author = DEMO if dice.chance(0.03) else dice.pick(others)
            score = dice.skewed(60, 3) - dice.skewed(9, 3)
            id, parent_id = len(comments) + len(thread) + 1, parent.id if parent else 0
            thread.append(Comment(id, post.id, parent_id, author, line, day, score))
        comments += thread
    return comments
