"""Helper functions of WebArena's evaluators for the embedded sites: they read a session's state
instead of asking a site.

Names (one has a spelling mistake) and results are those of WebArena's
evaluation_harness/helper_functions.py.
"""

from __future__ import annotations

from urllib.parse import unquote, urlsplit

from sites.local_server import SITES
from sites.session_state import World
from sites.store.records import Review


def shopping_get_latest_order_url(state: World) -> str:
    """Return the shop's address of the newest order of any customer; "" without orders."""
    order = max(state.store.orders, key=lambda order: (order.day, order.id), default=None)
    return f"http://{SITES['shopping']}/account/orders/{order.id}" if order else ""


def shopping_get_sku_latest_review_author(state: World, sku: str) -> str:
    """Return the nickname of a product's newest review of any status; "" without reviews."""
    review = _latest_review(state, sku)
    return review.nickname if review else ""


def shopping_get_sku_latest_review_rating(state: World, sku: str) -> str:
    """Return the newest review's rating in percent, for example "80"; "" without reviews."""
    review = _latest_review(state, sku)
    return str(review.rating * 20) if review else ""


def gitlab_get_project_memeber_role(state: World, url: str, account_name: str) -> str:
    """Return the account's role in the project of the page at `url`; "" if it is no member or there
    is no such project.
    """
    path = [unquote(part) for part in urlsplit(url).path.split("/")]
    project = state.hub.projects.first("path", "/".join(path[1:3]))
    return state.hub.role(project, account_name) if project else ""


def _latest_review(state: World, sku: str) -> Review | None:
    product = state.store.products.first("sku", sku)
    reviews = state.store.reviews.where("product_id", product.id) if product else []
    return reviews[-1] if reviews else None
