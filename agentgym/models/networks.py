"""The two trained networks, policy and critic. Each computes all in one `forward`, so that a
wrapper that splits parameters over ranks (FSDP) sees every use of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from agentgym.algorithms.batch import Batch
from agentgym.models.attention import PackedSequences, leave_uncompiled, require_ragged, run_packed

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SHARED_FRAC = 0.1  # of a sequence's tokens; a shorter prefix is not shared


def common_tokens(first: Sequence[int], second: Sequence[int]) -> int:
    """Return the length of the longest common prefix of two lists, or of two tuples."""
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        is_equal = first[low:middle] == second[low:middle]
        low, high = (middle, high) if is_equal else (low, middle - 1)
    return low


class Prefixes:
    """Lengths of the prefixes that pairs of sequences of a batch share."""

    def __init__(self, input_ids: Tensor, starts: Tensor) -> None:
        """Split a batch into its sequences. input_ids: [N] int; starts: [B + 1] int."""
        ids = input_ids.tolist()
        self._sequences = [ids[start:end] for start, end in pairwise(starts.tolist())]

    def shared(self, before: int, sequence: int) -> int:
        """Return the length of the prefix that the sequences with the indices `before` and
        `sequence` share; 0 if it is less than SHARED_FRAC of the latter's tokens.
        """
        ids = self._sequences[sequence]
        common = common_tokens(self._sequences[before], ids)
        return common if common >= SHARED_FRAC * len(ids) else 0

    def of(self, sequences: Sequence[int]) -> list[int]:
        """Return the number of tokens that each sequence shares with the one before it in the list,
        for `PackedSequences`; 0 for the first. sequences: indices.
        """
        return [0, *(self.shared(before, sequence) for before, sequence in pairwise(sequences))]


class PolicyNet(nn.Module):
    """The policy: computes log-probabilities and entropies of the action tokens of a batch."""

    def __init__(
        self, model: PreTrainedModel, head_chunk_tokens: int = 4_096, *, share_prefixes: bool = True
    ) -> None:
        """Wrap a model, not copied: a causal language model with RAGGED attention, else ValueError.
        head_chunk_tokens: action tokens whose logits exist at one time, in the backward, too.
        share_prefixes: compute the common prefix of neighboring sequences once.
        """
        super().__init__()
        require_ragged(model)
        self.model = model
        self._chunk, self._share = head_chunk_tokens, share_prefixes

    def forward(self, batch: Batch, entropy_gradient: bool = False) -> tuple[Tensor, Tensor]:
        """Return (log-probabilities, entropies) of every action token, [n] each, in nats, at the
        temperature of sampling. entropy_gradient: False detaches the entropies.
        """
        hidden, positions = _states(self.model.get_decoder(), batch, self._share)

        def head_logprobs(states: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
            """Map [c, H] states and [c] targets to [c] log-probabilities and [c] entropies."""
            logp = torch.log_softmax(
                head_logits(self.model, states).float() / batch.temperature, -1
            )
            spread = logp if entropy_gradient else logp.detach()
            return logp.gather(1, targets[:, None])[:, 0], -(spread.exp() * spread).sum(-1)

        score: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] = head_logprobs
        if len(positions) > self._chunk:
            score = partial(checkpoint, head_logprobs, use_reentrant=False)
        chunks = torch.split(positions, self._chunk)
        parts = [score(hidden[chunk - 1], batch.input_ids[chunk]) for chunk in chunks]
        return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])


def head_logits(model: PreTrainedModel, states: Tensor) -> Tensor:
    """Logits [..., V] of hidden states [..., H], with the scaling and the cap of the model's own
    forward. `require_faithful` refuses models whose forward does something else.
    """
    logits: Tensor = model.get_output_embeddings()(states)
    config = model.config.get_text_config(decoder=True)
    if factor := getattr(config, "logit_scale", None):  # Cohere
        logits = logits * factor
    if divisor := getattr(config, "logits_scaling", None):  # Granite
        logits = logits / divisor
    if cap := getattr(config, "final_logit_softcapping", None):  # Gemma
        logits = cap * torch.tanh(logits / cap)
    return logits


class ValueNet(nn.Module):
    """The critic: a body like the policy's and a linear head that begins at zero."""

    def __init__(self, model: PreTrainedModel, *, share_prefixes: bool = True) -> None:
        """Wrap a model's decoder, not copied, and add a value head. model: a separate causal
        language model, whose output head is not used. share_prefixes: as for `PolicyNet`.
        """
        super().__init__()
        require_ragged(model)
        self._share, self.config = share_prefixes, model.config
        self.body = model.get_decoder()
        like = next(self.body.parameters())
        self.head = nn.Linear(model.config.hidden_size, 1, dtype=like.dtype, device=like.device)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return values of states: ([n] before each action token, [B] at each sequence's end).

        Values are trained at tokens before an action token: the end of an observation, or any
        action token but the last.
        If a sequence ends in an observation, its end value is read at the last token.
        If it ends in an action, because the observation did not fit, the end value is read before
        that action's last token: by Bellman's equation the expected value of what follows.
        """
        hidden, positions = _states(self.body, batch, self._share)
        values = self.head(hidden).float()[:, 0]
        ends = batch.starts[1:] - 1
        return values[positions - 1], values[ends - batch.action_mask[ends].long()]


def _states(decoder: Any, batch: Batch, share: bool) -> tuple[Tensor, Tensor]:
    """Return ([N, H] hidden states of the packed tokens, [n] indices of the action tokens).
    The batch must be on the device of the weights.
    """
    assert not batch.action_mask[batch.starts[:-1]].any(), (
        "a sequence's first token has nothing before it that could have sampled it"
    )
    shared = None
    if share:
        shared = Prefixes(batch.input_ids, batch.starts).of(range(batch.num_sequences))
    layout = PackedSequences(batch.starts, shared)
    ids = batch.input_ids if layout.computed is None else batch.input_ids[layout.computed]
    hidden = run_packed(decoder, ids, layout).last_hidden_state[0]
    return layout.whole(hidden), batch.action_mask.nonzero()[:, 0]


def blocks(network: nn.Module) -> list[nn.Module]:
    """Return a decoder's blocks, in order: the items of all its ModuleLists."""
    lists = [module for module in network.modules() if isinstance(module, nn.ModuleList)]
    return [block for module_list in lists for block in module_list]


def compile_blocks(network: nn.Module, backend: str) -> None:
    """Let torch.compile compile each block, with `backend`, at its first forward, for any number of
    tokens; our attention stays uncompiled. Call it before sharding, so that the gathering of
    weights is not compiled.
    """
    leave_uncompiled()
    for block in blocks(network):
        block.forward = torch.compile(block.forward, backend=backend, dynamic=True)


def checkpoint_blocks(network: nn.Module) -> None:
    """Store only each block's input and recompute its activations in the backward.
    Call it after `compile_blocks`. There is no dropout, so no random number is drawn twice.
    """
    for block in blocks(network):
        block.forward = partial(
            checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False
        )
