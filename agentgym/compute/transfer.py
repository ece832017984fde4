"""Transfer of weights from the learner's first rank to rollout workers: through Ray's object store,
or by collective broadcast.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import hashlib
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load as load_safetensors
from torch import Tensor

from agentgym.models.tensorfiles import TensorFile
from agentgym.models.transport import (
    Broadcast,
    TransportBroken,
    layout_of,
    require_arrived,
    serve,
    weights_digest,
)
from agentgym.types import Delivery

SENDING = "send"  # concurrency group of a rank: its calls do not wait for the rank's other calls


@dataclass(frozen=True)
class InObjectStore:
    """Weights in Ray's object store, `Delivery` and `Sender` in one. A node fetches them once."""

    reference: Any  # of a safetensors file
    digest: str
    version: int

    async def weights(self) -> dict[str, Tensor]:
        stored = await self.reference
        return await asyncio.to_thread(self._opened, stored)

    def _opened(self, stored: np.ndarray[Any, Any]) -> dict[str, Tensor]:
        arrived = hashlib.sha256(stored.data).hexdigest()
        require_arrived(arrived, self.digest, self.version, node_address())
        return dict(load_safetensors(stored.tobytes()))

    def open(self, num_receivers: Sequence[int]) -> tuple[list[Delivery], None]:
        """Return this delivery for each entry of `num_receivers`, and None: no call sends it."""
        return [self for _ in num_receivers], None


def put(weights: dict[str, Tensor], version: int) -> InObjectStore:
    """Put weights into the object store of this process's node; return their delivery."""
    import ray

    blob = b"".join(TensorFile.of(weights).pieces())
    reference = ray.put(np.frombuffer(blob, np.uint8))
    return InObjectStore(reference, hashlib.sha256(blob).hexdigest(), version)


@dataclass(frozen=True)
class BroadcastSender:
    """Weights of one version, broadcast to some workers now, and to others later.

    Each sending has a new process group, so that a worker lost in one does not disturb the next.
    """

    rank: Any  # actor of the learner's first rank, with an `Outbox`
    template: Broadcast

    @property
    def digest(self) -> str:
        return self.template.digest

    def open(self, num_receivers: Sequence[int]) -> tuple[list[Delivery], Any]:
        """Begin a broadcast. num_receivers: for each worker, the number of its receiving processes.
        Result: a delivery for each worker, and a reference to the rank's call that sends.
        Errors: Ray's, if the rank is lost or does not answer.
        """
        import ray

        def ask(method: str, *arguments: Any) -> Any:  # in parallel to the rank's other calls
            remote = getattr(self.rank, method).options(concurrency_group=SENDING).remote
            return remote(*arguments)

        opened = ask("open_broadcast", self.template, 1 + sum(num_receivers))
        broadcast: Broadcast = ray.get(opened, timeout=self.template.timeout_s + SLACK_S)
        firsts = accumulate([1, *num_receivers[:-1]])
        return [broadcast.at(first) for first in firsts], ask("send", broadcast)


Sender = InObjectStore | BroadcastSender


class Outbox:
    """Weights that the learner's first rank broadcasts, now and to workers that come later."""

    def __init__(self, device: torch.device, folder: Path | None) -> None:
        """Begin without weights. device: the rank's. folder: one that all receivers see, to meet in
        a file in it. None: they meet at a port of this node.
        """
        self._device, self._folder = device, folder
        self._open: dict[int, Any] = {}  # rendezvous stores by port
        self._kept: tuple[int, dict[str, Tensor]] = (-1, {})

    def keep(self, weights: dict[str, Tensor], version: int, timeout_s: float) -> Broadcast:
        """Replace the kept weights; return a broadcast of the new ones that lacks an address.
        weights: in host memory; they are kept and not copied, so do not change them.
        """
        backend = "nccl" if self._device.type == "cuda" else "gloo"
        digest, layout = weights_digest(weights), layout_of(weights)
        described = Broadcast(digest, version, layout, backend, timeout_s)
        self._kept = version, weights  # only now: until here a worker may fetch the previous ones
        return described

    def open(self, template: Broadcast, size: int) -> Broadcast:
        """Prepare a meeting of `size` processes, this one included, at a new file or port; return
        the template with its address.
        """
        if self._folder is not None:
            path = self._folder / f"weights-{secrets.token_hex(8)}"
            return replace(template, size=size, path=str(path))
        limit = datetime.timedelta(seconds=template.timeout_s)
        store, (host, port) = serve(node_address(), size, limit)
        self._open[port] = store
        return replace(template, size=size, host=host, port=port)

    def send(self, broadcast: Broadcast) -> None:
        """Send the kept weights. Errors: TransportBroken, also if newer weights replaced them."""
        meeting, (version, weights) = self._open.pop(broadcast.port, None), self._kept
        if version != broadcast.version:
            raise TransportBroken(
                f"weights version {broadcast.version} are sent no more: {version} took their place"
            )
        broadcast.send(weights, self._device, meeting)


SLACK_S = 30.0  # on top of a remote call's own deadline


def node_id() -> str:
    import ray

    return str(ray.get_runtime_context().get_node_id())


def node_address() -> str:
    import ray

    return str(ray.util.get_node_ip_address())


def end(actors: Sequence[Any]) -> None:
    import ray

    if not ray.is_initialized():  # ray.kill would start a cluster
        return
    for actor in actors:
        with contextlib.suppress(Exception):  # already gone, or ends with the cluster
            ray.kill(actor, no_restart=True)


def cause_of(error: BaseException) -> BaseException:
    """Return the exception raised inside the actor, or the error itself if there is none."""
    cause = getattr(error, "cause", None)
    return cause if isinstance(cause, BaseException) else error


def first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else "no reason given"
