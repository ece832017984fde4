"""Weights on their way from a learner to the engines that sample with them: inside one process, in
memory that processes of one machine share, through Ray's object store, or by collective broadcast.

The sender computes a digest; the receiver computes that of the arrived weights before it samples.
"""

from __future__ import annotations

import asyncio
import datetime
import hashlib
import json
import logging
import os
import socket
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import psutil
import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor
from torch.nn.functional import pad
from torch.storage import TypedStorage

from agentgym.models.tensorfiles import DTYPE_NAMES, DTYPES, Shaped, TensorFile
from agentgym.types import Delivery, EngineMismatch
from agentgym.types import TransportBroken as TransportBroken

logger = logging.getLogger(__name__)
Received = TypeVar("Received")

TCPStore: Any = dist.TCPStore  # type: ignore[attr-defined]  # torch lists neither
FileStore: Any = dist.FileStore  # type: ignore[attr-defined]

UNREADABLE = "unreadable"  # in place of a digest
SUMS = "sums:"  # prefix of a digest made of sums
WORDS = 1 << 16  # of 32 bits in a block
BLOCKS_OF_GPU = 256  # blocks summed at once on a GPU: 64 MiB, and 256 MiB for the products
KEY = 0x5EED  # seed of the factors

Place = tuple[str, int] | Path  # where processes meet: host and port, or a file


def weights_digest(weights: Mapping[str, Tensor], like: str = "") -> str:
    """Return a digest of weights.
    For tensors in host memory this is the sha256 of the safetensors file that holds them. For
    tensors on a GPU it is made of sums that the GPU computes; a CPU computes the same ones.
    like: the digest to compare with, which decides the kind; "": the tensors' device decides.
    """
    if like.startswith(SUMS) or (not like and is_on_gpu(weights)):
        sums = [_sums(weights[name]) for name in sorted(weights)]  # `tolist` waits once for all
        layout = json.dumps([layout_of(weights), torch.stack(sums).tolist()], sort_keys=True)
        return SUMS + hashlib.sha256(layout.encode()).hexdigest()[:32]
    digest = hashlib.sha256()
    for piece in TensorFile.of(weights).pieces():
        digest.update(piece)
    return digest.hexdigest()


def is_on_gpu(weights: Mapping[str, Tensor]) -> bool:
    """Return True if all weights are in a GPU's memory; False if there are none."""
    return bool(weights) and all(tensor.is_cuda for tensor in weights.values())


def _sums(tensor: Tensor) -> Tensor:
    """Return two sums modulo 2^64 over the words of a tensor's bytes, [2] int64 on its device.

    Each word of 32 bits is multiplied by two odd random numbers of 64 bits: one for its position
    in a block of words, one for the block. Words or blocks that change places thus change the sum.
    Two changed words cancel each other in one sum with a probability of 2^-33.
    """
    content = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if content.numel() % 4 or content.storage_offset() % 4:
        content = pad(content, (0, -content.numel() % 4))  # the copy has offset 0
    words, device = content.view(torch.int32), content.device
    num_blocks = len(words) // WORDS
    inner = _factors(WORDS, (0, 1), device)
    outer = _factors(1 << num_blocks.bit_length(), (2, 3), device)
    total = torch.zeros(2, dtype=torch.int64, device=device)
    at_once = BLOCKS_OF_GPU if tensor.is_cuda else 1  # one fits into a CPU's cache
    for first in range(0, num_blocks, at_once):
        last = min(num_blocks, first + at_once)
        wide = words[first * WORDS : last * WORDS].long().view(-1, WORDS)
        for of_block, of_word, index in zip(outer, inner, (0, 1), strict=True):
            total[index] += ((wide * of_word).sum(1) * of_block[first:last]).sum()
    rest = words[num_blocks * WORDS :].long()
    return total + (rest * inner[:, : len(rest)]).sum(1) * outer[:, num_blocks]


@cache
def _factors(count: int, streams: tuple[int, ...], device: torch.device) -> Tensor:
    """Return odd random numbers, [len(streams), count] int64, the same in every process.
    For a larger `count`, a stream begins with the same numbers.
    """
    rows = [
        np.random.Generator(np.random.Philox(key=[KEY, stream])).integers(
            1 << 64, size=count, dtype=np.uint64
        )
        for stream in streams
    ]
    return torch.from_numpy((np.stack(rows) | np.uint64(1)).view(np.int64)).to(device)


def require_arrived(arrived: str, sent: str, version: int, where: str) -> None:
    """Raise EngineMismatch unless both digests are equal.
    version, where: version of the weights and name of the receiver, for the error.
    """
    if arrived != sent:
        came, went = (digest.removeprefix(SUMS)[:12] for digest in (arrived, sent))
        raise EngineMismatch(
            f"weights version {version} arrived at {where} with digest {came}, sent was {went}"
        )


def require_newer(version: int, current: int) -> None:
    """Raise ValueError unless `version` is above the engine's current one; 0 may follow 0."""
    if version <= current and not version == current == 0:
        raise ValueError(f"weight versions must grow: engine holds {current}, got {version}")


def write_weights(path: Path, weights: Mapping[str, Tensor]) -> None:
    """Write a safetensors file, whose sha256 is the digest of weights in host memory."""
    with path.open("wb") as file:
        file.writelines(TensorFile.of(weights).pieces())


def read_weights(path: Path, like: str) -> tuple[str, dict[str, Tensor]]:
    """Return (digest, weights) of a safetensors file; (UNREADABLE, {}), with a warning, if it is
    missing, cut off or damaged. like: see `weights_digest`.
    """
    try:
        weights = load_file(path)
    except (SafetensorError, OSError) as error:
        logger.warning("weights in %s cannot be read: %s", path, error)
        return UNREADABLE, {}
    return weights_digest(weights, like), weights


@contextmanager
def memory_file() -> Iterator[Path]:
    """Yield the path of an empty file in memory that other processes of this user can open. After
    the block the memory is freed as soon as they have closed the file.
    """
    descriptor = os.memfd_create("weights")
    try:
        yield Path(f"/proc/{os.getpid()}/fd/{descriptor}")
    finally:
        os.close(descriptor)


def shared_of(weights: Mapping[str, Tensor]) -> dict[str, list[Any]]:
    """Return name -> handle, plain values with which another process opens this GPU tensor.
    The sender must not change the tensors until the receiver has copied them.
    """
    shared = {}
    for name, tensor in weights.items():
        _, arguments = reduce_tensor(tensor.detach())  # type: ignore[no-untyped-call]
        _, size, stride, offset, _, _, *handles = arguments
        shared[name] = [DTYPE_NAMES[tensor.dtype], list(size), list(stride), offset, *handles]
    return shared


def opened(shared: Mapping[str, Sequence[Any]]) -> dict[str, Tensor]:
    """Open the GPU tensors of `shared_of`, not copied. Errors: RuntimeError if the driver fails."""
    return {
        name: rebuild_cuda_tensor(  # type: ignore[no-untyped-call]
            Tensor, size, stride, offset, TypedStorage, DTYPES[dtype], *handles
        )
        for name, (dtype, size, stride, offset, *handles) in shared.items()
    }


class InProcess:
    """A `Delivery` to an engine of the learner's process, which gets a copy."""

    def __init__(self, weights: Mapping[str, Tensor], version: int) -> None:
        self.held, self.version = weights, version  # the learner's tensors, not copied
        self.digest = weights_digest(weights)

    async def weights(self) -> dict[str, Tensor]:
        """Return a copy by name, on the device of the learner's weights. Errors: EngineMismatch."""
        return await asyncio.to_thread(self._copied)

    def _copied(self) -> dict[str, Tensor]:
        copied = {name: tensor.detach().clone() for name, tensor in self.held.items()}
        arrived = weights_digest(copied, self.digest)
        require_arrived(arrived, self.digest, self.version, "the engine")
        return copied


def shapes_of(layout: Mapping[str, tuple[str, Sequence[int]]]) -> dict[str, Tensor]:
    """Return name -> tensor on the meta device, without values. layout: see `layout_of`."""
    return {
        name: torch.empty(tuple(shape), dtype=DTYPES[dtype], device="meta")
        for name, (dtype, shape) in layout.items()
    }


@dataclass(frozen=True)
class FromProcess:
    """A `Delivery` from another process of this machine. It has plain values alone, no tensors.
    The weights lie in a safetensors file that the sender holds open, or in a GPU's memory.
    """

    digest: str
    version: int
    layout: dict[str, tuple[str, tuple[int, ...]]]  # see `layout_of`
    path: str = ""
    shared: dict[str, list[Any]] | None = None  # see `shared_of`

    @classmethod
    def written(
        cls, path: Path, weights: Mapping[str, Tensor], digest: str, version: int
    ) -> FromProcess:
        """Write weights to a file; return the delivery that names it. digest: of the weights."""
        write_weights(path, weights)
        return cls(digest, version, layout_of(weights), str(path))

    async def weights(self) -> dict[str, Tensor]:
        """Return a copy by name, on the GPU if they are shared there, else on the CPU.
        Errors: EngineMismatch; RuntimeError if the driver refuses the handles.
        """
        return await asyncio.to_thread(self._read)

    def _read(self) -> dict[str, Tensor]:
        if self.shared is None:
            arrived, weights = read_weights(Path(self.path), self.digest)
        else:
            weights = {name: tensor.clone() for name, tensor in opened(self.shared).items()}
            arrived = weights_digest(weights, self.digest)
        require_arrived(arrived, self.digest, self.version, "the engine")
        return weights


class HandOver:
    """Sender of weights to another process of this machine: on the GPU, else in the host's memory.
    If the receiver cannot open the GPU's memory, these and later weights go through the host's,
    with a warning in the log.
    """

    def __init__(self) -> None:
        self._shares = True

    async def send(
        self, delivery: Delivery, receive: Callable[[FromProcess], Awaitable[Received]]
    ) -> Received:
        """Call `receive` with the weights, which it must have copied before it ends, and return its
        result. It is called again if it raises TransportBroken for weights on the GPU.
        Errors: those of `receive` and of `Delivery.weights`.
        """
        digest, version = delivery.digest, delivery.version
        weights: Mapping[str, Tensor] = (
            delivery.held if isinstance(delivery, InProcess) else await delivery.weights()
        )
        if self._shares and is_on_gpu(weights):
            layout, shared = layout_of(weights), shared_of(weights)
            try:
                return await receive(FromProcess(digest, version, layout, shared=shared))
            except TransportBroken as refused:
                self._shares = False
                logger.warning("vLLM gets weights through the host's memory now: %s", refused)
        with memory_file() as path:
            return await receive(
                await asyncio.to_thread(FromProcess.written, path, weights, digest, version)
            )


@dataclass(frozen=True)
class Broadcast:
    """A `Delivery` by collective broadcast, as one process of the group takes part in it.
    Every value is plain, so that it can be sent as JSON.
    """

    digest: str
    version: int
    layout: dict[str, tuple[str, tuple[int, ...]]]  # name -> dtype as safetensors has it, shape
    backend: str  # gloo or nccl
    timeout_s: float  # of the whole exchange, from the start of the meeting
    rank: int = 0  # 0: the sender; for an engine that of its first process, the others follow
    size: int = 0
    host: str = ""  # address at which rank 0 opened a meeting place
    port: int = 0
    path: str = ""  # or the file in which they meet

    async def weights(self) -> dict[str, Tensor]:
        """Receive the weights; return them on the CPU. Errors: EngineMismatch, TransportBroken."""
        device = torch.device("cuda" if self.backend == "nccl" else "cpu")
        received = await asyncio.to_thread(self.receive, device)
        arrived = await asyncio.to_thread(weights_digest, received, self.digest)
        require_arrived(arrived, self.digest, self.version, socket.gethostname())
        return received

    def receive(self, device: torch.device) -> dict[str, Tensor]:
        """Receive the weights on a device; return them, unverified, in host memory.
        Errors: TransportBroken.
        """
        received: dict[str, Tensor] = {}
        with self._group(None) as broadcast:
            for name, (dtype, shape) in sorted(self.layout.items()):
                arriving = torch.empty(shape, dtype=DTYPES[dtype], device=device)
                broadcast(arriving)
                received[name] = arriving.cpu()
        return received

    def send(self, weights: Mapping[str, Tensor], device: torch.device, meeting: Any) -> None:
        """Send the weights, moved to `device` one by one. meeting: the store of `serve`; None if
        the processes meet in a file. Errors: TransportBroken.
        """
        with self._group(meeting) as broadcast:
            for name in sorted(self.layout):
                broadcast(weights[name].to(device).contiguous())

    def at(self, rank: int) -> Broadcast:
        """Return a copy of this record for the process with this rank."""
        return replace(self, rank=rank)

    @contextmanager
    def _group(self, meeting: Any) -> Iterator[Callable[[Tensor], None]]:
        """Join a group apart from torch's default group, which this process may be in already.
        Yield a function that sends a tensor (rank 0) or fills it with the values that arrive.
        Errors: TransportBroken if a process is lost or `timeout_s` has passed.
        """
        deadline = time.monotonic() + self.timeout_s
        meeting_place: Place = (self.host, self.port) if self.host else Path(self.path)

        def ended(work: Any) -> None:
            work.wait(datetime.timedelta(seconds=max(0.001, deadline - time.monotonic())))

        group = None
        try:
            group = self._joined(meeting or meet(meeting_place, self.size, self._limit))
            yield lambda tensor: ended(group.broadcast(_bytes_of(tensor), 0))
            ended(group.barrier())  # no process leaves while another reads
        except (RuntimeError, OSError) as error:  # torch's own are subclasses
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise TransportBroken(
                f"weights version {self.version}: broadcast to {self.size - 1} processes broke at"
                f" rank {self.rank} ({socket.gethostname()}): {reason}"
            ) from error
        finally:
            if group is not None and self.backend == "nccl":
                group.abort()  # free the group's GPU memory

    def _joined(self, store: Any) -> Any:
        if self.backend == "nccl":
            kind: Any = dist.ProcessGroupNCCL
            options = kind.Options()
            # without this, torch kills the whole process when another one is lost
            os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")
        else:
            kind = dist.ProcessGroupGloo
            options = kind._Options()
            name, gloo = os.environ.get("GLOO_SOCKET_IFNAME"), dist.ProcessGroupGloo
            options._devices = [
                gloo.create_device(interface=name) if name else gloo.create_default_device()
            ]
        options._timeout = self._limit
        return kind(store, self.rank, self.size, options)

    @property
    def _limit(self) -> datetime.timedelta:
        return datetime.timedelta(seconds=self.timeout_s)


def layout_of(weights: Mapping[str, Shaped]) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {
        name: (DTYPE_NAMES[tensor.dtype], tuple(tensor.shape)) for name, tensor in weights.items()
    }


def serve(host: str, size: int, timeout: datetime.timedelta) -> tuple[Any, tuple[str, int]]:
    """Serve a TCP store at which `size` processes meet, on a free port of this address only.
    Return (store, (host, port)). timeout: of each operation of the store.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as listener:
        port, descriptor = listener.getsockname()[1], listener.detach()
    options = {"wait_for_workers": False, "master_listen_fd": descriptor}
    return TCPStore(host, port, size, True, timeout=timeout, **options), (host, port)


def meet(meeting_place: Place, size: int, timeout: datetime.timedelta) -> Any:
    """Open the store at which `size` processes meet: one that another process serves, or a file."""
    if isinstance(meeting_place, Path):
        store = FileStore(str(meeting_place), size)
        store.set_timeout(timeout)
        return store
    return TCPStore(*meeting_place, size, is_master=False, timeout=timeout)


def interface_of(address: str) -> str:
    """Return the name of the network interface with an IPv4 address; "" if there is none.
    All addresses of 127.0.0.0/8 are the loopback's, which has 127.0.0.1.
    """
    sought = "127.0.0.1" if address.startswith("127.") else address
    for name, addresses in psutil.net_if_addrs().items():
        if (socket.AF_INET, sought) in [(entry.family, entry.address) for entry in addresses]:
            return str(name)
    return ""


def use_interface_of(address: str) -> None:
    """Set the environment variables by which gloo and NCCL choose an interface to the one with this
    address. Variables that are set already are kept. Without such an interface nothing is set.
    """
    name = interface_of(address)
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if name else ():
        os.environ.setdefault(variable, name)


def _bytes_of(tensor: Tensor) -> Tensor:
    """Return the bytes of a contiguous tensor as a [nbytes] uint8 view, for backends that cannot
    send every dtype. A tensor that is not contiguous would be copied, and a receive into it lost.
    """
    return tensor.reshape(-1).view(torch.uint8)
