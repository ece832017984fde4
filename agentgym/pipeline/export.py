"""A commit as an ordinary Hugging Face model folder."""

from __future__ import annotations

from pathlib import Path

from agentgym.config import ConfigError, RunConfig
from agentgym.models.checkpoint import has_weights, save_pretrained
from agentgym.pipeline.table import finished, key_of, open_store, steps_of
from agentgym.steps.context import scores
from agentgym.store.manifest import Manifest


def export(cfg: RunConfig, name: str, folder: Path, *, best: bool = False) -> Manifest:
    """Write the newest commit of this configuration's step to `folder`, in files that
    transformers, vLLM and others load; large weights in several, as their index says.

    best: the commit that did best in validation, the first of several, in place of the newest.
    Result: the commit. Errors: ConfigError where there is none with weights, or the folder is
    there already; BlobMissing, DigestMismatch.
    """
    table, store = steps_of(cfg), open_store(cfg)
    done = finished(cfg, store)
    if name not in table:
        raise ConfigError(f"unknown step {name!r}; this configuration has: {', '.join(table)}")
    if folder.exists():
        raise ConfigError(f"{folder} exists; name a folder that does not, or remove it")
    step = table[name]
    begun = all(parent in done for parent in step.parents)
    manifest = store.head(name, key_of(step, cfg, done)) if begun else None
    if manifest is None or not has_weights(manifest):
        having = [each for each, final in done.items() if has_weights(final)]
        raise ConfigError(
            f"step {name} has no commit with weights; those that have:"
            f" {', '.join(having) or 'none'}"
        )
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
    save_pretrained(folder, store, manifest)
    return manifest
