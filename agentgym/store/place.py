"""Address of a store, for processes on other nodes that must open it."""

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
    """Root and lease time with which another process opens the same store."""

    root: str  # a folder, or s3://bucket/prefix
    lease_ttl_s: float

    @classmethod
    def of(cls, store: RunStore) -> Self:
        root = store.root
        if not root.startswith("s3://"):
            root = str(Path(root).absolute())  # another process has another working directory
        return cls(root, store.lease_ttl_s)

    def open(self) -> RunStore:
        """Open the store. Errors: ConfigError if S3 cannot be used with this setup."""
        if self.root.startswith("s3://"):
            from agentgym.store.s3 import s3_store

            return s3_store(self.root, lease_ttl_s=self.lease_ttl_s)
        return posix_store(Path(self.root), lease_ttl_s=self.lease_ttl_s)

    def visit(self, step: str, key: str) -> RunStore:
        """Open the store that another process wrote this step to.
        Errors: StoreNotHere if this machine does not see the step's folder.
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
        """Size in bytes."""
        ...

    def write(self, place: StorePlace, step: str, key: str) -> dict[str, Blob]:
        """Write into a step's folder. Return name -> blob for the commit. Errors: StoreFull."""
        ...
