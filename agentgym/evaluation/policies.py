"""Policies that can be evaluated: how a user names them, and how each is opened.

| POLICY | what plays |
|---|---|
| `expert`, `random`, `echo:ACTION` | the environment's expert; random actions; always this action |
| `RUN:STEP`, `:STEP` | a checkpoint of a run of this folder, or of the configured run |
| `models:/NAME@ALIAS`, `models:/NAME/VERSION` | a version of the model registry |
| `https://HOST/v1` | a model behind an OpenAI-compatible endpoint |
| a folder, `OWNER/NAME`, `OWNER/NAME@REVISION` | a model of the Hugging Face layout |
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentgym.config import ConfigError, RunConfig
from agentgym.evaluation.protocol import EnvProtocol, EvaluationProtocol
from agentgym.rollouts.episode import Guide, PlayerFailed, PlayerOf, PlayerReply, token_players
from agentgym.rollouts.players import ExpertPlayer, RandomPlayer, ScriptedPlayer, TextPlayer
from agentgym.rollouts.policies.engines import engine_module, engine_python, versions_in
from agentgym.rollouts.policies.hosted import Endpoint, HostedModel
from agentgym.store.keys import environment_modules, source_digest
from agentgym.store.manifest import Manifest, canonical_json, sha256
from agentgym.store.runstore import RunStore
from agentgym.tracking.registry import parse_model_uri
from agentgym.types import Sampling, Usage

if TYPE_CHECKING:  # experts and endpoints are evaluated without torch
    from agentgym.models.checkpoint import Checkpoint

ENGINE_PACKAGES = {"torch": ("torch", "transformers"), "vllm": ("vllm", "torch", "transformers")}


class PolicyKind(StrEnum):
    """Kinds of policies that can be evaluated."""

    EXPERT = "expert"
    RANDOM = "random"
    ECHO = "echo"
    RUN = "run"
    REGISTRY = "registry"
    ENDPOINT = "endpoint"
    MODEL = "model"
    RECORDED = "recorded"  # the actions of another evaluation, played again


@dataclass(frozen=True, slots=True)
class PolicyName:
    """A policy's name in its parts, see the table of this module."""

    who: PolicyKind
    name: str  # action, step, model name, URL, folder or repository
    of: str = ""  # run, version or alias (`@champion`), revision
    text: str = ""  # as it was typed

    @classmethod
    def parse(cls, text: str) -> PolicyName:
        """Parse a policy's name; an existing folder is a model. Errors: ConfigError if unknown."""
        kind, separator, rest = text.partition(":")
        if text in ("expert", "random"):
            return cls(PolicyKind(text), "", text=text)
        if kind == "echo" and separator:
            return cls(PolicyKind.ECHO, rest, text=text)
        if kind == "models":
            try:
                return cls(PolicyKind.REGISTRY, *parse_model_uri(text), text)
            except ValueError as error:
                raise ConfigError(f"policy {error}") from None
        if kind in ("http", "https"):
            return cls(PolicyKind.ENDPOINT, text, text=text)
        if match := re.fullmatch(r"(?P<of>r?[0-9a-f]{4,64})?:(?P<name>[a-z0-9-]+)", text):
            return cls(PolicyKind.RUN, match["name"], match["of"] or "", text)
        if text and Path(text).is_dir():
            return cls(PolicyKind.MODEL, text, text=text)
        if match := re.fullmatch(r"(?P<name>[\w.-]+/[\w.-]+)(@(?P<of>[\w./-]+))?", text):
            return cls(PolicyKind.MODEL, match["name"], match["of"] or "", text)
        raise ConfigError(
            f"unknown policy {text!r}: expected expert, random, echo:ACTION, RUN:STEP,"
            " models:/NAME@ALIAS, the URL of an endpoint, a folder that exists, or OWNER/NAME of"
            " the Hub"
        )


@dataclass(frozen=True, slots=True)
class Seat:
    """A policy opened for playing: makes a player per episode; `stopped` returns why it ended."""

    player_of: PlayerOf
    stopped: Callable[[], str] = lambda: ""  # empty: it has not stopped


@dataclass(frozen=True)
class Contender:
    """A policy to evaluate, not opened yet. Its identity is part of the evaluation's digest."""

    identity: Mapping[str, Any]
    about: str  # for people
    needs_expert: bool = False
    needs_hints: bool = False
    knows_rules: bool = True  # false: a model not trained here; it gets the rules, see `with_room`
    checkpoint: Checkpoint | None = None  # if it samples with an engine
    version: int = 0  # of its weights: optimizer steps if a run trained them
    endpoint: Endpoint | None = None
    player_of: PlayerOf | None = None  # if it has neither checkpoint nor endpoint


@contextlib.asynccontextmanager
async def seated(contender: Contender, cfg: RunConfig, spent: Usage) -> AsyncIterator[Seat]:
    """Open the policy for the block, and close it after.
    cfg: engine, device, context and concurrency of a policy that needs an engine; spent: usage of
    earlier processes, which counts against a cost limit.
    """
    if contender.endpoint is not None:
        async with HostedModel(contender.endpoint, spent) as model:
            yield Seat(model.player, lambda: model.stopped)
    elif contender.checkpoint is None:
        assert contender.player_of is not None
        yield Seat(contender.player_of)
    else:
        from agentgym.rollouts.engine import open_policy  # imports torch, which is slow

        policy = open_policy(
            cfg, contender.checkpoint, num_slots=cfg.rollout.concurrency, version=contender.version
        )
        try:
            yield Seat(token_players(policy, contender.checkpoint.renderer))
        finally:
            await policy.close()


class EchoPlayer(TextPlayer):
    """Player that always takes the same action."""

    def __init__(self, action: str) -> None:
        self._said = PlayerReply(action, action)

    async def act(self, session: Any, sampling: Sampling) -> PlayerReply:
        return self._said


def plain_contender(name: PolicyName) -> Contender:
    """Return a policy that is no model: the expert, random actions, or one fixed action."""
    kind, action = {"kind": str(name.who)}, name.name
    if name.who is PolicyKind.EXPERT:
        return Contender(kind, "the expert", needs_expert=True, player_of=lambda *_: ExpertPlayer())
    if name.who is PolicyKind.RANDOM:
        return Contender(kind, "chance", needs_hints=True, player_of=lambda *_: RandomPlayer())
    assert name.who is PolicyKind.ECHO
    identity, about = {**kind, "action": action}, f"echo {action!r}"
    return Contender(identity, about, player_of=lambda *_: EchoPlayer(action))


def endpoint_contender(endpoint: Endpoint) -> Contender:
    """Return a model behind an endpoint, identified by its address and name."""
    kind, url = str(PolicyKind.ENDPOINT), endpoint.base_url.rstrip("/")
    identity = {"kind": kind, "url": url, "model": endpoint.model}
    about = f"{endpoint.model} at {endpoint.base_url}"
    return Contender(identity, about, knows_rules=False, endpoint=endpoint)


def weights_contender(
    checkpoint: Checkpoint, weights: str, cfg: RunConfig, about: str
) -> Contender:
    """Return a checkpoint as a policy to run here. weights: its digest; about: text for people."""
    engine = cfg.rollout.engine
    identity = {
        "kind": "weights",
        "weights": weights,
        "architecture": sha256(checkpoint.architecture.encode()),
        "tokenizer": sha256(checkpoint.tokenizer_json),
        "engine": engine,
        "engine_dtype": cfg.rollout.engine_dtype,
        "device": cfg.compute_device,
        "source": source_digest((engine_module(engine),)),
        "packages": versions_in(engine_python(cfg), ENGINE_PACKAGES.get(engine, ())),
    }
    return Contender(identity, f"{about}, engine {engine}", checkpoint=checkpoint)


def checkpoint_contender(cfg: RunConfig, store: RunStore, manifest: Manifest) -> Contender:
    """Return a commit's weights as a policy. Errors: those of `load_checkpoint`; ConfigError if the
    model's context is shorter than model.context_tokens.
    """
    from agentgym.models.architecture import policy_digest, read_architecture, require_positions
    from agentgym.models.checkpoint import load_checkpoint

    about = f"{manifest.step} commit {manifest.seq}"
    checkpoint = load_checkpoint(store, manifest)
    architecture = read_architecture(checkpoint.architecture)
    require_positions(architecture, cfg.model.context_tokens, about)
    contender = weights_contender(checkpoint, policy_digest(manifest), cfg, about)
    return replace(contender, version=int(manifest.state.get("global_step", 0)))


def folder_contender(folder: Path, cfg: RunConfig, about: str) -> Contender:
    """Return the model in a folder of the Hugging Face layout as a policy. about: text for people.
    Errors: ConfigError or ValueError if it cannot be loaded.
    """
    from agentgym.models.checkpoint import folder_digest, is_of_ours, load_folder

    checkpoint = load_folder(folder, cfg.model)
    contender = weights_contender(checkpoint, folder_digest(folder), cfg, about)
    return replace(contender, knows_rules=is_of_ours(folder))


def prompts_digest(instructions: str) -> str:
    """Return the sha256 of the episodes' opening instructions; empty if there are none."""
    return sha256(instructions.encode()) if instructions else ""


def env_version(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `source` digest and `options` of an installed environment, as JSON types."""
    source = source_digest(environment_modules(name))
    return {"options": json.loads(canonical_json(options)), "source": source}


class RecordedPlayer(ScriptedPlayer):
    """Player that repeats recorded actions; `act` raises PlayerFailed if there is no record."""

    def __init__(self, actions: tuple[str, ...] | None) -> None:
        super().__init__([PlayerReply(action, action) for action in actions or ()])
        self._missing = actions is None

    async def act(self, session: Any, sampling: Sampling) -> PlayerReply | None:
        if self._missing:
            raise PlayerFailed("no attempt at it counted, so there is nothing to grade", final=True)
        return await super().act(session, sampling)


def recorded_contender(
    of: str, records: str, actions: Mapping[tuple[str, int], tuple[str, ...]], about: str
) -> Contender:
    """Return a policy that repeats an evaluation's actions.
    of, records: digests of the evaluation and of its records; about: text for people;
    actions: by item id and sample. A player without recorded actions fails.
    """
    identity = {"kind": str(PolicyKind.RECORDED), "of": of, "records": records}
    return Contender(
        identity,
        f"{about}, graded again",
        player_of=lambda item, sample: RecordedPlayer(actions.get((item.item_id, sample))),
    )


REACT = """\
Answer in this form. First think, then name one action, alone on its line:
Thought: your thoughts
Action: your action"""
# default minimum tokens: of a reply, of an observation, of the text before the first turn, of a
# worked example
REPLY, OBSERVATION = EnvProtocol.model_fields["max_new_tokens"].default, 512
FIRST, EXAMPLE = 1024, 1024
# protocol fields that suit the policy rather than the question, and the run settings they come from
OWN = {
    "instructions": "rollout.instructions",
    "max_new_tokens": "rollout.max_new_tokens",
    "context_tokens": "model.context_tokens",
}


def with_room(
    protocol: EvaluationProtocol, cfg: RunConfig, kept: Collection[str], window: int | None
) -> EvaluationProtocol:
    """Return the protocol for a model that was not trained here: it has the instructions and token
    limits that leave room for all turns. cfg: the run whose protocol it is.
    kept: fields that the user chose, which stay as they are;
    window: the model's context length in tokens, if known; no limit is raised above it.
    """
    observation = max(cfg.rollout.observation_tokens, OBSERVATION)
    envs = []
    for settings in protocol.envs:
        reply, context = settings.max_new_tokens, settings.context_tokens
        if "max_new_tokens" not in kept:
            reply = max(reply, REPLY)
        if "context_tokens" not in kept:
            turns = settings.max_turns * (reply + observation)
            wanted = FIRST + settings.examples * EXAMPLE + turns
            context = max(context, wanted if window is None else min(wanted, window))
        if "max_new_tokens" not in kept:
            reply = min(reply, max(settings.max_new_tokens, context // 2))
        instructions = settings.instructions if "instructions" in kept else True
        fields = {"max_new_tokens": reply, "context_tokens": context, "instructions": instructions}
        envs.append(EnvProtocol.model_validate({**settings.model_dump(), **fields}))
    return protocol.model_copy(update={"envs": tuple(envs)})


def told_by(guides: Mapping[str, Guide], protocol: EvaluationProtocol) -> dict[str, str]:
    """Return environment -> its servers' instructions (`guides`) with as many worked examples as
    the protocol wants. Errors: ConfigError if an environment offers too few examples.
    """
    return {
        name: guides[name].opening(name, settings.examples, settings.action_format)
        for settings in protocol.envs
        for name in (settings.env.name,)
    }


def instructions_of(protocol: EvaluationProtocol, openings: Mapping[str, str]) -> dict[str, str]:
    """Return the text that a model not trained here reads first, by environment: the `openings`
    (from `told_by`) and, in the action format "react", the form of a reply.
    Environments whose protocol has no `instructions` are left out.
    """
    texts = {}
    for settings in protocol.envs:
        if settings.instructions:
            name, form = settings.env.name, REACT if settings.action_format == "react" else ""
            texts[name] = "\n\n".join(filter(None, (openings[name], form)))
    return texts


def adaptations(
    protocol: EvaluationProtocol,
    changed: EvaluationProtocol,
    openings: Mapping[str, str],
    instructions: Mapping[str, str],
) -> dict[str, dict[str, Any]]:
    """Return token limits and the instructions' digest, for each environment where this policy's
    differ from the protocol's. They are part of its identity, so that results stay comparable.
    changed: the protocol as this policy gets it; openings: the text that other policies get;
    instructions: the text that this policy gets.
    """
    return {
        adapted.env.name: {
            "instructions": prompts_digest(text),
            "max_new_tokens": adapted.max_new_tokens,
            "context_tokens": adapted.context_tokens,
        }
        for standard, adapted in zip(protocol.envs, changed.envs, strict=True)
        for text in (instructions.get(adapted.env.name, ""),)
        if adapted != standard
        or text != (openings[adapted.env.name] if standard.instructions else "")
    }


def adapted_lines(changed: EvaluationProtocol, instructions: Mapping[str, str]) -> Iterator[str]:
    """Yield a line per environment on the instructions and limits of a model not trained here."""
    for env_protocol in changed.envs:
        name, text = env_protocol.env.name, instructions.get(env_protocol.env.name, "")
        begins = f"{len(text)} characters of instructions" if text else "no instructions"
        if env_protocol.instructions and not text:
            begins += " (its servers have none)"
        yield (
            f"{name}: this model was not trained here. It gets {begins}, at most"
            f" {env_protocol.max_new_tokens} tokens a reply and {env_protocol.context_tokens} an"
            f" episode, action format {env_protocol.action_format}; --instructions,"
            " --max-new-tokens, --context-tokens and --action-format change that"
        )
