"""API client of a node: calls with retries, and watches."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import yaml

logger = logging.getLogger("node")

Object = dict[str, Any]
MERGE = "application/merge-patch+json"
PATIENCE_S = 120.0  # outlasts a server that is down for a minute
WATCH_S = 240
RETRIED = (429, 500, 502, 503, 504)


class Refused(Exception):
    """Error response of the API server; the message starts with its status."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"{status}: {text[:300]}")
        self.status = status


class Api:
    """API client for the cluster of a kubeconfig with a token."""

    def __init__(self, kubeconfig: Path) -> None:
        config = yaml.safe_load(kubeconfig.read_text())
        context = next(
            each["context"]
            for each in config["contexts"]
            if each["name"] == config["current-context"]
        )
        cluster = next(c["cluster"] for c in config["clusters"] if c["name"] == context["cluster"])
        user = next(u["user"] for u in config["users"] if u["name"] == context["user"])
        self.server: str = cluster["server"].rstrip("/")
        self.host, self.port = urlsplit(self.server).hostname, urlsplit(self.server).port
        self._tls = ssl.create_default_context(cafile=cluster.get("certificate-authority"))
        if cluster.get("insecure-skip-tls-verify"):
            self._tls.check_hostname, self._tls.verify_mode = False, ssl.CERT_NONE
        self._headers = {"Authorization": f"Bearer {user['token']}"}

    async def __aenter__(self) -> Api:
        self._http = aiohttp.ClientSession(
            self.server, headers=self._headers, connector=aiohttp.TCPConnector(ssl=self._tls)
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.close()

    async def call(
        self, method: str, path: str, body: Object | None = None, *, kind: str = "application/json"
    ) -> Object:
        """Call the API. Errors: Refused; TimeoutError without a response for PATIENCE_S."""
        loop = asyncio.get_running_loop()
        deadline, pause = loop.time() + PATIENCE_S, 0.2
        while True:
            try:
                async with self._http.request(
                    method,
                    path,
                    data=None if body is None else json.dumps(body),
                    headers={"Content-Type": kind},
                    timeout=aiohttp.ClientTimeout(15),
                ) as answer:
                    text = await answer.text()
                    if answer.status < 400:
                        return json.loads(text)
                    if answer.status not in RETRIED or loop.time() > deadline:
                        raise Refused(answer.status, text)
            except (aiohttp.ClientError, TimeoutError) as error:
                if loop.time() > deadline:
                    raise TimeoutError(f"{method} {path}: {error}") from error
            await asyncio.sleep(pause)
            pause = min(2 * pause, 5.0)

    async def follow(self, path: str, selector: str) -> AsyncIterator[tuple[str, Any]]:
        """Yield ("LISTED", objects), then (type, object) of each event; list again whenever the
        watch is lost.
        """
        while True:
            with contextlib.suppress(Refused, TimeoutError):
                listed = await self.call("GET", f"{path}?fieldSelector={selector}")
                yield "LISTED", listed["items"]
                version = listed["metadata"]["resourceVersion"]
                try:
                    async for event in self._events(path, selector, version):
                        if event["type"] == "ERROR":  # 410: the version is too old
                            break
                        yield event["type"], event["object"]
                except (aiohttp.ClientError, TimeoutError, ValueError) as error:
                    logger.info("the watch was lost: %s", error)
            await asyncio.sleep(0.5)

    async def _events(self, path: str, selector: str, version: str) -> AsyncIterator[Object]:
        query = f"fieldSelector={selector}&watch=1&timeoutSeconds={WATCH_S}"
        async with self._http.get(
            f"{path}?{query}&resourceVersion={version}",
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=WATCH_S + 30),
        ) as answer:
            answer.raise_for_status()
            rest = b""
            async for chunk in answer.content.iter_any():
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    yield json.loads(line)

    async def authority(self) -> str:
        """Return the server's certificate chain as PEM; clients in pods trust it."""

        def ask() -> str:
            import socket

            raw = socket.create_connection((self.host, self.port), timeout=10)
            with raw, self._tls.wrap_socket(raw, server_hostname=self.host) as shown:
                return "".join(
                    each.public_bytes()  # type: ignore[attr-defined]
                    for each in shown._sslobj.get_unverified_chain()  # type: ignore[attr-defined]
                )

        return await asyncio.to_thread(ask)
