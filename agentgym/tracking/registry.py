"""MLflow's model registry: a checkpoint becomes one version, however often it is tried."""

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
from agentgym.tracking.mlflow import Tracker
from agentgym.tracking.views import NOTE_OURS
from envs.plain import plain

FILES = "files.sha256"  # tag of a version: path -> sha256 of each of its files
ABOUT = (
    "Checkpoints of finished runs. The alias moves by a recorded decision: `agentgym history` tells"
    " of all, `agentgym promote` and `agentgym rollback` make one, `agentgym lineage` says what a"
    " version was made of."
)
REGISTER, RECORD = "register", "files.json"  # step, and the record with its version's digests
CARD = ("algorithm", "step_key", "weights.sha256")  # tags that a model's card shows: what it is
TASK = "llm/v1/chat"  # of MLflow's for transformers
MLMODEL = "MLmodel"
# fields of MLmodel that are another's where the same model is registered anew
_IDENTITY = ("artifact_path", "model_id", "model_uuid", "run_id", "utc_time_created")
_OF_MLFLOW = ("registered_model_meta",)  # what it adds to a copy
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
    task: str = TASK,
) -> str:
    """Log a transformers model with its tokenizer and chat template, register it, move `alias`
    to it (None: leave it).

    Result: the version.
    `tags` must hold `step_key`: a model is registered once per key, a kill at any point
    included.
    task: one of MLflow's for transformers.
    Errors: ValueError without `step_key` or where the folder holds no model.
    """
    if "step_key" not in tags:
        raise ValueError(
            f"tags {sorted(tags)} must hold step_key; without it a retry would register {name}"
            " twice"
        )
    texts = {key: plain(str(value)) for key, value in tags.items()}
    version = find_version(tracker, name, texts["step_key"])
    if version is None:
        model_id = _find_logged_model(tracker, name, texts["step_key"]) or _log_model(
            tracker, run_id, model_dir, name, texts, step, task
        )
        _create_registered(tracker, name)
        logged = tracker.client.get_logged_model(model_id)
        held = {FILES: logged.tags[FILES]} if FILES in logged.tags else {}
        tracker.client.create_model_version(
            name,
            logged.artifact_location,
            run_id=run_id,
            tags={**texts, **held},
            model_id=model_id,
        )
        version = _oldest_version(tracker, name, texts["step_key"])
    else:
        # the same weights, evaluated anew: the latest numbers count
        for key, value in texts.items():
            tracker.client.set_model_version_tag(name, version, key, value)
    if alias is not None:
        tracker.client.set_registered_model_alias(name, alias, version)
    return version


def find_version(tracker: Tracker, name: str, step_key: str) -> str | None:
    """The registered version made under this key, if any."""
    return min(_versions(tracker, name, step_key), key=int, default=None)


def all_versions(tracker: Tracker, name: str) -> list[str]:
    """Numbers of a registered model's versions, in order."""
    found = tracker.client.search_model_versions(f"name = '{name}'", max_results=1000)
    return sorted((str(each.version) for each in found), key=int)


def version_tags(tracker: Tracker, name: str, version: str) -> dict[str, str]:
    """Errors: LookupError where there is none."""
    return dict(_version(tracker, name, version).tags)


def version_run(tracker: Tracker, name: str, version: str) -> str:
    """The MLflow run that made it; empty: none did, or it is gone."""
    return str(_version(tracker, name, version).run_id or "")


def version_run_tags(tracker: Tracker, name: str, version: str) -> dict[str, str]:
    """Tags of the MLflow run that made it; empty where none did, or it is gone."""
    with contextlib.suppress(LookupError), _found("its run"):
        if run_id := version_run(tracker, name, version):
            return dict(tracker.client.get_run(run_id).data.tags)
    return {}


def _version(tracker: Tracker, name: str, version: str) -> Any:
    with _found(f"{name} has no version {version}"):
        return tracker.client.get_model_version(name, version)


def alias_version(tracker: Tracker, name: str, alias: str) -> str | None:
    """The version that holds the alias, if any."""
    try:
        with _found(name):
            held = tracker.client.get_registered_model(name).aliases
    except LookupError:
        return None
    return str(held[alias]) if alias in held else None


def model_tags(tracker: Tracker, name: str) -> dict[str, str] | None:
    """Tags of a registered model; None where there is none of this name."""
    with contextlib.suppress(LookupError), _found(name):
        return dict(tracker.client.get_registered_model(name).tags)
    return None


def all_models(tracker: Tracker) -> list[str]:
    """Names of every registered model."""
    found, page = [], None
    while True:
        models = tracker.client.search_registered_models(page_token=page)
        found += [str(each.name) for each in models]
        page = models.token
        if not page:
            return sorted(found)


def created_ms(tracker: Tracker, name: str) -> int:
    """When the registered model was made. Errors: LookupError where there is none."""
    with _found(name):
        return int(tracker.client.get_registered_model(name).creation_timestamp)


@contextlib.contextmanager
def _found(what: str) -> Iterator[None]:
    """MLflow's way of saying that something is not there becomes a LookupError."""
    from mlflow.exceptions import MlflowException

    try:
        yield
    except MlflowException as error:
        if error.error_code in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
            raise LookupError(what) from error
        raise


def file_digests(folder: Path) -> dict[str, str]:
    """Path below the folder -> sha256 of what lies there."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name not in _OF_MLFLOW:
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            found[path.relative_to(folder).as_posix()] = digest
    return found


def lasting_digests(folder: Path) -> dict[str, str]:
    """As `file_digests`, equal for the same model registered anew by the same packages."""
    found = file_digests(folder)
    path = folder / MLMODEL
    return {**found, MLMODEL: _lasting(path.read_bytes())} if MLMODEL in found else found


def lasting_files(tracker: Tracker, name: str, version: str) -> dict[str, str]:
    """`lasting_digests` of a version that was registered just now. Errors: LookupError."""
    from mlflow.artifacts import download_artifacts

    tags = version_tags(tracker, name, version)
    if FILES not in tags:
        return {}  # an earlier release registered it
    with tempfile.TemporaryDirectory() as folder, _found(f"the files of {name} version {version}"):
        source = tracker.client.get_model_version_download_uri(name, version)
        uri = f"{source.rstrip('/')}/{MLMODEL}"
        path = download_artifacts(artifact_uri=uri, dst_path=folder, tracking_uri=tracker.uri)
        return {**json.loads(tags[FILES]), MLMODEL: _lasting(Path(path).read_bytes())}


def _lasting(mlmodel: bytes) -> str:
    tree = yaml.safe_load(mlmodel)
    kept = {key: value for key, value in tree.items() if key not in _IDENTITY}
    return sha256(json.dumps(kept, sort_keys=True, default=str).encode())


def registered_files(store: RunStore, name: str, version: str) -> dict[str, str] | None:
    """`lasting_digests` of a version by the commit that registered it; None: not of this store."""
    commits = [
        each
        for each in store.keys(REGISTER)
        if RECORD in each.records
        and (each.results["model"], str(each.results["version"])) == (name, version)
    ]
    if not commits:
        return None
    last = max(commits, key=lambda each: each.created_at)
    return dict(json.loads(store.read(last, RECORD)))


def unregistered(name: str, version: str) -> str:
    """What is not checked of a version that no store here registered."""
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
    """A version's files, copied below `folder`, each with the digest that it was registered with.
    has_digests: one that was registered without is refused.
    committed: `lasting_digests` by the store, which whoever writes to MLflow cannot change.
    Result: where. Errors: LookupError where there is none; ModelChanged.
    """
    from mlflow.artifacts import download_artifacts

    tags = version_tags(tracker, name, version)
    if has_digests and FILES not in tags:
        raise ModelChanged(f"{name} version {version} lacks the digests of its files (tag {FILES})")
    with _found(f"the files of {name} version {version}"):
        source = tracker.client.get_model_version_download_uri(name, version)
        there = Path(
            download_artifacts(artifact_uri=source, dst_path=str(folder), tracking_uri=tracker.uri)
        )
    if committed is not None:
        check_files(lasting_digests(there), committed, f"{name} version {version}")
    elif FILES in tags:
        check_files(file_digests(there), json.loads(tags[FILES]), f"{name} version {version}")
    return there


def parse_model_uri(text: str) -> tuple[str, str]:
    """The name, and `@ALIAS` or the version. Errors: ValueError."""
    found = re.fullmatch(r"models:/([\w .-]+?)(?:(@[\w.-]+)|/([0-9]+))", text)
    if not found:
        raise ValueError(f"{text!r}: expected models:/NAME@ALIAS or models:/NAME/VERSION")
    return found[1], found[2] or found[3]


def version_meant(tracker: Tracker, name: str, of: str) -> str:
    """of: `@ALIAS` or a version. Errors: LookupError where nobody has the alias."""
    if not of.startswith("@"):
        return of
    version = alias_version(tracker, name, of[1:])
    if version is None:
        raise LookupError(f"no version of {name} has the alias {of[1:]}")
    return version


def verified_model(model_uri: str, folder: str | None = None, store: RunStore | None = None) -> str:
    """A version's files, each as it was registered, for MLflow's loaders, which do not look:
    `mlflow.transformers.load_model(verified_model("models:/NAME@champion"))`.

    model_uri: `models:/NAME@ALIAS` or `models:/NAME/VERSION` of the registry that MLflow is set to;
    folder: where to, a temporary one by default; store: whose commit has the files' digests.
    Without it the digests are MLflow's, and a warning says so.
    Errors: ValueError; LookupError where there is none; ModelChanged.
    """
    import mlflow

    name, of = parse_model_uri(model_uri)
    tracker = Tracker(mlflow.get_tracking_uri(), "", Path())
    version, place = version_meant(tracker, name, of), Path(folder or tempfile.mkdtemp())
    wanted = registered_files(store, name, version) if store is not None else None
    if wanted is None:
        logger.warning("not checked: %s", unregistered(name, version))
    return str(
        fetch_version(tracker, name, version, place, has_digests=wanted is None, committed=wanted)
    )


class ModelChanged(ValueError):
    """A registered model's files are not those that were registered."""


def check_files(found: Mapping[str, str], wanted: Mapping[str, str], what: str) -> None:
    """Errors: ModelChanged naming the first file that differs, is missing or is too much."""
    for path in sorted({*wanted, *found}):
        if wanted.get(path) == found.get(path):
            continue
        came = f"sha256 {found[path]}" if path in found else "nothing"
        expected = f"sha256 {wanted[path]}" if path in wanted else "no such file"
        raise ModelChanged(
            f"{what}: {path} is not what was registered: expected {expected}, got {came}; do not"
            " use it, register the checkpoint again"
        )


def describe_version(tracker: Tracker, name: str, version: str, note: str) -> None:
    """Write a version's description, unless a person changed the one we wrote."""
    held, note = _version(tracker, name, version), plain(note)
    present, ours = held.description or "", held.tags.get(NOTE_OURS, "")
    if present == note or (present and hashlib.sha256(present.encode()).hexdigest() != ours):
        return
    tracker.client.update_model_version(name, version, description=note)
    digest = hashlib.sha256(note.encode()).hexdigest()
    tracker.client.set_model_version_tag(name, version, NOTE_OURS, digest)


def _oldest_version(tracker: Tracker, name: str, step_key: str) -> str:
    """A request whose reply was lost with the server is sent again by MLflow's client: a
    second version of the same model goes.
    """
    version, *repeated = sorted(_versions(tracker, name, step_key), key=int)
    for other in repeated:
        tracker.client.delete_model_version(name, other)
    return version


def _versions(tracker: Tracker, name: str, step_key: str) -> list[str]:
    return [
        str(found.version)
        for found in tracker.client.search_model_versions(
            f"name = '{name}' and tags.step_key = '{step_key}'"
        )
    ]


def _find_logged_model(tracker: Tracker, name: str, step_key: str) -> str | None:
    """A whole model left by an attempt that was killed before it registered; half ones are
    removed.
    """
    ready = None
    found = tracker.client.search_logged_models(
        [tracker.experiment_id], filter_string=f"name = '{name}' and tags.step_key = '{step_key}'"
    )
    for model in found:
        if str(model.status) == "READY":
            ready = str(model.model_id)
        else:
            tracker.client.delete_logged_model(model.model_id)
    return ready


def _log_model(
    tracker: Tracker,
    run_id: str,
    model_dir: Path,
    name: str,
    tags: dict[str, str],
    step: int,
    task: str,
) -> str:
    """What `mlflow.transformers.log_model` does, by the client: no active run or tracking URI
    of the process is touched, and the run's metrics are not copied onto the model.
    """
    if not (model_dir / "config.json").is_file():
        raise ValueError(f"{model_dir} holds no config.json; pass the folder of save_pretrained")
    from mlflow.entities import LoggedModelOutput
    from mlflow.models import Model

    logged = tracker.client.create_logged_model(
        tracker.experiment_id, name=name, source_run_id=run_id, tags=tags
    )
    with tempfile.TemporaryDirectory() as folder:
        record = Model(
            model_uuid=logged.model_id,
            run_id=run_id,
            model_id=logged.model_id,
            artifact_path=logged.artifact_location,
        )
        saved = Path(folder, "model")
        save_flavor(model_dir, saved, record, name=name, tags=tags, task=task)
        held = json.dumps(file_digests(saved), separators=(",", ":"), sort_keys=True)
        tracker.client.set_logged_model_tags(logged.model_id, {FILES: held})
        tracker.client.log_model_artifacts(logged.model_id, str(saved))
    tracker.client.log_outputs(run_id, models=[LoggedModelOutput(logged.model_id, step=step)])
    tracker.client.finalize_logged_model(logged.model_id, "READY")
    return str(logged.model_id)


def _create_registered(tracker: Tracker, name: str) -> None:
    from mlflow.exceptions import MlflowException

    try:
        tracker.client.create_registered_model(name, description=ABOUT)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise


def save_flavor(
    model_dir: Path,
    path: Path,
    record: Any,
    *,
    name: str,
    tags: Mapping[str, str],
    task: str = TASK,
) -> None:
    """A folder that MLflow's transformers flavour loads, made without asking the hub for
    anything.
    """
    import mlflow.transformers
    from huggingface_hub import ModelCard
    from mlflow.utils import requirements_utils
    from transformers import AutoModelForCausalLM

    from agentgym.models.model import no_progress_bar

    # it would read what every installed package holds, to warn of versions that are those installed
    requirements_utils._MODULES_TO_PACKAGES = requirements_utils._MODULES_TO_PACKAGES or {}
    with no_progress_bar():
        model = AutoModelForCausalLM.from_pretrained(
            model_dir,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            attn_implementation="sdpa",
        )
        # no repository's name: MLflow would look for a licence there
        model.name_or_path = f"models:/{name}"
        card = [
            "---",
            "library_name: transformers",
            "---",
            "",
            f"# {name}",
            "",
            *(f"- {key}: {tags[key]}" for key in CARD if key in tags),
            "",
        ]
        mlflow.transformers.save_model(
            {"model": model, "tokenizer": _load_tokenizer(model_dir)},
            path=str(path),
            task=task,
            mlflow_model=record,
            pip_requirements=[
                f"{package}=={installed_version(package).partition('+')[0]}"
                for package in ("torch", "transformers")
            ],
            model_card=ModelCard("\n".join(card)),
        )
        # MLflow's guess, a link to a page that does not exist
        (path / "LICENSE.txt").unlink(missing_ok=True)


def _load_tokenizer(model_dir: Path) -> Any:
    """As it was trained.
    AutoTokenizer prefers the model family's class over the one the folder declares, and a family's
    class rebuilds its own splitting of text: a tokenizer of our own would come back with other ids.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    path = model_dir / "tokenizer_config.json"
    declared = json.loads(path.read_bytes()).get("tokenizer_class") if path.is_file() else None
    generic = declared in ("TokenizersBackend", "PreTrainedTokenizerFast")
    return (PreTrainedTokenizerFast if generic else AutoTokenizer).from_pretrained(
        model_dir, local_files_only=True, trust_remote_code=False
    )
