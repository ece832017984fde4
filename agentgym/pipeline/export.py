"""Export of weights as a folder, with a model card for the Hugging Face Hub, lineage and digests.

These are made from the store alone and hold no times: the same step gives the same bytes until it
is evaluated or judged again.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from agentgym.config import ConfigError, RunConfig
from agentgym.evaluation.history import History, Version
from agentgym.evaluation.result import CLOCK, RESULT, Result
from agentgym.models.architecture import policy_digest
from agentgym.pages import estimate, label, percent
from agentgym.pipeline.contenders import commit_of, key_of_run
from agentgym.pipeline.stored_config import find_run
from agentgym.pipeline.stored_config import label as run_name
from agentgym.pipeline.table import open_store
from agentgym.pipeline.versions import (
    ancestors,
    data_of,
    decision_of,
    decisions_on,
    evaluations_of,
    step_of,
)
from agentgym.steps.context import scores
from agentgym.store.manifest import BlobMissing, Manifest, canonical_json, sha256
from agentgym.store.runstore import RunStore
from agentgym.tracking.markdown import literal, markdown
from agentgym.tracking.registry import file_digests

CARD, LINEAGE, DIGESTS = "README.md", "lineage.json", "SHA256SUMS"
SCHEMA, SHORT = 1, 12
NUMBERS = ("greedy", "avg_at_", "pass_at_")  # beginnings of the success rates that a card shows
REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")  # of the Hub

LOAD = """from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("FOLDER")
tokenizer = AutoTokenizer.from_pretrained("FOLDER")"""
LOAD_ADAPTER = """from peft import PeftModel
from transformers import AutoModelForCausalLM

base = AutoModelForCausalLM.from_pretrained("BASE")
model = PeftModel.from_pretrained(base, "FOLDER")"""


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
    load, with a model card, lineage and digests. Large weights go to several files with an index.

    run: one that was started with this state folder, for example r3d1c27a5b9e0 or its beginning;
    empty: the configured one.
    best: export the commit that did best in validation (the first of equal ones), not the newest.
    adapter: export the adapter alone, for `PeftModel.from_pretrained`; else merged weights.
    Result: the commit. Errors: ConfigError if the folder exists or no commit has what is exported;
    BlobMissing, DigestMismatch.
    """
    from agentgym.models.checkpoint import adapter_of, save_adapter, save_pretrained

    if folder.exists():
        raise ConfigError(f"{folder} exists; name a folder that does not, or remove it")
    store = open_store(cfg)
    manifest = commit_of(cfg, store, name, run=run)
    base_name = manifest.config["model"]["name"] or None
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
        if "sft_step" in base.state:  # weights that a warm start trained have no published name
            base_name = None
        save_adapter(folder, trained, base_name)
    else:
        save_pretrained(folder, store, manifest)
    name_of_run = run_name(key_of_run(cfg, run))
    describe(folder, cfg, store, manifest, name_of_run, base_name=base_name, is_adapter=adapter)
    return manifest


def describe(
    folder: Path,
    cfg: RunConfig,
    store: RunStore,
    manifest: Manifest,
    run: str,
    *,
    base_name: str | None,
    is_adapter: bool,
) -> None:
    """Write card, lineage and digests next to the exported weights of a commit.
    run: name of the run that it was exported from; base_name: the pretrained model that the weights
    were made from or, for an adapter, that they are to be added to; None: no published one.
    The digests come last: a folder that has them is complete.
    """
    lineage = lineage_of(cfg, store, manifest, run)
    text = json.dumps(lineage, indent=1, ensure_ascii=False, allow_nan=False)
    (folder / LINEAGE).write_text(f"{text}\n", encoding="utf-8", errors="replace")
    card = card_of(lineage, base_name, is_adapter=is_adapter)
    (folder / CARD).write_text(card, encoding="utf-8", errors="replace")
    sums = "".join(f"{digest}  {path}\n" for path, digest in file_digests(folder).items())
    (folder / DIGESTS).write_text(sums, encoding="utf-8")


def lineage_of(cfg: RunConfig, store: RunStore, manifest: Manifest, run: str) -> dict[str, Any]:
    """Return in JSON types what a commit was made of, its evaluations, and the decisions on it that
    this store has.
    """
    heads = {head.digest: head for head in store.heads()} | {manifest.digest: manifest}
    made_of = list(ancestors(heads, manifest.digest))
    record = find_run(store, run)
    sources = record.config["sources"] if record is not None else {}
    weights = policy_digest(manifest)
    version, model = Version("", manifest.digest), manifest.config["model"]
    evaluations = evaluations_of(heads, manifest.digest, weights)
    entries = History(store, cfg.registered_model, cfg.registry.alias).entries()
    return {
        "schema_version": SCHEMA,
        "run": run,
        **step_of(manifest),
        "weights": weights,
        "base_model": {"name": model["name"], "revision": model.get("revision")}
        if model["name"]
        else None,
        "data": data_of(made_of),
        "config": {"digest": sha256(canonical_json(manifest.config)), "settings": manifest.config},
        "source": sources.get(manifest.step),
        "parents": [{**step_of(head), "source": sources.get(head.step)} for head in made_of[1:]],
        "evaluations": [
            _evaluation(store, head)
            for head in sorted(evaluations, key=lambda head: (head.step, head.key))
            if head.done
        ],
        "decisions": [decision_of(entry, version) for entry in decisions_on(entries, version)],
    }


def _evaluation(store: RunStore, head: Manifest) -> dict[str, Any]:
    """Return an evaluation's identity and, unless its result is gone from the store, its settings
    and numbers by environment.
    """
    row = step_of(head)
    try:
        where = f"{head.step} ({head.key[:12]})"
        result = Result.from_bytes(store.read(head, RESULT), store.read(head, CLOCK), where)
    except (BlobMissing, KeyError):  # collected, or of a release without results
        return row
    row |= {"result": result.digest, "valid": bool(result.about.get("valid")), "environments": []}
    for settings in result.identity["protocol"]["envs"]:
        name = settings["env"]["name"]
        numbers = result.numbers[name]
        items = settings["items"]
        success = {
            key: {part: value[part] for part in ("mean", "low", "high")}
            for key, value in numbers["summary"].items()
            if key.startswith(NUMBERS)
        }
        row["environments"].append(
            {
                "name": name,
                "split": "given" if items.get("ids") or items.get("file") else items["split"],
                "num_items": numbers["num_items"],
                "coverage": numbers["coverage"],
                **{key: settings[key] for key in ("num_samples", "max_turns", "temperature")},
                "success": success,
            }
        )
    return row


def card_of(lineage: Mapping[str, Any], base_name: str | None, *, is_adapter: bool) -> str:
    """Return the model card, Markdown with YAML, of a commit. Arguments: see `describe`."""
    from huggingface_hub import ModelCardData

    name, settings = f"{lineage['step']} of {lineage['run']}", lineage["config"]["settings"]
    recipe = settings.get("algorithm", {}).get("recipe")
    is_published = REPOSITORY.fullmatch(base_name or "") and not Path(base_name or "").exists()
    base = base_name if is_published else None  # a folder of this machine is no base for others
    results = list(_eval_results(lineage))
    data = ModelCardData(
        library_name="peft" if is_adapter else "transformers",
        pipeline_tag="text-generation",
        base_model=base,
        base_model_relation=("adapter" if is_adapter else "finetune") if base else None,
        tags=["agentgym-flow", "reinforcement-learning", *filter(None, [recipe]), *_envs(settings)],
        model_name=name if results else None,
        eval_results=results or None,
    )
    kind, load = ("A LoRA adapter", LOAD_ADAPTER) if is_adapter else ("Weights", LOAD)
    parts = [
        f"---\n{data.to_yaml()}\n---\n\n# {name}",
        f"{kind} of an agent that acts over several turns, trained with agentgym-flow: step"
        f" {lineage['step']}, commit {lineage['commit']}, of run {lineage['run']}.",
        f"```python\n{load}\n```",
        "## Training\n\n" + markdown(["", ""], list(_training(lineage)), right=2),
        "## Evaluation\n\n" + _evaluations(lineage),
        "## Decisions\n\n" + _decisions(lineage),
        f"## Origin\n\n`{LINEAGE}` has the digests of all steps, data, settings and source that"
        f" these weights were made of. `sha256sum -c {DIGESTS}` checks the files. No license is"
        " stated here: those of the base model and of the data decide.",
    ]
    return "\n\n".join(parts) + "\n"


def _envs(settings: Mapping[str, Any]) -> list[str]:
    """Return the names of the environments that a step's settings name."""
    envs = [settings["env"]] if "env" in settings else []
    return [env["name"] for env in (*envs, *settings.get("mix", ()))]


def _rows(lineage: Mapping[str, Any]) -> Iterator[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """Yield (evaluation, an environment of it) for all with enough episodes that count."""
    for evaluation in lineage["evaluations"]:
        if evaluation.get("valid"):
            for env in evaluation["environments"]:
                yield evaluation, env


def _eval_results(lineage: Mapping[str, Any]) -> Iterator[Any]:
    from huggingface_hub import EvalResult

    for _, env in _rows(lineage):
        for key, value in env["success"].items():
            yield EvalResult(
                task_type="text-generation",
                dataset_type=env["name"],
                dataset_name=env["name"],
                dataset_split=env["split"],
                dataset_args={key: env[key] for key in ("num_items", "num_samples", "max_turns")},
                metric_type="success",
                metric_name=label(key),
                metric_value=round(value["mean"], 6),
                metric_args={"low": round(value["low"], 6), "high": round(value["high"], 6)},
            )


def _training(lineage: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    settings, base = lineage["config"]["settings"], lineage["base_model"]
    yield "base model", literal(base["name"]) if base else "none: from random weights"
    steps = [row["step"] for row in (*reversed(lineage["parents"]), lineage)]
    yield "steps", " → ".join(steps)
    if "algorithm" in settings:
        yield "recipe", literal(settings["algorithm"]["recipe"])
    if "horizon" in settings:
        yield "turns an episode may have", ", ".join(map(str, settings["horizon"]["max_turns"]))
    if envs := _envs(settings):
        yield "environments", ", ".join(map(literal, envs))
    yield "seed", str(settings.get("seed", ""))
    yield "data", f"sha256 `{(lineage['data'] or '')[:SHORT]}`"


def _evaluations(lineage: Mapping[str, Any]) -> str:
    rows = list(_rows(lineage))
    if not rows:
        return "The store has no evaluation of these weights."
    names = list(dict.fromkeys(key for _, env in rows for key in env["success"]))
    lines = [
        [
            literal(env["name"]),
            f"{env['num_items']} {env['split']}",
            f"{env['max_turns']}",
            *(estimate(env["success"][key]) if key in env["success"] else "" for key in names),
            percent(env["coverage"], ""),
            f"`{evaluation['result'][:SHORT]}`",
        ]
        for evaluation, env in rows
    ]
    head = ["environment", "items", "turns", *map(label, names), "coverage", "result"]
    return (
        "Success and coverage (the episodes that count) in percent, with intervals in"
        " brackets.\n\n" + markdown(head, lines, right=2)
    )


def _decisions(lineage: Mapping[str, Any]) -> str:
    lines = [
        [row["as"], literal(row["verdict"]), "yes" if row["moved"] else "no", literal(row["why"])]
        for row in lineage["decisions"]
    ]
    if not lines:
        return "The store has no decision on these weights."
    return markdown(["as", "verdict", "alias moved", "why"], lines, right=4)
