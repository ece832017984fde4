"""Check the registered model against the store: export it again, compare file by file, and check
what MLflow shows.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from agentgym.audit.findings import Checks
from agentgym.audit.ledger import existing_ledger
from agentgym.audit.stored_steps import StepRecord
from agentgym.config import RunConfig
from agentgym.evaluation.history import (
    DECISION,
    VERDICT,
    WHY,
    HistoryElsewhere,
    artifact,
    decision_tags,
    note_of,
)
from agentgym.evaluation.publish import tags_of_version
from agentgym.evaluation.registry import HOME, Promotions, fetch_registered
from agentgym.models.adapter import MergedTensors
from agentgym.models.checkpoint import policy_of, save_pretrained
from agentgym.steps.step import Kind
from agentgym.store.manifest import Manifest, sha256
from agentgym.store.runstore import RunStore
from agentgym.tracking.registry import (
    ABOUT,
    FILES,
    MLMODEL,
    ModelChanged,
    lasting_digests,
    save_flavor,
)
from agentgym.tracking.saved_view import NOTE_OURS
from envs.plain import plain

SAME_BY_ALL = (".safetensors", ".jinja")  # files that do not depend on package versions
OF_RUN = ("run_key", "evaluation", "eval.")  # prefixes of tags about the run and its evaluation


def check_registry(
    cfg: RunConfig, store: RunStore, key: str, steps: Sequence[StepRecord], checks: Checks
) -> None:
    """Check each file, tag and description of the version that the run registered, if any. Skipped
    without an MLflow experiment. key: the run's key.
    """
    registration = next((record for record in steps if record.step.kind is Kind.REGISTER), None)
    if registration is None or registration.final is None or registration.checkpoint is None:
        return
    tracker = existing_ledger(cfg)
    if tracker is None:
        checks.skip("the registered model", "there is no ledger, as that check reports")
        return
    from mlflow.exceptions import MlflowException

    registered, checkpoint = registration.final.results, registration.checkpoint
    name, number = str(registered["model"]), str(registered["version"])
    where = f"{name} version {number}"
    try:
        version = tracker.client.get_model_version(name, number)
        model = tracker.client.get_registered_model(name)
        logged = tracker.client.get_logged_model(version.model_id) if version.model_id else None
    except MlflowException as error:
        checks.fail(f"{where}: {error.message}")
        return
    evaluation = registration.parents[registration.step.evaluation]
    tags = tags_of_version(cfg, store, checkpoint, evaluation, key)
    wanted = {tag: plain(text) for tag, text in tags.items()}
    if version.tags.get("run_key") != key:
        checks.skip(f"{where}: its evaluation", "another run that reached it speaks of its own")
        wanted = {tag: text for tag, text in wanted.items() if not tag.startswith(OF_RUN)}
    promotions = Promotions(store, tracker, name, str(registered["alias"]))
    _check_shown(promotions, version, logged, wanted, checks)
    checks.expect(name, "description", ABOUT, model.description)
    for tag in sorted(model.tags):
        if not tag.startswith(HOME):  # the decisions check reads this tag
            checks.skip(f"tag {tag} of {name}", "nothing of this run writes it")
    for alias in sorted(model.aliases.keys() - {promotions.alias}):
        checks.skip(f"alias {alias} of {name}", "this run decides on another one")
    with tempfile.TemporaryDirectory(prefix="agentgym-model-") as folder:
        try:
            there, left_out = fetch_registered(promotions, number, Path(folder, "theirs"))
        except (LookupError, ModelChanged) as error:
            checks.fail(f"{where}: {error}")
            there, left_out = Path(folder, "theirs"), ""
        if left_out:
            checks.skip(left_out.partition(", ")[0], left_out.partition(", ")[2])
        if there.is_dir():
            _check_files(store, version, logged, checkpoint, wanted, (Path(folder), there), checks)


def _check_shown(
    promotions: Promotions, version: Any, logged: Any, wanted: Mapping[str, str], checks: Checks
) -> None:
    """Check state, source, tags and description of a version in MLflow, also those of the last
    decision on it. logged: its logged model, if it has one; wanted: its tags from the registration.
    """
    where = f"{version.name} version {version.version}"
    state = version.status, version.current_stage, version.status_message
    checks.expect(where, "state", ("READY", "None", None), state)
    if logged is not None:
        source = logged.artifact_location, logged.source_run_id
        checks.expect(where, "source and run", source, (version.source, version.run_id))
        expected = (logged.name, str(logged.status), logged.tags.get(FILES))
        there = (version.name, "READY", version.tags.get(FILES))
        checks.expect(where, "its logged model", expected, there)
    try:
        history = promotions.history
        entries = [
            entry
            for entry in history.entries()
            if promotions.number_of(entry.candidate) == str(version.version)
        ]
        note = note_of(entries[-1], artifact(history, entries[-1])) if entries else ""
        shown = decision_tags(entries[-1]) if entries else {}
    except HistoryElsewhere as error:
        checks.skip(f"{where}: description and decision", str(error))
        shown = {tag: version.tags.get(tag, "") for tag in (VERDICT, WHY, DECISION)}
    else:
        checks.expect(where, "description", plain(note), version.description or "")
    digest = sha256((version.description or "").encode())
    wanted = {**wanted, **shown, **({NOTE_OURS: digest} if version.description else {})}
    for tag in sorted({*wanted, *version.tags} - {FILES}):
        if tag in wanted:
            checks.expect(where, f"tag {tag}", wanted[tag], version.tags.get(tag))
        elif not tag.startswith(OF_RUN):
            checks.skip(f"tag {tag} of {where}", "nothing of this run writes it")


def _check_files(
    store: RunStore,
    version: Any,
    logged: Any,
    checkpoint: Manifest,
    tags: Mapping[str, str],
    folders: tuple[Path, Path],
    checks: Checks,
) -> None:
    """Compare the files of a registered version with what the store exports from `checkpoint`.

    Files that differ are skipped if other versions of packages wrote them, except SAME_BY_ALL.
    Weights merged from an adapter may differ by rounding.
    logged: the version's logged model or None; tags: those of the registration.
    folders: (one to work in, the one with the version's files).
    """
    from mlflow.models import Model

    where, (scratch, there) = f"{version.name} version {version.version}", folders
    exported, ours_folder = scratch / "exported", scratch / "ours"
    save_pretrained(exported, store, checkpoint)
    save_flavor(exported, ours_folder, Model(), name=version.name, tags=tags)
    ours, theirs = lasting_digests(ours_folder), lasting_digests(there)
    packages, others = _packages(ours_folder), _packages(there)
    is_merged = isinstance(policy_of(store, checkpoint), MergedTensors)
    for path in sorted({*ours, *theirs}):
        both = path in ours and path in theirs
        same = ours.get(path) == theirs.get(path)
        if both and not same and path.endswith(".safetensors"):
            same = _are_near(ours_folder / path, there / path, is_merged)
        if both and not same and packages != others and not path.endswith(SAME_BY_ALL):
            checks.skip(f"{where}: {path}", f"{others} wrote it and {packages} is here")
        else:
            what = f"{path} as {checkpoint.step} commit {checkpoint.seq} exports it"
            checks.expect(where, what, True, same)
    if logged is not None and MLMODEL in theirs:
        tree = yaml.safe_load((there / MLMODEL).read_bytes())
        names = tuple(tree.get(name) for name in ("model_id", "model_uuid", "run_id"))
        made_by = logged.model_id, logged.model_id, logged.source_run_id
        checks.expect(where, f"who made it by {MLMODEL}", made_by, names)


def _packages(folder: Path) -> str:
    """Return the packages that wrote a folder's files, with versions, as one text; a fixed phrase
    if the folder's MLmodel cannot be read.
    """
    try:
        tree = yaml.safe_load((folder / MLMODEL).read_bytes())
        flavors = tree["flavors"]
        transformers = flavors["transformers"]["transformers_version"]
        python = flavors["python_function"]["python_version"]
        mlflow = tree["mlflow_version"]
    except (OSError, ValueError, LookupError, TypeError, yaml.YAMLError):
        return "something that no MLmodel names"
    return plain(f"MLflow {mlflow} with transformers {transformers} and Python {python}")[:100]


def _are_near(ours: Path, theirs: Path, is_merged: bool) -> bool:
    """Return True if two safetensors files have the same tensors; False if one is unreadable.

    is_merged: the tensors were merged from an adapter. They may then differ by rounding, because
    the sums of a second merge may run in another order.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        a, b = load_file(ours), load_file(theirs)
    except SafetensorError:
        return False
    rounding = 4 if is_merged else 0

    def near(ours: Tensor, theirs: Tensor) -> bool:
        if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
            return False
        limit = rounding * torch.finfo(ours.dtype).eps * float(ours.abs().max())
        return bool(((ours - theirs).abs() <= limit).all())

    return a.keys() == b.keys() and all(near(a[name], b[name]) for name in a)
