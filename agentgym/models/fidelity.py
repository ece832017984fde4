"""Check that a model computes here what its own code computes, before the model is used.

Learner and engine run a model's layers on packed sequences with our attention and its head on
selected tokens. An architecture that does something else in between would be trained wrongly
without an error: both sides would agree with each other but not with the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from agentgym.models.architecture import unsupported
from agentgym.models.attention import RAGGED, PackedSequences, run_packed
from agentgym.models.cache import CachedRows, KeyValueCache
from agentgym.models.networks import head_logits

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LENGTHS = (5, 32)  # tokens of the compared sequences
DECODED = 2  # last tokens of each sequence, which the engine decodes one by one
WINDOW = 7  # tokens of a sliding window during the check, so that it matters on short sequences
HALF = (torch.bfloat16, torch.float16)

# Nats between log-probabilities, in float32 arithmetic. Correctly computed models show at most
# 1e-4, SmolLM2-135M 7e-5; the mildest wrong mask so far, a dropped window of Qwen2-MoE, shows 0.1.
FORWARD = 1e-3
# Limit in half precision, nats per token from the model's own eager attention: a floor, and a
# multiple of the difference of the model's own sdpa. SmolLM2-135M in bfloat16 shows 0.002-0.003
# for either; scores scaled by half show more than 1.
HALF_KL, HALF_RATIO = 0.02, 4.0

_FAITHFUL: set[tuple[str, torch.dtype]] = set()  # (config.json, dtype) of models that passed


def require_faithful_once(model: PreTrainedModel) -> None:
    """Call `require_faithful` unless a model of this architecture and dtype passed in this process.

    Other weights run the same code; an audit loads many weights of one architecture.
    """
    if _checked_as(model) not in _FAITHFUL:
        require_faithful(model)


def _checked_as(model: PreTrainedModel) -> tuple[str, torch.dtype]:
    weight: Tensor = next(model.parameters())
    return model.config.to_json_string(), weight.dtype


def require_faithful(model: PreTrainedModel) -> None:
    """Raise ValueError unless learner and engine compute what the model's own code computes.

    The architecture is judged in float32 arithmetic for any dtype of the weights: a wrong mask
    is then visible and rounding is not. Weights in half precision are then run in their dtype,
    and may differ about as much as two of the model's own attentions.
    A model that passes is remembered for `require_faithful_once`.
    """
    name = f"{type(model).__name__} ({model.config.name_or_path or 'no name'})"
    for reason in (*unsupported(model.config), *_beside_parameters(model)):
        raise ValueError(f"model {name}: {reason}; use a model without it")
    try:
        largest = differences(model)
        rounding = half_precision_kl(model)
    except Exception as error:
        raise ValueError(
            f"model {name} cannot run on packed sequences: {type(error).__name__}: {error}"
        ) from error
    for side, difference in largest.items():
        if not difference <= FORWARD:
            raise ValueError(
                f"model {name}: the {side}'s log-probabilities differ from the model's own by "
                f"{difference:.3g} nats (at most {FORWARD:g}); its architecture is not supported"
            )
    limit = max(HALF_KL, HALF_RATIO * rounding.pop("sdpa", 0.0))
    for side, kl in rounding.items():
        if not kl <= limit:
            raise ValueError(
                f"model {name}: in {next(model.parameters()).dtype} the {side} is {kl:.3g} nats per"
                f" token from the model's own attention (at most {limit:.3g}); use model.dtype"
                " float32"
            )
    _FAITHFUL.add(_checked_as(model))


class Float32Arithmetic(TorchFunctionMode):
    """Context manager in which torch computes in float32 with half-precision tensors, which are
    widened for one call at a time. Additional memory: the largest weight in float32.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.dtype.__get__:  # type: ignore[attr-defined]
            return _widened(func(*args))
        if getattr(func, "__name__", "") != "__get__":
            args = _widened(args)
            kwargs = {name: _widened(value) for name, value in (kwargs or {}).items()}
        return func(*args, **(kwargs or {}))


def _widened(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.float() if value.dtype in HALF else value
    if type(value) in (tuple, list):
        return type(value)(map(_widened, value))
    return torch.float32 if isinstance(value, torch.dtype) and value in HALF else value


@contextmanager
def _short_windows(model: PreTrainedModel) -> Iterator[None]:
    """Set every sliding window to WINDOW tokens in a block: in the configuration, from which the
    model's code may build masks, and in the layers, which pass it to the attention.
    """
    holders = [model.config.get_text_config(decoder=True), *model.modules()]
    before = [
        (holder, holder.sliding_window)
        for holder in holders
        if isinstance(getattr(holder, "sliding_window", None), int)
    ]
    try:
        for holder, _ in before:
            holder.sliding_window = WINDOW
        yield
    finally:
        for holder, window in before:
            holder.sliding_window = window


def _beside_parameters(model: PreTrainedModel) -> Iterator[str]:
    """Yield the reasons why a commit would lose a part of a model: it stores the parameters alone,
    all in one dtype.
    """
    saved = model.state_dict(keep_vars=True)
    for name, _ in model.named_buffers():
        if name in saved:
            yield f"its buffer {name} is a part of its weights"
    dtypes = {parameter.dtype for parameter in model.parameters()}
    if len(dtypes) > 1:
        yield f"its parameters are of several dtypes ({', '.join(sorted(map(str, dtypes)))})"


@torch.no_grad()
def differences(model: PreTrainedModel) -> dict[str, float]:
    """Return the largest differences of log-probabilities from the model's own forward, in nats,
    of the forwards "learner" and "engine" (the keys).

    Arithmetic is float32, and windows are short. The model's own forward, with its eager attention,
    gets one sequence at a time.
    """
    sequences = _sequences(model)
    is_half = next(model.parameters()).dtype in HALF
    arithmetic = Float32Arithmetic() if is_half else nullcontext()  # three times as slow
    with _evaluated(model), _short_windows(model), arithmetic:
        expected = _own(model, sequences, "eager")
        logprobs_of = {"learner": _learner(model, sequences), "engine": _engine(model, sequences)}
        return {
            side: float((logprobs - expected).abs().max()) for side, logprobs in logprobs_of.items()
        }


@torch.no_grad()
def half_precision_kl(model: PreTrainedModel) -> dict[str, float]:
    """Return the mean KL divergence from the model's own eager forward, in nats per token, over
    one sequence of random tokens, the same at every call.

    Keys: the forwards "learner", "engine" and, if the model supports it, "sdpa", its own forward
    with that attention. {} if the weights are not in half precision.
    """
    if next(model.parameters()).dtype not in HALF:
        return {}
    sequences = _sequences(model)[-1:]
    with _evaluated(model):
        expected = _own(model, sequences, "eager")
        logprobs_of = {"learner": _learner(model, sequences), "engine": _engine(model, sequences)}
        if model._supports_sdpa:
            logprobs_of["sdpa"] = _own(model, sequences, "sdpa")
    return {
        side: float((expected.exp() * (expected - logprobs)).sum(-1).mean())
        for side, logprobs in logprobs_of.items()
    }


@contextmanager
def _evaluated(model: PreTrainedModel) -> Iterator[None]:
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


def _sequences(model: PreTrainedModel) -> list[Tensor]:
    """Return sequences of random token ids, [T] int64 for each T in LENGTHS, always the same."""
    like = next(model.parameters())
    draw = torch.Generator().manual_seed(0)
    size = model.get_input_embeddings().num_embeddings
    return [torch.randint(size, (n,), generator=draw).to(like.device) for n in LENGTHS]


def _own(model: PreTrainedModel, sequences: list[Tensor], attention: str) -> Tensor:
    """Log-probabilities [N, V] with one of the model's own attentions, one sequence at a time."""
    model.set_attn_implementation(attention)
    try:
        logits = [model(input_ids=sequence[None]).logits[0] for sequence in sequences]
    finally:
        model.set_attn_implementation(RAGGED)
    return torch.log_softmax(torch.cat(logits).float(), -1)


def _learner(model: PreTrainedModel, sequences: list[Tensor]) -> Tensor:
    """Log-probabilities [N, V] of the learner's forward, the sequences end to end."""
    starts = torch.tensor([0, *accumulate(map(len, sequences))], device=sequences[0].device)
    output = run_packed(model.get_decoder(), torch.cat(sequences), PackedSequences(starts))
    return torch.log_softmax(head_logits(model, output.last_hidden_state[0]).float(), -1)


def _engine(model: PreTrainedModel, sequences: list[Tensor]) -> Tensor:
    """Log-probabilities [N, V] of the engine's forwards, which decode the last DECODED tokens."""
    lengths = [len(sequence) for sequence in sequences]
    cache = KeyValueCache.of(model, num_slots=len(sequences), context_tokens=max(lengths))
    slots = list(range(len(sequences)))
    parts: list[list[Tensor]] = [[] for _ in sequences]
    cuts = [[0, n - DECODED, *range(n - DECODED + 1, n + 1)] for n in lengths]
    for wave in zip(*(pairwise(cut) for cut in cuts), strict=True):
        new = [end - start for start, end in wave]
        layout = CachedRows(cache, slots, [start for start, _ in wave], new)
        ids = torch.cat(
            [sequence[start:end] for sequence, (start, end) in zip(sequences, wave, strict=True)]
        )
        logits = run_packed(model, ids, layout).logits[0]
        for part, logits_of_sequence in zip(parts, logits.split(new), strict=True):
            part.append(logits_of_sequence)
    return torch.log_softmax(torch.cat([*chain.from_iterable(parts)]).float(), -1)


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Limits of numeric differences, for one engine and one dtype of weights."""

    forward: float  # nats, root mean square between two correct forwards of other shapes or kernels
    canary: float  # nats, root mean square between engine and learner right after a publish
    nats: float  # error of a logged log-probability; gap of a greedy token below the largest
    mass: float  # distance of a random number from its token's interval of probability
    mismatch_kl: float = 0.05  # nats per token between engine and learner over a batch
    rare: float = 0.0  # share of tokens that may exceed `nats` or `mass` in an audit
    most: float = 1.0  # hard limit for these tokens, as a multiple of `nats` or `mass`


Tolerances = Mapping[torch.dtype, Tolerance]

# The built-in engine runs the learner's own model code, so that forwards of one shape are equal to
# the bit: correct publishes show 0 if one process learns, and SmolLM2-135M in bfloat16 shows 0.04
# after a missed publish at a learning rate of 1e-7. `forward` is the canary's limit if shapes
# differ (several ranks, an adapter): SmolLM2 shows 0.06 to 0.1, wrong weights over 1.
# In an audit forwards differ in shape, too. 2,283 tokens of SmolLM2 in bfloat16 differed by
#   nats: mean 0.029, 0.13 % above 0.3, none above 0.39
#   probability: mean 0.0017, 0.15 % above 0.03, none above 0.05
# Among 1,115 tokens after the warm start, two differed by 0.127 and 0.133 of the probability.
# A token drawn by other random numbers differs by more than 0.12 in four of five cases.
# Beyond the hard limit an audit compares with float32 arithmetic, from which the engine differed
# by at most 0.091.
TORCH: Tolerances = {
    torch.float32: Tolerance(forward=1e-3, canary=1e-4, nats=1e-3, mass=1e-4),
    torch.float16: Tolerance(forward=0.05, canary=1e-3, nats=0.05, mass=4e-3, rare=0.01, most=4.0),
    torch.bfloat16: Tolerance(forward=0.3, canary=1e-2, nats=0.3, mass=0.03, rare=0.01, most=4.0),
}

# vLLM's kernels are not the learner's, and its draws cannot be repeated (mass). Its float32
# attention on a GPU computes in tf32: at most 0.0014 nats on the default model, while a missed
# publish at a learning rate of 1e-4 shows 0.01. In bfloat16 SmolLM2 shows 0.06 to 0.1, single
# tokens 0.6; smaller faults are found by the share of the learner's change that arrived, see
# `agentgym.rollouts.engine`.
VLLM: Tolerances = {
    torch.float32: Tolerance(forward=3e-3, canary=1.5e-3, nats=5e-3, mass=1.0),
    torch.float16: Tolerance(forward=0.05, canary=0.05, nats=0.1, mass=1.0, rare=0.01, most=4.0),
    torch.bfloat16: Tolerance(forward=0.3, canary=0.3, nats=0.6, mass=1.0, rare=0.01, most=4.0),
}
