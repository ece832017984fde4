"""One rank of many without memory and without the others: the learner's own code runs, its tensors
have shapes and no values, and every byte it would hold is counted as it comes and goes.

Floating-point tensors are torch's fake ones; what says where things lie (integers, masks) is real,
so that the code decides as it does. torch's fake process group stands for the other ranks.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._guards import active_fake_mode
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed._tools import fake_collectives  # noqa: F401  # what collectives result in
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from agentgym.learner.offload import HostMemory
from agentgym.learner.process_group import SingleProcess
from agentgym.learner.sharded import Sharded, _Copied
from agentgym.models.empty import materialize
from agentgym.models.tensorfiles import TensorFile, file_name

ALL_GATHER = torch.ops.c10d._allgather_base_.default
REDUCE_SCATTER = torch.ops.c10d._reduce_scatter_base_.default
WHOLE = torch.ops._c10d_functional.all_gather_into_tensor.default  # of DTensor.full_tensor
WAIT = torch.ops._c10d_functional.wait_tensor.default
COPY_OUT = torch.ops.fsdp.split_with_sizes_copy.default
COPY_IN = torch.ops.fsdp.chunk_cat.default
COPY = torch.ops.aten._to_copy.default
ITEM = torch.ops.aten._local_scalar_dense.default
NEAR = 1.01  # a composition is looked at again where the total has grown by so much
HOST, OTHER = "host memory", "activations"


def moved(func: Any, args: Any) -> tuple[str, int]:
    """Of a collective operation: its name, and the bytes of what it makes whole or takes whole."""
    if func is ALL_GATHER:
        return "all-gather", args[0].nbytes
    if func is WHOLE:
        return "all-gather", args[0].nbytes * args[1]
    return ("reduce-scatter", args[1].nbytes) if func is REDUCE_SCATTER else ("", 0)


class Traffic(TorchDispatchMode):
    """Counts what a real learner moves."""

    def __init__(self) -> None:
        super().__init__()
        self.moved: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # it asks again, of its own part
        name, size = moved(func, args)
        self.moved[name] += size
        return func(*args, **(kwargs or {}))


class _Block:
    """Memory of one storage."""

    __slots__ = ("kind", "size", "watch")

    def __init__(self, kind: str) -> None:
        self.kind, self.size = kind, 0
        self.watch: Any = None


class Ledger(TorchDispatchMode):
    """Within it no floating-point tensor has values, and the bytes of all are counted by kind."""

    def __init__(self, vocab_size: int, *, on_gpu: bool) -> None:
        """vocab_size: tensors as wide as this are logits. on_gpu: copies "to the CPU" are in
        another memory than all else; where they are not, the group is gloo's, which takes a copy
        of what it makes whole, and of what it takes whole.
        """
        super().__init__()
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._vocab_size, self._on_gpu = vocab_size, on_gpu
        self._kind = OTHER
        self._blocks: dict[int, _Block] = {}  # by id of the storage
        self._resize = torch.UntypedStorage.resize_
        self.begin()

    def begin(self) -> None:
        """A phase: what was the most until now is forgotten."""
        live = list(self._blocks.values())
        self._apart = sum(each.size for each in live if self._is_apart(each.kind))
        self._total = sum(each.size for each in live) - self._apart
        self._peak, self._apart_peak = self._total, self._apart
        self._then = [(each, each.size) for each in live]
        self.moved: Counter[str] = Counter()

    def most(self) -> dict[str, int]:
        """Bytes by kind when most were held on the device; of host memory the most."""
        found: Counter[str] = Counter()
        for block, size in self._then:
            if not self._is_apart(block.kind):
                found[block.kind] += size
        found[OTHER] += self._peak - found.total()  # since it was last looked at
        if self._on_gpu:
            found[HOST] = self._apart_peak
        return {kind: size for kind, size in found.items() if size}

    @contextlib.contextmanager
    def of(self, kind: str) -> Iterator[None]:
        """What is made meanwhile is of that kind."""
        before, self._kind = self._kind, kind
        try:
            yield
        finally:
            self._kind = before

    def are(self, kind: str, tensors: Iterable[Tensor]) -> None:
        """They turn out to be of that kind."""
        for each in tensors:
            own = each.to_local() if isinstance(each, DTensor) else each
            if block := self._blocks.get(id(own.untyped_storage())):
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
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # it asks again, of its own part
        kwargs = kwargs or {}
        if active_fake_mode() is not None:  # DTensor works out a shape
            return func(*args, **kwargs)
        given = [each for each in tree_flatten((args, kwargs))[0] if isinstance(each, Tensor)]
        is_fake = any(isinstance(each, FakeTensor) for each in given)
        if func is ITEM and is_fake:
            return 1.0
        if func is WAIT:  # on paper it would be a copy
            return args[0]
        self._told(func, args, kwargs)
        if is_fake or _makes_floats(given, kwargs):
            with self._fake:
                result = func(*args, **kwargs)
        else:
            result = func(*args, **kwargs)
        to_host = (  # the gradient of a cast names a device, too
            func is COPY and kwargs.get("device") is not None and given[0].dtype == result.dtype
        )
        for each in tree_flatten(result)[0]:
            if isinstance(each, Tensor) and each.device.type != "meta":
                self._seen(each, HOST if to_host else self._kind)
        return result

    def _told(self, func: Any, args: Any, kwargs: Mapping[str, Any]) -> None:
        """What an operation says of its tensors."""
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
            block = _Block(kind)
            block.watch = weakref.ref(storage, lambda _: self._gone(key))
            self._blocks[key] = block
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
                self._then = [(each, each.size) for each in self._blocks.values()]


def _makes_floats(given: list[Tensor], kwargs: Mapping[str, Any]) -> bool:
    """Whether an operation makes a floating-point tensor of nothing, or like one without memory."""
    if any(each.device.type != "meta" for each in given) or (given and not kwargs.get("device")):
        return False
    if torch.device(kwargs.get("device") or "cpu").type == "meta":
        return False
    dtype = kwargs.get("dtype") or (given[0].dtype if given else None)
    return bool(dtype and dtype.is_floating_point)


class _Paper:
    """What a process group cannot have here: values of sums, and what is stored."""

    bytes_read = 0

    def all_sum(self, tensor: Tensor) -> Tensor:
        """Of integers: they are real, and are asked for their values."""
        return torch.zeros(tensor.shape, dtype=torch.int64)

    def load(self, tensors: Mapping[str, Tensor], stored: Any) -> None:
        own = map(self.own, tensors.values())
        self.bytes_read += sum(each.nbytes for each in own)  # type: ignore[attr-defined]


class PaperAlone(_Paper, SingleProcess):
    """A single process."""

    def shard(self, module: nn.Module) -> None:
        materialize(module, self.device)  # there they stay


class PaperRank(_Paper, Sharded):
    """The first of several, of a fake group."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))

    def snapshot(self, tensors: Mapping[str, Tensor], name: str) -> dict[str, TensorFile]:
        """What this rank plans to write; the others are not asked."""
        copied, planner = _Copied(), DefaultSavePlanner(False, False)
        planner.set_up_planner(dict(tensors), None, self.rank == 0)
        copied.write_data(planner.create_local_plan(), planner)
        return {file_name(name, self.rank, self.size): TensorFile(copied.parts)}


class PaperHost(HostMemory):
    """Host memory that the ledger tells apart."""

    def __init__(self, ranks: Any, ledger: Ledger) -> None:
        super().__init__(ranks)
        self._ledger = ledger

    def put(self, tensor: Tensor) -> None:
        with self._ledger.of(HOST):
            super().put(tensor)


@contextlib.contextmanager
def paper_group(size: int) -> Iterator[Any]:
    """The first process of so many."""
    if size == 1:
        yield PaperAlone()
        return
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        yield PaperRank()
    finally:
        dist.destroy_process_group()
