"""The forum's pages and its members' actions."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from sites.forum.content import DEMO
from sites.forum.records import TODAY, Board, Comment, Member, Post, Subscription, Vote
from sites.overlay import Table
from sites.text import slug
from sites.web import (
    NotFound,
    Refused,
    Request,
    Response,
    Site,
    existing,
    look_up,
    matches,
    redirect,
)

PASSWORD = "quiet-corner-24"  # noqa: S105 (of the demo account, printed on the login page)
_PER_PAGE = 15
_SORTS = {"hot": "Hot", "new": "New", "top": "Top", "commented": "Most commented"}


def _context(request: Request) -> dict[str, Any]:
    forum = request.world.forum
    return {"forum": forum, "user": request.visitor(forum.members), "address": address}


site = Site("reddit", "forum", _context)


def address(post: Post) -> str:
    return f"/f/{post.board}/{post.id}/{slug(post.title)}"


def _me(request: Request) -> Member:
    """Return the logged-in member; call it only for pages that require a login."""
    return request.me(request.world.forum.members)


def _listing(
    request: Request, template: str, posts: Sequence[Post], default: str = "hot", **context: Any
) -> Response:
    """Show posts in the order of the query's `sort`, a key of `_SORTS`: highest first, and of equal
    posts the newer one. default: the order without `sort`. context: further values of the template.
    """
    forum, sort = request.world.forum, request.choice("sort", _SORTS, default)

    def heat(post: Post) -> float:
        votes = forum.post_score(post) + 2 * forum.num_comments(post)
        return votes / (2 + (TODAY - post.day).days)

    keys: dict[str, Callable[[Post], float]] = {
        "hot": heat,
        "new": lambda post: post.day.toordinal(),
        "top": forum.post_score,
        "commented": forum.num_comments,
    }
    ordered = sorted(posts, key=lambda post: (keys[sort](post), post.id), reverse=True)
    page = request.paged(ordered, _PER_PAGE)
    return request.page(template, page=page, sort=sort, sorts=_SORTS, **context)


@site.get("/")
def front(request: Request) -> Response:
    """Show posts of the member's subscribed boards; without subscription or login, all posts."""
    forum = request.world.forum
    subscribed = {forum.boards[subscription.id].name for subscription in forum.subscriptions}
    only_subscribed = request.visitor(forum.members) is not None and bool(subscribed)
    posts = [post for post in forum.posts if post.board in subscribed or not only_subscribed]
    return _listing(
        request, "front.html", posts, title="Subscribed forums" if only_subscribed else "All forums"
    )


@site.get("/all")
def everything(request: Request) -> Response:
    return _listing(request, "front.html", list(request.world.forum.posts), title="All forums")


@site.get("/forums")
def boards(request: Request) -> Response:
    forum = request.world.forum
    by = request.choice("by", ("name", "subscribers", "posts"), "name")
    rows = [
        (board, _subscribers(request, board), len(forum.posts.where("board", board.name)))
        for board in forum.boards
    ]
    keys = {
        "name": lambda row: row[0].name,
        "subscribers": lambda row: -row[1],
        "posts": lambda row: -row[2],
    }
    rows.sort(key=keys[by])
    return request.page("boards.html", rows=rows, by=by)


def _subscribers(request: Request, board: Board) -> int:
    return board.subscribers + (request.world.forum.subscriptions.get(board.id) is not None)


def _board(request: Request, name: str) -> Board:
    board = request.world.forum.boards.first("name", name)
    return existing(board, f"There is no forum called {name}.")


@site.get("/f/{name}")
def board(request: Request, name: str) -> Response:
    record = _board(request, name)
    posts = request.world.forum.posts.where("board", name)
    return _listing(
        request, "board.html", posts, board=record, subscribers=_subscribers(request, record)
    )


@site.post("/f/{name}/subscribe")
def subscribe(request: Request, name: str) -> Response:
    """Subscribe the member to the board; if it was subscribed, end the subscription."""
    record, subscriptions = _board(request, name), request.world.forum.subscriptions
    if subscriptions.get(record.id) is None:
        subscriptions.put(Subscription(record.id))
        return request.done(f"You are now subscribed to {record.title}.")
    subscriptions.remove(record.id)
    return request.done(f"You are no longer subscribed to {record.title}.")


def _post(request: Request, name: str, id: int) -> Post:
    return look_up(request.world.forum.posts, id, "post", board=name)


def _comment(request: Request, post: Post, id: int) -> Comment:
    return look_up(request.world.forum.comments, id, "comment", post_id=post.id)


def _thread(request: Request, post: Post) -> list[tuple[Comment, int]]:
    """Return (comment, depth) in reading order, depth from 0; siblings by score, highest first."""
    forum = request.world.forum
    children: dict[int, list[Comment]] = {}
    for comment in forum.comments.where("post_id", post.id):
        children.setdefault(comment.parent_id, []).append(comment)
    rows: list[tuple[Comment, int]] = []

    def below(parent_id: int, depth: int) -> list[tuple[Comment, int]]:
        replies = children.get(parent_id, ())
        ordered = sorted(replies, key=lambda c: (forum.comment_score(c), -c.id))
        return [(comment, depth) for comment in ordered]

    stack = below(0, 0)
    while stack:
        comment, depth = stack.pop()
        rows.append((comment, depth))
        stack += below(comment.id, depth + 1)
    return rows


@site.get("/f/{name}/{id}")
@site.get("/f/{name}/{id}/{slug}")
def post(request: Request, name: str, id: int, slug: str = "") -> Response:
    record = _post(request, name, id)
    return request.page(
        "post.html", post=record, board=_board(request, name), thread=_thread(request, record)
    )


@site.post("/f/{name}/{id}/comment")
def write_comment(request: Request, name: str, id: int) -> Response:
    commented, comments = _post(request, name, id), request.world.forum.comments
    given = request.form.get("parent", "")
    parent = int(given) if re.fullmatch(r"[0-9]{1,9}", given) else 0
    if parent:
        _comment(request, commented, parent)
    body = request.text("body", "Comment", 5000)
    comments.put(Comment(comments.next_id(), id, parent, _me(request).name, body, TODAY, 1))
    return request.done("Your comment was posted.", address(commented))


@site.get("/f/{name}/{id}/{slug}/comment/{id_comment}")
def comment(request: Request, name: str, id: int, slug: str, id_comment: int) -> Response:
    record, board = _post(request, name, id), _board(request, name)
    comment = _comment(request, record, id_comment)
    return request.page("comment.html", post=record, board=board, comment=comment)


@site.get("/f/{name}/{id}/{slug}/edit", private=True)
def edit_post(request: Request, name: str, id: int, slug: str) -> Response:
    return request.page("edit_post.html", post=_own_post(request, name, id))


@site.post("/f/{name}/{id}/{slug}/edit")
def save_post(request: Request, name: str, id: int, slug: str) -> Response:
    edited = _own_post(request, name, id)
    title = request.text("title", "Title", 300)
    new = request.world.forum.posts.put(
        replace(edited, title=title, body=request.text("body", "Body", 10_000, required=False))
    )
    return request.done("The post was edited.", address(new))


@site.post("/f/{name}/{id}/{slug}/delete")
def delete_post(request: Request, name: str, id: int, slug: str) -> Response:
    request.world.forum.posts.remove(_own_post(request, name, id).id)
    return request.done("The post was deleted.", f"/f/{name}")


def _own_post(request: Request, name: str, id: int) -> Post:
    record = _post(request, name, id)
    if record.author != _me(request).name:
        raise NotFound("Only the author can change a post.")
    return record


@site.post("/vote/post/{id}")
def vote_post(request: Request, id: int) -> Response:
    look_up(request.world.forum.posts, id, "post")
    return _vote(request, request.world.forum.post_votes, id)


@site.post("/vote/comment/{id}")
def vote_comment(request: Request, id: int) -> Response:
    look_up(request.world.forum.comments, id, "comment")
    return _vote(request, request.world.forum.comment_votes, id)


def _vote(request: Request, votes: Table[Vote], id: int) -> Response:
    """Record a vote on the post or comment `id`; a repeated vote removes it. Return a redirect."""
    value = int(request.one_of("value", "Vote", ("1", "-1")))
    old = votes.get(id)
    if old is not None and old.value == value:
        votes.remove(id)
    else:
        votes.put(Vote(id, value))
    return redirect(request.back())


@site.get("/submit", private=True)
@site.get("/submit/{name}", private=True)
def submit(request: Request, name: str = "") -> Response:
    if name:
        _board(request, name)
    ordered = sorted(request.world.forum.boards, key=lambda board: board.title)
    boards = {board.name: board.title for board in ordered}
    return request.page("submit.html", boards=boards, chosen=name)


@site.post("/submit")
def create_post(request: Request) -> Response:
    posts, boards = request.world.forum.posts, request.world.forum.boards
    name = request.one_of("board", "Forum", [board.name for board in boards])
    title = request.text("title", "Title", 300)
    url = request.text("url", "URL", 500, required=False)
    if url and not re.match(r"https?://[^\s/]+", url):
        raise Refused("URL must begin with http:// or https://.")
    body = request.text("body", "Body", 10_000, required=False)
    new = posts.put(Post(posts.next_id(), name, _me(request).name, title, url, body, TODAY, 1))
    return redirect(address(new))


@site.post("/create_forum")
def create_board(request: Request) -> Response:
    boards = request.world.forum.boards
    name, title = request.text("name", "Name", 25), request.text("title", "Title", 100)
    if not re.fullmatch(r"[A-Za-z0-9_]{3,25}", name):
        raise Refused("Name must be 3 to 25 letters, digits or underscores.")
    if any(board.name.lower() == name.lower() for board in boards):
        raise Refused("A forum of this name exists already.")
    description = request.text("description", "Description", 300)
    rules = request.text("rules", "Rules", 1000, required=False)
    new = boards.put(Board(boards.next_id(), name, title, description, rules, 0))
    request.world.forum.subscriptions.put(Subscription(new.id))
    return request.done("The forum was created.", f"/f/{name}")


@site.get("/user/{name}")
def user(request: Request, name: str) -> Response:
    forum = request.world.forum
    member = forum.members.first("name", name)
    member = existing(member, f"There is no member called {name}.")
    newest = forum.comments.where("author", name)[:-21:-1]
    comments = [(comment, forum.posts.get(comment.post_id)) for comment in newest]
    posts = forum.posts.where("author", name)
    return _listing(request, "user.html", posts, "new", member=member, comments=comments)


@site.get("/user/{name}/edit_biography", private=True)
def edit_bio(request: Request, name: str) -> Response:
    _check_self(request, name)
    return request.page("bio.html")


@site.post("/user/{name}/edit_biography")
def save_bio(request: Request, name: str) -> Response:
    _check_self(request, name)
    bio = request.text("bio", "Biography", 1000, required=False)
    request.world.forum.members.put(replace(_me(request), bio=bio))
    return request.done("Your biography was updated.", f"/user/{name}")


def _check_self(request: Request, name: str) -> None:
    if _me(request).name != name:
        raise NotFound("You can only edit your own biography.")


@site.get("/search")
def search(request: Request) -> Response:
    query = request.search("q")
    posts = [p for p in request.world.forum.posts if query and matches(query, p.title, p.body)]
    return _listing(request, "search.html", posts, "new", query=query)


site.show("/create_forum", "create.html")
site.admit(
    lambda _: DEMO,
    PASSWORD,
    wrong="Unknown user name or wrong password.",
    welcome=lambda _: f"Welcome back, {DEMO}!",
    goodbye="You are logged out.",
)
