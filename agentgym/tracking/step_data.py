"""A step as MLflow shows it: its data, the code that made it, and its episodes as traces.

The commit's key decides which episodes are drawn, and a trace's id is derived from its episode, so
that repeated deliveries write the same ones once. Texts are cut: the full record is in the store.
"""

from __future__ import annotations

import contextlib
import functools
import getpass
import importlib.metadata
import json
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from agentgym.config import RunConfig
from agentgym.data.items import SPLITS, Splits, splits_from_json
from agentgym.store.manifest import Manifest, canonical_json, sha256
from agentgym.store.runstore import RunStore
from agentgym.types import Trajectory
from envs.plain import plain

DIGEST_CHARS = 36  # MLflow's limit
LISTS = "splits.json"


@dataclass(frozen=True, slots=True)
class DatasetInput:
    """The items of one split that a step read."""

    name: str
    digest: str  # of the items' ids, in order
    split: str
    num_items: int
    source: str  # JSON: path and revision


def inputs_of(cfg: RunConfig, store: RunStore, manifest: Manifest) -> list[DatasetInput]:
    """Return the datasets that a step read, one per split; empty if no commit lists the splits."""
    prepared = prepared_by(store, manifest)
    if prepared is None:
        return []
    splits = splits_from_json(store.read(prepared, LISTS))
    return [_input(cfg, splits, name, num) for name, num in _read(manifest)]


def prepared_by(store: RunStore, manifest: Manifest) -> Manifest | None:
    """Return the manifest that has the lists of splits: this one or a parent; None if neither."""
    if LISTS in manifest.blobs:
        return manifest
    parents = (
        parent
        for name, digest in manifest.parents.items()
        for parent in store.heads(name)
        if parent.digest == digest and LISTS in parent.blobs
    )
    return next(parents, None)


def _read(manifest: Manifest) -> Sequence[tuple[str, int | None]]:
    """Return (split, number of items or None for all) for each split that a step read."""
    config = manifest.config
    if LISTS in manifest.blobs:
        return [(name, None) for name in SPLITS]
    if "evaluation" in config:
        settings = config["evaluation"]
        return [(str(settings["split"]), int(settings["num_items"]))]
    if "validation" in config:
        return [("train", None), ("validation", int(config["validation"]["num_items"]))]
    return [("train", None)]


def _input(cfg: RunConfig, splits: Splits, name: str, num: int | None) -> DatasetInput:
    ids = [item.item_id for item in getattr(splits, name)[:num]]
    path = cfg.data.path
    source = {"uri": str(path), **({"dvc": rev} if (rev := dvc_revision(path)) else {})}
    title, digest = f"{'-'.join(env.name for env in cfg.envs)} {name}", sha256(canonical_json(ids))
    origin = json.dumps(source, sort_keys=True)
    return DatasetInput(title, digest[:DIGEST_CHARS], name, len(ids), origin)


def dvc_revision(path: Path) -> str:
    """Return the digest in a folder's DVC pointer file; empty if that is missing or unreadable."""
    pointer = path.with_name(f"{path.name}.dvc")
    try:
        tree: Any = yaml.safe_load(pointer.read_text(encoding="utf-8"))
        return str(tree["outs"][0]["md5"])
    except (OSError, ValueError, yaml.YAMLError, LookupError, TypeError):
        return ""


ROOT = Path(__file__).resolve().parents[2]
GIT_TIMEOUT_S = 5.0
OURS = {"mlflow.source.name": "agentgym-flow", "mlflow.source.type": "PROJECT"}
OF_MACHINE = ("mlflow.source.git.commit", "mlflow.user", "source")  # tags not in any store


@functools.cache
def source_tags() -> dict[str, str]:
    """Return tags with the program's name and, if known, git commit, uncommitted changes, user."""
    tags = dict(OURS)
    if commit := _git("rev-parse", "HEAD"):
        changed = " with changes" if _git("status", "--porcelain", "--untracked-files=no") else ""
        tags |= {"mlflow.source.git.commit": commit, "source": f"{commit[:12]}{changed}"}
    with contextlib.suppress(OSError, KeyError):
        tags["mlflow.user"] = getpass.getuser()
    return tags


@functools.cache
def packages() -> bytes:
    """Return the installed packages as text, a line `name==version` for each, sorted."""
    versions = {
        distribution.metadata["Name"].lower(): distribution.version
        for distribution in importlib.metadata.distributions()
        if distribution.metadata["Name"]
    }
    return "".join(f"{name}=={versions[name]}\n" for name in sorted(versions)).encode()


def _git(*arguments: str) -> str:
    """Return a git command's output in our own repository; empty if git fails or is missing."""
    if not (ROOT / ".git").exists():
        return ""
    try:
        completed = subprocess.run(
            ["git", "-C", str(ROOT), *arguments],
            capture_output=True,
            text=True,
            timeout=GIT_TIMEOUT_S,
            check=False,
            encoding="utf-8",
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return completed.stdout.strip() if completed.returncode == 0 else ""


MAX_CHARS = 1500  # per text in a span
MAX_TURNS = 40  # turns in one trace; of a longer episode, the last ones
DIGEST = "mlflow.agentgym.episode"  # tag: digest of actions, observations and rewards
ATTRIBUTES = ("mlflow.traceRequestId", "mlflow.spanType", "mlflow.spanInputs", "mlflow.spanOutputs")


@dataclass(frozen=True, slots=True)
class EpisodeTrace:
    """An episode's trace as it is sent to MLflow, in plain JSON types."""

    trace_id: str
    spans: tuple[dict[str, Any], ...]
    began_ms: int
    took_ms: int
    name: str
    request: str
    response: str
    success: bool
    tags: Mapping[str, str]


def drawn(episodes: Sequence[Trajectory], key: str, count: int) -> list[Trajectory]:
    """Return up to `count` valid episodes, drawn by `key` alone.
    Half are successes, half failures; if there are too few of one kind, others take their place.
    """

    def order(episode: Trajectory) -> str:
        return sha256(_name(episode, key).encode())

    valid = sorted((episode for episode in episodes if episode.status.is_valid), key=order)
    solved, failed = ([e for e in valid if e.success is won] for won in (True, False))
    chosen = [*solved[: (count + 1) // 2], *failed[: count // 2]]
    taken = {id(episode) for episode in chosen}
    rest = [episode for episode in valid if id(episode) not in taken]
    return sorted([*chosen, *rest[: count - len(chosen)]], key=order)[:count]


def trace_of(manifest: Manifest, episode: Trajectory) -> EpisodeTrace:
    """Return the trace of an episode. manifest: the commit whose record the episode is in."""
    trace_id = trace_id_of(manifest, episode).removeprefix("tr-")
    # a record without times gets the time of its commit
    began = int(1e9 * (episode.timing.get("began_s", 0.0) or manifest.created_at))
    spans = list(_turns(episode, trace_id, began))
    end = max([began, *(span["end_time_unix_nano"] for span in spans)])
    request = _cut(episode.first_observation)
    outcome = {
        "success": episode.success,
        "reward": episode.reward,
        "status": str(episode.status),
        "turns": len(episode.turns),
    }
    root = _span(
        (trace_id, _span_id(trace_id, -1), None),
        _cut(f"{episode.item.item_id} sample {episode.sample}"),
        "AGENT",
        (began, end),
        ({"observation": request}, outcome),
        {"max_turns": episode.max_turns, "temperature": episode.temperature},
    )
    turns = [[turn.action, turn.observation, turn.reward] for turn in episode.turns]
    tags = {
        "step": manifest.step,
        "commit": str(manifest.seq),
        "item": _cut(episode.item.item_id),
        "sample": str(episode.sample),
        "optimizer_step": str(episode.step),
        "success": str(episode.success).lower(),
        "turns": str(len(episode.turns)),
        DIGEST: sha256(json.dumps([episode.first_observation, turns]).encode()),
    }
    times, texts = (began // 1_000_000, (end - began) // 1_000_000), (request, json.dumps(outcome))
    name, success = root["name"], episode.success
    return EpisodeTrace(f"tr-{trace_id}", (root, *spans), *times, name, *texts, success, tags)


def digest_of_spans(spans: Sequence[Mapping[str, Any]]) -> str:
    """sha256 of the spans' names, inputs and outputs alone, in order of time."""
    shown = [
        [span["name"], *(json.loads(span["attributes"][name]) for name in ATTRIBUTES[2:])]
        for span in sorted(spans, key=lambda s: (s["start_time_unix_nano"], s["name"]))
    ]
    return sha256(json.dumps(shown, sort_keys=True).encode())


def spans_of(spans: Sequence[Mapping[str, Any]]) -> list[list[Any]]:
    """Return [name, start, end, status, events, attributes] of each span, in order of time.

    Attributes' JSON is in one canonical form: a server escapes it differently than a database.
    """
    return [
        [
            span["name"],
            span["start_time_unix_nano"],
            span["end_time_unix_nano"],
            span["status"]["code"],
            span["events"],
            sorted((name, _parsed(value)) for name, value in span["attributes"].items()),
        ]
        for span in sorted(spans, key=lambda s: (s["start_time_unix_nano"], s["name"]))
    ]


def _parsed(attribute: Any) -> str:
    """Return an attribute's JSON in one canonical form; other text as its repr."""
    try:
        return json.dumps(json.loads(attribute), sort_keys=True)
    except (TypeError, ValueError):
        return repr(attribute)


def trace_id_of(manifest: Manifest, episode: Trajectory) -> str:
    """Return the id of an episode's trace. manifest: a commit of its step, whose key is used."""
    return f"tr-{sha256(_name(episode, manifest.key).encode())[:32]}"


def _turns(episode: Trajectory, trace_id: str, began: int) -> list[dict[str, Any]]:
    now, observation, spans = began, episode.first_observation, []
    for number, turn in enumerate(episode.turns):
        end = now + int(1e9 * (turn.generate_s + turn.env_s))
        if number >= len(episode.turns) - MAX_TURNS:
            span = _span(
                (trace_id, _span_id(trace_id, number), _span_id(trace_id, -1)),
                f"turn {number + 1}: {_cut(turn.action, 60)}",
                "TOOL",
                (now, end),
                (
                    {"prompt_tail": _cut(observation)},
                    {
                        "reply": _cut(turn.reply or turn.action),
                        "action": _cut(turn.action),
                        "observation": _cut(turn.observation),
                        "reward": turn.reward,
                    },
                ),
                {"generate_s": turn.generate_s, "env_s": turn.env_s, "weights": turn.version},
            )
            spans.append(span)
        now, observation = end, turn.observation
    return spans


def _span(
    ids: tuple[str, str, str | None],
    name: str,
    kind: str,
    times: tuple[int, int],
    texts: tuple[Mapping[str, Any], Mapping[str, Any]],
    more: Mapping[str, Any],
) -> dict[str, Any]:
    """Return a span for `mlflow.entities.Span.from_dict`; attributes are JSON texts.
    ids: trace, span, parent. times: begin, end, ns. texts: inputs, outputs. more: attributes.
    """
    trace_id, span_id, parent_id = ids
    values = (f"tr-{trace_id}", kind, *texts)
    attributes = dict(zip(ATTRIBUTES, values, strict=True)) | dict(more)
    return {
        "trace_id": f"tr-{trace_id}",
        "span_id": span_id,
        "parent_span_id": parent_id,
        "name": name,
        "start_time_unix_nano": times[0],
        "end_time_unix_nano": times[1],
        "events": [],
        "status": {"code": "STATUS_CODE_OK", "message": ""},
        "attributes": {key: json.dumps(value) for key, value in attributes.items()},
    }


def _span_id(trace_id: str, number: int) -> str:
    return sha256(f"{trace_id} {number}".encode())[:16]


def _name(episode: Trajectory, key: str) -> str:
    return f"{key} {episode.step} {episode.item.item_id} {episode.sample} {episode.temperature:g}"


def _cut(text: str, max_chars: int = MAX_CHARS) -> str:
    """Return a text's last `max_chars`, after `...` if cut, with control characters escaped."""
    return plain(text if len(text) <= max_chars else f"... {text[-max_chars:]}")
