"""A network's parameters with their optimizer and its schedule."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import cached_property

import torch
from torch import Tensor, nn

from agentgym.config import OptimizerConfig
from agentgym.learner.process_group import ProcessGroup
from agentgym.models.tensorfiles import StoredTensors


class HostMemory:
    """Tensors whose values stay in host memory, pinned for a GPU, until they are used.
    Meanwhile such a tensor keeps its shape but no storage.
    """

    def __init__(self, ranks: ProcessGroup) -> None:
        self._ranks = ranks
        self._hosts: dict[Tensor, Tensor] = {}

    def __getitem__(self, tensor: Tensor) -> Tensor:
        """Return the host's values of a tensor, sharded like it."""
        return self._hosts[tensor]

    @torch.no_grad()
    def put(self, tensor: Tensor) -> None:
        if tensor not in self._hosts:
            self._hosts[tensor] = torch.empty_like(
                tensor.detach(), device="cpu", pin_memory=tensor.is_cuda
            )
        local = self._ranks.own(tensor)
        self._ranks.own(self._hosts[tensor]).copy_(local)
        local.untyped_storage().resize_(0)

    @torch.no_grad()
    def fetch(self, tensor: Tensor) -> None:
        local, host = self._ranks.own(tensor), self._ranks.own(self._hosts[tensor])
        local.untyped_storage().resize_(local.numel() * local.element_size())
        local.copy_(host, non_blocking=True)


def learning_rate(config: OptimizerConfig, step: int, total_steps: int) -> float:
    """Return the learning rate of optimizer step 1 .. total_steps: warmup, then the schedule."""
    if step <= config.warmup_steps:
        return config.lr * step / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    progress = min(1.0, (step - config.warmup_steps) / max(1, total_steps - config.warmup_steps))
    shape = (
        1 - progress if config.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    )
    return config.lr * (config.final_lr_fraction + (1 - config.final_lr_fraction) * shape)


STATE = {"step", "exp_avg", "exp_avg_sq"}  # AdamW's keys for each parameter
MASTER = "master"  # name of a master weight among the optimizer's own tensors


class OptimizedNetwork:
    """The parameters of one network; AdamW steps those that require a gradient.

    A parameter narrower than float32 has a float32 master weight. Gradients of micro-batches add up
    in float32, AdamW steps the master, and the parameter is its rounding: bfloat16 keeps 8 bits, in
    which a step of a small learning rate rounds to nothing. A float32 parameter is its own master.
    """

    def __init__(
        self,
        network: nn.Module,
        config: OptimizerConfig,
        *,
        total_steps: int,
        ranks: ProcessGroup,
        offload: bool = False,
    ) -> None:
        """Begin a new optimizer at the present weights of a network that is sharded already.
        total_steps: see `learning_rate`. offload: keep moments and master weights in host memory,
        except those of the parameter that is being stepped.
        """
        self._config, self._total_steps, self._ranks = config, total_steps, ranks
        self._host = HostMemory(ranks) if offload else None
        # keep this rank's parts: after a forward without backward the network has gathered tensors
        # under these names
        self._parameters = dict(network.named_parameters())
        named = self._parameters.items()
        self._trained = {name: parameter for name, parameter in named if parameter.requires_grad}

    @cached_property
    def _masters(self) -> dict[str, nn.Parameter]:
        """Master weights by name, made on first use: a network that is only scored needs none."""
        masters = {}
        for name, parameter in self._trained.items():
            masters[name] = _master_of(parameter)
            if self._host and masters[name] is not parameter:
                self._host.put(masters[name])
        return masters

    @cached_property
    def _optimizers(self) -> dict[tuple[str, ...], torch.optim.AdamW]:
        """Optimizers by names of the masters they step: one for all, or one for each if offloaded.
        On a CUDA device a step is one kernel, which sums in another order than a CPU.
        """
        config, names = self._config, tuple(self._masters)
        is_cuda = self._ranks.device.type == "cuda"
        return {
            stepped: torch.optim.AdamW(
                [self._masters[name] for name in stepped],
                lr=config.lr,
                betas=config.betas,
                weight_decay=config.weight_decay,
                fused=is_cuda or None,
            )
            for stepped in ([(name,) for name in names] if self._host else [names])
        }

    def rate(self, step: int) -> float:
        return learning_rate(self._config, step, self._total_steps)

    def zero_grad(self) -> None:
        for optimizer in self._optimizers.values():
            optimizer.zero_grad(set_to_none=True)

    def optimizer_step(self, step: int, loss: float) -> float:
        """Clip the gradients and take one step. Result: the gradient's norm before clipping.
        step: from 1, for the learning rate. loss: only checked.
        Errors: FloatingPointError, with unchanged weights, if loss or gradient is not finite.
        """
        gradient_norm = nn.utils.clip_grad_norm_(self._masters.values(), self._config.grad_clip)
        norm = float(self._ranks.whole(gradient_norm))
        if not (math.isfinite(norm) and math.isfinite(loss)):
            raise FloatingPointError(
                f"loss {loss} with gradient norm {norm} is not finite; the weights were not changed"
            )
        for names, optimizer in self._optimizers.items():
            for group in optimizer.param_groups:
                group["lr"] = self.rate(step)
            if self._host is not None:
                for tensor in self._kept(names, optimizer).values():
                    self._host.fetch(tensor)
            optimizer.step()
            self._round(names)
            if self._host is not None:
                for tensor in self._kept(names, optimizer).values():
                    self._host.put(tensor)
        return norm

    def weights(self) -> dict[str, Tensor]:
        """Return this rank's parts of all parameters by name, detached; a tied tensor once."""
        return {name: parameter.detach() for name, parameter in self._parameters.items()}

    def parameters(self) -> dict[str, Tensor]:
        """Return this rank's parts of the trained parameters by name, detached."""
        return {name: parameter.detach() for name, parameter in self._trained.items()}

    def state(self) -> dict[str, Tensor]:
        """Return this rank's parts of optimizer state and master weights, as `parameter:key`."""
        return {
            entry: self._at_rest(tensor)
            for names, optimizer in self._optimizers.items()
            for entry, tensor in self._kept(names, optimizer).items()
        }

    def _kept(self, names: Iterable[str], optimizer: torch.optim.AdamW) -> dict[str, Tensor]:
        """Return optimizer state and master weights of these parameters, as `parameter:key`."""
        tensors: dict[str, Tensor] = {}
        for name in names:
            master = self._masters[name]
            if master is not self._parameters[name]:
                tensors[f"{name}:{MASTER}"] = master
            for key, value in optimizer.state.get(master, {}).items():
                tensors[f"{name}:{key}"] = value
        return tensors

    def _at_rest(self, tensor: Tensor) -> Tensor:
        """Return the tensor that has the values between updates: the host's if offloaded."""
        return (self._host[tensor] if self._host else tensor).detach()

    def load_state(self, stored: StoredTensors) -> None:
        """Load what `state` returned, for the same parameters and weights.

        Errors: DigestMismatch, BlobMissing; ValueError if the state is of other parameters or of
        another optimizer, or if a master weight is missing or does not round to its weight.
        """
        narrow = self._narrow(self._trained)
        if missing := sorted({f"{name}:{MASTER}" for name in narrow} - stored.tensors.keys()):
            raise ValueError(
                f"the optimizer's state has no master weight of {missing[0].rpartition(':')[0]}; it"
                " is of a model in float32"
            )
        loaded: dict[str, Tensor] = {}
        keys: dict[str, set[str]] = {}
        for entry, info in stored.tensors.items():
            name, _, key = entry.rpartition(":")
            keys.setdefault(name, set()).add(key)
            if name not in self._masters:
                raise ValueError(
                    f"the optimizer's state is of a parameter {name} that the model does not have;"
                    " take both from one commit"
                )
            master = self._masters[name]
            if key == MASTER:
                loaded[entry] = master
                continue
            # AdamW needs its step count on the device of the step
            like = master.detach() if info.shape else torch.empty((), device=self._ranks.device)
            loaded[entry] = torch.empty_like(like, dtype=info.dtype)
            if self._host:
                self._host.put(loaded[entry])
        for name, state_keys in keys.items():
            if state_keys - {MASTER} not in (set(), STATE):
                raise ValueError(
                    f"the optimizer's state of {name} is {', '.join(sorted(state_keys))}; expected"
                    f" {', '.join(sorted(STATE))}: it is of another optimizer"
                )
        tensors = {entry: self._at_rest(tensor) for entry, tensor in loaded.items()}
        stored.require_fit(tensors)
        self._ranks.load(tensors, stored)
        states = {
            name: optimizer.state for names, optimizer in self._optimizers.items() for name in names
        }
        for entry, tensor in loaded.items():
            name, _, key = entry.rpartition(":")
            if key != MASTER:
                states[name][self._masters[name]][key] = tensor
                continue
            wide = self._ranks.own(tensors[entry])
            rounded = self._ranks.own(narrow[name].detach()).to(wide.device)
            if not torch.equal(wide.to(rounded.dtype), rounded):
                raise ValueError(
                    f"master weight {name} does not round to its weight; take both from one commit"
                )

    def _narrow(self, names: Iterable[str]) -> dict[str, nn.Parameter]:
        """Return the parameters among `names` that have a separate master weight, by name."""
        parameters = {name: self._trained[name] for name in names}
        return {name: part for name, part in parameters.items() if part is not self._masters[name]}

    @torch.no_grad()
    def _round(self, names: Iterable[str]) -> None:
        if narrow := self._narrow(names):
            torch._foreach_copy_(
                [self._ranks.own(parameter) for parameter in narrow.values()],
                [self._ranks.own(self._masters[name]) for name in narrow],
            )


def _master_of(parameter: nn.Parameter) -> nn.Parameter:
    """Return the parameter if it is float32 or wider, else a new float32 master, to which a hook on
    the parameter moves its gradients from then on.
    """
    if parameter.dtype.itemsize >= torch.float32.itemsize:
        return parameter
    master = nn.Parameter(parameter.detach().float())

    def collect(narrow: Tensor) -> None:
        assert narrow.grad is not None
        gradient, narrow.grad = narrow.grad.float(), None
        master.grad = gradient if master.grad is None else master.grad.add_(gradient)

    parameter.register_post_accumulate_grad_hook(collect)  # type: ignore[no-untyped-call]
    return master
