"""Forecast of the memory, bytes of a commit and time that a run needs, before it starts.

Bytes follow from the model's shape. Time follows from the arithmetic of the tokens that the
settings ask for and from the speed of this machine, which is measured on a CPU and assumed for a
GPU. The time is right within a factor of two if actions and episodes have half of the tokens that
they may have.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from agentgym.algorithms.recipe import recipe_of
from agentgym.config import RunConfig
from agentgym.config.pretrained import INSTRUCTIONS, defaults
from agentgym.pipeline.plan import amount
from agentgym.pipeline.table import value_at
from agentgym.steps.step import stages

# Shares of the maximum: tokens of an action or an observation, turns of an episode.
OF_TOKENS, OF_TURNS = 0.5, 0.6
OF_GROUPS = 0.6  # share of groups whose rewards differ
PROCESS = 900 << 20  # bytes of a process that has imported torch, transformers and MLflow
ADAM, MASTER, GRADIENT = 8, 4, 4  # bytes of a trained parameter
# Bytes of activations a token and a layer, as multiples of hidden and MLP size: measured with 7
# billion parameters, see docs/reference/memory-per-rank.md.
OF_HIDDEN, OF_MLP = 10, 4
# A CPU: seconds of environment and client per turn; fixed seconds per pipeline step
TURN_S, STEP_S = 0.001, 3.0
THREAD_GAIN = 0.7  # speed that each thread after the first adds
TRAIN_SHARE = 0.7  # of the matrix speed, in a forward and backward pass
HALF_BATCH = 48  # episodes in flight at which decoding has half the speed of a long forward
LOAD_FLOP = 3_000  # per parameter, to load and check a pretrained model
# A GPU, as measured on an H200: shares of its peak and bytes a second
GPU_TRAIN_SHARE, GPU_READ_SHARE = 0.2, 0.3
GPU_BANDWIDTH, GPU_DECODE_S, GPU_SAMPLING_SHARE = 3.3e12, 0.005, 0.4
GPU_STEP_S = 75.0  # start of an engine


@dataclass(frozen=True, slots=True)
class Shape:
    """The size of a model."""

    num_parameters: int
    num_trained: int
    hidden_size: int
    mlp_size: int
    num_layers: int
    vocab_size: int
    kv_values: int  # keys and values of a token, in all layers
    itemsize: int  # bytes of a weight


@dataclass(frozen=True, slots=True)
class Work:
    """Tokens and turns of a run or of a part of it."""

    sampled: float
    read: float  # by the engine: prompts and observations
    passes: float  # tokens times learner passes; a pass has 2 FLOP per parameter
    turns: float

    def __add__(self, other: Work) -> Work:
        return Work(*(getattr(self, name) + getattr(other, name) for name in self.__slots__))


@dataclass(frozen=True, slots=True)
class Forecast:
    """Memory in bytes and time in seconds that a run needs."""

    device: str  # cpu or cuda
    learner_bytes: int  # of one rank, on the device
    engine_bytes: int  # of one engine, on the device
    host_bytes: int  # of one process in the host's memory; on a CPU with the two above
    commit_bytes: int
    weight_bytes: int  # of one checkpoint
    seconds: float | None  # None: the speed of the device is not known
    speed: str  # text on the measured or assumed speed of the device
    optimizer_bytes: int = 0  # of learner_bytes, with gradients
    activation_bytes: int = 0  # of learner_bytes, during an update
    cache_bytes: int = 0  # of engine_bytes, for keys and values
    step_seconds: float | None = None  # of an optimizer step with its rollouts
    device_bytes: int | None = None  # memory of the GPU; None: this machine has none

    @property
    def duration(self) -> str:
        if self.seconds is None:
            return "an unknown time"
        if self.seconds < 90:
            return f"about {self.seconds:.0f} s"
        if self.seconds < 5400:
            return f"about {self.seconds / 60:.0f} min"
        return f"about {self.seconds / 3600:.1f} h"

    def lines(self, num_commits: int) -> list[str]:
        """Return the forecast as text. num_commits: the stages' commits by store.commit_every."""
        written = amount(self.commit_bytes * num_commits)
        step = "" if self.step_seconds is None else f", {self.step_seconds:.1f} s an optimizer step"
        return [
            *self._memory(),
            f"store    {amount(self.commit_bytes)} a commit, {num_commits} by store.commit_every:"
            f" {written} written; {amount(self.weight_bytes)} of weights a checkpoint",
            f"time     {self.duration}{step} ({self.speed})",
        ]

    def _memory(self) -> Iterator[str]:
        """Yield the memory of learner and engine, and a line that states if a GPU has enough."""
        if self.device == "cpu":
            parts = f"learner {amount(self.learner_bytes)}, engine {amount(self.engine_bytes)}"
            yield f"memory   {amount(self.host_bytes)} on the host ({parts})"
            return
        optimizer, activations = self.optimizer_bytes, self.activation_bytes
        yield (
            f"memory   learner {amount(self.learner_bytes)} on the GPU (weights"
            f" {amount(self.learner_bytes - optimizer - activations)}, gradients and optimizer"
            f" {amount(optimizer)}, activations {amount(activations)})"
        )
        yield (
            f"         engine {amount(self.engine_bytes)} on the GPU (weights"
            f" {amount(self.engine_bytes - self.cache_bytes)}, cache {amount(self.cache_bytes)});"
            f" {amount(self.host_bytes)} on the host"
        )
        if self.device_bytes is None:
            return
        both = self.learner_bytes + self.engine_bytes
        in_turns = max(self.learner_bytes, both - activations)
        there = f"         the GPU has {amount(self.device_bytes)}:"
        if both <= self.device_bytes:
            yield f"{there} both fit at once"
        elif in_turns <= self.device_bytes:
            yield f"{there} they fit in turns, the engine sleeps while the learner updates"
        else:
            yield (
                f"{there} they need {amount(in_turns)} in turns; lower"
                " learner.micro_batch_tokens or rollout.concurrency, or set"
                " learner.offload_optimizer, learner.activation_checkpointing or lora.rank"
            )


def forecast(cfg: RunConfig, commit: int | None = None) -> Forecast:
    """Estimate a run's memory and time, and measure a CPU's speed, see `matrix_speed`.

    commit: bytes of one commit, if known; None: estimated.
    Errors: ConfigError if the model's config.json is not on this machine.
    """
    from agentgym.models.half import has_fast_half

    shape = shape_of(cfg)
    is_cpu = cfg.compute_device == "cpu"
    widens = is_cpu and shape.itemsize < 4 and not has_fast_half()
    state = shape.num_trained * (ADAM + (MASTER if shape.itemsize < 4 else 0))
    weights = shape.num_parameters * shape.itemsize
    is_adapter = shape.num_trained < shape.num_parameters
    active = _activations(cfg, shape)
    offloaded = state if cfg.learner.offload_optimizer else 0
    stepped = shape.num_trained * GRADIENT + (state - offloaded) // cfg.ray.num_ranks
    learner = weights + stepped + active
    learner += weights if getattr(cfg.algorithm, "kl_coef", 0) else 0
    cached = _slots(cfg) * cfg.model.context_tokens * shape.kv_values * shape.itemsize
    cached += shape.num_parameters * 4 if widens else 0
    engine = weights + cached
    commit = commit or state + (shape.num_trained * shape.itemsize if is_adapter else weights)
    host = PROCESS + offloaded + commit
    if is_cpu:
        waiting = 0 if cfg.rollout.max_staleness else active  # learner and engine take turns
        host = PROCESS + max(learner + engine - cached, learner - waiting + engine)
    seconds_of, fixed_s, speed = _clock(cfg, shape)
    whole = step = None
    if seconds_of is not None:
        whole = seconds_of(work_of(cfg)) + fixed_s
        step = seconds_of(_training(cfg)) / sum(cfg.horizon.stage_steps)
    return Forecast(
        device=cfg.compute_device,
        learner_bytes=learner,
        engine_bytes=engine,
        host_bytes=host,
        commit_bytes=commit,
        weight_bytes=weights,
        seconds=whole,
        speed=speed,
        optimizer_bytes=stepped,
        activation_bytes=active,
        cache_bytes=cached,
        step_seconds=step,
        device_bytes=None if is_cpu else _memory_of_gpu(),
    )


def _memory_of_gpu() -> int | None:
    import torch

    is_there = torch.cuda.is_available()
    return int(torch.cuda.get_device_properties(0).total_memory) if is_there else None


@dataclass(frozen=True, slots=True)
class Chosen:
    """A setting whose default depends on the kind of model: its value, default and reason."""

    path: str
    value: Any
    usual: Any
    why: str

    def __str__(self) -> str:
        usual = "" if self.value == self.usual else f"usual: {_plain(self.usual)}; "
        return f"{self.path:<33}{_plain(self.value):<8}{usual}{self.why}"


def usual_pretrained(cfg: RunConfig) -> list[Chosen]:
    """Return every setting whose default depends on the kind of model, sorted by path."""
    tree = cfg.model_dump(mode="json")
    usual = sorted(defaults(tree).items())
    return [Chosen(path, value_at(tree, path), one.value, one.why) for path, one in usual]


def shape_of(cfg: RunConfig) -> Shape:
    """Return the model's size. Errors: ConfigError if its config.json is not on this machine."""
    from agentgym.models.adapter import chosen_modules
    from agentgym.models.architecture import published_architecture
    from agentgym.models.model import empty_model, tiny_architecture
    from agentgym.models.networks import blocks

    hub = cfg.model.source == "hub"
    if hub:
        architecture = published_architecture(cfg.model, local_only=True)
    else:
        architecture = tiny_architecture(cfg.model, vocab_size=cfg.model.vocab_size)
    model = empty_model(architecture.to_json_string())
    count = sum(parameter.numel() for parameter in model.parameters())
    text = model.config.get_text_config(decoder=True)
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    trained = count
    if cfg.lora.rank:
        ends = chosen_modules(model, cfg.lora)
        trained = sum(
            cfg.lora.rank * (layer.in_features + layer.out_features)
            for block in blocks(model)
            for name, layer in block.named_modules()
            if name.rpartition(".")[2] in ends
        )
    published = str(getattr(architecture, "dtype", None) or "float32")
    dtype = cfg.model.dtype if cfg.model.dtype != "auto" else published if hub else "float32"
    return Shape(
        num_parameters=count,
        num_trained=trained,
        hidden_size=text.hidden_size,
        mlp_size=getattr(text, "intermediate_size", None) or 4 * text.hidden_size,
        num_layers=text.num_hidden_layers,
        vocab_size=text.vocab_size,
        kv_values=2 * text.num_hidden_layers * heads * width,
        itemsize=4 if dtype.endswith("float32") else 2,
    )


def work_of(cfg: RunConfig) -> Work:
    """Return the work of training, validation, the warm start and every evaluation."""
    evaluation, validation, warm = cfg.evaluation, cfg.validation, cfg.warm_start
    num_models = len(stages(cfg.horizon)) + 1 + warm.enabled
    turns = OF_TURNS * evaluation.max_turns
    episodes = [(num_models * evaluation.num_items * (evaluation.num_samples + 1), turns)]
    if validation.every:
        count = sum(cfg.horizon.stage_steps) // validation.every * validation.num_items
        episodes.append((count, OF_TURNS * validation.max_turns))
    work = _training(cfg) + _played(cfg, episodes, evaluation.num_samples + 1)
    if not warm.enabled:
        return work
    through = 3 * warm.steps * warm.batch_size * _length(cfg, turns)
    return work + Work(0, 0, through, warm.num_demos * turns)


def _training(cfg: RunConfig) -> Work:
    """Return the work of all stages: rollouts and updates."""
    rollout, algorithm = cfg.rollout, cfg.algorithm
    # Forward and backward count as three passes. One more pass is for the old log-probabilities,
    # which a single update computes itself, and one for a reference model. Groups of equal rewards
    # have no advantage and are left out.
    carrying = OF_GROUPS if recipe_of(algorithm.recipe).needs_groups else 1.0
    epochs = getattr(algorithm, "epochs", 1)
    is_only = epochs == getattr(algorithm, "minibatches", 1) == 1
    merged = is_only and cfg.learner_settings.share_prefixes
    passes = 3 * carrying * epochs + (1 - carrying if merged else 1)
    passes += bool(getattr(algorithm, "kl_coef", 0))
    at_once = rollout.items_per_step * rollout.group_size
    episodes = [
        (stage.num_steps * at_once, OF_TURNS * stage.max_turns) for stage in stages(cfg.horizon)
    ]
    group = rollout.group_size
    through = sum(count * passes * _length(cfg, played, group) for count, played in episodes)
    return _played(cfg, episodes, group) + Work(0, 0, through, 0)


def _played(cfg: RunConfig, episodes: Sequence[tuple[float, float]], group: int) -> Work:
    """Return the engine's work. episodes: (number, turns of one); group: episodes of one item."""
    action, work = OF_TOKENS * cfg.rollout.max_new_tokens, Work(0, 0, 0, 0)
    for count, turns in episodes:
        sampled = turns * action
        read = _length(cfg, turns, group) - sampled
        work += Work(count * sampled, count * read, 0, count * turns)
    return work


def _length(cfg: RunConfig, turns: float, group: int = 1) -> float:
    """Return tokens computed per episode; with share_prefixes a group shares its opening."""
    rollout = cfg.rollout
    observation = OF_TOKENS * rollout.observation_tokens
    instructions = OF_TOKENS * INSTRUCTIONS if rollout.instructions else 0.0
    opening = instructions + observation
    if cfg.learner_settings.share_prefixes:
        opening /= group
    return opening + turns * (OF_TOKENS * rollout.max_new_tokens + observation)


def _plain(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _activations(cfg: RunConfig, shape: Shape) -> int:
    from agentgym.learner.micro_batches import LOGITS_COPIES

    settings = cfg.learner
    usual, chunk = settings.usual_sizes
    tokens = min(usual, cfg.model.context_tokens * 64)
    layer = (OF_HIDDEN * shape.hidden_size + OF_MLP * shape.mlp_size) * shape.itemsize
    token_bytes = (
        shape.num_layers * shape.hidden_size * shape.itemsize + layer
        if settings.activation_checkpointing
        else shape.num_layers * layer
    )
    return tokens * token_bytes + LOGITS_COPIES * 4 * min(chunk, tokens) * shape.vocab_size


def _slots(cfg: RunConfig) -> int:
    """Return the maximum number of episodes in flight."""
    return min(cfg.rollout.concurrency, cfg.rollout.items_per_step * cfg.rollout.group_size)


def _clock(cfg: RunConfig, shape: Shape) -> tuple[Callable[[Work], float] | None, float, str]:
    """Return (function from work to seconds, fixed seconds of a run, text about the speed).

    The function is None if the speed of the device is not known.
    """
    flop, slots = 2.0 * shape.num_parameters, _slots(cfg)
    num_steps = 2 * len(stages(cfg.horizon)) + 4
    if cfg.compute_device == "cpu":
        speed = matrix_speed(shape.hidden_size, shape.mlp_size)
        batched = slots / (slots + HALF_BATCH)
        cores = os.cpu_count() or 1
        learning, playing = (  # speed of these threads, one per core at most, relative to one
            1 + THREAD_GAIN * (min(threads, cores) - 1)
            for threads in (cfg.learner_settings.threads, cfg.engine_threads)
        )
        loads = 2 * LOAD_FLOP * shape.num_parameters / speed if cfg.model.source == "hub" else 0

        def on_cpu(work: Work) -> float:
            passed = work.passes / learning + (work.sampled / batched + work.read) / playing
            return flop * passed / (TRAIN_SHARE * speed) + TURN_S * work.turns

        text = f"{speed / 1e9:.0f} GFLOP/s, measured in one thread"
        return on_cpu, loads / learning + STEP_S * num_steps, text
    import torch

    from agentgym.learner.micro_batches import peak_tflops

    peak = cfg.compute_peak_tflops
    if peak is None and torch.cuda.is_available():
        peak = peak_tflops(torch.cuda.get_device_name(0))
    if peak is None:
        return None, 0.0, "its GPU is not here: compute_peak_tflops names its speed"
    speed, weights = peak * 1e12, shape.num_parameters * shape.itemsize
    decode = slots / (GPU_DECODE_S + weights / GPU_BANDWIDTH) * GPU_SAMPLING_SHARE

    def on_gpu(work: Work) -> float:
        learned = flop * work.passes / (GPU_TRAIN_SHARE * speed) / cfg.ray.num_ranks
        played = work.sampled / decode + flop * work.read / (GPU_READ_SHARE * speed)
        return learned + played / cfg.ray.num_workers

    text = f"{peak:.0f} TFLOP/s of the device, shares of it as measured on an H200"
    return on_gpu, GPU_STEP_S * num_steps, text


def matrix_speed(hidden_size: int, mlp_size: int) -> float:
    """Measure FLOP/s of float32 products of this shape. Torch has one thread from then on."""
    import torch

    from agentgym.models.model import set_threads

    set_threads(1)
    tokens = 256
    states, weights = torch.ones(tokens, hidden_size), torch.ones(hidden_size, mlp_size)
    count, began = 0, time.thread_time()
    while (passed := time.thread_time() - began) < 0.5 or count < 2:
        states @ weights
        count += 1
    return count * 2.0 * tokens * hidden_size * mlp_size / passed
