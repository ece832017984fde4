"""Helper functions that WebArena's task files may name: newest order, newest review, a member's
role, the address of a post.

For the embedded sites they read the state of the session's sites; for real ones they query the
shop's REST API or the page itself.
"""

from __future__ import annotations

import json
import os
import re
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from envs.env import GraderFailed
from envs.options import SECRET_PREFIX
from envs.webarena.evaluators import run_script
from envs.webarena.tasks import PAGE, Task, parse_call

if TYPE_CHECKING:
    from envs.webarena.world import FinalPage

PASSWORD_VARIABLE = f"{SECRET_PREFIX}SHOP_PASSWORD"  # for the shop's REST API, user `admin`
TIMEOUT_S = 20.0
MAX_REPLY_BYTES = 16 << 20

# helper -> number of arguments
KNOWN = {
    "reddit_get_post_url": 1,
    "shopping_get_latest_order_url": 0,
    "shopping_get_sku_latest_review_author": 1,
    "shopping_get_sku_latest_review_rating": 1,
    "gitlab_get_project_memeber_role": 2,  # spelled like this in the task file
}
_POST = re.compile(r"/f/[^/]+/\d+(?=/|$)")
_ROLE = """name => {
  const rows = [...document.querySelectorAll('tr')];
  const row = rows.find(r => [...r.querySelectorAll('span')].some(s => s.innerText.trim() === '@' \
+ name));
  const role = row && row.querySelector("td.col-max-role span, [data-label='Max role'] span");
  return role ? role.innerText : '';
}"""


class HelperFailed(GraderFailed):
    """A site did not return a value that the evaluation needs: a failure of the environment."""


def check_calls(tasks: Iterable[Task], *, embedded: bool) -> None:
    """Check the tasks' helper calls without making them.
    embedded: the calls are for the embedded sites, which need no password.
    Errors: ValueError for an unknown helper, a wrong number of arguments, or if a call needs the
    shop's API and PASSWORD_VARIABLE is not set.
    """
    can_ask = embedded or PASSWORD_VARIABLE in os.environ
    for task in tasks:
        targets = task.evaluation.targets
        texts = [text for target in targets for text in (target.url, target.locator)]
        for text in (text for text in texts if text.startswith("func:")):
            call = parse_call(text)
            if KNOWN.get(call.name) != len(call.arguments):
                raise ValueError(
                    f"webarena task {task.id}: eval.program_html: no helper {text!r};"
                    f" known: {', '.join(KNOWN)}"
                )
            if call.name.startswith("shopping_") and not can_ask:
                raise ValueError(
                    f"webarena task {task.id}: {call.name} asks the shop's REST API; put"
                    f" its password into {PASSWORD_VARIABLE}"
                )


def post_url(url: str) -> str:
    """Return a forum post's address without its title; any other address unchanged."""
    parts = urllib.parse.urlsplit(url)
    match = _POST.match(parts.path)
    return f"{parts.scheme}://{parts.netloc}{match[0]}/" if match else url


class StateHelpers:
    """Helpers of the embedded sites: functions that read `state`, the session's state.
    queries: object with a function for each name; it takes the state and the arguments.
    """

    def __init__(self, state: Any, queries: Any) -> None:
        self._state = state
        self._queries = queries

    def call(self, name: str, arguments: Sequence[str], page: FinalPage) -> str:
        if name == "reddit_get_post_url":
            return post_url(arguments[0])
        values = [page.url if argument == PAGE else argument for argument in arguments]
        query: Callable[..., Any] = getattr(self._queries, name)
        return str(query(self._state, *values))


class SiteHelpers:
    """Helpers of sites that run elsewhere: they query the shop's REST API or read the open page.
    sites: name -> URL.
    """

    def __init__(self, sites: Mapping[str, str]) -> None:
        self._shop = sites.get("shopping", "").rstrip("/")

    def call(self, name: str, arguments: Sequence[str], page: FinalPage) -> str:
        """Return the result of helper `name` (a key of KNOWN) as text. page: the open page.
        Errors: HelperFailed for a failed request or a missing value.
        """
        try:
            match name:
                case "reddit_get_post_url":
                    return post_url(arguments[0])
                case "shopping_get_latest_order_url":
                    return self._latest_order()
                case "shopping_get_sku_latest_review_author":
                    return str(self._latest_review(arguments[0]).get("nickname", ""))
                case "shopping_get_sku_latest_review_rating":
                    return str(self._latest_review(arguments[0])["ratings"][0]["percent"])
                case _:
                    return run_script(page, f"({_ROLE})({json.dumps(arguments[1])})")
        except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
            raise HelperFailed(f"{name}: {type(error).__name__} {error}".strip()) from error

    def _latest_order(self) -> str:
        criteria = {
            "searchCriteria[sortOrders][0][field]": "created_at",
            "searchCriteria[sortOrders][0][direction]": "DESC",
            "searchCriteria[pageSize]": "1",
        }
        order = self._rest(f"orders?{urllib.parse.urlencode(criteria)}")["items"][0]
        return f"{self._shop}/sales/order/view/order_id/{int(order['increment_id'])}/"

    def _latest_review(self, sku: str) -> dict[str, Any]:
        reviews = self._rest(f"products/{urllib.parse.quote(sku, safe='')}/reviews")
        return dict(reviews[-1]) if reviews else {}

    def _rest(self, path: str) -> Any:
        login = {"username": "admin", "password": os.environ.get(PASSWORD_VARIABLE, "")}
        token = self._ask("integration/admin/token", json.dumps(login).encode(), {})
        return self._ask(path, None, {"Authorization": f"Bearer {token}"})

    def _ask(self, path: str, body: bytes | None, headers: dict[str, str]) -> Any:
        url = f"{self._shop}/rest/default/V1/{path}"
        headers = {"Content-Type": "application/json", **headers}
        request = urllib.request.Request(url, body, headers)  # noqa: S310  (a configured site)
        with open_url(request, TIMEOUT_S) as reply:
            return json.loads(reply.read(MAX_REPLY_BYTES))


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        """Return None, which makes urllib raise HTTPError: following the redirect would send all
        headers again, also the authorization.
        """
        return


_opener = urllib.request.build_opener(_NoRedirects)


def open_url(request: urllib.request.Request, timeout_s: float) -> Any:
    """Send a request and return the open reply, which the caller closes.
    Errors: OSError; HTTPError for every status but 2xx, also for redirects.
    """
    return _opener.open(request, timeout=timeout_s)
