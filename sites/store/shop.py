"""The shop's pages for customers: catalog, cart and checkout.
The customers' accounts are in `account.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from sites.store.records import (
    PAYMENT,
    SHIPPING,
    TODAY,
    CartLine,
    Comment,
    Customer,
    Line,
    Order,
    Product,
    Review,
)
from sites.web import NotFound, Refused, Request, Response, Site, paged, redirect

_PER_PAGE = 12
_MAX_QUANTITY = 99
_SORTS: dict[str, tuple[str, Callable[[Request, Product], Any]]] = {
    "position": ("Position", lambda _, product: product.id),
    "name": ("Product Name", lambda _, product: product.name),
    "price_asc": ("Price: low to high", lambda _, product: product.price),
    "price_desc": ("Price: high to low", lambda _, product: -product.price),
    "rating": ("Customer Rating", lambda request, product: -request.world.store.rating(product.id)),
    "newest": ("Newest", lambda _, product: -product.added.toordinal()),
}


def _context(request: Request) -> dict[str, Any]:
    store = request.world.store
    return {
        "store": store,
        "user": _customer(request),
        "cart_count": sum(line.quantity for line in store.cart),
        "wish_count": len(store.wishes),
    }


site = Site("shopping", "shop", _context)


def _customer(request: Request) -> Customer | None:
    login = request.world.logins["shopping"]
    return None if login is None else request.world.store.customers[login]


def me(request: Request) -> Customer:
    """The logged-in customer; only for pages that require a login."""
    customer = _customer(request)
    assert customer is not None
    return customer


def find(request: Request, id: int) -> Product:
    product = request.world.store.products.get(id)
    if product is None or not product.enabled:
        raise NotFound("This product does not exist.")
    return product


def _listing(request: Request, title: str, products: Sequence[Product], **extra: Any) -> Response:
    """Show products filtered by the query's brand and price, sorted and paged."""
    brands = sorted({product.brand for product in products})
    brand = request.choice("brand", brands, "")
    low, high = request.number("min", 0) * 100, request.number("max", 10**7) * 100
    chosen = [
        product
        for product in products
        if (not brand or product.brand == brand) and low <= product.price <= high
    ]
    sort = request.choice("sort", _SORTS, "position")
    chosen.sort(key=lambda product: (_SORTS[sort][1](request, product), product.id))
    page = paged(chosen, request.number("page", 1), _PER_PAGE)
    return request.page(
        "listing.html",
        title=title,
        page=page,
        sorts=_SORTS,
        sort=sort,
        brands=brands,
        brand=brand,
        **extra,
    )


@site.get("/")
def home(request: Request) -> Response:
    products = request.world.store.visible()
    newest = sorted(products, key=lambda product: (-product.added.toordinal(), product.id))[:8]
    best = sorted(
        products, key=lambda product: (-request.world.store.rating(product.id), product.id)
    )[:4]
    return request.page("home.html", newest=newest, best=best)


@site.get("/category/{slug}")
def category(request: Request, slug: str) -> Response:
    record = request.world.store.category(slug)
    if record is None:
        raise NotFound("This category does not exist.")
    products = [product for product in request.world.store.visible() if product.category == slug]
    return _listing(request, record.name, products, category=record, query="")


@site.get("/search")
def search(request: Request) -> Response:
    query = request.query.get("q", "").strip()[:100]
    words = query.lower().split()
    products = (
        [product for product in request.world.store.visible() if _matches(product, words)]
        if words
        else []
    )
    return _listing(request, f"Search results for: '{query}'", products, category=None, query=query)


def _matches(product: Product, words: Sequence[str]) -> bool:
    text = f"{product.name} {product.sku} {product.description}".lower()
    return all(word in text for word in words)


@site.get("/product/{id}/{slug}")
def product(request: Request, id: int, slug: str) -> Response:
    record = find(request, id)
    store = request.world.store
    related = [other for other in store.visible() if other.kind == record.kind and other.id != id][
        :4
    ]
    return request.page(
        "product.html",
        product=record,
        category=store.category(record.category),
        reviews=store.approved(id)[::-1],
        related=related,
    )


@site.post("/product/{id}/review", private=False)
def write_review(request: Request, id: int) -> Response:
    reviewed, store = find(request, id), request.world.store
    rating = int(request.one_of("rating", "Rating", "12345"))
    nickname = request.text("nickname", "Nickname", 60)
    title, text = request.text("title", "Summary", 120), request.text("text", "Review", 2000)
    store.reviews.put(
        Review(
            store.reviews.next_id(), reviewed.id, nickname, rating, title, text, TODAY, "Pending"
        )
    )
    return request.done("You submitted your review for moderation.")


@site.post("/cart/add/{id}", private=False)
def add_to_cart(request: Request, id: int) -> Response:
    wanted, store = find(request, id), request.world.store
    if wanted.values and "choice" not in request.form:
        return redirect(
            address(wanted)
        )  # a list of products offers no choice; the product's page does
    choice = (
        f"{wanted.option}: {request.one_of('choice', wanted.option, wanted.values)}"
        if wanted.values
        else ""
    )
    quantity = (
        request.whole("quantity", "Quantity", 1, _MAX_QUANTITY) if "quantity" in request.form else 1
    )
    same = next(
        (line for line in store.cart.where("product_id", id) if line.choice == choice), None
    )
    line = same or CartLine(store.cart.next_id(), id, choice, 0)
    others = sum(
        other.quantity for other in store.cart.where("product_id", id) if other.id != line.id
    )
    _check_stock(wanted, line.quantity + quantity + others)
    store.cart.put(replace(line, quantity=line.quantity + quantity))
    return request.done(f"You added {wanted.name} to your shopping cart.")


def _check_stock(product: Product, quantity: int) -> None:
    if product.stock == 0:
        raise Refused(f"{product.name} is out of stock.")
    if quantity > product.stock:
        raise Refused(
            f"The requested quantity of {product.name} is not available: {product.stock} left."
        )


@site.get("/cart")
def cart(request: Request) -> Response:
    return request.page("cart.html", **_bill(request))


def _bill(request: Request) -> dict[str, Any]:
    store = request.world.store
    items = [(line, store.products[line.product_id]) for line in store.cart]
    return {
        "items": items,
        "subtotal": sum(line.quantity * product.price for line, product in items),
    }


@site.post("/cart/update", private=False)
def update_cart(request: Request) -> Response:
    """Set the cart's quantities (fields `quantity_<line id>`); zero removes. Errors: Refused."""
    store = request.world.store
    lines = [
        replace(line, quantity=request.whole(f"quantity_{line.id}", "Quantity", 0, _MAX_QUANTITY))
        for line in store.cart
    ]
    for line in lines:
        if line.quantity:
            _check_stock(store.products[line.product_id], line.quantity)
    for line in lines:
        if line.quantity:
            store.cart.put(line)
        else:
            store.cart.remove(line.id)
    return request.done("Your shopping cart was updated.", "/cart")


@site.post("/cart/remove/{id}", private=False)
def remove_from_cart(request: Request, id: int) -> Response:
    request.world.store.cart.remove(id)
    return request.done("The item was removed from your cart.", "/cart")


@site.get("/checkout", private=True)
def checkout(request: Request) -> Response:
    bill = _bill(request)
    if not bill["items"]:
        return redirect("/cart")
    return request.page("checkout.html", shipping=SHIPPING, payment=PAYMENT, **bill)


@site.post("/checkout")
def place_order(request: Request) -> Response:
    store, customer = request.world.store, me(request)
    items = _bill(request)["items"]
    if not items:
        raise Refused("Your shopping cart is empty.")
    shipping = request.one_of("shipping", "Shipping method", SHIPPING)
    payment = request.one_of("payment", "Payment method", PAYMENT)
    wanted: dict[int, int] = {}
    for line, product in items:
        wanted[product.id] = wanted.get(product.id, 0) + line.quantity
        if not product.enabled:
            raise Refused(f"{product.name} is no longer sold.")
        _check_stock(product, wanted[product.id])
    lines = tuple(
        Line(product.id, product.name, product.sku, line.choice, product.price, line.quantity)
        for line, product in items
    )
    received = Comment(TODAY, "Pending", "Order received.", True)
    order = store.orders.put(
        Order(
            store.orders.next_id(),
            customer.id,
            TODAY,
            "Pending",
            lines,
            shipping,
            payment,
            customer.address,
            (received,),
        )
    )
    for id, quantity in wanted.items():
        store.products.put(replace(store.products[id], stock=store.products[id].stock - quantity))
    for line, _ in items:
        store.cart.remove(line.id)
    return redirect(f"/checkout/success/{order.id}")


def address(product: Product) -> str:
    """The path of a product's page."""
    return f"/product/{product.id}/{product.slug}"
