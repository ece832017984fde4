"""Requests to services that options name: the secret goes to the named address only, because
redirects are refused.
"""

from __future__ import annotations

import urllib.request
from typing import Any


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        """Refuse: urllib would send all headers again, also the authorization.
        Result: None, which makes urllib raise HTTPError.
        """
        return


_opener = urllib.request.build_opener(_NoRedirects)


def open_url(request: urllib.request.Request, timeout_s: float) -> Any:
    """Send a request and return the open reply.
    Errors: OSError; HTTPError for every status but 2xx, also for redirects.
    """
    return _opener.open(request, timeout=timeout_s)
