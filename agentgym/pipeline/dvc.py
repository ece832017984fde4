"""dvc.yaml from the table of steps, and the files that DVC keeps of a step: pointers and a few
numbers. The store must have what pointers name, because git and `dvc pull` bring no weights.

The module needs neither torch nor DVC.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from agentgym.config import ConfigError, RunConfig, first_of
from agentgym.pipeline.run import confirm
from agentgym.pipeline.stored_config import keep_run
from agentgym.pipeline.table import finished, open_store, run_key, steps_of
from agentgym.steps.step import Kind, Outcome, Step
from agentgym.store.manifest import Manifest, sha256
from agentgym.store.runstore import RunStore
from agentgym.tracking.deliver import curve

FILE, FOLDER, PARAMS = Path("dvc.yaml"), Path("outputs"), "params.yaml"
RESOLVED = "params"  # stage that writes all settings of the run, with defaults, for the others
HEADER = """\
# Made by `agentgym dvc` from the table of steps; for another schedule the same command makes
# another. The steps are those of `make pipeline` and share one store: what one has done the other
# finds done. Outputs are pointers (place, digest, numbers), never weights, and small enough for
# git: they are not cached, so that no run-cache can bring one back without its result. The first
# stage writes the settings that change results, with defaults, and each step depends on those that
# are in its key. The last stage checks that the store has what pointers name: a clone that has
# only pointers stops there.
"""
TRAINED = ("sft_loss", "rollout_success", "validation_success")
LAST = "stored"  # its output is in no clone, because git ignores the folder of local state


def dvc_yaml(cfg: RunConfig, params: str = PARAMS) -> str:
    """Return the text of dvc.yaml for a run of this configuration. params: its parameter file."""
    steps = steps_of(cfg)
    stages = {RESOLVED: _first_stage(params)}
    stages |= {name: _stage(step, cfg, params) for name, step in steps.items()}
    stages[LAST] = _last_stage(cfg, params)
    tree = {"stages": stages, "plots": _plots(steps)}
    return HEADER + yaml.safe_dump(tree, sort_keys=False, width=120)


def require_current(cfg: RunConfig, params: str = PARAMS) -> None:
    """Raise ConfigError if dvc.yaml exists with other stages than this run's, for example after
    `dvc exp run -S +horizon.stage_steps=[5]`, or cannot be read.
    DVC would run steps that the run does not have, or leave some out.
    """
    if not FILE.is_file():
        return
    try:
        stages = (yaml.safe_load(FILE.read_text(encoding="utf-8")) or {}).get("stages", {})
    except (yaml.YAMLError, AttributeError) as error:
        raise ConfigError(f"{FILE} cannot be read ({error}); run `agentgym dvc`") from None
    wanted = yaml.safe_load(dvc_yaml(cfg, params))["stages"]
    missing, unknown = sorted(wanted.keys() - stages.keys()), sorted(stages.keys() - wanted.keys())
    both = (wanted.keys() & stages.keys()) - {LAST}  # its file is in the state folder of this run
    differences = [
        f"{', '.join(names)} {what}"
        for names, what in (
            (missing, "is missing in it"),
            (unknown, "is no step of this run"),
            (sorted(name for name in both if wanted[name] != stages[name]), "is another one in it"),
        )
        if names
    ]
    if not differences:
        return
    raise ConfigError(
        f"{FILE} does not describe the run that {params} asks for: {'; '.join(differences)}. Run"
        f" `agentgym dvc{_options(params)}`, then `dvc repro`"
    )


def _first_stage(params: str) -> dict[str, Any]:
    out = _out(RESOLVED)
    return {
        "cmd": f"python -m agentgym config --out {out}{_options(params)}",
        "deps": [*dict.fromkeys((params, PARAMS)), "agentgym"],  # params may extend PARAMS
        "outs": [{out: {"cache": False}}],
    }


def _stage(step: Step, cfg: RunConfig, params: str) -> dict[str, Any]:
    inputs = [_out(parent) for parent in step.parents]
    if step.kind is Kind.PREPARE:
        inputs = [str(cfg.data.path), "data/trajectories"]
    stage: dict[str, Any] = {
        "cmd": f"python -m agentgym step {step.name} --out {_out(step.name)}{_options(params)}",
        "deps": [*inputs, "agentgym", "envs"],
        "params": [{_out(RESOLVED): list(step.sections)}],
        "outs": [{_out(step.name): {"cache": False}}],
    }
    if step.kind is Kind.EVALUATE:
        stage["metrics"] = [{_metrics(step): {"cache": False}}]
    return stage


def _last_stage(cfg: RunConfig, params: str) -> dict[str, Any]:
    out = cfg.state_dir / f"{LAST}.json"
    command = f"python -m agentgym {LAST}"
    stage: dict[str, Any] = {"deps": [_out(name) for name in steps_of(cfg)]}
    if out.is_absolute() or ".." in out.parts:  # DVC allows no outputs outside the project
        return {"cmd": f"{command}{_options(params)}", **stage, "always_changed": True}
    return {
        "cmd": f"{command} --out {out}{_options(params)}",
        **stage,
        "outs": [{str(out): {"cache": False, "persist": True}}],  # else the run-cache restores it
    }


def _plots(steps: dict[str, Step]) -> list[dict[str, Any]]:
    stages = [step.name for step in steps.values() if step.stage]
    warm_starts = [
        step.name for step in steps.values() if step.kind is Kind.TRAIN and not step.stage
    ]
    evaluations = [step.name for step in steps.values() if step.kind is Kind.EVALUATE]

    def plot(title: str, names: list[str], value: str, label: str, **more: str) -> dict[str, Any]:
        y = {_out(name): value for name in names}
        return {title: {**more, "x": "step", "y": y, "x_label": "optimizer step", "y_label": label}}

    plots = [
        plot("success while training", stages, "rollout_success", "share of episodes"),
        plot(
            "validation success while training", stages, "validation_success", "share of episodes"
        ),
        plot("turns per episode", stages, "rollout_turns_mean", "turns"),
        plot("success on test items", evaluations, "eval_pass_at_1", "pass@1", template="scatter"),
    ]
    if warm_starts:
        plots.insert(
            3, plot("loss of the warm start", warm_starts, "sft_loss", "nats per action token")
        )
    return plots


def _options(params: str) -> str:
    """Return the option, after a space, with which `agentgym` reads this file; "" for PARAMS."""
    return "" if params == PARAMS else f" --params {params}"


def _out(name: str) -> str:
    return f"{FOLDER}/{name}.json"


def _metrics(step: Step) -> str:
    return f"{FOLDER}/{step.checkpoint}.metrics.json"


def files_of(cfg: RunConfig, outcome: Outcome, out: Path) -> dict[Path, str]:
    """Return path -> text of the files that DVC keeps of a step. out: path of the pointer."""
    files = {out: pointer(cfg, outcome)}
    if outcome.step.kind is Kind.EVALUATE:
        files[out.with_name(Path(_metrics(outcome.step)).name)] = json.dumps(
            metrics(outcome.manifest.results), indent=1
        )
    return files


def numbers(outcome: Outcome, store: RunStore) -> dict[str, float]:
    """Return name -> number of a step's results: an evaluation's `metrics`, the last metrics
    (TRAINED) of training, else the numbers among the results.
    """
    manifest = outcome.manifest
    if outcome.step.kind is Kind.EVALUATE:
        return metrics(manifest.results)
    if points := curve(store, manifest):
        last = {key: points[-1].get(key) for key in TRAINED}
        return {key: value for key, value in last.items() if value is not None}
    return {key: value for key, value in manifest.results.items() if type(value) in (int, float)}


def metrics(results: Mapping[str, Any]) -> dict[str, float]:
    """Return an evaluation's means by name, `gain` over its baseline, if any, and `coverage`.
    Values have four decimal places; pass_at_1, which equals avg@n, is left out.
    """
    means = {
        name: interval["mean"]
        for name, interval in results["summary"].items()
        if name != "pass_at_1"  # equals avg@n
    }
    average = next(name for name in means if name.startswith("avg"))
    if "paired" in results:
        means["gain"] = results["paired"][average]["mean"]
    means["coverage"] = results["coverage"]
    return {name: round(value, 4) for name, value in means.items()}


def began_of(commits: Sequence[Manifest]) -> str | None:
    """sha256 of the first commit's time, by which equal runs differ. None without commits."""
    return sha256(repr(commits[0].created_at).encode()) if commits else None


def pointer(cfg: RunConfig, outcome: Outcome) -> str:
    """Return a pointer as JSON text: a step's store, digests, results and curve, never weights."""
    manifest, store = outcome.manifest, open_store(cfg)
    identity = {
        "step": manifest.step,
        "key": manifest.key,
        "digest": manifest.digest,
        "store": store.root,
        "records_digest": manifest.records_digest,
        "run": run_key(cfg),
        "began": began_of(store.history(manifest.step, manifest.key)),
    }
    content = {"manifest": [identity], "results": manifest.results, "curve": curve(store, manifest)}
    return json.dumps(content, indent=1, sort_keys=True)


def confirm_pointers(cfg: RunConfig, folder: Path) -> dict[str, str]:
    """Verify what the pointers in `folder` name, deliver it to MLflow, and write the run's
    configuration into the store.

    Result: step -> digest. Errors: ConfigError if the store lacks some of it, with the ways to get
    it; DigestMismatch, BlobMissing, LedgerUnavailable.
    """
    store, table = open_store(cfg), steps_of(cfg)
    done = finished(cfg, store)
    pointers = {name: found for name in table if (found := _read_pointer(folder / f"{name}.json"))}
    lacking = {
        name: known
        for name, known in pointers.items()
        if (head := done.get(name)) is None or head.digest != known["digest"] or not store.has(head)
    }
    if lacking:
        raise ConfigError(_lacking(store, folder, lacking, done))
    keep_run(cfg, store)
    for name in pointers:
        confirm(cfg, store, table[name], done[name])
    return {name: known["digest"] for name, known in pointers.items()}


def _read_pointer(path: Path) -> dict[str, str]:
    """Return a pointer's digest and store; empty if there is no pointer. Errors: ConfigError."""
    if not path.is_file():
        return {}
    try:
        identity = json.loads(path.read_bytes())["manifest"][0]
        return {"digest": str(identity["digest"]), "store": str(identity.get("store", ""))}
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{path} is no pointer ({type(error).__name__}); restore it with git, or remove it and"
            " run `dvc repro`"
        ) from None


def _lacking(
    store: RunStore,
    folder: Path,
    lacking: Mapping[str, Mapping[str, str]],
    done: Mapping[str, Manifest],
) -> str:
    """Return the error text: what is missing, and the ways to get it."""
    named = first_of([f"{name} ({known['digest'][:12]})" for name, known in lacking.items()], 3)
    roots = sorted({known["store"] for known in lacking.values()} - {"", store.root})
    shared = next((root for root in roots if root.startswith("s3://")), "")
    ways = [
        f"set store.uri to {shared}"
        if shared
        else "set store.uri to a store that you share with the person who made them"
    ]
    theirs = roots[0] if roots else store.root
    # a folder and a bucket have other layouts, so files cannot be copied from one to the other
    if not any(root.startswith("s3://") for root in (theirs, store.root)):
        here = store.root if roots else "the same place here"
        ways.append(f"copy that machine's {theirs} to {here}")
    if next(iter(lacking)) in done:
        ways.append("take this store's own run in their place: `dvc repro --force` trains nothing")
    else:
        ways.append("make them here: `dvc repro --force` trains, like the first time")
    return (
        f"{folder} has pointers to results that the store {store.root} lacks:"
        f" {named}. Git and `dvc pull` bring pointers and data, no weights. To"
        f" have them, {', or '.join(ways)}"
    )
