"""Checks of logged tokens under the weights that sampled them: their log-probabilities, and the
draws that chose them.

The engine draws a token by inverting its cumulative distribution at a random number that the
sample's `SampleKey` determines. So each sample has exactly one honest text. An episode that was
selected from many, copied from another sample or played with other random numbers is detected at
the first token that differs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from agentgym.audit.findings import Checks
from agentgym.audit.stored_steps import StepRecord, draw, load, place
from agentgym.config import RunConfig
from agentgym.models.architecture import has_weights
from agentgym.models.attention import PackedSequences
from agentgym.models.checkpoint import Checkpoint
from agentgym.models.fidelity import Float32Arithmetic, Tolerance
from agentgym.models.networks import head_logits
from agentgym.rollouts.policies.engines import engine_class, engine_dtype
from agentgym.rollouts.policies.torch import Distribution, uniforms
from agentgym.store.manifest import Manifest
from agentgym.types import SampleKey, Trajectory

FORWARD_TOKENS = 4_096  # of one forward, to stay within the CPU caches
MEAN_SHARE = 0.25  # largest mean deviation of all tokens, as a share of a token's usual bound
HEAD_ELEMENTS = 1 << 24  # logits (tokens times vocabulary) in memory at a time


def check_sampling(
    record: StepRecord, count: int | None, seed: int, rescore: Checks, sampling: Checks
) -> None:
    """Check log-probabilities and draws of turns under the version of the weights that they log.

    The episodes check verifies that these are the right weights. Skipped are pruned weights,
    weights of a dtype without a tolerance and, if the engine does not repeat its draws, the draws.
    Nothing is checked for a step without a checkpoint.
    count: episodes for each set of weights; None: all. seed: of this choice.
    rescore, sampling: receive the results for log-probabilities and for draws.
    """
    cfg = record.cfg
    if record.checkpoint is None:
        return
    if not engine_class(cfg.rollout.engine).repeats_draws:
        sampling.skip(
            "draws of a step",
            f"engine {cfg.rollout.engine} does not repeat its draws; log-probabilities alone speak"
            " for its tokens",
        )
    sources = weights_of_versions(record, record.checkpoint)
    logged = [(place(record.at(commit), episode), episode) for commit, episode in record.logged]
    random_seed = cfg.seed if record.stage is not None else cfg.evaluation.seed
    groups: dict[int, list[Logged]] = {}
    for where, episode in logged:
        versions = {turn.version for turn in episode.turns}
        if not versions <= sources.keys():
            _skip_pruned(1, rescore, sampling)
        for version in sorted(versions & sources.keys()):
            groups.setdefault(version, []).append((where, episode))
    for version, episodes in groups.items():
        checkpoint = load(record.store, sources[version])
        if checkpoint is None:
            _skip_pruned(len(episodes), rescore, sampling)
            continue
        chosen = episodes if count is None else draw(episodes, count, seed, record.name, version)
        share = cfg.rollout.engine_logprobs if record.stage is not None else 1.0
        judge = _Judge(cfg, checkpoint, random_seed, logged, rescore, sampling, share)
        if judge.tolerance is None:
            reason = f"no tolerance is stated for weights of {checkpoint.dtype}"
            for checks in (rescore, sampling):
                checks.skip(f"tokens of {record.name}", reason)
            continue
        for where, episode, turns in judge.turns_of(chosen, version):
            judge.compare(where, episode, turns)
        judge.close()


def _skip_pruned(num: int, *checks: Checks) -> None:
    for check in checks:
        check.skip("episodes of pruned weights", "store.keep_checkpoints keeps newer ones", num)


def weights_of_versions(record: StepRecord, checkpoint: Manifest) -> Mapping[int, Manifest]:
    """Return version of the weights (optimizer steps) -> commit that recorded them, for the
    versions that episodes of a step may have been played with: the checkpoint's and, in a training
    stage, those of the step's commits with weights.

    Versions between two commits are missing. Blobs of an older commit may have been pruned.
    checkpoint: the commit that the step starts from.
    """
    sources = {int(checkpoint.state["global_step"]): checkpoint}
    if record.stage is not None:
        sources |= {
            int(commit.state["global_step"]): commit
            for commit in record.commits
            if has_weights(commit)
        }
    return sources


Logged = tuple[str, Trajectory]  # where it is, for messages, and an episode


@dataclass(frozen=True, slots=True)
class _Turn:
    """One action of n tokens, recomputed under the weights."""

    number: int  # from 1
    start: int
    logprobs: Tensor  # [n] at the sampling temperature; at 1 for a greedy action
    drawn: Tensor  # [n] tokens that the sample's random numbers give
    outside: Tensor  # [n], see Distribution.distance
    below: Tensor  # [n]


Judged = tuple[str, Trajectory, list[_Turn]]


class _Deviations:
    """Distances between logged and recomputed tokens of one set of weights.

    No token may exceed the hard bound, few may exceed the usual one, and their sum is bounded.
    `add` collects the distances of an action and applies the hard bound; `close` checks the rest.
    usual: the usual bound. tolerance: gives the hard bound and the share that may exceed the usual.

    In float32 the two bounds are one. In half precision a few honest tokens exceed any bound that
    is worth checking for all of them.
    """

    def __init__(self, usual: float, tolerance: Tolerance) -> None:
        self._usual, self._most = usual, usual * tolerance.most
        self._rare = tolerance.rare
        self._num_tokens, self._num_beyond, self._sum = 0, 0, 0.0
        self._beyond: list[str] = []

    def add(self, values: Tensor, describe: Callable[[int], str]) -> str:
        """Add the distances of one action. values: [n]. describe: a token's index -> failure text.
        Result: the failure text for the first token beyond the hard bound, or an empty string.
        """
        self._num_tokens += len(values)
        self._sum += float(values.nan_to_num().sum())
        off = ~(values <= self._usual)
        if not off.any():
            return ""
        self._num_beyond += int(off.sum())
        if self.is_beyond(values):
            return describe(int((~(values <= self._most)).nonzero()[0]))
        self._beyond.append(describe(int(off.nonzero()[0])))
        return ""

    def is_beyond(self, values: Tensor) -> bool:
        """Return True if a value is beyond the hard bound or NaN."""
        return not bool((values.abs() <= self._most).all())

    def close(self, checks: Checks) -> None:
        """Record failures if more tokens exceed the usual bound, or all distances have a larger
        sum, than rounding explains. In float32 nothing is left to check.
        """
        if not self._rare:  # float32: the two bounds are equal
            return
        allowed = 1 + self._rare * self._num_tokens
        if self._num_beyond > allowed:
            for failure in self._beyond:
                checks.fail(
                    f"{failure}; {self._num_beyond} of {self._num_tokens} tokens are off by more"
                    f" than {self._usual:g}, rounding explains {allowed:.0f}"
                )
        max_sum = self._usual * (1 + MEAN_SHARE * self._num_tokens)
        if not self._sum <= max_sum:
            checks.fail(
                f"{self._num_tokens} tokens are off by {self._sum:.3g} in sum, rounding explains"
                f" {max_sum:.3g}"
            )


class _Judge:
    """Comparison of logged tokens with one set of weights. `turns_of` computes turns again,
    `compare` checks those of one episode, and `close` checks sums over all of them.
    """

    def __init__(
        self,
        cfg: RunConfig,
        checkpoint: Checkpoint,
        seed: int,
        logged: Sequence[Logged],
        rescore: Checks,
        sampling: Checks,
        logged_share: float = 1.0,
    ) -> None:
        self._logged_share = logged_share  # of the actions, whose log-probabilities are recorded
        self._model, self._seed, self._logged = checkpoint.model.eval(), seed, logged
        self._rescore, self._sampling = rescore, sampling
        self._stop_ids = checkpoint.renderer.stop_ids
        self._max_new_tokens = cfg.rollout.max_new_tokens
        self._vocabulary = self._model.get_input_embeddings().num_embeddings
        engine = engine_class(cfg.rollout.engine)
        self._repeats_draws = engine.repeats_draws
        self.tolerance = engine.tolerances.get(engine_dtype(cfg, checkpoint.dtype))
        if self.tolerance is not None:
            self._gaps = _Deviations(self.tolerance.nats, self.tolerance)
            self._outside = _Deviations(self.tolerance.mass, self.tolerance)
            self._below = _Deviations(self.tolerance.nats, self.tolerance)

    def turns_of(self, episodes: Sequence[Logged], version: int) -> Iterator[Judged]:
        """Yield (place, episode, turns that `version` sampled), shortest episodes first, several in
        one forward. The place is the text that names the episode.

        Episodes with impossible ids, spans or lengths are failures and are not yielded.
        """
        sound: list[Logged] = []
        for where, episode in episodes:
            if not all(0 <= token < self._vocabulary for token in episode.input_ids):
                self._rescore.fail(f"{where}: token ids outside 0 .. {self._vocabulary - 1}")
            elif any(
                not 0 < turn.start < turn.end <= len(episode.input_ids) for turn in episode.turns
            ):
                self._rescore.fail(f"{where}: an action of no token, or outside of its episode")
            elif len(episode.logprobs) != len(episode.input_ids):
                self._rescore.fail(
                    f"{where}: {len(episode.logprobs)} log-probabilities of"
                    f" {len(episode.input_ids)} tokens"
                )
            else:
                sound.append((where, episode))
        size = 0
        chunk: list[Logged] = []
        for entry in sorted(sound, key=lambda pair: len(pair[1].input_ids)):  # little padding
            if chunk and size + len(entry[1].input_ids) > FORWARD_TOKENS:
                yield from self._forward(chunk, version)
                size, chunk = 0, []
            size += len(entry[1].input_ids)
            chunk.append(entry)
        if chunk:
            yield from self._forward(chunk, version)

    def _forward(self, chunk: Sequence[Logged], version: int) -> Iterator[Judged]:
        """Yield (place, episode, turns that `version` sampled) for each episode.
        In half precision, an episode with a token beyond a hard bound is computed again in float32,
        because the audit rounds as much as the engine.
        """
        assert self.tolerance is not None
        for where, episode, turns in self._computed(chunk, version):
            if self.tolerance.rare and self._is_far(episode, turns):
                with Float32Arithmetic():
                    again = list(self._computed([(where, episode)], version))
                yield from again
            else:
                yield where, episode, turns

    def _is_far(self, episode: Trajectory, turns: Sequence[_Turn]) -> bool:
        """Return True if a token is beyond a hard bound."""
        for turn in turns:
            logged = torch.tensor(episode.logprobs[turn.start : turn.start + len(turn.drawn)])
            is_logged = episode.turns[turn.number - 1].has_logprobs
            if is_logged and self._gaps.is_beyond(turn.logprobs - logged):
                return True
            if self._repeats_draws:
                drawn = turn.outside if episode.temperature else turn.below
                if (self._outside if episode.temperature else self._below).is_beyond(drawn):
                    return True
        return False

    @torch.inference_mode()
    def _computed(self, chunk: Sequence[Logged], version: int) -> Iterator[Judged]:
        starts = np.cumsum([0, *(len(episode.input_ids) for _, episode in chunk)])
        ids = torch.tensor([token for _, episode in chunk for token in episode.input_ids])
        layout = PackedSequences(torch.tensor(starts))
        hidden = self._model.get_decoder()(
            input_ids=ids[None], position_ids=layout.position[None], use_cache=False, layout=layout
        ).last_hidden_state[0]
        spans, positions, numbers, temperatures = [], [], [], []
        for sequence, (_, episode) in enumerate(chunk):
            for index, turn in enumerate(episode.turns):
                if turn.version == version:
                    key, length = self._key(episode, index), turn.end - turn.start
                    spans.append((sequence, index, turn.start, length))
                    positions.append(starts[sequence] + np.arange(turn.start, turn.end))
                    numbers.append(uniforms(key, length))
                    temperatures += [episode.temperature] * length
        at = torch.tensor(np.concatenate(positions))
        judged = self._head(hidden, ids, at, np.concatenate(numbers), temperatures)
        by_sequence: dict[int, list[_Turn]] = {}
        for (sequence, index, start, _), *parts in zip(
            spans, *(torch.split(part, [span[3] for span in spans]) for part in judged), strict=True
        ):
            by_sequence.setdefault(sequence, []).append(_Turn(index + 1, start, *parts))
        for sequence, (where, episode) in enumerate(chunk):
            yield where, episode, by_sequence[sequence]

    def _key(self, episode: Trajectory, turn: int) -> SampleKey:
        return SampleKey(self._seed, episode.step, episode.item.item_id, episode.sample, turn)

    def _head(
        self,
        hidden: Tensor,
        ids: Tensor,
        positions: Tensor,
        numbers: np.ndarray,
        temperatures: Sequence[float],
    ) -> tuple[Tensor, ...]:
        """Return (log-probabilities, tokens drawn, outside, below) of the n tokens at `positions`,
        each [n]; the last two as `Distribution.distance`.
        hidden: [N, H]; ids: [N]; numbers: [n] random numbers of the draws; temperatures: [n].
        """
        size = max(1, HEAD_ELEMENTS // self._vocabulary)
        parts = []
        tensors = positions, torch.tensor(numbers), torch.tensor(temperatures)
        chunks = zip(*(torch.split(tensor, size) for tensor in tensors), strict=True)
        for chunk, uniform, temperature in chunks:
            logits, tokens = head_logits(self._model, hidden[chunk - 1]).float(), ids[chunk]
            distribution = Distribution(logits, temperature)
            logprobs, drawn = distribution.logprobs(tokens), distribution.draw(uniform)
            parts.append((logprobs, drawn, *distribution.distance(uniform, tokens)))
        return tuple(torch.cat(pieces) for pieces in zip(*parts, strict=True))

    def compare(self, where: str, episode: Trajectory, turns: Sequence[_Turn]) -> None:
        honest = True
        for turn in turns:
            ids = episode.input_ids[turn.start : turn.start + len(turn.drawn)]
            logged = torch.tensor(episode.logprobs[turn.start : turn.start + len(ids)])

            def described(index: int, turn: _Turn = turn) -> str:
                token = turn.start + index
                return (
                    f"{where} turn {turn.number} token {token} (id {episode.input_ids[token]}):"
                    f" log-probability: expected {float(turn.logprobs[index]):.6f}, got"
                    f" {episode.logprobs[token]:.6f}"
                )

            if episode.turns[turn.number - 1].has_logprobs:
                self._rescore.counted += 1
                if failure := self._gaps.add((turn.logprobs - logged).abs(), described):
                    self._rescore.fail(failure)
            elif self._key(episode, turn.number - 1).is_drawn(self._logged_share):
                self._rescore.fail(
                    f"{where} turn {turn.number}: no log-probabilities, and its sample is of the"
                    f" share that rollout.engine_logprobs {self._logged_share:g} draws"
                )
            else:
                self._rescore.skip(
                    "turns whose log-probabilities the engine was not asked for",
                    f"rollout.engine_logprobs {self._logged_share:g}",
                )
            # tokens after a forged turn were sampled from another context
            if honest and self._repeats_draws:
                self._sampling.counted += len(ids)
                honest = self._is_drawn(where, episode, turn, ids)

    def close(self) -> None:
        """Record failures that only all turns together can show. Call after the last turn."""
        self._gaps.close(self._rescore)
        self._outside.close(self._sampling)
        self._below.close(self._sampling)

    def _is_drawn(self, where: str, episode: Trajectory, turn: _Turn, ids: Sequence[int]) -> bool:
        at = f"{where} turn {turn.number}"

        def described(index: int) -> str:
            far = f"{float(values[index]):.3g} {unit}"
            return (
                f"{at} token {turn.start + index} (id {ids[index]}): the random numbers of this"
                f" sample draw id {int(turn.drawn[index])}, {far} away{self._twins(where, episode)}"
            )

        off, values, unit = self._outside, turn.outside, "of the probability"
        if not episode.temperature:
            off, values, unit = self._below, turn.below, "nats"
        if failure := off.add(values, described):
            self._sampling.fail(failure)
        elif not set(ids[:-1]).isdisjoint(self._stop_ids) or len(ids) > self._max_new_tokens:
            self._sampling.fail(
                f"{at}: {len(ids)} tokens that continue after a stop token or"
                f" rollout.max_new_tokens {self._max_new_tokens}"
            )
        elif ids[-1] not in self._stop_ids and len(ids) < self._max_new_tokens:
            self._sampling.fail(
                f"{at}: it ends after {len(ids)} tokens without a stop token; the engine continues"
                f" to {self._max_new_tokens}"
            )
        else:
            return True
        return False

    def _twins(self, where: str, episode: Trajectory) -> str:
        """Return a note that names another episode with the same tokens and versions, or "".
        It is shown only with a failed draw: if little is left to chance, honest episodes may have
        equal texts.
        """
        versions = [turn.version for turn in episode.turns]
        same = [
            name
            for name, other in self._logged
            if name != where
            and other.input_ids == episode.input_ids
            and [turn.version for turn in other.turns] == versions
        ]
        return f"; its tokens are those of {same[0]}" if same else ""
