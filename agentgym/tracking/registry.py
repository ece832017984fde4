"""MLflow's model registry: one version per checkpoint, however often that is registered."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import re
import tempfile
from collections.abc import Iterator, Mapping
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import Any

import yaml

from agentgym.store.manifest import sha256
from agentgym.store.runstore import RunStore
from agentgym.tracking.mlflow import Tracker, all_pages
from agentgym.tracking.saved_view import NOTE_OURS, is_replaceable
from envs.plain import plain

FILES = "files.sha256"  # tag of a version: path -> sha256, for each of its files
ABOUT = (
    "Checkpoints of finished runs. The alias moves by a recorded decision: `agentgym history` tells"
    " of all, `agentgym promote` and `agentgym rollback` make one, `agentgym lineage` says what a"
    " version was made of."
)
REGISTER, RECORD = "register", "files.json"  # step; file of its commit with a version's digests
MLMODEL = "MLmodel"
CARD = ("algorithm", "step_key", "weights.sha256")  # tags shown on a model's card
TASK = "llm/v1/chat"  # one of MLflow's tasks for transformers
# fields of MLmodel that change if the same model is registered again
_IDENTITY = ("artifact_path", "model_id", "model_uuid", "run_id", "utc_time_created")
_OF_MLFLOW = ("registered_model_meta",)  # files that MLflow adds to a download
logger = logging.getLogger(__name__)


def register_model(
    tracker: Tracker,
    run_id: str,
    model_dir: Path,
    *,
    name: str,
    alias: str | None,
    tags: Mapping[str, str],
    step: int,
) -> str:
    """Log the transformers model in `model_dir`, with tokenizer, to a run; register it as `name`.

    alias: moved to this version; None: no alias is moved. step: optimizer step of the weights.
    tags: must have `step_key`; a model is registered once per key, also after a kill at any point.
    A repeat only sets the tags and moves the alias. Versions that MLflow made twice are deleted.
    Result: the version. Errors: ValueError without `step_key`, or if the folder has no model.
    """
    from mlflow.exceptions import MlflowException

    if "step_key" not in tags:
        raise ValueError(
            f"tags {sorted(tags)} must hold step_key; without it a retry would register {name}"
            " twice"
        )
    texts = {key: plain(str(value)) for key, value in tags.items()}
    version = find_version(tracker, name, texts["step_key"])
    if version is None:
        # a complete model was left by an attempt that was killed before registration
        model_id = tracker.ready_model(name, texts["step_key"]) or _log_model(
            tracker, run_id, model_dir, name, texts, step
        )
        try:
            tracker.client.create_registered_model(name, description=ABOUT)
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
        logged = tracker.client.get_logged_model(model_id)
        digest_tags = {FILES: logged.tags[FILES]} if FILES in logged.tags else {}
        source, all_tags = logged.artifact_location, {**texts, **digest_tags}
        tracker.client.create_model_version(name, source, run_id, all_tags, model_id=model_id)
        # MLflow's client repeats a request whose reply was lost, which makes a duplicate
        version, *repeated = all_versions(tracker, name, texts["step_key"])
        for other in repeated:
            tracker.client.delete_model_version(name, other)
    else:
        # the same weights were evaluated again: the latest numbers count
        for key, value in texts.items():
            tracker.client.set_model_version_tag(name, version, key, value)
    if alias is not None:
        tracker.client.set_registered_model_alias(name, alias, version)
    return version


def find_version(tracker: Tracker, name: str, step_key: str) -> str | None:
    """Return the number of the oldest version with the tag `step_key`; None without one."""
    return next(iter(all_versions(tracker, name, step_key)), None)


def all_versions(tracker: Tracker, name: str, step_key: str | None = None) -> list[str]:
    """Return the numbers of a registered model's versions, at most 1000, in ascending order.
    step_key: only of those with this tag; None: of all.
    """
    tagged = "" if step_key is None else f" and tags.step_key = '{step_key}'"
    versions = tracker.client.search_model_versions(f"name = '{name}'{tagged}", max_results=1000)
    return sorted((str(version.version) for version in versions), key=int)


def version_tags(tracker: Tracker, name: str, version: str) -> dict[str, str]:
    """Return the tags of a version. Errors: LookupError if there is no such version."""
    return dict(_version(tracker, name, version).tags)


def version_run(tracker: Tracker, name: str, version: str) -> str:
    """Return the id of the MLflow run that made a version; empty if none. Errors: LookupError."""
    return str(_version(tracker, name, version).run_id or "")


def version_run_tags(tracker: Tracker, name: str, version: str) -> dict[str, str]:
    """Return the tags of the MLflow run that made a version; {} if version or run is missing."""
    with contextlib.suppress(LookupError), _found("its run"):
        if run_id := version_run(tracker, name, version):
            return dict(tracker.client.get_run(run_id).data.tags)
    return {}


def _version(tracker: Tracker, name: str, version: str) -> Any:
    with _found(f"{name} has no version {version}"):
        return tracker.client.get_model_version(name, version)


def alias_version(tracker: Tracker, name: str, alias: str) -> str | None:
    """Return the version that has the alias; None if none has, or the model is missing."""
    with contextlib.suppress(LookupError), _found(name):
        aliases = tracker.client.get_registered_model(name).aliases
        return str(aliases[alias]) if alias in aliases else None
    return None


def model_tags(tracker: Tracker, name: str) -> dict[str, str] | None:
    """Return the tags of a registered model; None if there is no model of this name."""
    with contextlib.suppress(LookupError), _found(name):
        return dict(tracker.client.get_registered_model(name).tags)
    return None


def all_models(tracker: Tracker) -> list[str]:
    """Return the names of all registered models, sorted."""
    search = tracker.client.search_registered_models
    return sorted(str(model.name) for model in all_pages(lambda token: search(page_token=token)))


def created_ms(tracker: Tracker, name: str) -> int:
    """Return a registered model's creation time, ms since 1970. Errors: LookupError if missing."""
    with _found(name):
        return int(tracker.client.get_registered_model(name).creation_timestamp)


@contextlib.contextmanager
def _found(what: str) -> Iterator[None]:
    """Turn the block's MLflow errors for a missing or invalid object into LookupError(what)."""
    from mlflow.exceptions import MlflowException

    try:
        yield
    except MlflowException as error:
        if error.error_code in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
            raise LookupError(what) from error
        raise


def file_digests(folder: Path) -> dict[str, str]:
    """Return path below the folder -> sha256, without the files that MLflow adds to a download."""
    digests = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name not in _OF_MLFLOW:
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            digests[path.relative_to(folder).as_posix()] = digest
    return digests


def lasting_digests(folder: Path) -> dict[str, str]:
    """Return `file_digests`, but for MLmodel the digest of its fields without ids and time.
    Equal models have equal results, also if one is registered again.
    """
    digests = file_digests(folder)
    path = folder / MLMODEL
    return {**digests, MLMODEL: _lasting(path.read_bytes())} if MLMODEL in digests else digests


def lasting_files(tracker: Tracker, name: str, version: str) -> dict[str, str]:
    """Return a version's `lasting_digests`: those that its tag in MLflow states, and for MLmodel
    that of the file, which is downloaded; {} if it has no such tag. Errors: LookupError.
    """
    from mlflow.artifacts import download_artifacts

    tags = version_tags(tracker, name, version)
    if FILES not in tags:
        return {}  # registered by an earlier release
    with tempfile.TemporaryDirectory() as folder, _found(f"the files of {name} version {version}"):
        source = tracker.client.get_model_version_download_uri(name, version)
        uri = f"{source.rstrip('/')}/{MLMODEL}"
        path = download_artifacts(artifact_uri=uri, dst_path=folder, tracking_uri=tracker.uri)
        return {**json.loads(tags[FILES]), MLMODEL: _lasting(Path(path).read_bytes())}


def _lasting(mlmodel: bytes) -> str:
    tree = yaml.safe_load(mlmodel)
    fields = {key: value for key, value in tree.items() if key not in _IDENTITY}
    return sha256(json.dumps(fields, sort_keys=True, default=str).encode())


def registered_files(store: RunStore, name: str, version: str) -> dict[str, str] | None:
    """Return a version's `lasting_digests` from the commit that registered it; None without one."""
    commits = [
        commit
        for commit in store.heads(REGISTER)
        if RECORD in commit.records
        and (commit.results["model"], str(commit.results["version"])) == (name, version)
    ]
    if not commits:
        return None
    last = max(commits, key=lambda commit: commit.created_at)
    return dict(json.loads(store.read(last, RECORD)))


def unregistered(name: str, version: str) -> str:
    """Return the text that reports a version whose files cannot be checked."""
    return f"files of {name} version {version}, no store here has the commit that registered it"


def fetch_version(
    tracker: Tracker,
    name: str,
    version: str,
    folder: Path,
    *,
    has_digests: bool = False,
    committed: Mapping[str, str] | None = None,
) -> Path:
    """Download a version's files below `folder` and return their folder.

    has_digests: refuse a version that was registered without digests.
    committed: `lasting_digests` from the store, which writers to MLflow cannot change, to check the
    files by; None: they are checked by the digests that MLflow has, if any.
    Errors: LookupError if there is no such version; ModelChanged if a check fails.
    """
    from mlflow.artifacts import download_artifacts

    tags = version_tags(tracker, name, version)
    if has_digests and FILES not in tags:
        raise ModelChanged(f"{name} version {version} lacks the digests of its files (tag {FILES})")
    what, target = f"{name} version {version}", str(folder)
    with _found(f"the files of {what}"):
        uri = tracker.client.get_model_version_download_uri(name, version)
        path = download_artifacts(artifact_uri=uri, dst_path=target, tracking_uri=tracker.uri)
    if committed is not None:
        check_files(lasting_digests(Path(path)), committed, what)
    elif FILES in tags:
        check_files(file_digests(Path(path)), json.loads(tags[FILES]), what)
    return Path(path)


def parse_model_uri(text: str) -> tuple[str, str]:
    """Return (name, `@ALIAS` or version) of a model URI. Errors: ValueError."""
    match = re.fullmatch(r"models:/([\w .-]+?)(?:(@[\w.-]+)|/([0-9]+))", text)
    if not match:
        raise ValueError(f"{text!r}: expected models:/NAME@ALIAS or models:/NAME/VERSION")
    return match[1], match[2] or match[3]


def version_meant(tracker: Tracker, name: str, of: str) -> str:
    """Return the version that has the alias if `of` is `@ALIAS`, else `of`. Errors: LookupError."""
    if not of.startswith("@"):
        return of
    version = alias_version(tracker, name, of[1:])
    if version is None:
        raise LookupError(f"no version of {name} has the alias {of[1:]}")
    return version


def verified_model(model_uri: str, folder: str | None = None, store: RunStore | None = None) -> str:
    """Download a version for MLflow's loaders, which do not check files. Return its folder.

    Use: `mlflow.transformers.load_model(verified_model("models:/NAME@champion"))`.
    model_uri: `models:/NAME@ALIAS` or `models:/NAME/VERSION` in the registry that MLflow is set to.
    folder: target; a new temporary one by default.
    store: has the commit with the files' digests. Without store or commit the digests are MLflow's,
    and a warning is logged.
    Errors: ValueError; LookupError if there is no such version; ModelChanged.
    """
    import mlflow

    name, of = parse_model_uri(model_uri)
    tracker = Tracker(mlflow.get_tracking_uri(), "", Path())
    version, target = version_meant(tracker, name, of), Path(folder or tempfile.mkdtemp())
    wanted = registered_files(store, name, version) if store is not None else None
    if lost := wanted is None:
        logger.warning("not checked: %s", unregistered(name, version))
    return str(fetch_version(tracker, name, version, target, has_digests=lost, committed=wanted))


class ModelChanged(ValueError):
    """Error for a model whose files are not the registered ones, or lack their digests."""


def check_files(digests: Mapping[str, str], wanted: Mapping[str, str], what: str) -> None:
    """Raise ModelChanged, naming `what`, unless both mappings of path -> sha256 are equal."""
    for path in sorted({*wanted, *digests}):
        if wanted.get(path) == digests.get(path):
            continue
        actual = f"sha256 {digests[path]}" if path in digests else "nothing"
        expected = f"sha256 {wanted[path]}" if path in wanted else "no such file"
        raise ModelChanged(
            f"{what}: {path} is not what was registered: expected {expected}, got {actual}; do not"
            " use it, register the checkpoint again"
        )


def describe_version(tracker: Tracker, name: str, version: str, note: str) -> None:
    """Set a version's description to `note`, unless a person wrote or changed the present one."""
    model_version, note = _version(tracker, name, version), plain(note)
    ours = model_version.tags.get(NOTE_OURS, "")
    if is_replaceable(model_version.description or "", note, ours):
        tracker.client.update_model_version(name, version, description=note)
        tracker.client.set_model_version_tag(name, version, NOTE_OURS, sha256(note.encode()))


def _log_model(
    tracker: Tracker, run_id: str, model_dir: Path, name: str, tags: dict[str, str], step: int
) -> str:
    """Log a model through the client and return its id. Errors: ValueError without config.json.
    `mlflow.transformers.log_model` would change the active run and copy its metrics to the model.
    """
    if not (model_dir / "config.json").is_file():
        raise ValueError(f"{model_dir} holds no config.json; pass the folder of save_pretrained")
    from mlflow.entities import LoggedModelOutput
    from mlflow.models import Model

    new = tracker.client.create_logged_model
    logged = new(tracker.experiment_id, name=name, source_run_id=run_id, tags=tags)
    with tempfile.TemporaryDirectory() as folder:
        ids = {"model_uuid": logged.model_id, "model_id": logged.model_id, "run_id": run_id}
        record = Model(**ids, artifact_path=logged.artifact_location)
        saved = Path(folder, "model")
        save_flavor(model_dir, saved, record, name=name, tags=tags)
        digests = json.dumps(file_digests(saved), separators=(",", ":"), sort_keys=True)
        tracker.client.set_logged_model_tags(logged.model_id, {FILES: digests})
        tracker.client.log_model_artifacts(logged.model_id, str(saved))
    tracker.client.log_outputs(run_id, models=[LoggedModelOutput(logged.model_id, step=step)])
    tracker.client.finalize_logged_model(logged.model_id, "READY")
    return str(logged.model_id)


def save_flavor(
    model_dir: Path, path: Path, record: Any, *, name: str, tags: Mapping[str, str]
) -> None:
    """Save the model of `model_dir` at `path` in MLflow's transformers format, without network.
    record: MLflow's `Model`, filled and saved with it. name, tags: for the model's card.
    """
    import mlflow.transformers
    from huggingface_hub import ModelCard
    from mlflow.utils import requirements_utils
    from transformers import AutoModelForCausalLM

    from agentgym.models.model import no_progress_bar

    # an empty cache makes MLflow scan all installed packages, only for a version warning
    requirements_utils._MODULES_TO_PACKAGES = requirements_utils._MODULES_TO_PACKAGES or {}
    with no_progress_bar():
        model = AutoModelForCausalLM.from_pretrained(
            model_dir,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            attn_implementation="sdpa",
        )
        # MLflow would look for a license in a repository of this name
        model.name_or_path = f"models:/{name}"
        facts = "".join(f"- {key}: {tags[key]}\n" for key in CARD if key in tags)
        card = f"---\nlibrary_name: transformers\n---\n\n# {name}\n\n{facts}"
        mlflow.transformers.save_model(
            {"model": model, "tokenizer": _load_tokenizer(model_dir)},
            path=str(path),
            task=TASK,
            mlflow_model=record,
            pip_requirements=[
                f"{package}=={installed_version(package).partition('+')[0]}"
                for package in ("torch", "transformers")
            ],
            model_card=ModelCard(card),
        )
        # MLflow's guess links to a page that does not exist
        (path / "LICENSE.txt").unlink(missing_ok=True)


def _load_tokenizer(model_dir: Path) -> Any:
    """Load a folder's tokenizer: a generic one if the folder declares that, else by AutoTokenizer.

    AutoTokenizer alone would prefer the class of the model's architecture, which splits text in
    its own way: our own tokenizer would return other ids.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    path = model_dir / "tokenizer_config.json"
    declared = json.loads(path.read_bytes()).get("tokenizer_class") if path.is_file() else None
    generic = declared in ("TokenizersBackend", "PreTrainedTokenizerFast")
    return (PreTrainedTokenizerFast if generic else AutoTokenizer).from_pretrained(
        model_dir, local_files_only=True, trust_remote_code=False
    )
