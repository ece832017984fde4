"""Proxy between a client and an API server, for tests. It forwards everything and, on command,
fails: too many requests, server errors, broken or expired watches, no response at all.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import json
import ssl
import subprocess
import threading
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import yaml
from aiohttp import web

REASONS = {409: "Conflict", 410: "Expired", 429: "TooManyRequests", 503: "ServiceUnavailable"}
PASSED_ON = ("Authorization", "Content-Type", "Accept", "User-Agent")
START_TIMEOUT_S = 60.0

Which = Callable[[str, str], bool]  # takes the method and the path with its query


def any_request(method: str, path: str) -> bool:
    return True


def is_watch(method: str, path: str) -> bool:
    return method == "GET" and ("watch=1" in path or "watch=true" in path)


@dataclass
class Fault:
    """Error response for the next `times` requests that match."""

    status: int
    times: int
    which: Which
    retry_after_s: int | None = None
    as_event: bool = False  # for a watch: status 200, with the error as an event in the stream


class Proxy:
    """API proxy that runs in a thread from `start` to `stop`."""

    def __init__(self, kubeconfig: Path, folder: Path) -> None:
        self.kubeconfig = folder / "kubeconfig"
        self.asked: Counter[tuple[str, int]] = Counter()  # (method, status) -> number of responses
        self._folder = folder
        self._config = yaml.safe_load(kubeconfig.read_text())
        self._cluster = self._config["clusters"][0]["cluster"]
        self._server = self._cluster["server"].rstrip("/")
        self._faults: list[Fault] = []
        self._watches: set[asyncio.Transport] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    # --- commands --------------------------------------------------------------------------------

    def fail(
        self,
        status: int,
        times: int,
        which: Which = any_request,
        *,
        retry_after_s: int | None = None,
        as_event: bool = False,
    ) -> None:
        """Answer the next `times` matching requests with this status; do not forward them."""
        self._faults.append(Fault(status, times, which, retry_after_s, as_event))

    def expire_watches(self, times: int, *, as_event: bool = True) -> None:
        """Answer watches with 410 (version too old), as an event in the stream or as the status."""
        self.fail(410, times, is_watch, as_event=as_event)

    def drop_watches(self) -> int:
        """Abort every open watch. Return their number."""

        async def drop() -> int:
            dropped = list(self._watches)
            for each in dropped:
                each.abort()
            return len(dropped)

        return self._do(drop())

    @property
    def failures_left(self) -> int:
        return sum(each.times for each in self._faults)

    @contextlib.contextmanager
    def away(self) -> Iterator[None]:
        """Stop listening and abort open connections until the context ends."""
        self._do(self._shut())
        try:
            yield
        finally:
            self._do(self._listen())

    # --- start and stop --------------------------------------------------------------------------

    def start(self) -> None:
        self._thread.start()
        subject = ("-subj", "/CN=localhost", "-keyout", "key.pem", "-out", "certificate.pem")
        subprocess.run(
            ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *subject],
            cwd=self._folder,
            check=True,
            capture_output=True,
            timeout=60,
        )
        self._tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self._tls.load_cert_chain(self._folder / "certificate.pem", self._folder / "key.pem")
        self._do(self._set_up())
        url = f"https://127.0.0.1:{self._port}"
        cluster = {"server": url, "insecure-skip-tls-verify": True}
        self._config["clusters"][0]["cluster"] = cluster
        self.kubeconfig.write_text(yaml.safe_dump(self._config))
        self.kubeconfig.chmod(0o600)

    def stop(self) -> None:
        self._do(self._tear_down())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(START_TIMEOUT_S)

    def _do(self, work: Coroutine[Any, Any, Any]) -> Any:
        future: concurrent.futures.Future[Any] = asyncio.run_coroutine_threadsafe(work, self._loop)
        return future.result(START_TIMEOUT_S)

    async def _set_up(self) -> None:
        trusted = ssl.create_default_context(cafile=self._cluster.get("certificate-authority"))
        if self._cluster.get("insecure-skip-tls-verify"):
            trusted.check_hostname, trusted.verify_mode = False, ssl.CERT_NONE
        self._http = aiohttp.ClientSession(
            auto_decompress=False,
            connector=aiohttp.TCPConnector(ssl=trusted, limit=0),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=10),
        )
        app = web.Application(client_max_size=1 << 24)
        app.router.add_route("*", "/{path:.*}", self._pass_on)
        self._runner = web.AppRunner(
            app, access_log=None, shutdown_timeout=1.0, handler_cancellation=True
        )
        await self._runner.setup()
        self._port = 0
        await self._listen()
        self._port = self._runner.addresses[0][1]

    async def _listen(self) -> None:
        self._site = web.TCPSite(
            self._runner, "127.0.0.1", self._port, ssl_context=self._tls, reuse_address=True
        )
        await self._site.start()

    async def _shut(self) -> None:
        await self._site.stop()
        for each in self._runner.server.connections:
            each.force_close()
            if each.transport is not None:
                each.transport.abort()
        await asyncio.sleep(0)  # let their handlers see the abort

    async def _tear_down(self) -> None:
        await self._shut()
        await self._runner.cleanup()
        await self._http.close()

    # --- requests --------------------------------------------------------------------------------

    def _fault(self, method: str, path: str) -> Fault | None:
        for each in self._faults:
            if each.times > 0 and each.which(method, path):
                each.times -= 1
                return each
        return None

    async def _pass_on(self, request: web.Request) -> web.StreamResponse:
        if (fault := self._fault(request.method, request.path_qs)) is not None:
            self.asked[request.method, fault.status] += 1
            return self._failure(fault)
        return await self._answer(request, request.transport)

    def _failure(self, fault: Fault) -> web.Response:
        status = {
            "kind": "Status",
            "apiVersion": "v1",
            "status": "Failure",
            "message": f"the tests' proxy says {fault.status}",
            "reason": REASONS.get(fault.status, "InternalError"),
            "code": fault.status,
        }
        if fault.as_event:
            return web.json_response({"type": "ERROR", "object": status})
        headers = {} if fault.retry_after_s is None else {"Retry-After": str(fault.retry_after_s)}
        return web.Response(
            status=fault.status,
            text=json.dumps(status),
            headers=headers,
            content_type="application/json",
        )

    async def _answer(
        self, request: web.Request, transport: asyncio.Transport
    ) -> web.StreamResponse:
        headers = {name: request.headers[name] for name in PASSED_ON if name in request.headers}
        async with self._http.request(
            request.method,
            f"{self._server}{request.path_qs}",
            data=await request.read(),
            headers=headers,
        ) as told:
            self.asked[request.method, told.status] += 1
            kind = told.headers.get("Content-Type", "application/json")
            answer = web.StreamResponse(status=told.status, headers={"Content-Type": kind})
            await answer.prepare(request)
            if is_watch(request.method, request.path_qs):
                self._watches.add(transport)
            try:
                async for chunk in told.content.iter_any():
                    await answer.write(chunk)
            finally:
                self._watches.discard(transport)
            return answer
