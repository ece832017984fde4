"""One rank of many, without memory and without the others: the learner's own code runs on tensors
that have shapes and no values, and every byte that it would allocate is counted.

Floating-point tensors are torch's fake ones; index tensors (integers, masks) are real, so that the
code takes its real branches. torch's fake process group replaces the other ranks.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._guards import active_fake_mode
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed._tools import fake_collectives  # noqa: F401  # fake collectives
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from agentgym.learner.optimizer import HostMemory
from agentgym.learner.process_group import ProcessGroup
from agentgym.learner.sharded import Sharded, T
from agentgym.models.model import materialize

ALL_GATHER = torch.ops.c10d._allgather_base_.default
REDUCE_SCATTER = torch.ops.c10d._reduce_scatter_base_.default
WHOLE = torch.ops._c10d_functional.all_gather_into_tensor.default  # used by DTensor.full_tensor
WAIT = torch.ops._c10d_functional.wait_tensor.default
COPY_OUT = torch.ops.fsdp.split_with_sizes_copy.default
COPY_IN = torch.ops.fsdp.chunk_cat.default
COPY = torch.ops.aten._to_copy.default
ITEM = torch.ops.aten._local_scalar_dense.default
NEAR = 1.01  # record the composition of the peak again when it has grown by this factor
HOST, OTHER = "host memory", "activations"


def moved(func: Any, args: Any) -> tuple[str, int]:
    """Return a collective operation's name, and the bytes of the tensor it gathers or reduces."""
    if func is ALL_GATHER:
        return "all-gather", args[0].nbytes
    if func is WHOLE:
        return "all-gather", args[0].nbytes * args[1]
    return ("reduce-scatter", args[1].nbytes) if func is REDUCE_SCATTER else ("", 0)


class Traffic(TorchDispatchMode):
    """Counter of the bytes that a real learner moves."""

    def __init__(self) -> None:
        super().__init__()
        self.moved: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(tensor_type, DTensor) for tensor_type in types):
            return NotImplemented  # DTensor calls again with its local part
        name, size = moved(func, args)
        self.moved[name] += size
        return func(*args, **(kwargs or {}))


@dataclass(slots=True, eq=False)
class _Block:
    kind: str
    size: int = 0
    watch: Any = None


class Ledger(TorchDispatchMode):
    """Mode in which floating-point tensors have no values; it counts the bytes of all by kind."""

    def __init__(self, vocab_size: int, *, on_gpu: bool) -> None:
        """Start an empty ledger. vocab_size: tensors of this width are logits. on_gpu: copies "to
        the CPU" are in separate host memory; otherwise the process group is gloo, which copies
        its inputs.
        """
        super().__init__()
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._vocab_size, self._on_gpu = vocab_size, on_gpu
        self._kind = OTHER
        self._blocks: dict[int, _Block] = {}  # by id of the storage
        self._resize = torch.UntypedStorage.resize_
        self.begin()

    def begin(self) -> None:
        """Begin a phase: reset the peak."""
        live = list(self._blocks.values())
        self._apart = sum(block.size for block in live if self._is_apart(block.kind))
        self._total = sum(block.size for block in live) - self._apart
        self._peak, self._apart_peak = self._total, self._apart
        self._then = [(block, block.size) for block in live]
        self.moved: Counter[str] = Counter()

    def most(self) -> dict[str, int]:
        """Return the bytes by kind at the device's peak; for host memory, at its separate peak."""
        by_kind: Counter[str] = Counter()
        for block, size in self._then:
            if not self._is_apart(block.kind):
                by_kind[block.kind] += size
        by_kind[OTHER] += self._peak - by_kind.total()  # growth since the composition was recorded
        if self._on_gpu:
            by_kind[HOST] = self._apart_peak
        return {kind: size for kind, size in by_kind.items() if size}

    @contextlib.contextmanager
    def of(self, kind: str) -> Iterator[None]:
        """Count tensors that are created in the block as this kind."""
        before, self._kind = self._kind, kind
        try:
            yield
        finally:
            self._kind = before

    def are(self, kind: str, tensors: Iterable[Tensor]) -> None:
        """Count these tensors as this kind from now on."""
        for tensor in tensors:
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            if block := self._blocks.get(id(local.untyped_storage())):
                block.kind = kind

    def __enter__(self) -> Ledger:
        def resize(storage: torch.UntypedStorage, size: int) -> Any:
            result = self._resize(storage, size)
            self._sized(storage)
            return result

        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(tensor_type, DTensor) for tensor_type in types):
            return NotImplemented  # DTensor calls again with its local part
        kwargs = kwargs or {}
        if active_fake_mode() is not None:  # DTensor computes a shape
            return func(*args, **kwargs)
        inputs = [value for value in tree_flatten((args, kwargs))[0] if isinstance(value, Tensor)]
        is_fake = any(isinstance(value, FakeTensor) for value in inputs)
        if func is ITEM and is_fake:
            return 1.0
        if func is WAIT:  # its fake version would copy
            return args[0]
        self._told(func, args, kwargs)
        makes_fakes = is_fake or _makes_floats(inputs, kwargs)
        with self._fake if makes_fakes else contextlib.nullcontext():
            result = func(*args, **kwargs)
        to_host = (  # a cast's gradient also passes a device
            func is COPY and kwargs.get("device") is not None and inputs[0].dtype == result.dtype
        )
        for output in tree_flatten(result)[0]:
            if isinstance(output, Tensor) and output.device.type != "meta":
                self._seen(output, HOST if to_host else self._kind)
        return result

    def _told(self, func: Any, args: Any, kwargs: Mapping[str, Any]) -> None:
        """Record traffic, and the kinds of the operation's tensors."""
        name, size = moved(func, args)
        if size:
            self.moved[name] += size
            if not self._on_gpu:
                self._count(OTHER, size)
                self._count(OTHER, -size)
        if func is ALL_GATHER:
            self.are("gathered weights", args[:1])
        elif func is REDUCE_SCATTER:
            self.are("exchanged gradients", args[:2])
        elif func is COPY_OUT:
            self.are("gathered weights", kwargs["out"])
        elif func is COPY_IN:
            self.are("exchanged gradients", [*args[0], kwargs["out"]])

    def _seen(self, tensor: Tensor, kind: str) -> None:
        storage = tensor.untyped_storage()
        key = id(storage)
        if key not in self._blocks:
            if kind == OTHER and tensor.ndim > 1 and tensor.shape[-1] == self._vocab_size:
                kind = "logits"
            watch = weakref.ref(storage, lambda _: self._gone(key))
            self._blocks[key] = _Block(kind, watch=watch)
        self._sized(storage)

    def _sized(self, storage: torch.UntypedStorage) -> None:
        if block := self._blocks.get(id(storage)):
            more, block.size = storage.nbytes() - block.size, storage.nbytes()
            self._count(block.kind, more)

    def _gone(self, key: int) -> None:
        block = self._blocks.pop(key)
        self._count(block.kind, -block.size)

    def _is_apart(self, kind: str) -> bool:
        return kind == HOST and self._on_gpu

    def _count(self, kind: str, more: int) -> None:
        if self._is_apart(kind):
            self._apart += more
            self._apart_peak = max(self._apart_peak, self._apart)
            return
        self._total += more
        if self._total > self._peak:
            self._peak = self._total
            if self._peak > NEAR * sum(size for _, size in self._then):
                self._then = [(block, block.size) for block in self._blocks.values()]


def _makes_floats(inputs: list[Tensor], kwargs: Mapping[str, Any]) -> bool:
    """Return True if floating-point tensors are created from nothing or from a meta tensor."""
    if any(tensor.device.type != "meta" for tensor in inputs) or (
        inputs and not kwargs.get("device")
    ):
        return False
    if torch.device(kwargs.get("device") or "cpu").type == "meta":
        return False
    dtype = kwargs.get("dtype") or (inputs[0].dtype if inputs else None)
    return bool(dtype and dtype.is_floating_point)


class _Paper:
    """Methods that a fake process group cannot have: values of sums, and stored files."""

    bytes_read = 0

    def all_sum(self, tensor: Tensor) -> Tensor:
        """Return zeros: sums of integers are real tensors, because their values are read."""
        return torch.zeros(tensor.shape, dtype=torch.int64)

    def load(self, tensors: Mapping[str, Tensor], stored: Any) -> None:
        own_parts = map(self.own, tensors.values())
        self.bytes_read += sum(part.nbytes for part in own_parts)  # type: ignore[attr-defined]


class PaperAlone(_Paper, ProcessGroup):
    def shard(self, module: nn.Module) -> None:
        materialize(module, self.device)  # no sharding


class PaperRank(_Paper, Sharded):
    """The first rank of several, in a fake group."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))

    def _together(self, work: Callable[[], T]) -> T:
        return work()  # the other ranks do not exist


class PaperHost(HostMemory):
    """Host memory that the ledger counts separately."""

    def __init__(self, ranks: Any, ledger: Ledger) -> None:
        super().__init__(ranks)
        self._ledger = ledger

    def put(self, tensor: Tensor) -> None:
        with self._ledger.of(HOST):
            super().put(tensor)


@contextlib.contextmanager
def paper_group(size: int) -> Iterator[Any]:
    """Yield the first process of a group of this size."""
    if size == 1:
        yield PaperAlone()
        return
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        yield PaperRank()
    finally:
        dist.destroy_process_group()
