"""The objects of an S3 bucket, with timeouts, bounded retries and errors that advise what to do."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import logging
import random
import threading
import time
from collections.abc import Callable, Iterator
from email.utils import parsedate_to_datetime
from typing import Any, TypeVar

from agentgym.config import ConfigError
from agentgym.store.lease import Content

logger = logging.getLogger(__name__)

T = TypeVar("T")
CONNECT_TIMEOUT_S = 5
READ_TIMEOUT_S = 30  # of silence
MAX_ATTEMPTS = 5  # of one request
MAX_BACKOFF_S = 20.0
# larger blobs are sent in parts, several at a time; a stream has ten parts in memory
PART_BYTES = 32 << 20
MAX_PARTS = 10_000  # of one object
NUM_CONNECTIONS = 16
_connecting = threading.Lock()  # boto3's default session is not thread-safe


class StoreUnreachable(ConnectionError):
    """S3 gave no answer, or errors, until all attempts were used up. Earlier commits stay valid."""


def connect() -> Any:
    """Return a boto3 client with timeouts and retries. Errors: ConfigError if none can be made."""
    try:
        import boto3
        from botocore.config import Config
        from botocore.exceptions import BotoCoreError
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"store.uri needs {error.name}; run `pip install -e '.[s3]'` in the checkout, or"
            " leave store.uri empty"
        ) from None
    config = Config(
        connect_timeout=CONNECT_TIMEOUT_S,
        read_timeout=READ_TIMEOUT_S,
        retries={"mode": "standard", "total_max_attempts": MAX_ATTEMPTS},
        max_pool_connections=NUM_CONNECTIONS,
    )
    try:
        with _connecting:
            client = boto3.client("s3", config=config)
    except (BotoCoreError, ValueError) as error:  # an unknown profile, an endpoint that is no URL
        raise ConfigError(
            f"store.uri: the AWS settings of this shell cannot be used: {error}"
        ) from None
    client.meta.events.register("needs-retry.s3", _retry_when_told_to_slow_down)
    return client


def _retry_when_told_to_slow_down(response: Any, attempts: int, **_: Any) -> float | None:
    """Return seconds to wait after a plain 429, which botocore does not repeat; None: no retry."""
    if response is None or response[0].status_code != 429 or attempts >= MAX_ATTEMPTS:
        return None
    # spreads retries, keeps no secret
    return min(MAX_BACKOFF_S, random.uniform(0.5, 1) * 2.0 ** (attempts - 1))  # noqa: S311


class Bucket:
    """The objects of a bucket, by key. Every method raises FileNotFoundError, EOFError, ConfigError
    or StoreUnreachable in place of an error of botocore.
    """

    def __init__(self, name: str, client: Any) -> None:
        self.name = name
        self._client = client

    def get(self, key: str) -> tuple[bytes, str, float]:
        """Return content, ETag and age (s, by the server's clock). Errors: FileNotFoundError."""
        data, response = self._read(key, lambda body: body.read())
        now = parsedate_to_datetime(response["ResponseMetadata"]["HTTPHeaders"]["date"])
        return data, response["ETag"], (now - response["LastModified"]).total_seconds()

    def digest(self, key: str) -> str:
        """Return the sha256 of an object, streamed, as 64 hex digits. Errors: FileNotFoundError."""
        return self._read(key, lambda body: hashlib.file_digest(body, "sha256").hexdigest())[0]

    def _read(self, key: str, consume: Callable[[Any], T], **how: Any) -> tuple[T, dict[str, Any]]:
        """Return (`consume(body)`, response). If a response breaks off, which botocore does not
        retry, wait and request it again, MAX_ATTEMPTS in all. how: further arguments of the
        request. Errors: FileNotFoundError, StoreUnreachable.
        """
        for attempt in range(1, MAX_ATTEMPTS + 1):
            with self._translated(key):
                response = self._client.get_object(Bucket=self.name, Key=key, **how)
            try:
                return consume(response["Body"]), response
            except _transport_errors() as error:
                logger.info("s3://%s/%s: the answer broke off: %s", self.name, key, error)
                time.sleep(min(MAX_BACKOFF_S, 0.1 * 2**attempt))
        raise StoreUnreachable(
            f"s3://{self.name}/{key}: the answer broke off {MAX_ATTEMPTS} times; the last commit"
            " stays valid"
        )

    def put_if(self, key: str, data: bytes, etag: str | None) -> str | None:
        """Replace the object if it has this ETag; with None create it if it does not exist.

        Result: the new ETag; None if the condition does not hold, or if it did, but the response
        was lost. Errors: StoreUnreachable, also if MAX_ATTEMPTS writes collided with others.
        """
        from botocore.exceptions import ClientError

        condition = {"IfNoneMatch": "*"} if etag is None else {"IfMatch": etag}
        for attempt in range(1, MAX_ATTEMPTS + 1):
            with self._translated(key):
                try:
                    where = {"Bucket": self.name, "Key": key}
                    return str(self._client.put_object(**where, Body=data, **condition)["ETag"])
                except ClientError as error:
                    status = error.response["ResponseMetadata"]["HTTPStatusCode"]
                    if status == 412 or error.response["Error"]["Code"] == "NoSuchKey":
                        return None
                    if status != 409:
                        raise
            # two conditional writes collided; the one with this status was not carried out
            time.sleep(min(MAX_BACKOFF_S, 0.1 * 2**attempt))
        raise StoreUnreachable(
            f"s3://{self.name}/{key}: {MAX_ATTEMPTS} conditional writes met others; try again"
        )

    def upload(self, key: str, data: bytes) -> None:
        """Write an object, a large one in parts. An error aborts the parts that were sent."""
        with self._translated(key):
            self._client.upload_fileobj(io.BytesIO(data), self.name, key, Config=_transfer())

    def upload_stream(self, key: str, content: Content) -> None:
        """Write an object from streamed content with a few parts at a time in memory."""
        with self._translated(key):
            whole_parts = io.BufferedReader(_Pieces(content))
            self._client.upload_fileobj(whole_parts, self.name, key, Config=_transfer(content.size))

    def read_into(self, key: str, start: int, buffer: memoryview) -> None:
        """Fill `buffer`, which must not be empty, with the object's bytes from index `start` on.
        Errors: FileNotFoundError; EOFError if there are too few.
        """
        span = f"bytes={start}-{start + len(buffer) - 1}"
        data, _ = self._read(key, lambda body: body.read(), Range=span)
        if len(data) != len(buffer):
            raise EOFError(f"s3://{self.name}/{key} ends too early")
        buffer[:] = data

    def download(self, key: str) -> bytes:
        """Return an object's content, received in parts if large. Errors: FileNotFoundError."""
        sink = io.BytesIO()
        with self._translated(key):
            self._client.download_fileobj(self.name, key, sink, Config=_transfer())
        return sink.getvalue()

    def size(self, key: str) -> int:
        """Return an object's size in bytes. Errors: FileNotFoundError."""
        with self._translated(key):
            return int(self._client.head_object(Bucket=self.name, Key=key)["ContentLength"])

    def delete(self, key: str) -> None:
        with self._translated(key):
            self._client.delete_object(Bucket=self.name, Key=key)

    def names(self, prefix: str) -> list[str]:
        """Return the names directly below `prefix`, as `ls` does: objects, then folders.
        They are without `prefix` and without a slash at the end.
        """
        pages = self._pages("list_objects_v2", prefix, Delimiter="/")
        objects = [row["Key"] for page in pages for row in page.get("Contents", ())]
        folders = [row["Prefix"] for page in pages for row in page.get("CommonPrefixes", ())]
        return [name.removeprefix(prefix).rstrip("/") for name in (*objects, *folders)]

    def num_bytes(self, prefix: str) -> int:
        """Return the bytes of all objects below `prefix`."""
        pages = self._pages("list_objects_v2", prefix)
        return sum(row["Size"] for page in pages for row in page.get("Contents", ()))

    def abort_uploads(self, prefix: str) -> int:
        """Abort incomplete multi-part uploads below `prefix`. Return their number."""
        pages = self._pages("list_multipart_uploads", prefix)
        uploads = [upload for page in pages for upload in page.get("Uploads", ())]
        for upload in uploads:
            with contextlib.suppress(FileNotFoundError), self._translated(upload["Key"]):
                self._client.abort_multipart_upload(
                    Bucket=self.name, Key=upload["Key"], UploadId=upload["UploadId"]
                )
        return len(uploads)

    def _pages(self, operation: str, prefix: str, **how: str) -> list[dict[str, Any]]:
        """Return all pages of a listing. how: further arguments of `operation`."""
        with self._translated(prefix):
            paginator = self._client.get_paginator(operation)
            return list(paginator.paginate(Bucket=self.name, Prefix=prefix, **how))

    @contextlib.contextmanager
    def _translated(self, key: str) -> Iterator[None]:
        from botocore.exceptions import ClientError, NoCredentialsError, PartialCredentialsError

        uri = f"s3://{self.name}/{key}"
        try:
            yield
        except ClientError as error:
            details = error.response["Error"]
            code, message = details["Code"], details.get("Message", "")
            status = error.response["ResponseMetadata"]["HTTPStatusCode"]
            if code == "NoSuchBucket":
                raise ConfigError(
                    f"store.uri: there is no bucket {self.name}; create it, or correct store.uri"
                ) from None
            if status == 404:
                raise FileNotFoundError(errno.ENOENT, "no such object", uri) from None
            if status == 416:
                raise EOFError(f"{uri} ends too early") from None
            if status in (301, 400, 401, 403, 501):
                advice = "check the AWS_ variables and what the bucket's policy allows"
                raise ConfigError(
                    f"store.uri: {uri} was refused: {code} ({message}); {advice}"
                ) from None
            raise StoreUnreachable(
                f"{uri}: {code} ({message}) after {MAX_ATTEMPTS} attempts; the last commit stays"
                " valid"
            ) from None
        except (NoCredentialsError, PartialCredentialsError) as error:
            advice = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"
            raise ConfigError(f"store.uri: no credentials for {uri} ({error}); {advice}") from None
        except _transport_errors() as error:
            advice = "check AWS_ENDPOINT_URL and the network; the last commit stays valid"
            raise StoreUnreachable(f"{uri} cannot be reached: {error}; {advice}") from None


def _transport_errors() -> tuple[type[Exception], ...]:
    from boto3.exceptions import Boto3Error
    from botocore.exceptions import BotoCoreError
    from urllib3.exceptions import HTTPError

    return (BotoCoreError, Boto3Error, HTTPError, OSError)


class _Pieces(io.RawIOBase):
    """A file interface to content, read once from its beginning."""

    def __init__(self, content: Content) -> None:
        self._pieces, self._left = content.pieces(), memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._left:
            piece = next(self._pieces, None)
            if piece is None:
                return 0
            self._left = piece
        count = min(len(buffer), len(self._left))
        buffer[:count], self._left = self._left[:count], self._left[count:]
        return count


def _transfer(size: int = 0) -> Any:
    """Return boto3's transfer settings. size: bytes of a stream, which boto3 cannot measure."""
    from boto3.s3.transfer import TransferConfig

    part_bytes = max(PART_BYTES, -(-size // MAX_PARTS))
    return TransferConfig(
        multipart_threshold=part_bytes,
        multipart_chunksize=part_bytes,
        max_concurrency=4,
        preferred_transfer_client="classic",
    )
