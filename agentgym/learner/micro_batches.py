"""Distribution of a batch over ranks and micro-batches; forward and backward passes over them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn

from agentgym.algorithms.batch import Batch
from agentgym.config import LearnerConfig
from agentgym.learner.process_group import ProcessGroup
from agentgym.models.networks import PolicyNet, Prefixes, ValueNet

# (sequences of one micro-batch, whether they count); a rank without work still runs the forward
Share = tuple[Tensor, bool]
# (micro-batch, its action tokens among the batch's, [n] bool) -> its share of the loss and of the
# logged values
LossFunction = Callable[[Batch, Tensor], tuple[Tensor, dict[str, Tensor]]]

# Dense bfloat16 TFLOP/s from the makers' data sheets (rates with sparsity are twice as high). The
# first row whose words are all in the device's name applies.
PEAK_TFLOPS = (
    ("H100 NVL", 835.0),
    ("H100 PCIe", 756.0),
    ("H100", 989.0),
    ("H200 NVL", 836.0),
    ("H200", 989.0),
    ("GH200", 989.0),
    ("H20", 148.0),
    ("GB200", 2500.0),
    ("B200", 2250.0),
    ("A100", 312.0),
    ("A10", 125.0),
    ("L40S", 362.0),
    ("L40", 181.0),
    ("L4", 121.0),
    ("MI300X", 1307.0),
)


def peak_tflops(device_name: str) -> float | None:
    """Return the dense bfloat16 peak, TFLOP/s, of a device named by `torch.cuda.get_device_name`;
    None for an unknown device and for a slice of one (MIG).
    """
    words_of_name = set(re.split("[ -]", device_name))
    if "MIG" in words_of_name:
        return None
    return next((peak for words, peak in PEAK_TFLOPS if set(words.split()) <= words_of_name), None)


def device_peak_tflops(device: torch.device) -> float | None:
    """Return the peak of a device as `peak_tflops`; None for a CPU and for an unknown device."""
    return peak_tflops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None


@dataclass(frozen=True, slots=True)
class TrainingFlops:
    """The size of a network, and the operations of its forward and backward without recomputation.

    A token takes 6 operations for each weight of blocks and head. Attention over a sequence takes
    12 x layers x width x sequence length for each token; causal masking leaves half of that, 6.
    """

    weights: int  # of blocks and head
    attention: int  # layers x width

    @classmethod
    def of(cls, network: nn.Module, model: Any) -> Self:
        """Count a network's weights, before it is sharded; embeddings only if they also are the
        head. model: its language model or decoder.
        """
        embedding = model.get_input_embeddings().weight
        head = getattr(model, "get_output_embeddings", lambda: None)()
        is_head = head is not None and head.weight is embedding
        config = model.config.get_text_config(decoder=True)
        heads = config.num_attention_heads
        head_size = getattr(config, "head_dim", None) or config.hidden_size // heads
        return cls(
            sum(parameter.numel() for parameter in network.parameters())
            - (0 if is_head else embedding.numel()),
            config.num_hidden_layers * heads * head_size,
        )

    def tflop(self, lengths: Tensor, shared: Tensor | None = None) -> float:
        """Return the number of operations, in 1e12, for sequences of [R] int64 lengths. shared: [R]
        int64, leading tokens of each that another one computes.
        """
        prefix = torch.zeros_like(lengths) if shared is None else shared
        tokens, pairs = int((lengths - prefix).sum()), int((lengths**2 - prefix**2).sum())
        return 6e-12 * (self.weights * tokens + self.attention * pairs)


class Dealt:
    """Sequences of a batch, divided among ranks and, on each rank, into micro-batches."""

    def __init__(self, passes: Passes, batch: Batch, sequences: list[int], unit: int) -> None:
        """Divide the sequences, given by index. unit: see `micro_batches`. With `share_prefixes`, a
        prefix that a sequence shares with the one before it counts once.
        """
        ranks, share = passes.ranks, passes.settings.share_prefixes
        self.idle = sequences[:unit]  # computed by a rank without work, and not counted
        self._lengths = batch.lengths.tolist()
        self._prefixes = Prefixes(batch.input_ids, batch.starts) if share else None
        padded, tokens = ranks.device.type == "cpu", passes.budget.tokens
        options: dict[str, Any] = {"tokens": tokens, "unit": unit, "padded": padded}
        if self._prefixes is not None:
            options["shared"] = self._prefixes.shared
        self.ranks = [
            list(micro_batches(self._lengths, of_rank, **options))
            for of_rank in deal(self._lengths, sequences, num_ranks=ranks.size, unit=unit)
        ]

    def largest(self, rank: int) -> int:
        """Return the number of tokens that the rank's largest micro-batch computes; 0 if none."""
        return max((sum(lengths) - sum(shared) for lengths, shared in self._sizes(rank)), default=0)

    def _sizes(self, rank: int) -> Iterator[tuple[list[int], list[int]]]:
        """Yield the lengths of each micro-batch's sequences, and their shared tokens."""
        for part in self.ranks[rank]:
            shared = [0] * len(part) if self._prefixes is None else self._prefixes.of(part)
            yield [self._lengths[sequence] for sequence in part], shared

    def tflop(self, networks: Sequence[TrainingFlops]) -> float:
        """Return the number of operations, in 1e12, of an update of the networks, on all ranks."""
        lengths, shared = [], []
        for rank in range(len(self.ranks)):
            for part_lengths, part_shared in self._sizes(rank):
                lengths += part_lengths
                shared += part_shared
        counts = torch.tensor(lengths), torch.tensor(shared)
        return sum(network.tflop(*counts) for network in networks)


def deal(
    lengths: Sequence[int], sequences: Sequence[int], *, num_ranks: int, unit: int
) -> list[list[int]]:
    """Return each rank's sequences, in the order given, with about equal tokens on each rank: the
    longest unit goes first, to the rank with the fewest tokens (Graham's LPT rule).
    lengths: tokens of every sequence of the batch. unit: number of neighbors in `sequences` that
    stay together; divides their number.
    """
    units = [sequences[first : first + unit] for first in range(0, len(sequences), unit)]
    tokens = [sum(lengths[sequence] for sequence in members) for members in units]
    dealt: list[list[int]] = [[] for _ in range(num_ranks)]
    loads = [0] * num_ranks
    for index in sorted(range(len(units)), key=lambda index: (-tokens[index], index)):
        rank = loads.index(min(loads))
        dealt[rank].append(index)
        loads[rank] += tokens[index]
    return [
        [sequence for index in sorted(indices) for sequence in units[index]] for indices in dealt
    ]


def micro_batches(
    lengths: Sequence[int],
    sequences: Sequence[int],
    *,
    tokens: int,
    unit: int,
    padded: bool,
    shared: Callable[[int, int], int] = lambda _before, _sequence: 0,
) -> Iterator[list[int]]:
    """Yield lists of consecutive sequences within the budget of `tokens`, in multiples of `unit`.

    A single unit may exceed the budget. lengths, unit: see `deal`.
    padded: True: a sequence that shares no tokens counts as long as the longest such sequence.
    shared: gives the tokens that (the sequence before, a sequence) have in common; they count once.
    """

    def grown(size: _Size, before: int | None, block: Sequence[int]) -> _Size:
        for sequence in block:
            num_shared = 0 if before is None else shared(before, sequence)
            size, before = size.plus(lengths[sequence], num_shared), sequence
        return size

    chosen: list[int] = []
    size = _Size()
    for first in range(0, len(sequences), unit):
        block = list(sequences[first : first + unit])
        more = grown(size, chosen[-1] if chosen else None, block)
        if chosen and (more.padded if padded else more.tokens) > tokens:
            yield chosen
            chosen, more = [], grown(_Size(), None, block)
        chosen, size = chosen + block, more
    if chosen:
        yield chosen


@dataclass(frozen=True, slots=True)
class _Size:
    """The computed tokens of a micro-batch."""

    tokens: int = 0
    sharing: int = 0  # of sequences that share tokens
    num_alone: int = 0  # sequences that share no tokens
    longest_alone: int = 0

    @property
    def padded(self) -> int:
        return self.sharing + self.num_alone * self.longest_alone

    def plus(self, length: int, shared: int) -> _Size:
        tokens = self.tokens + length - shared
        if shared:
            return replace(self, tokens=tokens, sharing=self.sharing + length - shared)
        longest = max(self.longest_alone, length)
        return _Size(tokens, self.sharing, self.num_alone + 1, longest)


FIRST_TOKENS = 4_096  # in the micro-batch whose memory is measured
FILLED_FRAC = 0.8  # of the free memory, since memory per token varies with sequence length
LOGITS_FRAC = 0.1  # of the device's memory
LOGITS_COPIES = 3  # float32 logits, their log-softmax and its gradient exist at the same time


def head_chunk_tokens(settings: LearnerConfig, device: torch.device, vocab_size: int) -> int:
    """Return the number of action tokens whose logits exist at the same time: the setting.
    If it is auto, on a GPU as many as a tenth of its memory holds, because the backward recomputes
    the logits of several chunks, but at least the default; on a CPU the default.
    """
    _, usual = settings.usual_sizes
    if settings.head_chunk_tokens != "auto" or device.type != "cuda":
        return usual
    memory = torch.cuda.get_device_properties(device).total_memory
    return max(usual, int(LOGITS_FRAC * memory) // (LOGITS_COPIES * 4 * vocab_size))


class TokenBudget:
    """Maximum number of tokens in a micro-batch, equal on all ranks: the setting.
    If it is auto on a GPU: FIRST_TOKENS at first, then as many as fit by the memory updates took.
    """

    def __init__(self, settings: LearnerConfig, ranks: ProcessGroup) -> None:
        self._ranks, self._device = ranks, ranks.device
        self._measures = settings.micro_batch_tokens == "auto" and self._device.type == "cuda"
        usual, _ = settings.usual_sizes
        self.tokens = FIRST_TOKENS if self._measures else usual

    def begin(self) -> None:
        """Start to measure an update: reset torch's peak memory of the device. Nothing to do for a
        budget that is not auto, or on a CPU.
        """
        if self._measures:
            torch.cuda.reset_peak_memory_stats(self._device)
            self._before = torch.cuda.memory_allocated(self._device)

    def end(self, largest: int) -> None:
        """Set the budget from the memory taken since `begin`, if that measures. largest: tokens of
        the largest micro-batch since then. All ranks call it, or none.
        """
        if not self._measures:
            return
        taken = torch.cuda.max_memory_allocated(self._device) - self._before
        free, _ = torch.cuda.mem_get_info(self._device)
        # the allocator keeps freed blocks for the next update
        free += torch.cuda.memory_reserved(self._device) - self._before
        fitting = int(FILLED_FRAC * free / max(taken / max(largest, 1), 1.0))
        if self._ranks.size > 1:
            of_ranks = torch.zeros(self._ranks.size, dtype=torch.float64, device=self._device)
            of_ranks[self._ranks.rank] = fitting
            fitting = int(self._ranks.all_sum(of_ranks).min())
        self.tokens = max(FIRST_TOKENS, fitting)


class Passes:
    """Forward and backward passes over this rank's share of a batch, in micro-batches."""

    def __init__(self, settings: LearnerConfig, ranks: ProcessGroup) -> None:
        self.settings, self.ranks = settings, ranks
        self.budget = TokenBudget(settings, ranks)

    def deal(self, batch: Batch, sequences: Tensor, unit: int = 1) -> Dealt:
        """Deal sequences of a batch, [R] int64, to ranks and micro-batches. unit: see `deal`."""
        return Dealt(self, batch, sequences.tolist(), unit)

    def shares(self, dealt: Dealt) -> Iterator[Share]:
        """Yield (sequences of a micro-batch, True if they count) for this rank. A forward needs all
        ranks, so all yield equally often: a rank that has no more yields (dealt.idle, False).
        """
        of_rank = dealt.ranks[self.ranks.rank]
        for index in range(max(map(len, dealt.ranks))):
            counts = index < len(of_rank)
            chosen = of_rank[index] if counts else dealt.idle
            yield torch.tensor(chosen, device=self.ranks.device), counts

    def forward_backward(
        self, batch: Batch, dealt: Dealt, loss_of: LossFunction
    ) -> dict[str, float]:
        """Add the gradient of a loss over the dealt sequences to the parameters' gradients, and
        adapt the token budget to the memory taken.
        Result: name -> sum over all ranks, of the "loss" and of each logged value.
        """
        sums: dict[str, Tensor] = {}
        sequence = batch.sequence[batch.action_mask]
        self.budget.begin()
        for chosen, counts in self.shares(dealt):
            loss, logged = loss_of(batch.select(chosen), torch.isin(sequence, chosen))
            (loss if counts else 0.0 * loss).backward()  # type: ignore[no-untyped-call]
            for name, value in {"loss": loss.detach(), **logged}.items():
                sums[name] = sums.get(name, loss.new_zeros(())) + value.sum() * counts
        self.budget.end(dealt.largest(self.ranks.rank))
        totals = self.ranks.all_sum(torch.stack([value.float() for value in sums.values()]))
        return dict(zip(sums, totals.tolist(), strict=True))

    @torch.no_grad()
    def scores(self, network: PolicyNet, batch: Batch, sequences: Tensor | None = None) -> Tensor:
        """Return [2, N] log-probabilities and entropies, nats; 0 except at action tokens of the
        scored sequences. sequences: [R] int64, those to score; None: all.
        """
        result = batch.rewards.new_zeros(2, len(batch.input_ids))
        dealt = self.deal(batch, all_sequences(batch) if sequences is None else sequences)
        for chosen, counts in self.shares(dealt):
            scores = torch.stack(network(batch.select(chosen)))
            if counts:
                result[:, torch.isin(batch.sequence, chosen) & batch.action_mask] = scores
        return self.ranks.all_sum(result)

    @torch.no_grad()
    def values(self, critic: ValueNet, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return values of states: ([n] before each action token, [B] at each sequence's end)."""
        values = batch.rewards.new_zeros(len(batch.input_ids))
        ends = batch.rewards.new_zeros(batch.num_sequences)
        for chosen, counts in self.shares(self.deal(batch, all_sequences(batch))):
            at_tokens, at_ends = critic(batch.select(chosen))
            if counts:
                values[torch.isin(batch.sequence, chosen) & batch.action_mask] = at_tokens
                ends[chosen] = at_ends
        return self.ranks.all_sum(values)[batch.action_mask], self.ranks.all_sum(ends)


def all_sequences(batch: Batch) -> Tensor:
    """Return the indices of all sequences of a batch, [B] int64."""
    return torch.arange(batch.num_sequences, device=batch.starts.device)


def minibatches(
    sequences: Tensor, epochs: int, count: int, *, key: tuple[int, int]
) -> Iterator[Tensor]:
    """Yield each epoch's sequences in `count` random parts, ascending; empty ones are left out.
    sequences: [R] int64. key: seed of the draw; equal keys give equal parts.
    """
    order = np.random.Generator(np.random.Philox(key=list(key)))
    for _ in range(epochs):
        shuffled = torch.from_numpy(order.permutation(len(sequences))).to(sequences.device)
        for chosen in sequences[shuffled].tensor_split(count):
            if len(chosen):
                yield chosen.sort().values
