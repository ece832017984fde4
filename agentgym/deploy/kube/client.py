"""Client of a cluster's API server. Every call has a deadline, is repeated if that may help, and
otherwise fails with one sentence.
Objects are plain mappings, as in manifests.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from agentgym.deploy.kube.calls import (
    MISSING,
    AlreadyExists,
    Forbidden,
    Gone,
    KubeError,
    NotFound,
    NotServed,
    RateLimiter,
    Retries,
    Transport,
)
from agentgym.deploy.kube.credentials import Session, Source

logger = logging.getLogger(__name__)

MANAGER = "agentgym"
REQUEST_ANNOTATION = "agentgym.io/request"  # marks a create, whose answer may get lost
PAGE = 500  # objects of one answer to a list
STREAM_S = 240.0  # one connection of a watch
LOG_S = 4.0  # short: a log is a courtesy
MERGE = "application/merge-patch+json"

Object = dict[str, Any]  # as JSON has it
Labels = Mapping[str, str | None]  # None matches any value
Propagation = Literal["Background", "Foreground", "Orphan"]


class Kind(NamedTuple):
    """A kind of object as a manifest names it, for example Kind("apps/v1", "Deployment")."""

    api_version: str
    kind: str

    @classmethod
    def of(cls, obj: Object) -> Kind:
        return cls(obj["apiVersion"], obj["kind"])

    def __str__(self) -> str:
        return f"{self.kind} ({self.api_version})"


DEPLOYMENT = Kind("apps/v1", "Deployment")
POD = Kind("v1", "Pod")
SECRET = Kind("v1", "Secret")
SERVICE = Kind("v1", "Service")
EVENT = Kind("v1", "Event")
NODE = Kind("v1", "Node")
RESOURCE_QUOTA = Kind("v1", "ResourceQuota")
LEASE = Kind("coordination.k8s.io/v1", "Lease")
REVIEW = Kind("authorization.k8s.io/v1", "SelfSubjectAccessReview")


class Listing(NamedTuple):
    """Objects that a list request returned, and the version of the cluster's state they show."""

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
    kubeconfig, context: see `Source.find`. manager: name under which server-side apply sets fields.

    Errors: ConfigError without the package `kubernetes`, or without credentials.
    """
    return Kube(
        Transport(Session(Source.find(kubeconfig, context)), retries),
        namespace=namespace,
        manager=manager,
        creates=RateLimiter(creates_per_s, max(1, round(2 * creates_per_s))),
        deletes=RateLimiter(deletes_per_s, max(1, round(2 * deletes_per_s))),
    )


@dataclass(eq=False)
class Kube:
    """Client of one cluster and a namespace in it. A manifest's own namespace takes precedence.
    Threads may share it.

    Every method may raise KubeError (see calls.py) with a sentence that names the remedy, and
    ApiUnreachable once the deadline has passed.
    """

    transport: Transport
    namespace: str
    manager: str
    creates: RateLimiter
    deletes: RateLimiter
    _resources: dict[str, dict[str, Any]] = field(default_factory=dict)  # by version and kind

    def close(self) -> None:
        self.transport.session.close()

    def apply(self, wanted: Object, *, force: bool = False, dry_run: bool = False) -> Object:
        """Apply the object on the server side and return it as it is now. Idempotent.
        dry_run: validate and change nothing. force: take over fields of other managers.
        Errors: FieldConflict if another manager owns a field, unless forced.
        """
        return self._ask(
            "server_side_apply",
            f"apply of {name_of(wanted)}",
            Kind.of(wanted),
            wanted["metadata"].get("namespace"),
            limiter=self.creates,
            body=wanted,
            field_manager=self.manager,
            force_conflicts=force,
            dry_run="All" if dry_run else None,
        )

    def create(self, wanted: Object) -> Object:
        """Create the object and return it. If the answer is lost, the object is recognized by this
        call's key, which is added to its annotations.

        Errors: AlreadyExists if another client created one of that name, or if this account may not
        read it.
        """
        metadata, kind = wanted["metadata"], Kind.of(wanted)
        key, namespace = secrets.token_hex(8), metadata.get("namespace")
        marked = metadata.get("annotations", {}) | {REQUEST_ANNOTATION: key}
        try:
            return self._ask(
                "create",
                f"creation of {name_of(wanted)}",
                kind,
                namespace,
                limiter=self.creates,
                body=wanted | {"metadata": metadata | {"annotations": marked}},
                field_manager=f"{self.manager}-update",
            )
        except AlreadyExists:
            with contextlib.suppress(Forbidden):  # an account may only create Secrets, for example
                obj = self.find(kind, metadata["name"], namespace=namespace)
                if obj and obj["metadata"].get("annotations", {}).get(REQUEST_ANNOTATION) == key:
                    return obj
            raise

    def patch(self, kind: Kind, name: str, changes: Object, *, subresource: str = "") -> Object:
        """Apply a JSON merge patch and return the object as it is now. subresource: patch this part
        of it, for example `status`.
        With metadata.resourceVersion in the patch, raise Stale if the object was changed since.
        """
        return self._ask(
            "patch",
            f"change of {kind.kind} {name}",
            kind,
            name=f"{name}/{subresource}" if subresource else name,
            body=changes,
            content_type=MERGE,
            field_manager=f"{self.manager}-update",
        )

    def get(self, kind: Kind, name: str, *, namespace: str | None = None) -> Object:
        """Return the object. Errors: NotFound."""
        return self._ask("get", f"look at {kind.kind} {name}", kind, namespace, name=name)

    def find(self, kind: Kind, name: str, *, namespace: str | None = None) -> Object | None:
        """Return the object, or None if there is none."""
        try:
            return self.get(kind, name, namespace=namespace)
        except NotFound:
            return None

    def list(self, kind: Kind, *, labels: Labels | None = None, fields: str = "") -> Listing:
        """Return all objects of a kind that have the labels.
        fields: a field selector, for example `involvedObject.name=env-babyai-7`.
        """
        chosen = {"label_selector": selector(labels or {}), "field_selector": fields or None}
        items: list[Object] = []
        doing = f"list of {kind.kind}"
        more: str | None = None
        while True:
            try:
                page = self._ask("get", doing, kind, limit=PAGE, _continue=more, **chosen)
            except Gone:
                if more is None:
                    raise
                items, more = [], None  # the pages read so far are too old
                continue
            # an answer names kind and version once, for all of its items
            shared = {"apiVersion": kind.api_version, "kind": kind.kind}
            items += [shared | item for item in page.get("items") or []]
            more = page["metadata"].get("continue") or None
            if more is None:
                return Listing(items, page["metadata"].get("resourceVersion", ""))

    def delete(
        self,
        kind: Kind,
        name: str,
        *,
        uid: str = "",
        propagation: Propagation = "Background",
        grace_s: int | None = None,
    ) -> bool:
        """Delete the object, which may last longer than the call. Return False if there was none.
        uid: delete only the object with this uid; raise Stale for another one of that name.
        grace_s: seconds that a pod has instead of its own grace period.
        """
        options = {
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            "propagationPolicy": propagation,
            "preconditions": {"uid": uid or None},
            "gracePeriodSeconds": grace_s,
        }
        doing = f"deletion of {kind.kind} {name}"
        try:
            self._ask("delete", doing, kind, limiter=self.deletes, name=name, body=options)
        except NotFound:
            return False
        return True

    def watch(
        self, kind: Kind, *, labels: Labels | None = None, for_s: float, idle_s: float = 5.0
    ) -> Iterator[Sequence[Object]]:
        """Yield all objects of a kind that have the labels, for for_s seconds or until closed: as
        they are now, after every change, and whenever nothing has changed for idle_s.

        The watch recovers from dropped connections and from forgotten versions (410): a change may
        come late, or several as one, and none is lost.
        Errors: ApiUnreachable if no answer comes for the deadline of a call.
        """
        clock, retries = self.transport.clock, self.transport.retries
        end, version, attempt, heard_at = clock() + for_s, "", 0, clock()
        objects: dict[str, Object] = {}  # by uid
        while (left_s := end - clock()) > 0:
            if not version:
                listing = self.list(kind, labels=labels)
                version, heard_at = listing.version, clock()
                objects = {obj["metadata"]["uid"]: obj for obj in listing.items}
                yield tuple(objects.values())
            events = self.transport.stream(
                f"watch of {kind.kind}",
                idle_s=idle_s,
                resource=self._resource(kind),
                namespace=self.namespace,
                label_selector=selector(labels or {}),
                resource_version=version,
                allow_watch_bookmarks=True,
                timeout_seconds=max(1, round(min(left_s, STREAM_S))),
            )
            try:
                for event in events:
                    attempt, heard_at = 0, clock()
                    if event is not None:
                        version = _record(event, objects)
                    if event is None or event["type"] != "BOOKMARK":
                        yield tuple(objects.values())
                    if clock() >= end:
                        return
            except KubeError as error:
                may_pass = isinstance(error, Gone) or retries.may_retry(error)
                if not may_pass or clock() - heard_at > retries.deadline_s:
                    raise
                logger.info("%s; watching on", error)
                version = version if error.status == 0 else ""
                yield tuple(objects.values())
                self.transport.sleep(self.transport.pause_s(attempt))
                attempt += 1

    def log(self, pod: str, *, lines: int = 15, previous: bool = False) -> str:
        """Return the last lines of a pod's output; empty if there are none, or no such container.
        previous: read the output of the container before its last restart.
        """
        try:
            output = self.transport.call(
                "get",
                f"log of pod {pod}",
                within_s=LOG_S,
                resource=self._resource(POD),
                namespace=self.namespace,
                name=f"{pod}/log",
                query_params=[("tailLines", lines), *([("previous", "true")] if previous else [])],
            )
        except KubeError as error:
            if error.status in (MISSING, 400):  # the container never started
                return ""
            raise
        return output.decode(errors="replace")

    def may(self, verb: str, group: str, plural: str, *, subresource: str = "") -> bool:
        """Return True if this account may use the verb on the resource in the namespace.
        group: the API group, "" for the core. plural: for example `pods`.
        """
        attributes = {"verb": verb, "group": group, "resource": plural, "subresource": subresource}
        spec = {"resourceAttributes": attributes | {"namespace": self.namespace}}
        review = {"apiVersion": REVIEW.api_version, "kind": REVIEW.kind, "spec": spec}
        doing = f"question whether it may {verb} {plural}"
        answer = self._ask("create", doing, REVIEW, body=review)
        return bool(answer.get("status", {}).get("allowed"))

    def version(self) -> str:
        """Return the version of Kubernetes, for example `v1.36.0`."""
        doing = "question for the version"
        info = self.transport.ask("request", doing, method="get", path="/version")
        return str(info.get("gitVersion", "of unknown version"))

    def serves(self, kind: Kind) -> bool:
        """Return True if the cluster knows the kind in that version."""
        try:
            self._resource(kind)
        except NotServed:
            return False
        return True

    def _ask(
        self, verb: str, doing: str, kind: Kind, namespace: str | None = None, **options: Any
    ) -> Object:
        """Carry out a verb of the dynamic client on a kind and return the answer."""
        resource, namespace = self._resource(kind), namespace or self.namespace
        return self.transport.ask(verb, doing, resource=resource, namespace=namespace, **options)

    def _resource(self, kind: Kind) -> Any:
        """Return the package's Resource for a kind, from one cached request per API version.
        The package's own discovery is not used: it sends requests without a deadline, and trusts a
        file in the shared temporary folder. Errors: NotServed.
        """
        version = kind.api_version
        resources = self._resources.get(version, {})
        if kind.kind not in resources:
            from kubernetes.dynamic import Resource

            prefix = "apis" if "/" in version else "api"
            doing, path = f"question for {version}", f"/{prefix}/{version}"
            try:
                known = self.transport.ask("request", doing, method="get", path=path)["resources"]
            except NotFound:
                known = []
            resources = self._resources[version] = {
                row["kind"]: Resource(
                    prefix, None, version, row["kind"], row["namespaced"], name=row["name"]
                )
                for row in known
                if "/" not in row["name"]  # a subresource
            }
        if kind.kind not in resources:
            raise NotServed(
                f"the cluster does not know {kind}; it is too old, or lacks the definition (CRD)"
            )
        return resources[kind.kind]


def _record(event: Mapping[str, Any], objects: dict[str, Object]) -> str:
    """Apply an event of a watch to `objects`, in place. Return the version to watch from next."""
    obj = event["object"]
    if event["type"] == "DELETED":
        objects.pop(obj["metadata"]["uid"], None)
    elif event["type"] != "BOOKMARK":
        objects[obj["metadata"]["uid"]] = obj
    return str(obj["metadata"]["resourceVersion"])


def selector(labels: Labels) -> str | None:
    """Return labels as a query's label selector, for example `app=env,run`; None without any."""
    texts = (name if value is None else f"{name}={value}" for name, value in sorted(labels.items()))
    return ",".join(texts) or None


def name_of(obj: Object) -> str:
    """Return kind and name for a message, for example `Deployment env-babyai`."""
    return f"{obj.get('kind', 'object')} {obj['metadata'].get('name', '?')}"
