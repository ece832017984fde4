"""Where a store is, for processes that are sent there."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, Self

from agentgym.store.manifest import Blob
from agentgym.store.posix import posix_store
from agentgym.store.runstore import RunStore, folder_name


class StoreNotHere(ValueError):
    """A store in a folder that this machine does not see."""


@dataclass(frozen=True, slots=True)
class StorePlace:
    """What a process needs in order to open a store."""

    root: str  # a folder, or s3://bucket/prefix
    lease_ttl_s: float

    @classmethod
    def of(cls, store: RunStore) -> Self:
        root = store.root
        if not root.startswith("s3://"):
            root = str(Path(root).absolute())  # where it is opened, another folder is the current
        return cls(root, store.lease_ttl_s)

    def open(self) -> RunStore:
        """Errors: ConfigError where S3 cannot be used as it is set up."""
        if self.root.startswith("s3://"):
            from agentgym.store.s3 import s3_store

            return s3_store(self.root, lease_ttl_s=self.lease_ttl_s)
        return posix_store(Path(self.root), lease_ttl_s=self.lease_ttl_s)

    def visit(self, step: str, key: str) -> RunStore:
        """The store, where the process that sent this one here has this step.
        Errors: StoreNotHere.
        """
        folder = Path(self.root) / "steps" / folder_name(step, key)
        if not self.root.startswith("s3://") and not folder.is_dir():
            raise StoreNotHere(
                f"the store {self.root} is not on {socket.gethostname()}; every node of the"
                " cluster must see it: give store.path a folder that all share, or set store.uri"
            )
        return self.open()


class Writable(Protocol):
    """A copy of weights and optimizers, in the processes that hold them."""

    @property
    def size(self) -> int:
        """Bytes."""
        ...

    def write(self, place: StorePlace, step: str, key: str) -> dict[str, Blob]:
        """Into the folder of a step, as blobs of the next commit. Errors: StoreFull."""
        ...
