"""Logged tokens under the weights that sampled them: how likely they were, and whether they are
what was drawn.

The engine draws a token by inverting its distribution at a uniform that the sample's `SampleKey`
determines. So of each sample there is one honest text: an episode chosen among many, copied from
another sample or played with other random numbers shows at the first token that differs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from agentgym.audit.report import Checks
from agentgym.audit.steps import StepRecord, draw, load, place
from agentgym.config import RunConfig
from agentgym.models.attention import PackedSequences
from agentgym.models.checkpoint import Checkpoint, has_weights
from agentgym.models.fidelity import Float32Arithmetic
from agentgym.models.networks import head_logits
from agentgym.models.tolerance import Tolerance
from agentgym.rollouts.policies.draw import Distribution, uniforms
from agentgym.rollouts.policies.engines import engine_class, engine_dtype
from agentgym.store.manifest import Manifest
from agentgym.store.runstore import RunStore
from agentgym.types import SampleKey, Trajectory

FORWARD_TOKENS = 4_096  # of one forward: what the caches hold
MEAN_SHARE = 0.25  # of a token's usual bound that all tokens may be off by on average
HEAD_ELEMENTS = 1 << 24  # tokens times vocabulary whose logits exist at one time


def check_sampling(
    cfg: RunConfig,
    store: RunStore,
    record: StepRecord,
    count: int | None,
    seed: int,
    rescore: Checks,
    sampling: Checks,
) -> None:
    """Every turn under the weights it names; the episodes check says whether those are the right
    ones.

    count: of each commit's weights, how many episodes; None: all.
    """
    if record.checkpoint is None:
        return
    if not engine_class(cfg.rollout.engine).repeats_draws:
        sampling.skip(
            "draws of a step",
            f"engine {cfg.rollout.engine} does not repeat its draws; log-probabilities alone speak"
            " for its tokens",
        )
    sources = weights_of_versions(cfg, record, record.checkpoint)
    logged = [
        (place(record.at(commit), e), e)
        for commit in record.commits
        for e in record.episodes.get(commit.seq, ())
    ]
    random_seed = cfg.seed if record.stage is not None else cfg.evaluation.seed
    groups: dict[int, list[tuple[str, Trajectory]]] = {}
    for where, episode in logged:
        versions = {turn.version for turn in episode.turns}
        if not versions <= sources.keys():
            _skip_pruned(1, rescore, sampling)
        for version in sorted(versions & sources.keys()):
            groups.setdefault(version, []).append((where, episode))
    for version, episodes in groups.items():
        checkpoint = load(store, sources[version])
        if checkpoint is None:
            _skip_pruned(len(episodes), rescore, sampling)
            continue
        chosen = episodes if count is None else draw(episodes, count, seed, record.name, version)
        judge = _Judge(cfg, checkpoint, random_seed, logged)
        if judge.tolerance is None:
            reason = f"no tolerance is stated for weights of {checkpoint.dtype}"
            for checks in (rescore, sampling):
                checks.skip(f"tokens of {record.name}", reason)
            continue
        for where, episode, turns in judge.turns_of(chosen, version, rescore):
            judge.compare(where, episode, turns, rescore, sampling)
        judge.close(rescore, sampling)


def _skip_pruned(num: int, *checks: Checks) -> None:
    for each in checks:
        each.skip("episodes of pruned weights", "store.keep_checkpoints keeps newer ones", num)


def weights_of_versions(
    cfg: RunConfig, record: StepRecord, checkpoint: Manifest
) -> Mapping[int, Manifest]:
    """Version of the weights -> commit that holds them, of those a step's episodes may name."""
    sources = {int(checkpoint.state["global_step"]): checkpoint}
    if record.stage is not None:
        sources |= {
            int(commit.state["global_step"]): commit
            for commit in record.commits
            if has_weights(commit)
        }
    return sources


@dataclass(frozen=True, slots=True)
class _Turn:
    """Results of the weights for one action of n tokens."""

    number: int  # from 1
    start: int
    logprobs: Tensor  # [n] at the temperature it was sampled at, 1 where greedy
    drawn: Tensor  # [n] the tokens the sample's random numbers draw
    outside: Tensor  # [n], see Distribution.distance
    below: Tensor  # [n]


class _Deviations:
    """Distances between logged and recomputed tokens of one set of weights.

    No token may exceed the hard bound, few may exceed the usual one, and their sum is bounded.

    In float32 the two bounds are one. In half precision a few honest tokens exceed any bound that
    is worth checking for all of them.
    """

    def __init__(self, usual: float, tolerance: Tolerance) -> None:
        self._usual, self._most = usual, usual * tolerance.most
        self._rare = tolerance.rare
        self._num_tokens, self._num_beyond, self._sum = 0, 0, 0.0
        self._beyond: list[str] = []

    def add(self, values: Tensor, describe: Callable[[int], str]) -> str:
        """values: [n] of one action. describe: the failure text for a token's index.
        Result: the failure of a token beyond the hard bound, or an empty string.
        """
        self._num_tokens += len(values)
        self._sum += float(values.nan_to_num().sum())
        off = ~(values <= self._usual)
        if not off.any():
            return ""
        self._num_beyond += int(off.sum())
        first = int(off.nonzero()[0])
        if self.is_beyond(values):
            return describe(int((~(values <= self._most)).nonzero()[0]))
        self._beyond.append(describe(first))
        return ""

    def is_beyond(self, values: Tensor) -> bool:
        """Return True if a value is beyond the hard bound, or no number."""
        return not bool((values.abs() <= self._most).all())

    def close(self, checks: Checks) -> None:
        """Fail what is beyond the usual bound where that is more than honest rounding does."""
        if not self._rare:  # then no token is beyond one bound and within the other
            return
        allowed = 1 + self._rare * self._num_tokens
        if self._num_beyond > allowed:
            for failure in self._beyond:
                checks.fail(
                    f"{failure}; {self._num_beyond} of {self._num_tokens} tokens are off by more"
                    f" than {self._usual:g}, rounding explains {allowed:.0f}"
                )
        most = self._usual * (1 + MEAN_SHARE * self._num_tokens)
        if not self._sum <= most:
            checks.fail(
                f"{self._num_tokens} tokens are off by {self._sum:.3g} in sum, rounding explains"
                f" {most:.3g}"
            )


class _Judge:
    """One set of weights."""

    def __init__(
        self,
        cfg: RunConfig,
        checkpoint: Checkpoint,
        seed: int,
        logged: Sequence[tuple[str, Trajectory]],
    ) -> None:
        self._model = checkpoint.model.eval()
        self._stop_ids, self._seed, self._max_new_tokens = (
            checkpoint.renderer.stop_ids,
            seed,
            cfg.rollout.max_new_tokens,
        )
        self._logged = logged
        self._vocabulary = self._model.get_input_embeddings().num_embeddings
        engine = engine_class(cfg.rollout.engine)
        self._repeats_draws = engine.repeats_draws
        self.tolerance = engine.tolerances.get(engine_dtype(cfg, checkpoint.dtype))
        if self.tolerance is not None:
            self._gaps = _Deviations(self.tolerance.nats, self.tolerance)
            self._outside = _Deviations(self.tolerance.mass, self.tolerance)
            self._below = _Deviations(self.tolerance.nats, self.tolerance)

    def turns_of(
        self, episodes: Sequence[tuple[str, Trajectory]], version: int, rescore: Checks
    ) -> Iterator[tuple[str, Trajectory, list[_Turn]]]:
        """The turns that `version` sampled, several episodes in one forward."""
        sound: list[tuple[str, Trajectory]] = []
        for where, episode in episodes:
            if not all(0 <= token < self._vocabulary for token in episode.input_ids):
                rescore.fail(f"{where}: token ids outside 0 .. {self._vocabulary - 1}")
            elif any(
                not 0 < turn.start < turn.end <= len(episode.input_ids) for turn in episode.turns
            ):
                rescore.fail(f"{where}: an action of no token, or outside of its episode")
            elif len(episode.logprobs) != len(episode.input_ids):
                rescore.fail(
                    f"{where}: {len(episode.logprobs)} log-probabilities of"
                    f" {len(episode.input_ids)} tokens"
                )
            else:
                sound.append((where, episode))
        size = 0
        chunk: list[tuple[str, Trajectory]] = []
        for entry in sorted(sound, key=lambda each: len(each[1].input_ids)):  # little padding
            if chunk and size + len(entry[1].input_ids) > FORWARD_TOKENS:
                yield from self._forward(chunk, version)
                size, chunk = 0, []
            size += len(entry[1].input_ids)
            chunk.append(entry)
        if chunk:
            yield from self._forward(chunk, version)

    def _forward(
        self, chunk: Sequence[tuple[str, Trajectory]], version: int
    ) -> Iterator[tuple[str, Trajectory, list[_Turn]]]:
        """Yield the turns of each episode. An episode with a token beyond a hard bound is computed
        again in float32: the audit's own rounding in half precision is as large as the engine's.
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
            off = [self._gaps.is_beyond(turn.logprobs - logged)]
            if self._repeats_draws:
                drawn = turn.outside if episode.temperature else turn.below
                off.append((self._outside if episode.temperature else self._below).is_beyond(drawn))
            if any(off):
                return True
        return False

    @torch.inference_mode()
    def _computed(
        self, chunk: Sequence[tuple[str, Trajectory]], version: int
    ) -> Iterator[tuple[str, Trajectory, list[_Turn]]]:
        starts = np.cumsum([0, *(len(episode.input_ids) for _, episode in chunk)])
        ids = torch.tensor([token for _, episode in chunk for token in episode.input_ids])
        layout = PackedSequences(torch.tensor(starts))
        hidden = self._model.get_decoder()(
            input_ids=ids[None], position_ids=layout.position[None], use_cache=False, layout=layout
        ).last_hidden_state[0]
        spans, places, numbers, temperatures = [], [], [], []
        for sequence, (_, episode) in enumerate(chunk):
            for index, turn in enumerate(episode.turns):
                if turn.version == version:
                    key = SampleKey(
                        self._seed, episode.step, episode.item.item_id, episode.sample, index
                    )
                    length = turn.end - turn.start
                    spans.append((sequence, index, turn.start, length))
                    places.append(starts[sequence] + np.arange(turn.start, turn.end))
                    numbers.append(uniforms(key, length))
                    temperatures += [episode.temperature] * length
        judged = self._head(
            hidden, ids, torch.tensor(np.concatenate(places)), np.concatenate(numbers), temperatures
        )
        by_sequence: dict[int, list[_Turn]] = {}
        for (sequence, index, start, _), *parts in zip(
            spans, *(torch.split(part, [span[3] for span in spans]) for part in judged), strict=True
        ):
            by_sequence.setdefault(sequence, []).append(_Turn(index + 1, start, *parts))
        for sequence, (where, episode) in enumerate(chunk):
            yield where, episode, by_sequence[sequence]

    def _head(
        self,
        hidden: Tensor,
        ids: Tensor,
        places: Tensor,
        numbers: np.ndarray,
        temperatures: Sequence[float],
    ) -> tuple[Tensor, ...]:
        """(log-probabilities, tokens drawn, outside, below) of the tokens at `places`, [n] each."""
        size = max(1, HEAD_ELEMENTS // self._vocabulary)
        parts = []
        for place_, uniform, temperature in zip(
            *(
                torch.split(each, size)
                for each in (places, torch.tensor(numbers), torch.tensor(temperatures))
            ),
            strict=True,
        ):
            logits, tokens = head_logits(self._model, hidden[place_ - 1]).float(), ids[place_]
            distribution = Distribution(logits, temperature)
            parts.append(
                (
                    distribution.logprobs(tokens),
                    distribution.draw(uniform),
                    *distribution.distance(uniform, tokens),
                )
            )
        return tuple(torch.cat(each) for each in zip(*parts, strict=True))

    def compare(
        self,
        where: str,
        episode: Trajectory,
        turns: Sequence[_Turn],
        rescore: Checks,
        sampling: Checks,
    ) -> None:
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

            rescore.counted += 1
            if failure := self._gaps.add((turn.logprobs - logged).abs(), described):
                rescore.fail(failure)
            # what follows a forged turn was read under other words
            if honest and self._repeats_draws:
                sampling.counted += len(ids)
                honest = self._is_drawn(where, episode, turn, ids, sampling)

    def close(self, rescore: Checks, sampling: Checks) -> None:
        """After the last turn: fail what is too much for all of them together."""
        self._gaps.close(rescore)
        self._outside.close(sampling)
        self._below.close(sampling)

    def _is_drawn(
        self, where: str, episode: Trajectory, turn: _Turn, ids: Sequence[int], sampling: Checks
    ) -> bool:
        at = f"{where} turn {turn.number}"

        def described(index: int) -> str:
            far = (
                f"{float(turn.below[index]):.3g} nats"
                if not episode.temperature
                else f"{float(turn.outside[index]):.3g} of the probability"
            )
            return (
                f"{at} token {turn.start + index} (id {ids[index]}): the random numbers of this"
                f" sample draw id {int(turn.drawn[index])}, {far} away{self._twins(where, episode)}"
            )

        off, values = (
            (self._outside, turn.outside) if episode.temperature else (self._below, turn.below)
        )
        if failure := off.add(values, described):
            sampling.fail(failure)
        elif not set(ids[:-1]).isdisjoint(self._stop_ids) or len(ids) > self._max_new_tokens:
            sampling.fail(
                f"{at}: {len(ids)} tokens that go on after a stop token or rollout.max_new_tokens"
                f" {self._max_new_tokens}"
            )
        elif ids[-1] not in self._stop_ids and len(ids) < self._max_new_tokens:
            sampling.fail(
                f"{at}: it ends after {len(ids)} tokens without a stop token; the engine goes on"
                f" to {self._max_new_tokens}"
            )
        else:
            return True
        return False

    def _twins(self, where: str, episode: Trajectory) -> str:
        """Whose tokens these are.
        Equal texts alone are honest where little is left to chance; drawn they cannot be.
        """
        own = [turn.version for turn in episode.turns]
        same = [
            name
            for name, other in self._logged
            if name != where
            and other.input_ids == episode.input_ids
            and [turn.version for turn in other.turns] == own
        ]
        return f"; its tokens are those of {same[0]}" if same else ""
