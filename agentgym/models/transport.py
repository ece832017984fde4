"""Weights on their way from a learner to the engines that sample with them: inside one process, by
file, through Ray's object store, or by collective broadcast.

The sender computes a digest, and the receiver computes it again of what arrived, before it samples
with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import fcntl
import hashlib
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from agentgym.models.tensorfiles import DTYPE_NAMES, DTYPES, TensorFile
from agentgym.types import EngineMismatch

TCPStore: Any = dist.TCPStore  # type: ignore[attr-defined]  # torch lists neither
FileStore: Any = dist.FileStore  # type: ignore[attr-defined]

_SIOCGIFADDR, _IFREQ_BYTES, _ADDRESS = 0x8915, 40, slice(20, 24)  # netdevice(7)

Place = tuple[str, int] | Path  # where processes meet: host and port, or a file


class TransportBroken(RuntimeError):
    """Weights did not get to all of a group: one of them died, hangs, or was too slow."""


def weights_digest(weights: Mapping[str, Tensor]) -> str:
    """sha256 of the safetensors file that holds them."""
    found = hashlib.sha256()
    for piece in TensorFile.of(weights).pieces():
        found.update(piece)
    return found.hexdigest()


def require_arrived(arrived: str, sent: str, version: int, where: str) -> None:
    """Of two digests. Errors: EngineMismatch."""
    if arrived != sent:
        raise EngineMismatch(
            f"weights version {version} arrived at {where} with sha256 {arrived[:12]}, sent was"
            f" {sent[:12]}"
        )


def require_newer(version: int, held: int) -> None:
    """Errors: ValueError."""
    if version <= held and not version == held == 0:
        raise ValueError(f"weight versions must grow: engine holds {held}, got {version}")


def write_weights(path: Path, weights: Mapping[str, Tensor]) -> None:
    """As a safetensors file, whose sha256 is their digest."""
    with path.open("wb") as file:
        file.writelines(TensorFile.of(weights).pieces())


class InProcess:
    """A `Delivery` to an engine of the same process, which takes a copy."""

    def __init__(self, weights: Mapping[str, Tensor], version: int) -> None:
        self._weights, self.version = weights, version
        self.digest = weights_digest(weights)

    async def weights(self) -> dict[str, Tensor]:
        """In host memory."""
        return await asyncio.to_thread(self._copied)

    def _copied(self) -> dict[str, Tensor]:
        copied = {name: each.detach().to("cpu", copy=True) for name, each in self._weights.items()}
        require_arrived(weights_digest(copied), self.digest, self.version, "the engine")
        return copied


@dataclass(frozen=True)
class Broadcast:
    """A `Delivery` by collective operations; one process's part in them.

    Every value is plain, so that it can be sent as JSON.
    """

    digest: str
    version: int
    layout: dict[str, tuple[str, tuple[int, ...]]]  # name -> dtype as safetensors has it, shape
    backend: str  # gloo or nccl
    timeout_s: float  # of the meeting, and from its beginning on of all that follows
    rank: int = 0  # the sender's is 0, an engine's first process has this, the next this + 1
    size: int = 0
    host: str = ""  # where rank 0 opened a meeting place
    port: int = 0
    path: str = ""  # or the file in which they meet

    @property
    def shapes(self) -> dict[str, Tensor]:
        """Without values."""
        return {
            name: torch.empty(shape, dtype=DTYPES[dtype], device="meta")
            for name, (dtype, shape) in self.layout.items()
        }

    async def weights(self) -> dict[str, Tensor]:
        """Errors: EngineMismatch, TransportBroken."""
        device = torch.device("cuda" if self.backend == "nccl" else "cpu")
        received = await asyncio.to_thread(self.receive, device)
        found = await asyncio.to_thread(weights_digest, received)
        require_arrived(found, self.digest, self.version, socket.gethostname())
        return received

    def receive(self, device: torch.device) -> dict[str, Tensor]:
        """In host memory, whatever the device they come to. Errors: TransportBroken."""
        received: dict[str, Tensor] = {}
        with self._group(None) as broadcast:
            for name, (dtype, shape) in sorted(self.layout.items()):
                arriving = torch.empty(shape, dtype=DTYPES[dtype], device=device)
                broadcast(arriving)
                received[name] = arriving.cpu()
        return received

    def send(self, weights: Mapping[str, Tensor], device: torch.device, meeting: Any) -> None:
        """meeting: see `serve`; None where processes meet in a file. Errors: TransportBroken."""
        with self._group(meeting) as broadcast:
            for name in sorted(self.layout):
                broadcast(weights[name].to(device).contiguous())

    def at(self, rank: int) -> Broadcast:
        """Another process's place."""
        return replace(self, rank=rank)

    @contextmanager
    def _group(self, meeting: Any) -> Iterator[Callable[[Tensor], None]]:
        """Apart from torch's default group, which this process may be in with others.
        Result: sends, or fills, a tensor.
        """
        deadline = time.monotonic() + self.timeout_s
        place: Place = (self.host, self.port) if self.host else Path(self.path)

        def ended(work: Any) -> None:
            work.wait(datetime.timedelta(seconds=max(0.001, deadline - time.monotonic())))

        group = None
        try:
            group = self._joined(meeting or meet(place, self.size, self._limit))
            yield lambda tensor: ended(group.broadcast(_bytes_of(tensor), 0))
            ended(group.barrier())  # nobody leaves while another reads
        except (RuntimeError, OSError) as error:  # torch's own are subclasses
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise TransportBroken(
                f"weights version {self.version}: broadcast to {self.size - 1} processes broke at"
                f" rank {self.rank} ({socket.gethostname()}): {reason}"
            ) from error
        finally:
            if group is not None and self.backend == "nccl":
                group.abort()  # it holds memory of the GPU

    def _joined(self, store: Any) -> Any:
        if self.backend == "nccl":
            kind: Any = dist.ProcessGroupNCCL
            options = kind.Options()
            # else torch ends the whole process when another is lost
            os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")
        else:
            kind = dist.ProcessGroupGloo
            options = kind._Options()
            options._devices = [_gloo_device()]
        options._timeout = self._limit
        return kind(store, self.rank, self.size, options)

    @property
    def _limit(self) -> datetime.timedelta:
        return datetime.timedelta(seconds=self.timeout_s)


def layout_of(weights: Mapping[str, Tensor]) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {name: (DTYPE_NAMES[each.dtype], tuple(each.shape)) for name, each in weights.items()}


def serve(host: str, size: int, timeout: datetime.timedelta) -> tuple[Any, tuple[str, int]]:
    """Open a place where so many processes meet, on this address alone. Result: it, its address."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as listener:
        port, descriptor = listener.getsockname()[1], listener.detach()
    store = TCPStore(
        host,
        port,
        size,
        is_master=True,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=descriptor,
    )
    return store, (host, port)


def meet(place: Place, size: int, timeout: datetime.timedelta) -> Any:
    """Enter a place that another process opened, or a file."""
    if isinstance(place, Path):
        store = FileStore(str(place), size)
        store.set_timeout(timeout)
        return store
    return TCPStore(*place, size, is_master=False, timeout=timeout)


def interface_of(address: str) -> str:
    """Name of the network interface that has an IPv4 address, any of 127.0.0.0/8 included; ""
    where none is found.
    """
    for _, name in socket.if_nameindex():
        with (
            socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe,
            contextlib.suppress(OSError),
        ):
            reply = fcntl.ioctl(probe, _SIOCGIFADDR, name.encode().ljust(_IFREQ_BYTES, b"\0"))
            found = socket.inet_ntoa(reply[_ADDRESS])
            if found == address or (found.startswith("127.") and address.startswith("127.")):
                return name
    return ""


def use_interface_of(address: str) -> None:
    """What processes exchange goes through the interface with this address, unless somebody named
    another.
    """
    name = interface_of(address)
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if name else ():
        os.environ.setdefault(variable, name)


def _gloo_device() -> Any:
    name = os.environ.get("GLOO_SOCKET_IFNAME")
    return (
        dist.ProcessGroupGloo.create_device(interface=name)
        if name
        else dist.ProcessGroupGloo.create_default_device()
    )


def _bytes_of(tensor: Tensor) -> Tensor:
    """A view that every backend can send."""
    return tensor.reshape(-1).view(torch.uint8)
