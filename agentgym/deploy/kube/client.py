"""Client of a cluster's API server. Every call has a deadline, is repeated if that may help, and
otherwise fails with one sentence.
Objects are plain mappings, as in manifests.
"""

from __future__ import annotations

import contextlib
import json
import logging
import secrets
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal, NamedTuple

from agentgym.deploy.kube.credentials import Session, Source
from agentgym.deploy.kube.errors import (
    MISSING,
    AlreadyExists,
    Forbidden,
    Gone,
    KubeError,
    NotFound,
    NotServed,
    error_of,
)
from agentgym.deploy.kube.kinds import POD, Kind, Object, Place, name_of, selector
from agentgym.deploy.kube.pace import RateLimiter, Retries
from agentgym.deploy.kube.transport import Request, Transport
from agentgym.deploy.kube.watching import IDLE, Change, Known

logger = logging.getLogger(__name__)

MANAGER = "agentgym"
REQUEST_ANNOTATION = "agentgym.io/request"  # marks a create, whose answer may get lost
PAGE = 500  # objects of one answer to a list
STREAM_S = 240.0  # one connection of a watch
LOG_S = 4.0  # short: a log is a courtesy
APPLY, MERGE = "application/apply-patch+yaml", "application/merge-patch+json"
REVIEW = Kind("authorization.k8s.io/v1", "SelfSubjectAccessReview")

Propagation = Literal["Background", "Foreground", "Orphan"]


class Listing(NamedTuple):
    """All objects of a request, as of one version."""

    items: list[Object]
    version: str


def connect(
    *,
    kubeconfig: Path | None = None,
    context: str = "",
    namespace: str = "default",
    manager: str = MANAGER,
    retries: Retries = Retries(),  # noqa: B008 (it is frozen)
    creates_per_s: float = 20.0,
    deletes_per_s: float = 20.0,
) -> Kube:
    """Return a client of the cluster that kubectl would use, or of the one that this pod runs in.
    No request is sent yet.
    manager: the name under which server-side apply sets fields.

    Errors: ConfigError without the package `kubernetes`, or without credentials.
    """
    return Kube(
        Transport(Session(Source.find(kubeconfig, context)), retries),
        namespace=namespace,
        manager=manager,
        creates=RateLimiter(creates_per_s, max(1, round(2 * creates_per_s))),
        deletes=RateLimiter(deletes_per_s, max(1, round(2 * deletes_per_s))),
    )


class Kube:
    """Client of one cluster and a namespace in it; a method's `namespace` overrides that one.
    Threads may share it.

    Every method raises KubeError (see errors.py) with a sentence that names the remedy: Forbidden,
    NotFound, NotServed, FieldConflict, ..., and ApiUnreachable once the deadline has passed.
    """

    def __init__(
        self,
        transport: Transport,
        *,
        namespace: str,
        manager: str,
        creates: RateLimiter,
        deletes: RateLimiter,
    ) -> None:
        self.namespace = namespace
        self.manager = manager
        self._transport = transport
        self._creates, self._deletes = creates, deletes
        self._places: dict[str, dict[str, Place]] = {}  # api version -> kind -> place
        self._lock = threading.Lock()

    @property
    def calls(self) -> Counter[str]:
        """Number of requests by verb, repeated ones included."""
        return self._transport.calls

    def close(self) -> None:
        self._transport.session.close()

    def apply(self, wanted: Object, *, force: bool = False, dry_run: bool = False) -> Object:
        """Apply the object on the server side and return it as it is now. A repeated call changes
        nothing.

        Errors: FieldConflict if another manager owns a field, unless forced.
        """
        metadata = wanted["metadata"]
        query = [("fieldManager", self.manager), ("force", str(force).lower())]
        request = Request(
            "PATCH",
            self._path(Kind.of(wanted), metadata["name"], metadata.get("namespace")),
            f"apply of {name_of(wanted)}",
            query + ([("dryRun", "All")] if dry_run else []),
            wanted,
            APPLY,
        )
        return self._transport.ask(request, limiter=self._creates)

    def create(self, wanted: Object) -> Object:
        """Create the object and return it. If the answer is lost, the object is recognized by a key
        of this call.

        Errors: AlreadyExists if another client created one of that name, or it cannot be read.
        """
        metadata, kind = wanted["metadata"], Kind.of(wanted)
        key, namespace = secrets.token_hex(8), metadata.get("namespace")
        marked = metadata.get("annotations", {}) | {REQUEST_ANNOTATION: key}
        request = Request(
            "POST",
            self._path(kind, None, namespace),
            f"creation of {name_of(wanted)}",
            [("fieldManager", f"{self.manager}-update")],
            wanted | {"metadata": metadata | {"annotations": marked}},
        )
        try:
            return self._transport.ask(request, limiter=self._creates)
        except AlreadyExists:
            existing = None
            with contextlib.suppress(Forbidden):  # an account may only create Secrets, for example
                existing = self.find(kind, metadata["name"], namespace=namespace)
            if (
                existing
                and existing["metadata"].get("annotations", {}).get(REQUEST_ANNOTATION) == key
            ):
                return existing
            raise

    def patch(
        self,
        kind: Kind,
        name: str,
        changes: Object,
        *,
        namespace: str | None = None,
        subresource: str = "",
    ) -> Object:
        """Apply a JSON merge patch and return the object as it is now.
        With metadata.resourceVersion among the changes, raise Stale if the object was changed
        since.
        """
        request = Request(
            "PATCH",
            self._path(kind, name, namespace, subresource),
            f"change of {kind.kind} {name}",
            [("fieldManager", f"{self.manager}-update")],
            changes,
            MERGE,
        )
        return self._transport.ask(request)

    def get(self, kind: Kind, name: str, *, namespace: str | None = None) -> Object:
        """Return the object. Errors: NotFound."""
        path = self._path(kind, name, namespace)
        return self._transport.ask(Request("GET", path, f"look at {kind.kind} {name}"))

    def find(self, kind: Kind, name: str, *, namespace: str | None = None) -> Object | None:
        """Return the object, or None if there is none."""
        try:
            return self.get(kind, name, namespace=namespace)
        except NotFound:
            return None

    def list(
        self,
        kind: Kind,
        *,
        labels: Mapping[str, str | None] | None = None,
        fields: str = "",
        namespace: str | None = None,
    ) -> Listing:
        """Return all objects of a kind that have the labels; None as a label's value matches any
        value.
        fields: a field selector, for example `involvedObject.name=env-babyai-7`.
        """
        query = [("limit", str(PAGE)), *_selected(labels, fields)]
        path, doing = self._path(kind, None, namespace), f"list of {kind.kind}"
        items: list[Object] = []
        more: list[tuple[str, str]] = []
        while True:
            try:
                page = self._transport.ask(Request("GET", path, doing, query + more))
            except Gone:
                if not more:
                    raise
                items, more = [], []  # the pages read so far are too old
                continue
            # an answer names kind and version once, for all of its items
            shared = {"apiVersion": kind.api_version, "kind": kind.kind}
            items += [shared | item for item in page.get("items") or []]
            if not page["metadata"].get("continue"):
                return Listing(items, page["metadata"].get("resourceVersion", ""))
            more = [("continue", page["metadata"]["continue"])]

    def delete(
        self,
        kind: Kind,
        name: str,
        *,
        namespace: str | None = None,
        uid: str = "",
        propagation: Propagation = "Background",
        grace_s: int | None = None,
    ) -> bool:
        """Delete the object. Return False if there was none.
        uid: delete only the object with this uid; raise Stale for another one of that name.
        grace_s: seconds that a pod has instead of its own grace period.
        """
        options: Object = {"apiVersion": "v1", "kind": "DeleteOptions"}
        options["propagationPolicy"] = propagation
        if uid:
            options["preconditions"] = {"uid": uid}
        if grace_s is not None:
            options["gracePeriodSeconds"] = grace_s
        path = self._path(kind, name, namespace)
        request = Request("DELETE", path, f"deletion of {kind.kind} {name}", body=options)
        try:
            self._transport.ask(request, limiter=self._deletes)
        except NotFound:
            return False
        return True

    def watch(
        self,
        kind: Kind,
        *,
        labels: Mapping[str, str | None] | None = None,
        fields: str = "",
        namespace: str | None = None,
        for_s: float,
        idle_s: float = 5.0,
    ) -> Iterator[Change]:
        """Yield what exists (as `added`), then what changes, for for_s seconds or until closed.

        `idle` follows the first objects, and comes whenever nothing has changed for idle_s.
        The watch recovers from dropped connections, and from versions that the API server has
        forgotten (410): a change may come late, or two of one object as one, and none is lost.
        Errors: ApiUnreachable if no answer comes for the deadline of a call.
        """
        clock = self._transport.clock
        end, known, version, attempt, heard_at = clock() + for_s, Known(), "", 0, clock()
        path, doing = self._path(kind, None, namespace), f"watch of {kind.kind}"
        while (left_s := end - clock()) > 0:
            if not version:
                listing = self.list(kind, labels=labels, fields=fields, namespace=namespace)
                version, heard_at = listing.version, clock()
                yield from known.listed(listing.items)
                yield IDLE
            query = [
                ("watch", "true"),
                ("allowWatchBookmarks", "true"),
                ("resourceVersion", version),
                ("timeoutSeconds", str(max(1, round(min(left_s, STREAM_S))))),
                *_selected(labels, fields),
            ]
            request = Request("GET", path, doing, query)
            try:
                for event in self._transport.stream(request, idle_s=idle_s, end=end):
                    attempt, heard_at = 0, clock()
                    if event is None:
                        yield IDLE
                        continue
                    _raise_error(event, doing)
                    version = event["object"]["metadata"]["resourceVersion"]
                    if event["type"] != "BOOKMARK" and (change := known.told(event)):
                        yield change
            except Gone:
                logger.info("%s: its version is forgotten, listing again", doing)
                version = ""
            except KubeError as error:
                patience_s = self._transport.retries.deadline_s
                may_retry = self._transport.retries.may_retry(error.status)
                if not may_retry or clock() - heard_at > patience_s:
                    raise
                logger.info("%s; watching on", error)
                version = version if error.status == 0 else ""
                yield IDLE
                self._transport.pause(attempt)
                attempt += 1

    def log(self, pod: str, *, container: str = "", lines: int = 15, previous: bool = False) -> str:
        """Return the last lines of a container's output; empty if there are none."""
        query = [("tailLines", str(lines))]
        query += [("container", container)] if container else []
        query += [("previous", "true")] if previous else []
        request = Request("GET", self._path(POD, pod, None, "log"), f"log of pod {pod}", query)
        try:
            reply = self._transport.call(request, within_s=LOG_S)
        except KubeError as error:
            if error.status in (MISSING, 400):  # the container never started
                return ""
            raise
        return reply.body.decode(errors="replace")

    def may(
        self, verb: str, group: str, plural: str, *, subresource: str = "", anywhere: bool = False
    ) -> bool:
        """Return True if this account may do that in the namespace, by a SelfSubjectAccessReview.
        anywhere: for a resource that has no namespace.
        """
        attributes = {"verb": verb, "group": group, "resource": plural, "subresource": subresource}
        if not anywhere:
            attributes["namespace"] = self.namespace
        request = Request(
            "POST",
            f"{REVIEW.root}/selfsubjectaccessreviews",
            f"question whether it may {verb} {plural}",
            body={
                "apiVersion": REVIEW.api_version,
                "kind": REVIEW.kind,
                "spec": {"resourceAttributes": attributes},
            },
        )
        answer = self._transport.ask(request)
        return bool(answer.get("status", {}).get("allowed"))

    def version(self) -> tuple[int, int]:
        """Return the version of Kubernetes, for example (1, 36); (0, 0) if it is unknown."""
        info = self._transport.ask(Request("GET", "/version", "question for the version"))
        digits = ("".join(filter(str.isdigit, str(info.get(name)))) for name in ("major", "minor"))
        major, minor = (int(number or 0) for number in digits)
        return major, minor

    def serves(self, kind: Kind) -> bool:
        """Return True if the cluster knows the kind in that version."""
        try:
            self._place(kind)
        except NotServed:
            return False
        return True

    def _place(self, kind: Kind) -> Place:
        """Return the kind's Place, from one cached request per API version. Errors: NotServed."""
        with self._lock:
            places = self._places.get(kind.api_version, {})
        if kind.kind not in places:
            doing = f"question for {kind.api_version}"
            try:
                answer = self._transport.ask(Request("GET", kind.root, doing))
            except NotFound:
                answer = {"resources": []}
            places = {
                resource["kind"]: Place(resource["name"], resource["namespaced"])
                for resource in answer["resources"]
                if "/" not in resource["name"]  # a subresource
            }
            with self._lock:
                self._places[kind.api_version] = places
        if kind.kind not in places:
            raise NotServed(
                f"the cluster does not know {kind}; it is too old, or lacks the definition (CRD)"
            )
        return places[kind.kind]

    def _path(
        self, kind: Kind, name: str | None, namespace: str | None, subresource: str = ""
    ) -> str:
        kind_place = self._place(kind)
        within = f"/namespaces/{namespace or self.namespace}" if kind_place.is_namespaced else ""
        parts = (kind.root + within, kind_place.plural, name, subresource)
        return "/".join(part for part in parts if part)


def _selected(labels: Mapping[str, str | None] | None, fields: str) -> list[tuple[str, str]]:
    query = [("labelSelector", selector(labels))] if labels else []
    return query + ([("fieldSelector", fields)] if fields else [])


def _raise_error(event: Object, doing: str) -> None:
    """Raise KubeError if an event of a watch is an error. doing: for the message."""
    if event["type"] == "ERROR":
        status = event["object"]
        raise error_of(int(status.get("code") or 500), json.dumps(status).encode(), doing)
