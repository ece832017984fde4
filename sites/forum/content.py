"""Generated content of the forum: boards, members, posts and comments of one seed."""

from __future__ import annotations

from datetime import date, timedelta

from sites.dice import Dice
from sites.forum import lore
from sites.forum.lore import Topic
from sites.forum.records import (
    TODAY,
    Board,
    Comment,
    Forum,
    Member,
    Post,
    Subscription,
)
from sites.overlay import Seed, Table
from sites.text import slug

DEMO = "marlow_reads"
_POSTS_PER_BOARD = 30
_DAYS = 420
_SUBSCRIBED = ("books", "cooking", "homelab")


def generate(seed: int) -> Forum:
    dice = Dice(seed, "boards")
    boards = [
        Board(id, t.name, t.title, t.description, t.rules, dice.between(120, 4800))
        for id, t in enumerate(lore.TOPICS, 1)
    ]
    dice = Dice(seed, "members")
    names = (DEMO, *lore.NAMES)
    members = [
        Member(id, name, dice.pick(lore.BIOS), TODAY - timedelta(days=dice.between(430, 2200)))
        for id, name in enumerate(names, 1)
    ]
    posts = _posts(Dice(seed, "posts"))
    comments = _comments(posts, Dice(seed, "comments"))
    subscribed = [Subscription(board.id) for board in boards if board.name in _SUBSCRIBED]
    return Forum(
        Table(Seed(boards)),
        Table(Seed(members)),
        Table(Seed(posts)),
        Table(Seed(comments)),
        Table(Seed(())),
        Table(Seed(())),
        Table(Seed(subscribed)),
    )


def _posts(dice: Dice) -> list[Post]:
    """Generate the posts of all boards, sorted by day; titles are unique on a board."""
    drafts: list[tuple[date, float, Topic, str, str, str]] = []
    for topic in lore.TOPICS:
        titles = sorted(
            {
                template.format(a=a, b=b) + f"\n{a}\n{b}"
                for template in topic.titles
                for a in topic.a
                for b in topic.b
            }
        )
        taken: set[str] = set()
        for draft in dice.shuffled(titles):
            title, a, b = draft.split("\n")
            if title in taken:
                continue
            taken.add(title)
            drafts.append(
                (
                    TODAY - timedelta(days=dice.between(0, _DAYS)),
                    dice.between(0, 10**6),
                    topic,
                    title,
                    a,
                    b,
                )
            )
            if len(taken) == _POSTS_PER_BOARD:
                break
    drafts.sort(key=lambda draft: draft[:2])
    return [
        _post(id, topic, title, a, b, day, dice)
        for id, (day, _, topic, title, a, b) in enumerate(drafts, 1)
    ]


def _post(id: int, topic: Topic, title: str, a: str, b: str, day: date, dice: Dice) -> Post:
    title = title[0].upper() + title[1:]
    body = f"{dice.pick(topic.bodies).format(a=a, b=b)}\n\n{dice.pick(lore.CLOSERS)}".strip()
    url = ""
    if dice.chance(0.12):
        url, body = f"https://{dice.pick(lore.DOMAINS)}/{slug(title)}", ""
    author = DEMO if dice.chance(0.03) else dice.pick(lore.NAMES)
    return Post(
        id,
        topic.name,
        author,
        title,
        url,
        body[:1].upper() + body[1:],
        day,
        dice.skewed(420, 3) + dice.between(-4, 6),
    )


def _comments(posts: list[Post], dice: Dice) -> list[Comment]:
    """Generate up to 14 comments under each post, some of them replies to comments."""
    topics = {topic.name: topic for topic in lore.TOPICS}
    comments: list[Comment] = []
    for post in posts:
        thread: list[Comment] = []
        lines = dice.shuffled(topics[post.board].comments) + dice.shuffled(lore.REPLIES)
        for line in lines[: dice.skewed(14, 1.5)]:
            parent = (
                dice.pick(thread) if thread and (line in lore.REPLIES or dice.chance(0.2)) else None
            )
            day = min(
                TODAY, (parent.day if parent else post.day) + timedelta(days=dice.skewed(5, 2))
            )
            author = (
                DEMO
                if dice.chance(0.03)
                else dice.pick(
                    [name for name in lore.NAMES if name != (parent.author if parent else "")]
                )
            )
            score = dice.skewed(60, 3) - dice.skewed(9, 3)
            thread.append(
                Comment(
                    len(comments) + len(thread) + 1,
                    post.id,
                    parent.id if parent else 0,
                    author,
                    line,
                    day,
                    score,
                )
            )
        comments += thread
    return comments
