"""Committed episodes as traces of MLflow: a span of the episode, and one of each turn.

The commit's key decides which episodes are drawn, so that the same ones are drawn again. A
trace's id is derived from its episode, so that repeated deliveries write it once. Texts are
cut: a trace is for display, the full record is in the store.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentgym.store.manifest import Manifest, sha256
from agentgym.types import Trajectory
from envs.plain import plain

MAX_CHARS = 1500  # per text in a span
MAX_TURNS = 40  # turns in one trace; of a longer episode, the last ones
DIGEST = "mlflow.agentgym.episode"  # tag: digest of actions, observations and rewards
ATTRIBUTES = ("mlflow.traceRequestId", "mlflow.spanType", "mlflow.spanInputs", "mlflow.spanOutputs")


@dataclass(frozen=True, slots=True)
class EpisodeTrace:
    """A trace as it is sent, in plain JSON types."""

    trace_id: str
    spans: tuple[dict[str, Any], ...]
    began_ms: int
    took_ms: int
    name: str
    request: str
    response: str
    success: bool
    tags: Mapping[str, str]

    @property
    def digest(self) -> str:
        """sha256 of the names, inputs and outputs of the trace's spans, see `digest_of_spans`.

        Times, tags and other attributes do not count.
        """
        return digest_of_spans(self.spans)


def drawn(episodes: Sequence[Trajectory], key: str, count: int) -> list[Trajectory]:
    """Return up to `count` valid episodes, as many successes as failures if there are enough.

    The order and the draw depend only on `key` and on the set of episodes.
    """
    valid = sorted(
        (episode for episode in episodes if episode.status.is_valid), key=lambda e: _order(e, key)
    )
    parts = [
        [episode for episode in valid if episode.success is wanted] for wanted in (True, False)
    ]
    balanced = [parts[0][: (count + 1) // 2], parts[1][: count // 2]]
    chosen = [*balanced[0], *balanced[1]]
    taken = {id(episode) for episode in chosen}
    rest = [episode for episode in valid if id(episode) not in taken]
    return sorted([*chosen, *rest[: count - len(chosen)]], key=lambda e: _order(e, key))[:count]


def trace_of(manifest: Manifest, episode: Trajectory) -> EpisodeTrace:
    """Return the trace of an episode.

    manifest: the commit whose record the episode is in.
    """
    trace_id = trace_id_of(manifest, episode).removeprefix("tr-")
    began = _began(manifest, episode)
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
    tags = {
        "step": manifest.step,
        "commit": str(manifest.seq),
        "item": _cut(episode.item.item_id),
        "sample": str(episode.sample),
        "optimizer_step": str(episode.step),
        "success": str(episode.success).lower(),
        "turns": str(len(episode.turns)),
        DIGEST: episode_digest(episode),
    }
    return EpisodeTrace(
        f"tr-{trace_id}",
        (root, *spans),
        began // 1_000_000,
        (end - began) // 1_000_000,
        root["name"],
        request,
        json.dumps(outcome),
        episode.success,
        tags,
    )


def digest_of_spans(spans: Sequence[Mapping[str, Any]]) -> str:
    """sha256 of the spans' names and texts, in order of time."""
    shown = [
        [span["name"], *(json.loads(span["attributes"][name]) for name in ATTRIBUTES[2:])]
        for span in sorted(spans, key=lambda s: (s["start_time_unix_nano"], s["name"]))
    ]
    return sha256(json.dumps(shown, sort_keys=True).encode())


def spans_of(spans: Sequence[Mapping[str, Any]]) -> list[list[Any]]:
    """Return the content that `digest_of_spans` leaves out: times, state and attributes.

    The spans are in order of time. Attributes are parsed: a server escapes their JSON in another
    way than a database.
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
    """Return the trace id of an episode in the record of this commit."""
    return f"tr-{sha256(_name(episode, manifest.key).encode())[:32]}"


def episode_digest(episode: Trajectory) -> str:
    """sha256 of an episode's actions, observations and rewards."""
    turns = [[turn.action, turn.observation, turn.reward] for turn in episode.turns]
    return sha256(json.dumps([episode.first_observation, turns]).encode())


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
    """Return a span for `mlflow.entities.Span.from_dict`; attributes are JSON texts."""
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


def _began(manifest: Manifest, episode: Trajectory) -> int:
    """Return an episode's start in ns since 1970; the commit's time if it was not recorded."""
    began = episode.timing.get("began_s", 0.0)
    return int(1e9 * (began or manifest.created_at))


def _name(episode: Trajectory, key: str) -> str:
    return f"{key} {episode.step} {episode.item.item_id} {episode.sample} {episode.temperature:g}"


def _order(episode: Trajectory, key: str) -> str:
    return sha256(_name(episode, key).encode())


def _cut(text: str, max_chars: int = MAX_CHARS) -> str:
    """Return text, a long one cut to its end, since the policy acts on what came last.

    Control characters are spelled out: some databases refuse them.
    """
    return plain(text if len(text) <= max_chars else f"... {text[-max_chars:]}")
