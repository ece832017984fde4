"""User input on the sites: errors are shown, invalid requests are refused, text stays text."""

import re
from urllib.parse import urlencode

import pytest

from sites import SITES
from sites.local_server import _BY_HOST
from tests.sites.visitor import MUG, note

TIDE = "/jlindgren/tidebook/-"
BAD = [
    (
        "shopping",
        "/product/2/review",
        MUG,
        {"nickname": "Typed before"},
        "Rating is a required field.",
    ),
    (
        "shopping",
        "/cart/add/2",
        MUG,
        {"choice": "Forest Green", "quantity": "-1"},
        "Quantity must be a whole number from 1 to 99.",
    ),
    (
        "shopping",
        "/cart/add/2",
        MUG,
        {"choice": "Pink", "quantity": "1"},
        "Color: please choose one of the offered values.",
    ),
    (
        "shopping",
        "/account/address",
        "/account/address",
        {"street": "Typed before"},
        "City is a required field.",
    ),
    (
        "shopping",
        "/account/edit",
        "/account/edit",
        {"first": "N", "last": "W", "email": "a b@c"},
        "Please enter a valid email address",
    ),
    (
        "shopping_admin",
        "/products/2",
        "/products/2",
        {"name": "Typed before", "price": "free"},
        "Price must be an amount such as 24.90.",
    ),
    (
        "shopping_admin",
        "/orders/5/comment",
        "/orders/5",
        {"status": "Lost"},
        "Status: please choose one of the offered values.",
    ),
    (
        "reddit",
        "/submit",
        "/submit",
        {"board": "books", "body": "Typed before"},
        "Title is a required field.",
    ),
    (
        "reddit",
        "/create_forum",
        "/create_forum",
        {"name": "a b", "title": "Typed before"},
        "Name must be 3 to 25 letters, digits or",
    ),
    (
        "reddit",
        "/f/homelab/300/comment",
        "/f/homelab/300",
        {"body": " "},
        "Comment is a required field.",
    ),
    (
        "gitlab",
        "/projects/new",
        "/projects/new",
        {"name": "tidebook", "visibility": "Public"},
        "jlindgren/tidebook exists already.",
    ),
    (
        "gitlab",
        f"{TIDE}/issues/new",
        f"{TIDE}/issues/new",
        {"title": "Typed before", "due": "soon"},
        "Due date must be",
    ),
    (
        "gitlab",
        f"{TIDE}/milestones/new",
        "/",
        {"title": "M", "start": "2024-02-02", "due": "2024-01-01"},
        "Due date must not be",
    ),
]


@pytest.mark.parametrize(("site", "path", "at", "form", "message"), BAD)
def test_a_wrong_form_says_what_is_wrong_and_keeps_what_was_typed(
    visitor, site, path, at, form, message
):
    page = visitor.post(site, path, form, at)
    kind, text = note(page)
    assert kind == "alert"
    assert message in text
    assert ("Typed before" in form.values()) == ("Typed before" in page)
    assert "Typed before" not in visitor.get(site, at)  # it is shown only once


ODD = [
    {},
    {
        "quantity": "٣",
        "price": "-1",
        "rating": "0",
        "value": "2",
        "title": "\x00",
        "text": "x" * 20_000,
        "body": "x" * 20_000,
        "path": "../x",
    },
    {
        "title": "%s{{7*7}}",
        "board": "nope",
        "parent": "99999999",
        "due": "9999-99-99",
        "status": "\ud83d",
        "labels": ["a", "b"],
        "name": "-",
    },
]


@pytest.mark.parametrize("site", SITES)
@pytest.mark.parametrize("form", ODD)
def test_no_form_of_any_route_answers_with_an_error_of_the_server(visitor, site, form):
    body = urlencode(form, doseq=True, errors="replace")
    paths = {
        "ns": "jlindgren",
        "name": "tidebook" if site == "gitlab" else "books",
        "slug": "x",
        "step": "merge",
        "path": "README.md",
    }
    for method, pattern, _, _ in _BY_HOST[SITES[site]].routes:
        path = re.sub(
            r"\(\?P<(\w+)>.*?\)(?=/|$)",
            lambda part: paths.get(part[1], "1"),
            pattern.pattern.removesuffix("/?"),
        )
        if path == "/logout":
            continue
        status = visitor.send(
            method,
            site,
            path + ("" if method == "POST" else f"?{body[:2000]}&page=0&from=x"),
            body if method == "POST" else None,
        )[0]
        assert status in (200, 303, 400, 404), (path, status)


def test_oversized_and_odd_requests_are_refused(visitor):
    assert visitor.send("POST", "reddit", "/submit", "body=" + "x" * 300_000)[0] == 413
    assert (
        visitor.send("POST", "reddit", "/submit", "&".join(f"a{n}=1" for n in range(200)))[0] == 400
    )
    assert visitor.send("PUT", "reddit", "/submit", "a=1")[0] == 405
    assert visitor.send("POST", "reddit", "/forums", "a=1")[0] == 405
    assert visitor.send("GET", "reddit", "/%00%ff/../..")[0] == 404
    assert visitor.send("HEAD", "reddit", "/")[:2] == (200, "")


def test_what_a_person_types_is_shown_as_text(visitor):
    evil = '"><script>alert(1)</script><b onmouseover=x>'
    visitor.post("reddit", "/submit", {"board": "books", "title": evil, "body": evil})
    visitor.post("reddit", "/f/books/301/comment", {"body": evil})
    visitor.post("reddit", "/user/marlow_reads/edit_biography", {"bio": evil})
    visitor.post(
        "shopping",
        "/product/2/review",
        {"rating": "1", "nickname": evil, "title": evil, "text": evil},
    )
    visitor.post("gitlab", "/jlindgren/tidebook/-/issues/new", {"title": evil, "body": evil})
    visitor.post(
        "gitlab",
        "/jlindgren/tidebook/-/labels",
        {"title": evil[:40], "description": evil, "color": "red"},
    )
    visitor.post("gitlab", "/profile", {"full_name": evil, "status": evil, "bio": evil})
    pages = [
        ("reddit", "/f/books/301"),
        ("reddit", "/f/books?sort=new"),
        ("reddit", "/user/marlow_reads"),
        ("shopping_admin", "/reviews"),
    ]
    pages += [
        ("shopping_admin", "/reviews/783"),
        ("gitlab", "/jlindgren/tidebook/-/issues"),
        ("gitlab", "/jlindgren/tidebook/-/issues/19"),
    ]
    pages += [
        ("gitlab", "/jlindgren/tidebook/-/labels"),
        ("gitlab", "/jlindgren"),
        ("gitlab", f"/search?{urlencode({'q': evil})}"),
    ]
    for site, path in pages:
        page = visitor.get(site, path)
        assert "&lt;script&gt;" in page, path
        assert "<script" not in page, path
        assert "<b onmouseover" not in page, path
