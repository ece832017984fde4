"""The RunStore on S3: immutable objects, and one small head per step that is replaced only under
its ETag.

    <prefix>/steps/<step>-<key[:16]>/
        head.json                     the holder, the heartbeat, and the manifests that count
        blobs/<sha256>                content
        manifests/<seq>-<epoch>.json  created exclusively; counts once the head names it

Taking a lease, every heartbeat and every commit replace the head under `If-Match`.
A writer that was taken over has lost the ETag, so nothing it sends later can count.
Endpoint and credentials are the usual AWS ones (AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID, ...).
They must allow to get, put, delete and list objects, and to list and abort multi-part uploads.
"""

from __future__ import annotations

import json
import logging
import re
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import Any, Self, TypeVar

from agentgym.config import ConfigError
from agentgym.store.bucket import NUM_CONNECTIONS, Bucket, StoreUnreachable, connect
from agentgym.store.lease import Content, Fenced, Holder, Lease, Tenure, digest_of
from agentgym.store.manifest import Blob, ManifestError

logger = logging.getLogger(__name__)

T = TypeVar("T")
U = TypeVar("U")
MANIFEST = re.compile(r"(?P<seq>\d{6,})-(?P<epoch>\d+)\.json")
ENDED = "ended/{:06d}.txt"  # by epoch: the object with the reason why a lease was released early
NUM_REPLACEMENTS = 5  # attempts to replace the head, which others change, before an error


def s3_backend(uri: str) -> S3Backend:
    """Return the back end at `s3://bucket/prefix`; no request is sent yet.
    Errors: ConfigError without boto3 or valid settings.
    """
    bucket, _, prefix = uri.removeprefix("s3://").partition("/")
    return S3Backend(Bucket(bucket, connect()), prefix)


class S3Backend:
    """Storage of all steps below one prefix of a bucket, with a prefix for each step."""

    def __init__(self, bucket: Bucket, prefix: str) -> None:
        self.root = f"s3://{bucket.name}/{prefix}".rstrip("/")
        self._bucket = bucket
        self._base = f"{prefix}/" if prefix else ""
        self._proven = False

    def folders(self) -> list[str]:
        return self._bucket.names(f"{self._base}steps/")

    def folder(self, name: str) -> S3Folder:
        return S3Folder(self._bucket, f"{self._base}steps/{name}", self._prove_conditions)

    def map(self, function: Callable[[T], U], items: Iterable[T]) -> list[U]:
        with ThreadPoolExecutor(NUM_CONNECTIONS) as pool:
            return list(pool.map(function, items))

    def _prove_conditions(self) -> None:
        """Raise ConfigError unless conditional writes work: else a step could have two writers.
        The test writes the object `conditions`; once passed, it is not repeated.
        """
        if self._proven:
            return
        key = f"{self._base}conditions"
        about = (
            b"Written without a condition, so that writing it under one that does not hold can be"
            b" seen to fail.\n"
        )
        self._bucket.upload(key, about)
        for name, etag in {"If-None-Match": None, "If-Match": f'"{"0" * 32}"'}.items():
            if self._bucket.put_if(key, about, etag) is not None:
                raise ConfigError(
                    f"store.uri {self.root}: the service ignores {name} on PutObject, so it cannot"
                    " keep a second writer out; use one that honours conditional writes, or leave"
                    " store.uri empty"
                )
        self._proven = True


@dataclass(frozen=True, slots=True)
class Head:
    """Content of head.json, the one mutable object of a step."""

    holder: Holder
    # replacements by this holder: no two heads are equal, so an ETag never comes back
    beat: int = 0
    released: bool = False
    num_commits: int = 0
    spans: tuple[tuple[int, int], ...] = ()  # (first seq, epoch that wrote from there on)
    collected: bool = False  # commits and content were removed or are being removed

    def commits(self, names: Iterable[str]) -> dict[int, str]:
        """Return seq -> path below the step of each committed manifest file, in order.
        names: all files in manifests/, some without effect as their writer lost its lease.
        """
        counting = {}
        for match in filter(None, map(MANIFEST.fullmatch, names)):
            seq = int(match["seq"])
            # of the lease under which it was committed, if it was
            epoch = next((epoch for first, epoch in reversed(self.spans) if first <= seq), 0)
            if seq < self.num_commits and int(match["epoch"]) == epoch:
                counting[seq] = f"manifests/{match.string}"
        return dict(sorted(counting.items()))

    def to_bytes(self) -> bytes:
        return json.dumps(asdict(self), indent=1).encode()

    @classmethod
    def from_bytes(cls, data: bytes, where: str) -> Self:
        """Parse a head. `where` names the source in errors. Errors: ManifestError."""
        try:
            tree = json.loads(data)
            spans = tuple((int(first), int(epoch)) for first, epoch in tree.pop("spans"))
            return cls(Holder.from_tree(tree.pop("holder")), spans=spans, **tree)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise ManifestError(
                f"{where} is no head of a step ({error!r}); restore it from a copy"
            ) from None


class S3Folder:
    """The objects of one step, below its prefix."""

    def __init__(self, bucket: Bucket, path: str, prove_conditions: Callable[[], None]) -> None:
        self.place = f"s3://{bucket.name}/{path}"
        self.bucket = bucket
        self.path = path
        self._prove_conditions = prove_conditions

    def commits(self) -> dict[int, str]:
        try:
            head = self.head()[0]
        except FileNotFoundError:
            return {}
        return head.commits(self.bucket.names(f"{self.path}/manifests/"))

    def head(self) -> tuple[Head, str, float]:
        """Return head, ETag and age in seconds. Errors: FileNotFoundError, ManifestError."""
        data, etag, age_s = self.bucket.get(f"{self.path}/head.json")
        return Head.from_bytes(data, f"{self.place}/head.json"), etag, age_s

    def replace_head(self, head: Head, etag: str | None) -> str | None:
        """Write the head if its ETag is `etag`; None: if there is no head yet.
        Result: the new ETag, or None, see `Bucket.put_if`.
        """
        return self.bucket.put_if(f"{self.path}/head.json", head.to_bytes(), etag)

    def read(self, name: str) -> bytes:
        if not name.startswith("blobs/"):  # small: one request
            return self.bucket.get(f"{self.path}/{name}")[0]
        return self.bucket.download(f"{self.path}/{name}")

    def read_into(self, name: str, start: int, buffer: memoryview) -> None:
        if buffer:  # S3 has no empty range
            self.bucket.read_into(f"{self.path}/{name}", start, buffer)

    def size(self, name: str) -> int:
        return self.bucket.size(f"{self.path}/{name}")

    def digest(self, name: str) -> str:
        return self.bucket.digest(f"{self.path}/{name}")

    def blobs(self) -> set[str]:
        return set(self.bucket.names(f"{self.path}/blobs/"))

    def put(self, blob: Blob, data: bytes) -> None:
        """Send the blob, also one that exists, so that a damaged one is replaced.
        The writer passes unchanged content as a `Blob` and does not call this.
        """
        self.bucket.upload(f"{self.path}/{blob.path}", data)

    def stream(self, content: Content) -> Blob:
        """Hash content, then send it (S3 needs an object's name first); return its Blob."""
        blob = Blob(digest=digest_of(content), size=content.size)
        self.bucket.upload_stream(f"{self.path}/{blob.path}", content)
        return blob

    def remove(self, digest: str) -> None:
        self.bucket.delete(f"{self.path}/blobs/{digest}")

    def collected(self) -> bool:
        try:
            return self.head()[0].collected
        except FileNotFoundError:
            return False

    def num_bytes(self) -> int:
        return self.bucket.num_bytes(f"{self.path}/")

    def has_content(self) -> bool:
        return any(self.bucket.names(f"{self.path}/{kind}/") for kind in ("manifests", "blobs"))

    def tenure(self, ttl_s: float) -> Tenure | None:
        try:
            head, _, silent_s = self.head()
        except FileNotFoundError:
            return None
        if not head.released:
            return Tenure(head.holder, head.holder.is_alive(silent_s - 1, ttl_s=ttl_s), None)
        try:
            reason = self.bucket.get(f"{self.path}/{ENDED.format(head.holder.epoch)}")[0]
        except FileNotFoundError:
            reason = b""
        return Tenure(head.holder, False, reason.decode("utf-8", "replace"))

    def acquire(self, ttl_s: float, what: str, parents: Sequence[str] = ()) -> Lease:
        self._prove_conditions()
        me: Holder | None = None
        for _ in range(NUM_REPLACEMENTS):
            try:
                last, etag, silent_s = self.head()
            except FileNotFoundError:
                me = Holder.me(1, parents)
                desired, last_etag = Head(me), None
            else:
                # this process took the lease, and the response was lost
                if me is not None and last.holder.token == me.token:
                    return S3Lease(self, last, etag, ttl_s, what)
                if not last.released:
                    # S3 gives times in whole seconds, rounded down
                    last.holder.refuse_if_alive(silent_s - 1, ttl_s=ttl_s, what=what)
                me = Holder.me(last.holder.epoch + 1, parents)
                desired, last_etag = replace(last, holder=me, beat=0, released=False), etag
            new_etag = self.replace_head(desired, last_etag)
            if new_etag is not None:
                return S3Lease(self, desired, new_etag, ttl_s, what)
        raise StoreUnreachable(
            f"{what}: the lease changed hands {NUM_REPLACEMENTS} times while this process asked for"
            " it; try again"
        )


class S3Lease(Lease):
    """A lease in a step's head, with the head as this holder last wrote it."""

    def __init__(self, folder: S3Folder, head: Head, etag: str, ttl_s: float, what: str) -> None:
        self._folder = folder
        self._head = head
        self._etag = etag
        self._lock = threading.Lock()  # the heartbeat and the writer replace the same object
        super().__init__(head.holder, ttl_s, what)

    def check(self) -> None:
        self._read()

    def commit(self, first: int, last: int, data: bytes) -> None:
        name = f"manifests/{first:06d}-{self.holder.epoch}.json"
        key = f"{self._folder.path}/{name}"
        if self._folder.bucket.put_if(key, data, None) is None and self._folder.read(name) != data:
            raise Fenced(
                f"{self._what}: commit {first} was already begun by this process"
                f" ({self.holder.pid}, epoch {self.holder.epoch}) and may count or not; stop, and"
                " run the step again to continue from what counts"
            )
        spans = self._head.spans
        if not spans or spans[-1][1] != self.holder.epoch:
            spans = (*spans, (first, self.holder.epoch))
        self._replace(num_commits=last + 1, spans=spans)

    def drop(self, first: int) -> None:
        spans = tuple(span for span in self._head.spans if span[0] < first)
        self._replace(num_commits=first, spans=spans)

    def collect(self) -> None:
        self._replace(num_commits=0, spans=(), collected=True)
        self._empty()

    def begin_anew(self) -> None:
        if self._head.collected:
            self._empty()
            self._replace(collected=False)

    def _empty(self) -> None:
        for kind in ("manifests", "blobs"):
            for name in self._folder.bucket.names(f"{self._folder.path}/{kind}/"):
                self.check()
                self._folder.bucket.delete(f"{self._folder.path}/{kind}/{name}")

    def sweep(self) -> int:
        self.check()
        num_aborted = self._folder.bucket.abort_uploads(f"{self._folder.path}/")
        names = self._folder.bucket.names(f"{self._folder.path}/manifests/")
        counting = set(self._head.commits(names).values())
        orphans = [name for name in names if f"manifests/{name}" not in counting]
        for name in orphans:
            self.check()  # a newer holder's may be among them
            self._folder.bucket.delete(f"{self._folder.path}/manifests/{name}")
        return num_aborted + len(orphans)

    def _beat(self) -> None:
        self._replace()

    def _give_back(self, reason: str) -> None:
        if reason:  # an object of its own: earlier versions refuse a head with another field
            key = f"{self._folder.path}/{ENDED.format(self.holder.epoch)}"
            self._folder.bucket.put_if(key, reason.encode("utf-8", "replace"), None)
        self._replace(released=True)

    def _replace(self, **changes: Any) -> None:
        """Replace the head by a copy with these fields changed and the next `beat`.
        Errors: Fenced; StoreUnreachable after NUM_REPLACEMENTS attempts.
        """
        with self._lock:
            for _ in range(NUM_REPLACEMENTS):
                head = replace(self._head, beat=self._head.beat + 1, **changes)
                etag = self._folder.replace_head(head, self._etag)
                if etag is not None:
                    self._head, self._etag = head, etag
                    return
                # _read raises if the head is another holder's; else a response was lost
                self._head, self._etag = self._read()
                if self._head == head:
                    return
        raise StoreUnreachable(
            f"{self._what}: {self._folder.place}/head.json was changed {NUM_REPLACEMENTS} times by"
            " others; run it again"
        )

    def _read(self) -> tuple[Head, str]:
        """Return the stored head and its ETag. Errors: Fenced if missing or another holder's."""
        try:
            head, etag, _ = self._folder.head()
        except FileNotFoundError:
            raise Fenced(
                f"{self._what} was deleted while process {self.holder.pid} wrote to it; run the"
                " step again"
            ) from None
        if head.holder.token != self.holder.token:
            raise self._fenced_by(head.holder)
        return head, etag
