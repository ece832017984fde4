"""Records of the forum. All records are frozen; ids count from 1."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date

from sites.overlay import Table

TODAY = date(2024, 3, 15)  # the sites' date, which never changes


@dataclass(frozen=True, slots=True)
class Board:
    """A forum within the forum site."""

    id: int
    name: str
    title: str
    description: str
    rules: str
    subscribers: int  # without the session's member


@dataclass(frozen=True, slots=True)
class Member:
    id: int
    name: str
    bio: str
    since: date


@dataclass(frozen=True, slots=True)
class Post:
    id: int
    board: str
    author: str
    title: str
    url: str  # "" for a text post
    body: str
    day: date
    score: int  # without the session's vote


@dataclass(frozen=True, slots=True)
class Comment:
    id: int
    post_id: int
    parent_id: int  # 0 for an answer to the post
    author: str
    body: str
    day: date
    score: int


@dataclass(frozen=True, slots=True)
class Vote:
    """A vote of the session's member on the post or comment `id`."""

    id: int
    value: int  # 1 or -1


@dataclass(frozen=True, slots=True)
class Subscription:
    id: int  # of the board


@dataclass
class Forum:
    """One session's records of the forum; votes and subscriptions are those of the demo member."""

    boards: Table[Board]
    members: Table[Member]
    posts: Table[Post]
    comments: Table[Comment]
    post_votes: Table[Vote]
    comment_votes: Table[Vote]
    subscriptions: Table[Subscription]

    def post_score(self, post: Post) -> int:
        vote = self.post_votes.get(post.id)
        return post.score + (vote.value if vote else 0)

    def comment_score(self, comment: Comment) -> int:
        vote = self.comment_votes.get(comment.id)
        return comment.score + (vote.value if vote else 0)

    def num_comments(self, post: Post) -> int:
        return len(self.comments.where("post_id", post.id))
