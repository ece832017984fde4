"""A customer's own pages in the shop: orders, wish list, address, login."""

from __future__ import annotations

import re
from dataclasses import replace

from sites.store.records import PAYMENT, SHIPPING, TODAY, Address, CartLine, Comment, Order, Wish
from sites.store.shop import find, me, site
from sites.web import Refused, Request, Response, look_up

PASSWORD = "larkspur-2024"  # noqa: S105 (of the demo account, printed on the login page)
_FIELDS = (
    ("street", "Street Address"),
    ("city", "City"),
    ("state", "State/Province"),
    ("zip", "Zip/Postal Code"),
    ("country", "Country"),
    ("phone", "Phone Number"),
)


@site.get("/checkout/success/{id}", private=True)
def success(request: Request, id: int) -> Response:
    return request.page("success.html", order=_order(request, id))


@site.get("/wishlist", private=True)
def wishlist(request: Request) -> Response:
    store = request.world.store
    products = [store.products[wish.product_id] for wish in store.wishes]
    return request.page("wishlist.html", products=products)


@site.post("/wishlist/add/{id}")
def add_wish(request: Request, id: int) -> Response:
    wished, store = find(request, id), request.world.store
    if store.wishes.first("product_id", id) is None:
        store.wishes.put(Wish(store.wishes.next_id(), id))
    return request.done(f"{wished.name} has been added to your Wish List.", "/wishlist")


@site.post("/wishlist/remove/{id}")
def remove_wish(request: Request, id: int) -> Response:
    for wish in request.world.store.wishes.where("product_id", id):
        request.world.store.wishes.remove(wish.id)
    return request.done("The product was removed from your Wish List.", "/wishlist")


@site.get("/account", private=True)
def account(request: Request) -> Response:
    return request.page("account.html", orders=_orders(request)[:5])


def _orders(request: Request) -> list[Order]:
    """Return the customer's orders, newest first."""
    return request.world.store.orders.where("customer_id", me(request).id)[::-1]


def _order(request: Request, id: int) -> Order:
    return look_up(request.world.store.orders, id, "order", customer_id=me(request).id)


@site.get("/account/orders", private=True)
def orders(request: Request) -> Response:
    return request.page("orders.html", page=request.paged(_orders(request), 10))


@site.get("/account/orders/{id}", private=True)
def order(request: Request, id: int) -> Response:
    return request.page("order.html", order=_order(request, id), shipping=SHIPPING, payment=PAYMENT)


@site.post("/account/orders/{id}/reorder")
def reorder(request: Request, id: int) -> Response:
    """Add the order's products to the cart in the quantities ordered.
    Products that are no longer sold, or of which fewer are in stock, are left out.
    """
    store, count = request.world.store, 0
    for line in _order(request, id).lines:
        product = store.products.get(line.product_id, enabled=True)
        if product is not None and product.stock >= line.quantity:
            store.cart.put(CartLine(store.cart.next_id(), product.id, line.choice, line.quantity))
            count += 1
    items = "1 item of the order was" if count == 1 else f"{count} items of the order were"
    return request.done(f"{items} added to your cart.", "/cart")


@site.post("/account/orders/{id}/cancel")
def cancel(request: Request, id: int) -> Response:
    order = _order(request, id)
    if order.status not in ("Pending", "On Hold"):
        raise Refused("Only pending orders can be canceled.")
    comment = Comment(TODAY, "Canceled", "Canceled by the customer.", True)
    new = replace(order, status="Canceled", comments=(*order.comments, comment))
    request.world.store.orders.put(new)
    return request.done("Your order was canceled.")


@site.post("/account/address")
def save_address(request: Request) -> Response:
    new = Address(**{name: request.text(name, label, 100) for name, label in _FIELDS})
    request.world.store.customers.put(replace(me(request), address=new))
    return request.done("You saved the address.", "/account")


@site.post("/account/edit")
def save_account(request: Request) -> Response:
    first, last = request.text("first", "First Name", 60), request.text("last", "Last Name", 60)
    email = request.text("email", "Email", 120)
    if not re.fullmatch(r"[^@ ]+@[^@ ]*\.[^@ ]*", email):
        raise Refused("Please enter a valid email address (for example, johndoe@domain.com).")
    new = replace(
        me(request), first=first, last=last, email=email, newsletter="newsletter" in request.form
    )
    request.world.store.customers.put(new)
    return request.done("You saved the account information.", "/account")


site.show("/account/address", "address.html", fields=_FIELDS)
site.show("/account/edit", "edit.html")
site.admit(
    lambda world: world.store.customers[1].email,
    PASSWORD,
    form_field="email",
    wrong="The account sign-in was incorrect. Please check the email and the password.",
    welcome=lambda world: f"Welcome back, {world.store.customers[1].first}!",
)
