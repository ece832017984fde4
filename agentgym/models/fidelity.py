"""Does a model compute here what its own code computes: asked of every model before it is used.

Learner and engine run a model's layers on packed sequences with our attention and its head on
chosen tokens. An architecture that does something else in between would be trained wrongly without
a word: both sides would agree with each other and not with the model.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from agentgym.models.architecture import unsupported
from agentgym.models.attention import RAGGED, CachedRows, KeyValueCache, PackedSequences
from agentgym.models.networks import head_logits
from agentgym.models.tolerance import TORCH

if TYPE_CHECKING:
    from transformers import PreTrainedModel


LENGTHS = (3, 13, 32)  # tokens of the compared sequences
DECODED = 2  # last tokens of each that the engine gets one forward later
# nats; what attention in another order of summation may differ by


def require_faithful(model: PreTrainedModel) -> None:
    """Errors: ValueError naming the model and what of it is not supported, or by how much our
    log-probabilities differ from its own."""
    name = f"{type(model).__name__} ({model.config.name_or_path or 'no name'})"
    for reason in (*unsupported(model.config), *_beside_parameters(model)):
        raise ValueError(f"model {name}: {reason}; use a model without it")
    try:
        found = differences(model)
    except Exception as error:
        raise ValueError(
            f"model {name} cannot run on packed sequences: {type(error).__name__}: {error}"
        ) from error
    limit = TORCH.get(next(model.parameters()).dtype, TORCH[torch.float32]).forward
    for side, difference in found.items():
        if not difference <= limit:
            raise ValueError(
                f"model {name}: the {side}'s log-probabilities differ from the model's own by "
                f"{difference:.3g} nats (at most {limit:g}); its architecture is not supported"
            )


def _beside_parameters(model: PreTrainedModel) -> Iterator[str]:
    """What of a model a commit would lose: parameters of one dtype are all that it holds."""
    saved = model.state_dict(keep_vars=True)
    for name, _ in model.named_buffers():
        if name in saved:
            yield f"its buffer {name} is a part of its weights"
    dtypes = {each.dtype for each in model.parameters()}
    if len(dtypes) > 1:
        yield f"its parameters are of several dtypes ({', '.join(sorted(map(str, dtypes)))})"


@torch.no_grad()
def differences(model: PreTrainedModel) -> dict[str, float]:
    """Largest difference to the model's own forward, sequence by sequence, in nats.

    Result: of the learner's forward and of the engine's.
    """
    was_training = model.training
    model.eval()
    sequences = _sequences(model)
    with _own_attention(model):
        own = [
            torch.log_softmax(model(input_ids=sequence[None]).logits[0].float(), -1)
            for sequence in sequences
        ]
    expected = torch.cat(own)
    result = {
        "learner": _largest(_learner(model, sequences), expected),
        "engine": _largest(_engine(model, sequences), expected),
    }
    model.train(was_training)
    return result


def _sequences(model: PreTrainedModel) -> list[Tensor]:
    """Token ids of LENGTHS, [T] int64 each."""
    like = next(model.parameters())
    draw = torch.Generator().manual_seed(0)
    size = model.get_input_embeddings().num_embeddings
    return [torch.randint(size, (n,), generator=draw).to(like.device) for n in LENGTHS]


@contextmanager
def _own_attention(model: PreTrainedModel) -> Iterator[None]:
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(RAGGED)


def _learner(model: PreTrainedModel, sequences: list[Tensor]) -> Tensor:
    """[N, V] log-probabilities, the sequences end to end."""
    starts = torch.tensor(
        [0, *torch.tensor(LENGTHS).cumsum(0).tolist()], device=sequences[0].device
    )
    layout = PackedSequences(starts)
    hidden = model.get_decoder()(
        input_ids=torch.cat(sequences)[None],
        position_ids=layout.position[None],
        use_cache=False,
        layout=layout,
    ).last_hidden_state[0]
    return torch.log_softmax(head_logits(model, hidden).float(), -1)


def _engine(model: PreTrainedModel, sequences: list[Tensor]) -> Tensor:
    """[N, V] log-probabilities, the sequences end to end."""
    cache = KeyValueCache.of(model, num_slots=len(sequences), context_tokens=max(LENGTHS))
    slots = list(range(len(sequences)))
    parts: list[list[Tensor]] = [[] for _ in sequences]
    cuts = [[0, n - DECODED, *range(n - DECODED + 1, n + 1)] for n in LENGTHS]
    for wave in zip(*(pairwise(cut) for cut in cuts), strict=True):
        new = [end - start for start, end in wave]
        layout = CachedRows(cache, slots, [start for start, _ in wave], new)
        ids = torch.cat(
            [sequence[start:end] for sequence, (start, end) in zip(sequences, wave, strict=True)]
        )
        logits = model(
            input_ids=ids[None], position_ids=layout.position[None], use_cache=False, layout=layout
        ).logits[0]
        for part, own in zip(parts, logits.split(new), strict=True):
            part.append(own)
    return torch.log_softmax(torch.cat([each for part in parts for each in part]).float(), -1)


def _largest(found: Tensor, expected: Tensor) -> float:
    """Both [N, V]."""
    return float((found - expected).abs().max())
