"""The shop's administration: the pages of its staff."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from datetime import date
from typing import Any

from sites.store.records import (
    GROUPS,
    ORDER_STATUSES,
    REVIEW_STATUSES,
    SHIPPING,
    TODAY,
    Comment,
    Order,
    Product,
)
from sites.web import Refused, Request, Response, Site, look_up, matches

PASSWORD = "backoffice-2024"  # noqa: S105 (of the demo account, printed on the login page)
USER = "admin"
_PER_PAGE = 15
_STATES: dict[str, Callable[[Product], bool]] = {
    "enabled": lambda product: product.enabled,
    "disabled": lambda product: not product.enabled,
    "out": lambda product: product.stock == 0,
}
_PERIODS = {"day": "Day", "month": "Month", "year": "Year"}


def _context(request: Request) -> dict[str, Any]:
    pending = len(request.world.store.reviews.where("status", "Pending"))
    return {
        "store": request.world.store,
        "user": None if request.world.logins["shopping_admin"] is None else USER,
        "pending_reviews": pending,
    }


site = Site("shopping_admin", "admin", _context, closed=True)


def _counted(orders: Iterable[Order]) -> list[Order]:
    return [order for order in orders if order.status != "Canceled"]


@site.get("/")
def dashboard(request: Request) -> Response:
    store = request.world.store
    orders = _counted(store.orders)
    revenue = sum(order.total for order in orders)
    return request.page(
        "dashboard.html",
        revenue=revenue,
        average=round(revenue / len(orders)) if orders else 0,
        num_orders=len(orders),
        num_customers=len(store.customers),
        latest=list(store.orders)[:-8:-1],
        best=_bestsellers(orders)[:5],
    )


def _bestsellers(orders: Iterable[Order]) -> list[tuple[int, str, int, int]]:
    """Return (product id, name when sold, quantity, revenue in cents) rows, most sold first."""
    sold: Counter[tuple[int, str]] = Counter()
    revenue: Counter[tuple[int, str]] = Counter()
    for order in orders:
        for line in order.lines:
            sold[line.product_id, line.name] += line.quantity
            revenue[line.product_id, line.name] += line.total
    ranked = sorted(sold, key=lambda key: (-sold[key], key))
    return [(id, name, sold[id, name], revenue[id, name]) for id, name in ranked]


@site.get("/products")
def products(request: Request) -> Response:
    search, status = request.search("search"), request.choice("status", _STATES, "")
    sort = request.choice("sort", ("id", "name", "price", "stock"), "id")
    chosen = [
        product
        for product in request.world.store.products
        if (not status or _STATES[status](product)) and matches(search, product.name, product.sku)
    ]
    chosen.sort(key=lambda product: (getattr(product, sort), product.id))
    page = request.paged(chosen, _PER_PAGE)
    return request.page("products.html", page=page, search=search, status=status, sort=sort)


@site.get("/products/{id}")
def product(request: Request, id: int) -> Response:
    store = request.world.store
    return request.page(
        "product.html",
        product=look_up(store.products, id, "product"),
        reviews=store.reviews.where("product_id", id)[::-1],
        categories={category.slug: category.name for category in store.categories},
    )


@site.post("/products/{id}")
def save_product(request: Request, id: int) -> Response:
    old = look_up(request.world.store.products, id, "product")
    new = replace(
        old,
        name=request.text("name", "Product Name", 120),
        price=_cents(request.text("price", "Price", 20)),
        stock=request.whole("stock", "Quantity", 0, 999_999),
        enabled=request.one_of("enabled", "Status", ("yes", "no")) == "yes",
        category=request.one_of(
            "category", "Category", [category.slug for category in request.world.store.categories]
        ),
        description=request.text("description", "Description", 4000),
    )
    request.world.store.products.put(new)
    return request.done("You saved the product.", f"/products/{id}")


def _cents(text: str) -> int:
    """Parse an amount such as 12, 12.5 or $1,299.00 into cents; commas are ignored.
    Errors: Refused for other text, or more than 6 digits before the point.
    """
    match = re.fullmatch(r"\$?([0-9]{1,6})(?:\.([0-9]{1,2}))?", text.replace(",", ""))
    if match is None:
        raise Refused("Price must be an amount such as 24.90.")
    return int(match[1]) * 100 + int((match[2] or "0").ljust(2, "0"))


@site.get("/orders")
def orders(request: Request) -> Response:
    store = request.world.store
    search, status = request.search("search"), request.choice("status", ORDER_STATUSES, "")
    rows = store.orders.where("status", status) if status else store.orders
    named = ((row, store.customers[row.customer_id].name) for row in rows)
    chosen = [row for row, name in named if matches(search, row.number, name)]
    page = request.paged(chosen[::-1], _PER_PAGE)
    return request.page(
        "orders.html", page=page, search=search, status=status, statuses=ORDER_STATUSES
    )


@site.get("/orders/{id}")
def order(request: Request, id: int) -> Response:
    record = look_up(request.world.store.orders, id, "order")
    customer = request.world.store.customers[record.customer_id]
    return request.page(
        "order.html", order=record, customer=customer, statuses=ORDER_STATUSES, shipping=SHIPPING
    )


@site.post("/orders/{id}/comment")
def comment_order(request: Request, id: int) -> Response:
    """Set the order's status and append a comment.
    Errors: Refused if the comment's text is empty and the status does not change.
    """
    old = look_up(request.world.store.orders, id, "order")
    status = request.one_of("status", "Status", ORDER_STATUSES)
    text = request.text("comment", "Comment", 1000, required=False)
    if not text and status == old.status:
        raise Refused("Please enter a comment or choose another status.")
    comment = Comment(TODAY, status, text, "visible" in request.form)
    request.world.store.orders.put(replace(old, status=status, comments=(*old.comments, comment)))
    return request.done("The order was updated.", f"/orders/{id}")


@site.get("/customers")
def customers(request: Request) -> Response:
    search, group = request.search("search"), request.choice("group", GROUPS, "")
    customers = request.world.store.customers
    chosen = [
        row
        for row in (customers.where("group", group) if group else customers)
        if matches(search, row.name, row.email, row.address.city, row.address.phone)
    ]
    page = request.paged(chosen, _PER_PAGE)
    return request.page("customers.html", page=page, search=search, group=group, groups=GROUPS)


@site.get("/customers/{id}")
def customer(request: Request, id: int) -> Response:
    record = look_up(request.world.store.customers, id, "customer")
    orders = request.world.store.orders.where("customer_id", id)[::-1]
    spent = sum(order.total for order in _counted(orders))
    return request.page("customer.html", customer=record, orders=orders, spent=spent, groups=GROUPS)


@site.post("/customers/{id}")
def save_customer(request: Request, id: int) -> Response:
    group = request.one_of("group", "Group", GROUPS)
    customers = request.world.store.customers
    customers.put(replace(look_up(customers, id, "customer"), group=group))
    return request.done("You saved the customer.", f"/customers/{id}")


@site.get("/reviews")
def reviews(request: Request) -> Response:
    store = request.world.store
    search, status = request.search("search"), request.choice("status", REVIEW_STATUSES, "")
    names = {product.id: product.name for product in store.products}
    chosen = [
        row
        for row in (store.reviews.where("status", status) if status else store.reviews)
        if matches(search, row.title, row.nickname, row.text, names[row.product_id])
    ]
    page = request.paged(chosen[::-1], _PER_PAGE)
    return request.page(
        "reviews.html", page=page, search=search, status=status, statuses=REVIEW_STATUSES
    )


@site.get("/reviews/{id}")
def review(request: Request, id: int) -> Response:
    record = look_up(request.world.store.reviews, id, "review")
    product = request.world.store.products[record.product_id]
    return request.page("review.html", review=record, product=product, statuses=REVIEW_STATUSES)


@site.post("/reviews/{id}")
def save_review(request: Request, id: int) -> Response:
    status = request.one_of("status", "Status", REVIEW_STATUSES)
    reviews = request.world.store.reviews
    reviews.put(replace(look_up(reviews, id, "review"), status=status))
    return request.done("You saved the review.", f"/reviews/{id}")


@site.post("/reviews/{id}/delete")
def delete_review(request: Request, id: int) -> Response:
    look_up(request.world.store.reviews, id, "review")
    request.world.store.reviews.remove(id)
    return request.done("The review has been deleted.", "/reviews")


@site.get("/reports/sales")
def sales(request: Request) -> Response:
    """Show the sales per day, month or year (the last 100 rows), without canceled orders."""
    chosen, span = _in_span(request)
    period = request.choice("period", _PERIODS, "month")
    cut = {"day": 10, "month": 7, "year": 4}[period]
    rows: dict[str, list[Order]] = {}
    for order in chosen:
        rows.setdefault(order.day.isoformat()[:cut], []).append(order)
    table = [
        (key, len(orders), sum(map(_items, orders)), sum(order.total for order in orders))
        for key, orders in sorted(rows.items())
    ]
    total = (len(chosen), sum(map(_items, chosen)), sum(order.total for order in chosen))
    return request.page(
        "sales.html", rows=table[-100:], total=total, period=period, periods=_PERIODS, **span
    )


@site.get("/reports/bestsellers")
def bestsellers(request: Request) -> Response:
    chosen, span = _in_span(request)
    return request.page("bestsellers.html", rows=_bestsellers(chosen)[:20], **span)


def _items(order: Order) -> int:
    return sum(line.quantity for line in order.lines)


def _in_span(request: Request) -> tuple[list[Order], dict[str, Any]]:
    """Return the orders, without canceled ones, between the query's days (default: this year), and
    these days as `start` and `end`. Errors: Refused for invalid or reversed days.
    """
    start = request.day("from", "From") or date(TODAY.year, 1, 1)
    end = request.day("to", "To") or TODAY
    if start > end:
        raise Refused("From must not be later than To.")
    orders = (order for order in request.world.store.orders if start <= order.day <= end)
    return _counted(orders), {"start": start, "end": end}


site.admit(
    lambda _: USER,
    PASSWORD,
    wrong="The account sign-in was incorrect. Please check the user name and the password.",
    after="/login",
)
