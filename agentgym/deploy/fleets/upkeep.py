"""Duties while a run plays on a fleet: renew its lease, write the servers' addresses to files for
its clients, and stop the run if there are too many servers.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence

from agentgym.config import ConfigError
from agentgym.deploy.fleets.addresses import (
    Listing,
    Outside,
    kind_of_addresses,
    servers_of,
    service_of,
)
from agentgym.deploy.fleets.fleet_lease import RENEWALS, Group, renew
from agentgym.deploy.fleets.startup import FleetTripped, check_breaker
from agentgym.deploy.kube.calls import KubeError
from agentgym.deploy.kube.client import Kube
from agentgym.deploy.manifests import RUN_LABEL

logger = logging.getLogger(__name__)

IDLE_S = 2.0  # silence of the watch before the other duties have their turn
PAUSE_S = 2.0  # after an API server that did not answer
REACH_S = 30.0  # for the first server to answer
ASK_S = 5.0


class Upkeep:
    """Background thread that renews a group's lease and writes its servers' addresses to listings.
    If the lease is lost or there are too many pods, it writes the reason there and ends. After
    other errors of the cluster, which are only logged, it tries again.
    """

    def __init__(
        self, kube: Kube, group: Group, listings: Mapping[str, Listing], *, most: int
    ) -> None:
        """Prepare the upkeep of a run's servers; `running` starts its thread.
        listings: files for the servers' addresses, by Service. most: limit on the run's live pods.
        Errors: KubeError.
        """
        self._kube, self._group, self._listings, self._most = kube, group, dict(listings), most
        self._kind = kind_of_addresses(kube)
        self._outside = Outside(kube)
        self._renewed_at = time.monotonic()
        self._stop = threading.Event()
        self._lock = threading.Lock()  # guards the listings' files

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Run the thread during the block. Then stop it without waiting, and remove the files."""
        threading.Thread(target=self._run, name=f"fleet {self._group.run}", daemon=True).start()
        try:
            yield
        finally:
            self._stop.set()
            with self._lock:
                for listing in self._listings.values():
                    listing.remove()

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self._watch()
            except (LostLease, FleetTripped) as error:
                logger.error("%s", error)
                for listing in self._listings.values():
                    self._write(listing, [], str(error))
                return
            except (KubeError, ConfigError, OSError) as error:
                logger.warning("%s; the run continues with the servers known so far", error)
                self._stop.wait(PAUSE_S)

    def _watch(self) -> None:
        labels = {RUN_LABEL: self._group.run}
        for slices in self._kube.watch(self._kind, labels=labels, for_s=3600.0, idle_s=IDLE_S):
            if self._stop.is_set():
                return
            for service, listing in self._listings.items():
                servers = servers_of(obj for obj in slices if service_of(obj) == service)
                self._write(listing, self._outside.addresses(servers))
            if time.monotonic() - self._renewed_at >= self._period_s:
                self._renewed_at = time.monotonic()
                if not renew(self._kube, self._group):
                    raise LostLease(
                        f"the servers of {self._group.run} were taken down or taken over by"
                        " another process; run again, which brings up new ones"
                    )
                check_breaker(self._kube, self._group.run, self._most)

    @property
    def _period_s(self) -> float:
        return min(self._group.ttl_s / RENEWALS, 60.0)

    def _write(self, listing: Listing, addresses: Sequence[str], trouble: str = "") -> None:
        with self._lock:
            if not self._stop.is_set():
                listing.say(addresses, trouble)


class LostLease(RuntimeError):
    """The group no longer belongs to this process."""


def first_addresses(kube: Kube, service: str, *, num: int, timeout_s: float) -> list[str]:
    """Wait until a Service has at least `num` ready servers and return the URLs of all of them, see
    `Outside.addresses`. Errors: KubeError; RuntimeError after timeout_s.
    """
    end, kind, outside = time.monotonic() + timeout_s, kind_of_addresses(kube), Outside(kube)
    while True:
        servers = servers_of(obj for obj in kube.list(kind).items if service_of(obj) == service)
        if len(servers) >= num:
            return outside.addresses(servers)
        if time.monotonic() > end:
            raise RuntimeError(
                f"service {service} has {len(servers)} of {num} addresses after {timeout_s:g} s,"
                " though its pods are ready; is the controller of endpoints running?"
            )
        time.sleep(0.2)


def reach(addresses: Sequence[str], *, timeout_s: float = REACH_S) -> None:
    """Wait until one of the URLs answers this machine, with any HTTP status.
    Errors: RuntimeError if none does within timeout_s.
    """
    end, reason = time.monotonic() + timeout_s, ""
    # never use a proxy between a run and its servers
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    while time.monotonic() < end:
        for address in addresses:
            try:
                with opener.open(f"{address}/healthz", timeout=ASK_S):
                    return
            except urllib.error.HTTPError:
                return  # it answers
            except OSError as error:
                reason = str(error)
        time.sleep(0.5)
    raise RuntimeError(
        f"the servers are ready, and none answers here ({', '.join(addresses[:3])}: {reason});"
        " run the flow inside of the cluster, route this machine to its pods, or give the pods the"
        " annotation agentgym.io/address (k8s/README.md)"
    )
