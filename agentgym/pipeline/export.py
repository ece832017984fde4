"""A commit as an ordinary Hugging Face model folder, or its adapter as a folder of peft's."""

from __future__ import annotations

from pathlib import Path

from agentgym.config import ConfigError, RunConfig
from agentgym.models.checkpoint import (
    adapter_of,
    has_weights,
    save_adapter,
    save_pretrained,
)
from agentgym.pipeline.table import finished, key_of, open_store, run_key, steps_of
from agentgym.steps.context import scores
from agentgym.store.manifest import Manifest
from agentgym.store.runstore import RunStore
from agentgym.tracking.deliver import delivered_steps


def export(
    cfg: RunConfig,
    name: str,
    folder: Path,
    *,
    run: str = "",
    best: bool = False,
    adapter: bool = False,
) -> Manifest:
    """Write the newest commit of a step to `folder`, in files that transformers, vLLM and others
    load; large weights in several, as their index says.

    run: one that was started with this state folder, for example r3d1c27a5b9e0 or its beginning;
    empty: the configured one.
    best: the commit that did best in validation, the first of several, in place of the newest.
    adapter: the adapter alone, as `PeftModel.from_pretrained` reads it; else merged weights.
    Result: the commit. Errors: ConfigError where there is none with weights, or the folder is
    there already; BlobMissing, DigestMismatch.
    """
    if folder.exists():
        raise ConfigError(f"{folder} exists; name a folder that does not, or remove it")
    store = open_store(cfg)
    manifest = commit_of(cfg, store, name, run=run)
    if best:
        found = scores(store, name, manifest.key)
        if not found:
            raise ConfigError(f"step {name} has no commit that was validated")
        seq = max(found, key=lambda each: each[0])[1]
        manifest = store.history(name, manifest.key)[seq]
        if not store.has(manifest):
            raise ConfigError(
                f"the commit of step {name} that did best in validation, {seq}, has no weights any"
                " more; train with store.keep_best=true"
            )
    if adapter:
        held = adapter_of(store, manifest)
        if held is None:
            raise ConfigError(
                f"step {name} commit {manifest.seq} holds whole weights and no adapter; export it"
                " without --adapter"
            )
        save_adapter(folder, held, base_name=_published_name(held.base.manifest))
    else:
        save_pretrained(folder, store, manifest)
    return manifest


def commit_of(cfg: RunConfig, store: RunStore, name: str, *, run: str = "") -> Manifest:
    """The newest commit of a step, which has weights. run: as for `export`.
    Errors: ConfigError where there is none.
    """
    heads = _steps_of_run(cfg, store, run, name) if run else _configured(cfg, store, name)
    manifest = heads.get(name)
    if manifest is None or not has_weights(manifest):
        having = [each for each, head in heads.items() if has_weights(head)]
        raise ConfigError(
            f"step {name} has no commit with weights; those that have:"
            f" {', '.join(having) or 'none'}"
        )
    return manifest


def _published_name(base: Manifest) -> str | None:
    """Of the model whose weights these are as they came; None where a warm start trained them."""
    return None if "sft_step" in base.state else base.config["model"]["name"] or None


def _configured(cfg: RunConfig, store: RunStore, name: str) -> dict[str, Manifest]:
    """What this configuration has of each step, done or, of the named one, half done."""
    table, done = steps_of(cfg), finished(cfg, store)
    if name not in table:
        raise ConfigError(f"unknown step {name!r}; this configuration has: {', '.join(table)}")
    step = table[name]
    begun = all(parent in done for parent in step.parents)
    head = store.head(name, key_of(step, cfg, done)) if begun else None
    return done if head is None else {**done, name: head}


def _steps_of_run(cfg: RunConfig, store: RunStore, run: str, name: str) -> dict[str, Manifest]:
    """What a run has of each step, by what was noted when it brought its numbers to MLflow; of
    one that another machine brought there, by the configuration that the store has of it.
    Errors: ConfigError where no run, or several, have this name.
    """
    known = delivered_steps(cfg)
    matching = [each for each in known if each.startswith(run.removeprefix("r"))]
    if not matching and run_key(cfg).startswith(run.removeprefix("r")):
        return _configured(cfg, store, name)
    if len(matching) != 1:
        there = ", ".join(f"r{each[:12]}" for each in matching or known) or "no run"
        what = "is several" if matching else "is none"
        raise ConfigError(f"run {run} {what} of those known under {cfg.state_dir}: {there}")
    steps = known[matching[0]]
    return {head.step: head for head in store.heads() if (head.step, head.key[:16]) in steps}
