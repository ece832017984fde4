"""The plan of a run: which steps would run and why, and whether its model can be used."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from agentgym.config import LoraConfig, ModelConfig, RunConfig, first_of
from agentgym.models.architecture import published_architecture
from agentgym.pipeline.table import finished, key_of, open_store, semantic_of, steps_of
from agentgym.steps.step import Kind, Step, stages
from agentgym.store.manifest import Manifest
from agentgym.store.runstore import RunStore


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """One step of a plan."""

    name: str
    title: str
    action: Literal["skip", "resume", "run"]
    why: str


def plan(cfg: RunConfig) -> list[PlannedStep]:
    """Return all steps in order, with actions. Errors: ConfigError if the dataset is missing."""
    store = open_store(cfg)
    done = finished(cfg, store)
    return [_plan_step(step, cfg, store, done) for step in steps_of(cfg).values()]


def num_commits(cfg: RunConfig) -> int:
    """Number of commits that the stages of a run make by `store.commit_every`. Further ones, by
    `store.keep_best` and of exploration, are not counted; fewer remain if an alarm stops the run.
    """
    every = cfg.store.commit_every
    return sum(
        sum(step % every == 0 for step in range(stage.first_step, stage.last_step)) + 1
        for stage in stages(cfg.horizon)
    )


def commit_bytes(cfg: RunConfig) -> int | None:
    """Bytes of the largest recent commit of a training step with this model; None without one."""
    training = {step.name for step in steps_of(cfg).values() if step.kind is Kind.TRAIN}
    tree, store = cfg.semantic(), open_store(cfg)
    known = [
        head
        for head in store.heads()
        if head.step in training
        and head.blobs
        and all(head.config.get(name, tree[name]) == tree[name] for name in ("model", "lora"))
    ]
    if not known:
        return None
    last = known[-1]
    # the last commit of a step may lack the optimizer's state, which those before it have
    commits = store.history(last.step, last.key, after=last.seq - cfg.store.commit_every - 1)
    return max(sum(blob.size for blob in commit.blobs.values()) for commit in commits)


def amount(num_bytes: int) -> str:
    """Return a size with at most three digits and its unit, for example "1.5 GiB"."""
    amount = float(num_bytes)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if amount < 999.5:
            return f"{amount:.3g} {unit}"
        amount /= 1024
    return f"{amount:.3g} TiB"


def _plan_step(
    step: Step, cfg: RunConfig, store: RunStore, done: dict[str, Manifest]
) -> PlannedStep:
    if step.name in done:
        return PlannedStep(
            step.name, step.title, "skip", f"done, manifest {done[step.name].digest[:12]}"
        )
    waiting = [parent for parent in step.parents if parent not in done]
    known = store.heads(step.name)
    if waiting:
        # this step's key follows from its parents' digests, which are not known yet
        changed = _differences(step, cfg, known[-1]) if known else []
        suffix = f"; changed: {_few(changed)}" if changed else ""
        return PlannedStep(step.name, step.title, "run", f"after {_few(waiting)}{suffix}")
    head = store.head(step.name, key_of(step, cfg, done))
    if head is not None:
        steps = head.state.get("sft_step", head.state.get("num_items"))
        reached = head.state.get("global_step") if step.stage else steps
        return PlannedStep(step.name, step.title, "resume", f"at {reached} (commit {head.seq})")
    return PlannedStep(step.name, step.title, "run", _why_new(step, cfg, store, known, done))


def _why_new(
    step: Step, cfg: RunConfig, store: RunStore, known: list[Manifest], done: dict[str, Manifest]
) -> str:
    """Return the reason why a step must run anew: it was collected, it never ran, or its difference
    from the step's latest commits in the store, `known[-1]`.

    done: the finished steps of this run, by name, with all of the step's parents.
    """
    if store.is_collected(step.name, key_of(step, cfg, done)):
        return "collected by `agentgym gc`"
    if not known:
        return "never ran"
    latest = known[-1]
    changed = _differences(step, cfg, latest)
    if changed:
        return f"changed: {_few(changed)}"
    parents = [name for name in step.parents if latest.parents.get(name) != done[name].digest]
    if parents:
        return f"other input: {_few(parents)}"
    return "its source code changed" if step.parents else "the dataset or the source code changed"


def _differences(step: Step, cfg: RunConfig, before: Manifest) -> list[str]:
    """Return the lines of `changed`, first those of settings that only one version has."""
    lines = changed(semantic_of(step, cfg), before.config)
    return sorted(lines, key=lambda line: not line.endswith((" is gone", " is new")))


def changed(now: Any, before: Any, path: str = "") -> list[str]:
    """Return `path before -> now`, `path is gone` or `path is new` for each differing value."""
    if not (isinstance(now, dict) and isinstance(before, dict)):
        return [] if now == before else [f"{path.removesuffix('.')} {before} -> {now}"]
    lines = [f"{path}{key} is gone" for key in before if key not in now]
    for key, value in now.items():
        if key in before:
            lines += changed(value, before[key], f"{path}{key}.")
        else:
            lines.append(f"{path}{key} is new")
    return lines


def _few(texts: list[str], num: int = 3) -> str:
    return first_of([text if len(text) <= 80 else f"{text[:77]}..." for text in texts], num)


def check_model(config: ModelConfig, lora: LoraConfig) -> None:
    """Raise ConfigError if a published model is missing or not supported, with its tokenizer and
    chat template, or if the model lacks the layers that `lora` names.
    """
    published = published_architecture(config) if config.source == "hub" else None
    if published:
        from agentgym.models.chat import ChatRenderer
        from agentgym.models.tokenizer import load_tokenizer

        ChatRenderer(load_tokenizer(config.name, config.revision, name=config.name), config.chat)
    if lora.rank:
        from agentgym.models.adapter import chosen_modules
        from agentgym.models.model import empty_model, tiny_architecture

        architecture = published or tiny_architecture(config, vocab_size=config.vocab_size)
        chosen_modules(empty_model(architecture.to_json_string()), lora)
