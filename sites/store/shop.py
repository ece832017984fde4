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
from sites.web import Refused, Request, Response, Site, existing, look_up, matches, redirect

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
        "user": request.visitor(store.customers),
        "cart_count": sum(line.quantity for line in store.cart),
        "wish_count": len(store.wishes),
    }


site = Site("shopping", "shop", _context)


def me(request: Request) -> Customer:
    """Return the logged-in customer; call it only for pages that require a login."""
    return request.me(request.world.store.customers)


def find(request: Request, id: int) -> Product:
    return look_up(request.world.store.products, id, "product", enabled=True)


def _listing(request: Request, title: str, products: Sequence[Product], **extra: Any) -> Response:
    """Show the products that match the query's brand and price range, sorted and paged."""
    brands = sorted({product.brand for product in products})
    brand = request.choice("brand", brands, "")
    low, high = request.number("min", 0) * 100, request.number("max", 10**7) * 100
    chosen = [product for product in products if low <= product.price <= high]
    if brand:
        chosen = [product for product in chosen if product.brand == brand]
    sort = request.choice("sort", _SORTS, "position")
    chosen.sort(key=lambda product: (_SORTS[sort][1](request, product), product.id))
    page, context = request.paged(chosen, _PER_PAGE), {"brands": brands, "brand": brand, **extra}
    return request.page("listing.html", title=title, page=page, sorts=_SORTS, sort=sort, **context)


@site.get("/")
def home(request: Request) -> Response:
    store = request.world.store
    newest = sorted(store.visible(), key=lambda row: (-row.added.toordinal(), row.id))[:8]
    best = sorted(store.visible(), key=lambda row: (-store.rating(row.id), row.id))[:4]
    return request.page("home.html", newest=newest, best=best)


@site.get("/category/{slug}")
def category(request: Request, slug: str) -> Response:
    record = existing(request.world.store.category(slug), "This category does not exist.")
    products = [product for product in request.world.store.visible() if product.category == slug]
    return _listing(request, record.name, products, category=record, query="")


@site.get("/search")
def search(request: Request) -> Response:
    query = request.search("q")
    products = [
        product
        for product in request.world.store.visible()
        if query and matches(query, product.name, product.sku, product.description)
    ]
    return _listing(request, f"Search results for: '{query}'", products, category=None, query=query)


@site.get("/product/{id}/{slug}")
def product(request: Request, id: int, slug: str) -> Response:
    record, store = find(request, id), request.world.store
    related = [other for other in store.visible() if other.kind == record.kind and other.id != id]
    category, reviews = store.category(record.category), store.approved(id)[::-1]
    return request.page(
        "product.html", product=record, category=category, reviews=reviews, related=related[:4]
    )


@site.post("/product/{id}/review", private=False)
def write_review(request: Request, id: int) -> Response:
    find(request, id)
    store = request.world.store
    rating = int(request.one_of("rating", "Rating", "12345"))
    nickname = request.text("nickname", "Nickname", 60)
    title, text = request.text("title", "Summary", 120), request.text("text", "Review", 2000)
    number = store.reviews.next_id()
    store.reviews.put(Review(number, id, nickname, rating, title, text, TODAY, "Pending"))
    return request.done("You submitted your review for moderation.")


@site.post("/cart/add/{id}", private=False)
def add_to_cart(request: Request, id: int) -> Response:
    wanted, store = find(request, id), request.world.store
    choice, quantity = "", 1
    if wanted.values:
        if "choice" not in request.form:  # sent from a list; the product's page offers choices
            return redirect(f"/product/{id}/{wanted.slug}")
        choice = f"{wanted.option}: {request.one_of('choice', wanted.option, wanted.values)}"
    if "quantity" in request.form:
        quantity = request.whole("quantity", "Quantity", 1, _MAX_QUANTITY)
    line = store.cart.first("product_id", id, choice=choice)
    line = line or CartLine(store.cart.next_id(), id, choice, 0)
    in_cart = sum(other.quantity for other in store.cart.where("product_id", id))
    _check_stock(wanted, in_cart + quantity)
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
    subtotal = sum(line.quantity * product.price for line, product in items)
    return {"items": items, "subtotal": subtotal}


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
    terms = (shipping, payment, customer.address)
    received = Comment(TODAY, "Pending", "Order received.", True)
    id = store.orders.next_id()
    store.orders.put(Order(id, customer.id, TODAY, "Pending", lines, *terms, (received,)))
    for product_id, quantity in wanted.items():
        product = store.products[product_id]
        store.products.put(replace(product, stock=product.stock - quantity))
    for line, _ in items:
        store.cart.remove(line.id)
    return redirect(f"/checkout/success/{id}")
