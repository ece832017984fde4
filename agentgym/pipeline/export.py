"""Export of a commit as a Hugging Face model folder, or of its adapter as a folder for peft."""

from __future__ import annotations

from pathlib import Path

from agentgym.config import ConfigError, RunConfig
from agentgym.models.checkpoint import adapter_of, has_weights, save_adapter, save_pretrained
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
    load. Large weights go to several files with an index.

    run: one that was started with this state folder, for example r3d1c27a5b9e0 or its beginning;
    empty: the configured one.
    best: export the commit that did best in validation (the first of equal ones), not the newest.
    adapter: export the adapter alone, for `PeftModel.from_pretrained`; else merged weights.
    Result: the commit. Errors: ConfigError if no commit has weights, or the folder exists already;
    BlobMissing, DigestMismatch.
    """
    if folder.exists():
        raise ConfigError(f"{folder} exists; name a folder that does not, or remove it")
    store = open_store(cfg)
    manifest = commit_of(cfg, store, name, run=run)
    if best:
        scored = scores(store, name, manifest.key)
        if not scored:
            raise ConfigError(f"step {name} has no commit that was validated")
        seq = max(scored, key=lambda entry: entry[0])[1]
        manifest = store.history(name, manifest.key)[seq]
        if not store.has(manifest):
            raise ConfigError(
                f"the commit of step {name} that did best in validation, {seq}, has no weights any"
                " more; train with store.keep_best=true"
            )
    if adapter:
        trained = adapter_of(store, manifest)
        if trained is None:
            raise ConfigError(
                f"step {name} commit {manifest.seq} holds whole weights and no adapter; export it"
                " without --adapter"
            )
        base = trained.base.manifest
        # weights that a warm start trained have no published name
        name_of_base = None if "sft_step" in base.state else base.config["model"]["name"] or None
        save_adapter(folder, trained, base_name=name_of_base)
    else:
        save_pretrained(folder, store, manifest)
    return manifest


def commit_of(cfg: RunConfig, store: RunStore, name: str, *, run: str = "") -> Manifest:
    """Return the newest commit of a step. run: see `export`.

    Errors: ConfigError if there is none or it has no weights.
    """
    heads = _steps_of_run(cfg, store, run, name) if run else _configured(cfg, store, name)
    manifest = heads.get(name)
    if manifest is None or not has_weights(manifest):
        having = [step for step, head in heads.items() if has_weights(head)]
        raise ConfigError(
            f"step {name} has no commit with weights; those that have:"
            f" {', '.join(having) or 'none'}"
        )
    return manifest


def _configured(cfg: RunConfig, store: RunStore, name: str) -> dict[str, Manifest]:
    """Return step -> newest commit for the finished steps of this configuration and for `name`."""
    table, done = steps_of(cfg), finished(cfg, store)
    if name not in table:
        raise ConfigError(f"unknown step {name!r}; this configuration has: {', '.join(table)}")
    step = table[name]
    begun = all(parent in done for parent in step.parents)
    head = store.head(name, key_of(step, cfg, done)) if begun else None
    return done if head is None else {**done, name: head}


def _steps_of_run(cfg: RunConfig, store: RunStore, run: str, name: str) -> dict[str, Manifest]:
    """Return step -> newest commit of a run, from the local notes about its deliveries to MLflow.

    The configured run is found without such notes.
    Errors: ConfigError if no run or several have this name.
    """
    known = delivered_steps(cfg)
    matching = [key for key in known if key.startswith(run.removeprefix("r"))]
    if not matching and run_key(cfg).startswith(run.removeprefix("r")):
        return _configured(cfg, store, name)
    if len(matching) != 1:
        there = ", ".join(f"r{key[:12]}" for key in matching or known) or "no run"
        what = "is several" if matching else "is none"
        raise ConfigError(f"run {run} {what} of those known under {cfg.state_dir}: {there}")
    steps = known[matching[0]]
    return {head.step: head for head in store.heads() if (head.step, head.key[:16]) in steps}
