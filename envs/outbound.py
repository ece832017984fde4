"""Requests to services that options name: they go to the address that was named, with its
secret, and nowhere else.
"""

from __future__ import annotations

import urllib.request
from typing import Any


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        """urllib would send every header again, the authorization too.
        None makes it raise HTTPError.
        """
        return


_opener = urllib.request.build_opener(_NoRedirects)


def open_url(request: urllib.request.Request, timeout_s: float) -> Any:
    """The open reply.
    Errors: OSError, of which HTTPError for any status but 2xx, redirects among them.
    """
    return _opener.open(request, timeout=timeout_s)
