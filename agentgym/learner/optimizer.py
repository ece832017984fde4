"""Weights, their optimizer and its schedule, kept together."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import cached_property

import torch
from torch import Tensor, nn

from agentgym.config import OptimizerConfig
from agentgym.learner.offload import HostMemory
from agentgym.learner.process_group import ProcessGroup
from agentgym.models.tensorfiles import StoredTensors


def learning_rate(config: OptimizerConfig, step: int, total_steps: int) -> float:
    """The rate at optimizer step 1 .. total_steps: a pure function of the step, never 0 at the
    first update.
    """
    if step <= config.warmup_steps:
        return config.lr * step / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    progress = min(1.0, (step - config.warmup_steps) / max(1, total_steps - config.warmup_steps))
    shape = (
        1 - progress if config.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    )
    return config.lr * (config.final_lr_fraction + (1 - config.final_lr_fraction) * shape)


STATE = {"step", "exp_avg", "exp_avg_sq"}  # of AdamW, for each parameter
MASTER = "master"  # name of a master weight among the optimizer's own tensors


class OptimizedNetwork:
    """The parameters of one network, of which those that require a gradient are under AdamW.

    A parameter narrower than float32 has a float32 master weight.
    Gradients of micro-batches add up in float32, AdamW steps the master, and the parameter is its
    rounding: bfloat16 keeps 8 bits, in which a step of a small learning rate rounds to nothing.
    A float32 parameter is its own master.
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
        """network: already spread over the ranks.
        offload: moments and master weights are in host memory, and on the device those of one
        parameter at a time, while it is stepped.
        A new optimizer begins at the weights as they are, rounded ones too.
        """
        self._config, self._total_steps, self._ranks = config, total_steps, ranks
        self._host = HostMemory(ranks) if offload else None
        # this rank's parts: after a forward without a backward the network shows other, gathered
        # tensors under these names
        self._parameters = dict(network.named_parameters())
        self._trained = {
            name: each for name, each in self._parameters.items() if each.requires_grad
        }

    @cached_property
    def _masters(self) -> dict[str, nn.Parameter]:
        """By parameter name. Made at the first use: a network that is only scored needs none."""
        masters = {}
        for name, parameter in self._trained.items():
            masters[name] = _master_of(parameter)
            if self._host and masters[name] is not parameter:
                self._host.put(masters[name])
        return masters

    @cached_property
    def _optimizers(self) -> dict[tuple[str, ...], torch.optim.AdamW]:
        """By the names of the masters each steps: one for all, or one for each where states are
        offloaded.

        On a CUDA device a step is one kernel, which adds in another order than that of a CPU.
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
        for each in self._optimizers.values():
            each.zero_grad(set_to_none=True)

    def optimizer_step(self, step: int, loss: float) -> float:
        """Clip, check and take one step. Result: the gradient's norm before clipping.

        Errors: FloatingPointError where loss or gradient is not finite; the weights are then
        unchanged.
        """
        norm = float(
            self._ranks.whole(
                nn.utils.clip_grad_norm_(self._masters.values(), self._config.grad_clip)
            )
        )
        if not (math.isfinite(norm) and math.isfinite(loss)):
            raise FloatingPointError(
                f"loss {loss} with gradient norm {norm} is not finite; the weights were not changed"
            )
        for names, optimizer in self._optimizers.items():
            for group in optimizer.param_groups:
                group["lr"] = self.rate(step)
            if self._host is None:
                optimizer.step()
                self._round(names)
                continue
            for each in self._kept(names, optimizer).values():
                self._host.fetch(each)
            optimizer.step()
            self._round(names)
            for each in self._kept(names, optimizer).values():
                self._host.put(each)
        return norm

    def weights(self) -> dict[str, Tensor]:
        """This rank's parts of all parameters by name, detached; a tied tensor appears once, under
        the name that owns it.
        """
        return {name: parameter.detach() for name, parameter in self._parameters.items()}

    def parameters(self) -> dict[str, Tensor]:
        """This rank's parts of what is trained, by name, detached."""
        return {name: parameter.detach() for name, parameter in self._trained.items()}

    def state(self) -> dict[str, Tensor]:
        """This rank's parts of the optimizer's state and of the master weights, as
        `parameter:key`.
        """
        return {
            entry: self._at_rest(each)
            for names, optimizer in self._optimizers.items()
            for entry, each in self._kept(names, optimizer).items()
        }

    def _kept(self, names: Iterable[str], optimizer: torch.optim.AdamW) -> dict[str, Tensor]:
        """What it keeps of these parameters, as `parameter:key`."""
        tensors: dict[str, Tensor] = {}
        for name in names:
            master = self._masters[name]
            if master is not self._parameters[name]:
                tensors[f"{name}:{MASTER}"] = master
            for key, value in optimizer.state.get(master, {}).items():
                tensors[f"{name}:{key}"] = value
        return tensors

    def _at_rest(self, tensor: Tensor) -> Tensor:
        """Where its values are between two updates, detached."""
        return (self._host[tensor] if self._host else tensor).detach()

    def load_state(self, stored: StoredTensors) -> None:
        """What `state` was, for a network of the same parameters with the weights of that time.

        Errors: ValueError where a master weight is missing or does not round to the weight: they
        are of two updates; or where a parameter is unknown.
        """
        narrow = self._narrow()
        if missing := sorted({f"{name}:{MASTER}" for name in narrow} - stored.tensors.keys()):
            raise ValueError(
                f"the optimizer's state has no master weight of {missing[0].rpartition(':')[0]}; it"
                " is of a model in float32"
            )
        held: dict[str, Tensor] = {}
        keys: dict[str, set[str]] = {}
        for entry, each in stored.tensors.items():
            name, _, key = entry.rpartition(":")
            keys.setdefault(name, set()).add(key)
            if name not in self._masters:
                raise ValueError(
                    f"the optimizer's state is of a parameter {name} that the model does not have;"
                    " take both from one commit"
                )
            master = self._masters[name]
            if key == MASTER:
                held[entry] = master
                continue
            # the count of steps lies where they are taken
            like = master.detach() if each.shape else torch.empty((), device=self._ranks.device)
            held[entry] = torch.empty_like(like, dtype=each.dtype)
            if self._host:
                self._host.put(held[entry])
        for name, found in keys.items():
            if found - {MASTER} not in (set(), STATE):
                raise ValueError(
                    f"the optimizer's state of {name} is {', '.join(sorted(found))}; expected"
                    f" {', '.join(sorted(STATE))}: it is of another optimizer"
                )
        tensors = {entry: self._at_rest(each) for entry, each in held.items()}
        stored.require_fit(tensors)
        self._ranks.load(tensors, stored)
        states = {
            name: optimizer.state for names, optimizer in self._optimizers.items() for name in names
        }
        for entry, tensor in held.items():
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

    def _narrow(self) -> dict[str, nn.Parameter]:
        """Parameters that have a master weight beside them."""
        return {
            name: parameter
            for name, parameter in self._trained.items()
            if parameter is not self._masters[name]
        }

    @torch.no_grad()
    def _round(self, names: Iterable[str]) -> None:
        narrow = [name for name in names if self._parameters[name] is not self._masters[name]]
        own = self._ranks.own
        if narrow:
            torch._foreach_copy_(
                [own(self._parameters[name]) for name in narrow],
                [own(self._masters[name]) for name in narrow],
            )


def _master_of(parameter: nn.Parameter) -> nn.Parameter:
    """What AdamW steps in the parameter's place; its gradients arrive there and leave the
    parameter.
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
