"""The helper queries of WebArena's evaluators, over the state of a session instead of the sites'
own interfaces.

Names (one spelling mistake included) and results are WebArena's: webarena,
evaluation_harness/helper_functions.py.
"""

from __future__ import annotations

from urllib.parse import unquote, urlsplit

from sites.server import SITES
from sites.store.records import Review
from sites.world import World


def reddit_get_post_url(url: str) -> str:
    """The address of the post that `url` shows or is part of; other addresses unchanged."""
    parts = urlsplit(url)
    path = parts.path.split("/")
    if len(path) < 4 or path[1] != "f":
        return url
    return f"{parts.scheme}://{parts.netloc}/f/{path[2]}/{path[3]}/"


def shopping_get_latest_order_url(state: World) -> str:
    """The shop's page of the newest order, "" without any."""
    order = max(state.store.orders, key=lambda order: (order.day, order.id), default=None)
    return f"http://{SITES['shopping']}/account/orders/{order.id}" if order else ""


def shopping_get_sku_latest_review_author(state: World, sku: str) -> str:
    """The nickname of the newest review of a product, whatever its status; "" without any."""
    review = _latest_review(state, sku)
    return review.nickname if review else ""


def shopping_get_sku_latest_review_rating(state: World, sku: str) -> str:
    """The rating of the newest review in percent, such as "80"; "" without any."""
    review = _latest_review(state, sku)
    return str(review.rating * 20) if review else ""


def gitlab_get_project_memeber_role(state: World, url: str, account_name: str) -> str:
    """The account's role in the project that the page at `url` belongs to; "" for no member or
    no project.
    """
    path = [unquote(part) for part in urlsplit(url).path.split("/")]
    project = state.hub.projects.first("path", "/".join(path[1:3]))
    return state.hub.role(project, account_name) if project else ""


def _latest_review(state: World, sku: str) -> Review | None:
    product = state.store.products.first("sku", sku)
    reviews = state.store.reviews.where("product_id", product.id) if product else []
    return reviews[-1] if reviews else None
