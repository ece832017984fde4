"""Records of the shop and its administration.
All records are frozen; amounts are cents; ids count from 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date

from sites.overlay import Table

TODAY = date(2024, 3, 15)  # the sites' date, which never changes
ORDER_STATUSES = ("Pending", "Processing", "On Hold", "Shipped", "Complete", "Canceled")
REVIEW_STATUSES = ("Approved", "Pending", "Not Approved")
GROUPS = ("General", "Wholesale", "VIP")
SHIPPING = {
    "standard": ("Standard shipping (3-5 days)", 499),
    "express": ("Express shipping (1-2 days)", 1299),
    "pickup": ("Store pickup", 0),
}
PAYMENT = {"invoice": "Pay by invoice", "transfer": "Bank transfer", "delivery": "Cash on delivery"}


@dataclass(frozen=True, slots=True)
class Product:
    id: int
    sku: str
    name: str
    slug: str
    brand: str
    category: str  # its slug
    kind: str
    icon: str
    price: int
    stock: int
    enabled: bool
    description: str
    details: tuple[tuple[str, str], ...]
    option: str  # name of the choice to make, "" if there is none
    values: tuple[str, ...]
    added: date


@dataclass(frozen=True, slots=True)
class Review:
    id: int
    product_id: int
    nickname: str
    rating: int  # 1 to 5
    title: str
    text: str
    day: date
    status: str


@dataclass(frozen=True, slots=True)
class Address:
    street: str
    city: str
    state: str
    zip: str
    country: str
    phone: str


@dataclass(frozen=True, slots=True)
class Customer:
    id: int
    first: str
    last: str
    email: str
    group: str
    since: date
    address: Address
    newsletter: bool

    @property
    def name(self) -> str:
        return f"{self.first} {self.last}"


@dataclass(frozen=True, slots=True)
class Line:
    """A product in an order, as it was when ordered."""

    product_id: int
    name: str
    sku: str
    choice: str
    price: int
    quantity: int

    @property
    def total(self) -> int:
        return self.price * self.quantity


@dataclass(frozen=True, slots=True)
class Comment:
    day: date
    status: str
    text: str
    visible: bool  # to the customer


@dataclass(frozen=True, slots=True)
class Order:
    id: int
    customer_id: int
    day: date
    status: str
    lines: tuple[Line, ...]
    shipping: str
    payment: str
    address: Address
    comments: tuple[Comment, ...]

    @property
    def number(self) -> str:
        return f"{self.id:09d}"

    @property
    def subtotal(self) -> int:
        return sum(line.total for line in self.lines)

    @property
    def shipping_fee(self) -> int:
        return SHIPPING[self.shipping][1]

    @property
    def total(self) -> int:
        return self.subtotal + self.shipping_fee


@dataclass(frozen=True, slots=True)
class CartLine:
    id: int
    product_id: int
    choice: str
    quantity: int


@dataclass(frozen=True, slots=True)
class Wish:
    id: int
    product_id: int


@dataclass(frozen=True, slots=True)
class Category:
    slug: str
    name: str
    blurb: str


@dataclass
class Store:
    """One session's records of the shop; cart and wish list belong to the session's visitor."""

    categories: tuple[Category, ...]
    search_terms: tuple[tuple[str, int, int], ...]  # term, results, uses
    products: Table[Product]
    reviews: Table[Review]
    customers: Table[Customer]
    orders: Table[Order]
    cart: Table[CartLine]
    wishes: Table[Wish]

    def visible(self) -> list[Product]:
        """Return the enabled products; the shop shows no others."""
        return [product for product in self.products if product.enabled]

    def approved(self, product_id: int) -> list[Review]:
        """Return the product's approved reviews, oldest first; the shop shows no others."""
        reviews = self.reviews.where("product_id", product_id)
        return [review for review in reviews if review.status == "Approved"]

    def rating(self, product_id: int) -> float:
        """Return the mean rating (1 to 5) of the product's approved reviews; 0 without any."""
        ratings = [review.rating for review in self.approved(product_id)]
        return sum(ratings) / len(ratings) if ratings else 0.0

    def category(self, slug: str) -> Category | None:
        return next((category for category in self.categories if category.slug == slug), None)
