"""A visitor of the embedded sites over HTTP."""

import html
import http.client
import re
from urllib.parse import urlencode

from sites import SITES, TENANT_HEADER

MUG = "/product/2/halden-ember-enamel-mug"


class Visitor:
    """HTTP client with a session's cookies."""

    def __init__(self, server, port, login=True):
        self.server, self.port = server, port
        self.token = server.open_tenant(login)

    @property
    def world(self):
        return self.server.state(self.token)

    def send(self, method, site, path, body=None, **headers):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        given = {
            "Host": SITES.get(site, site),
            TENANT_HEADER: self.token,
            "Content-Type": "application/x-www-form-urlencoded",
            **headers,
        }
        connection.request(method, path, body, given)
        answer = connection.getresponse()
        text = answer.read().decode()
        connection.close()
        return answer.status, text, answer.headers

    def get(self, site, path):
        """Return the text of a page."""
        status, text, _ = self.send("GET", site, path)
        assert status == 200, (path, status)
        return text

    def post(self, site, path, form=None, at="/"):
        """Submit a form of the page `at`. Return the page to which it leads."""
        status, text, headers = self.send(
            "POST",
            site,
            path,
            urlencode(form or {}, doseq=True),
            Referer=f"http://{SITES[site]}{at}",
        )
        assert status == 303, (path, status, text)
        return self.send("GET", site, headers["Location"])[1]


def note(page):
    """Return (role, text) of the message at the top of a page, or None."""
    found = re.search(r'class="note \w+" role="(status|alert)">([^<]*)<', page)
    return (found[1], html.unescape(found[2])) if found else None
