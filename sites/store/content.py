"""Generated content of the shop: products, reviews, customers and orders of one seed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import date, timedelta
from typing import Any

from sites.dice import Dice, load_words
from sites.overlay import Seed, Table
from sites.store.records import (
    PAYMENT,
    SHIPPING,
    TODAY,
    Address,
    Category,
    Comment,
    Customer,
    Line,
    Order,
    Product,
    Review,
    Store,
)
from sites.text import slug

WORDS = load_words(__file__)
_PER_KIND = 6
_NUM_CUSTOMERS = 60
_NUM_ORDERS = 300
_DEMO_ORDERS = 22
_OPENED = date(2022, 1, 10)


@dataclass(frozen=True)
class Kind:
    """A sort of product: name, icon, price range in dollars, option to choose, details, and a
    line on its use.
    """

    name: str
    icon: str
    low: int
    high: int
    option: str
    values: tuple[str, ...]
    details: tuple[tuple[str, tuple[str, ...]], ...]
    line: str


@dataclass(frozen=True)
class Shelf:
    """A category of the shop with its brands and kinds of product."""

    slug: str
    name: str
    blurb: str
    brands: tuple[str, ...]
    kinds: tuple[Kind, ...]


_SHELVES = tuple(
    Shelf(**{**row, "kinds": tuple(Kind(**kind) for kind in row["kinds"])})
    for row in WORDS.categories
)


def generate(seed: int) -> Store:
    products = _products(Dice(seed, "products"))
    customers = _customers(Dice(seed, "customers"))
    dice = Dice(seed, "terms")
    terms = tuple(
        (term, sum(term in product.name.lower() for product in products), dice.between(3, 60))
        for term in WORDS.search_terms
    )
    reviews = _reviews(products, Dice(seed, "reviews"))
    orders = _orders(products, customers, Dice(seed, "orders"))
    tables: tuple[Iterable[Any], ...] = (products, reviews, customers, orders, (), ())
    return Store(
        tuple(Category(shelf.slug, shelf.name, shelf.blurb) for shelf in _SHELVES),
        tuple(sorted(terms, key=lambda term: -term[2])),
        *(Table(Seed(rows)) for rows in tables),
    )


def _products(dice: Dice) -> list[Product]:
    products: list[Product] = []
    for shelf in _SHELVES:
        for kind in shelf.kinds:
            for series in dice.some(WORDS.series, _PER_KIND):
                id, brand = len(products) + 1, dice.pick(shelf.brands)
                products.append(_product(id, shelf.slug, brand, series, kind, dice))
    return products


def _product(id: int, category: str, brand: str, series: str, kind: Kind, dice: Dice) -> Product:
    name = f"{brand} {series} {kind.name}"
    opening = dice.pick(WORDS.openings).format(
        brand=brand, series=series, kind=kind.name.lower(), line=kind.line
    )
    return Product(
        id,
        sku=f"{kind.icon[:3].upper()}-{id:04d}",
        name=name,
        slug=slug(name),
        brand=brand,
        category=category,
        kind=kind.name,
        icon=kind.icon,
        price=dice.between(kind.low, kind.high) * 100 + dice.pick((0, 50, 95, 99)) - 100,
        stock=0 if dice.chance(0.06) else dice.between(2, 180),
        enabled=not dice.chance(0.04),
        description=f"{opening} {dice.pick(WORDS.middles)} {dice.pick(WORDS.closings)}",
        details=(("Brand", brand), *((label, dice.pick(values)) for label, values in kind.details)),
        option=kind.option,
        values=kind.values,
        added=_OPENED + timedelta(days=dice.between(0, 760)),
    )


def _reviews(products: list[Product], dice: Dice) -> list[Review]:
    """Generate up to 9 reviews per product, sorted by day; some recent ones are not approved."""
    drafts: list[tuple[date, int, Product]] = []
    for product in products:
        days = (TODAY - product.added).days
        drafts += [
            (product.added + timedelta(days=dice.between(3, days)), product.id, product)
            for _ in range(dice.skewed(9, 1.6))
        ]
    drafts.sort(key=lambda draft: draft[:2])
    return [_review(id, product, day, dice) for id, (day, _, product) in enumerate(drafts, 1)]


def _review(id: int, product: Product, day: date, dice: Dice) -> Review:
    rating = dice.pick((5, 5, 5, 5, 4, 4, 4, 3, 3, 2, 1))
    series = product.name.removeprefix(product.brand).split()[0]
    lines = dice.some(WORDS.review_lines[str(rating)], 2)
    good, poor = ("gift", "cleaning"), ("noise", "size")
    topics = {5: good, 4: good, 3: ("size", "cleaning"), 2: poor, 1: ("smell", "noise")}
    if dice.chance(0.3):
        powered = product.category == "electronics" and rating < 4
        lines.append(WORDS.review_topics["battery" if powered else dice.pick(topics[rating])])
    recent = (TODAY - day).days < 60
    status = dice.pick(("Approved", "Pending", "Pending", "Not Approved")) if recent else "Approved"
    text = " ".join(lines).format(kind=product.kind.lower(), series=series, brand=product.brand)
    nickname, title = dice.pick(WORDS.nicknames), dice.pick(WORDS.review_titles[str(rating)])
    return Review(id, product.id, nickname, rating, title, text, day, status)


def _customers(dice: Dice) -> list[Customer]:
    names = [("Nora", "Whitfield")]
    while len(names) < _NUM_CUSTOMERS:
        name = (dice.pick(WORDS.first), dice.pick(WORDS.last))
        if name not in names:
            names.append(name)
    return [_customer(id, first, last, dice) for id, (first, last) in enumerate(names, 1)]


def _customer(id: int, first: str, last: str, dice: Dice) -> Customer:
    city, state, zip = dice.pick(WORDS.cities)
    phone = f"555-01{dice.between(0, 99):02d}"
    street = f"{dice.between(1, 240)} {dice.pick(WORDS.streets)}"
    address = Address(street, city, state, zip, "United States", phone)
    since = _OPENED if id == 1 else _OPENED + timedelta(days=dice.between(0, 700))
    group = dice.pick(("General", "General", "General", "General", "Wholesale", "VIP"))
    email = f"{first}.{last}@example.com".lower()
    return Customer(id, first, last, email, group, since, address, dice.chance(0.4))


def _orders(products: list[Product], customers: list[Customer], dice: Dice) -> list[Order]:
    """Generate the orders, sorted by day; the demo customer gets a fixed number of them."""
    drafts = []
    for index in range(_NUM_ORDERS):
        customer = customers[0] if index < _DEMO_ORDERS else dice.pick(customers[1:])
        days = (TODAY - customer.since).days
        drafts.append((customer.since + timedelta(days=dice.between(1, days - 1)), index, customer))
    drafts.sort(key=lambda draft: draft[:2])
    return [
        _order(id, customer, day, products, dice) for id, (day, _, customer) in enumerate(drafts, 1)
    ]


def _order(id: int, customer: Customer, day: date, products: list[Product], dice: Dice) -> Order:
    sold = [product for product in products if product.added <= day] or products[:20]
    lines = []
    for product in dice.some(sold, dice.pick((1, 1, 2, 2, 3, 4))):
        choice = f"{product.option}: {dice.pick(product.values)}" if product.values else ""
        quantity = dice.pick((1, 1, 1, 2, 3))
        lines.append(Line(product.id, product.name, product.sku, choice, product.price, quantity))
    age = (TODAY - day).days
    recent = ("Pending", "Pending", "Processing", "Shipped", "On Hold")
    status = dice.pick((*("Complete",) * 8, "Canceled") if age > 30 else recent)
    comments = [Comment(day, "Pending", "Order received.", True)]
    if dice.chance(0.35):
        text, next_day = dice.pick(WORDS.order_comments), min(TODAY, day + timedelta(days=1))
        comments.append(Comment(next_day, status, text, dice.chance(0.5)))
    terms = (dice.pick(tuple(SHIPPING)), dice.pick(tuple(PAYMENT)), customer.address)
    return Order(id, customer.id, day, status, tuple(lines), *terms, tuple(comments))
