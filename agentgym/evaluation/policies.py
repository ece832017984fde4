"""Who can be evaluated, by what a person types, and how each of them comes to play.

| POLICY | who |
|---|---|
| `expert`, `random`, `echo:ACTION` | the environment's expert; chance; always this action |
| `RUN:STEP`, `:STEP` | a checkpoint of a run of this folder, or of the configured run |
| `models:/NAME@ALIAS`, `models:/NAME/VERSION` | a version of the model registry |
| `https://HOST/v1` | a model behind an OpenAI-compatible endpoint |
| a folder, `OWNER/NAME`, `OWNER/NAME@REVISION` | a model of the Hugging Face layout |
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentgym.config import ConfigError, RunConfig
from agentgym.rollouts.episode import PlayerFailed, Said
from agentgym.rollouts.players import (
    ExpertPlayer,
    PlayerOf,
    RandomPlayer,
    ScriptedPlayer,
    TextPlayer,
    token_players,
)
from agentgym.rollouts.policies.engines import engine_module, engine_python, versions_in
from agentgym.rollouts.policies.hosted import Endpoint, HostedModel
from agentgym.rollouts.policies.opening import open_policy
from agentgym.store.keys import environment_modules, source_digest
from agentgym.store.manifest import Manifest, canonical_json, sha256
from agentgym.store.runstore import RunStore
from agentgym.tracking.registry import parse_model_uri
from agentgym.types import Sampling, Usage

if TYPE_CHECKING:  # experts and endpoints are evaluated without torch
    from agentgym.models.checkpoint import Checkpoint

ENGINE_PACKAGES = {"torch": ("torch", "transformers"), "vllm": ("vllm", "torch", "transformers")}


class Who(StrEnum):
    """What kind of policy a name is of."""

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
    """What was typed, taken apart."""

    who: Who
    name: str  # action, step, model name, URL, folder or repository
    of: str = ""  # run, version or alias (`@champion`), revision
    text: str = ""  # as it was typed

    @classmethod
    def parse(cls, text: str) -> PolicyName:
        """Errors: ConfigError."""
        kind, separator, rest = text.partition(":")
        if text in ("expert", "random"):
            return cls(Who(text), "", text=text)
        if kind == "echo" and separator:
            return cls(Who.ECHO, rest, text=text)
        if kind == "models":
            try:
                return cls(Who.REGISTRY, *parse_model_uri(text), text)
            except ValueError as error:
                raise ConfigError(f"policy {error}") from None
        if kind in ("http", "https"):
            return cls(Who.ENDPOINT, text, text=text)
        if found := re.fullmatch(r"(?P<of>r?[0-9a-f]{4,64})?:(?P<name>[a-z0-9-]+)", text):
            return cls(Who.RUN, found["name"], found["of"] or "", text)
        if text and Path(text).is_dir():
            return cls(Who.MODEL, text, text=text)
        if found := re.fullmatch(r"(?P<name>[\w.-]+/[\w.-]+)(@(?P<of>[\w./-]+))?", text):
            return cls(Who.MODEL, found["name"], found["of"] or "", text)
        raise ConfigError(
            f"policy {text!r} is none: expected expert, random, echo:ACTION, RUN:STEP,"
            " models:/NAME@ALIAS, the URL of an endpoint, a folder that exists, or OWNER/NAME of"
            " the Hub"
        )


@dataclass(frozen=True, slots=True)
class Seat:
    """An open policy: who plays an episode, and why it plays no more."""

    player_of: PlayerOf
    stopped: Callable[[], str] = lambda: ""  # empty: it goes on


@dataclass(frozen=True)
class Contender:
    """A policy that is known and not open yet. Its identity is in an evaluation's digest."""

    identity: Mapping[str, Any]
    about: str  # for people
    needs_expert: bool = False
    needs_hints: bool = False
    knows_rules: bool = True  # false: a model nobody trained here, see `agentgym.evaluation.asking`
    checkpoint: Checkpoint | None = None  # of one that samples with an engine
    version: int = 0  # of its weights: optimizer steps, where they are a run's
    endpoint: Endpoint | None = None
    player_of: PlayerOf | None = None  # of all others


@contextlib.asynccontextmanager
async def seated(contender: Contender, cfg: RunConfig, spent: Usage) -> AsyncIterator[Seat]:
    """The policy, open. cfg: whose engine, device, context and concurrency an engine is opened
    with; spent: what was spent before this process, and counts against a limit of cost.
    """
    if contender.endpoint is not None:
        async with HostedModel(contender.endpoint, spent) as model:
            yield Seat(model.player, lambda: model.stopped)
    elif contender.checkpoint is None:
        assert contender.player_of is not None
        yield Seat(contender.player_of)
    else:
        policy = open_policy(
            cfg,
            contender.checkpoint,
            num_slots=cfg.rollout.concurrency,
            version=contender.version,
        )
        try:
            yield Seat(token_players(policy, contender.checkpoint.renderer))
        finally:
            await policy.close()


class EchoPlayer(TextPlayer):
    """Says one thing for ever."""

    def __init__(self, action: str) -> None:
        self._said = Said(action, action)

    async def act(self, session: Any, sampling: Sampling) -> Said:
        return self._said


def plain_contender(name: PolicyName) -> Contender:
    """Of those that are no models."""
    identity = {"kind": str(name.who)}
    if name.who is Who.EXPERT:
        return Contender(
            identity, "the expert", needs_expert=True, player_of=lambda *_: ExpertPlayer()
        )
    if name.who is Who.RANDOM:
        chance = Contender(identity, "chance", player_of=lambda *_: RandomPlayer())
        return replace(chance, needs_hints=True)
    assert name.who is Who.ECHO
    action = name.name
    return Contender(
        {**identity, "action": action}, f"echo {action!r}", player_of=lambda *_: EchoPlayer(action)
    )


def endpoint_contender(endpoint: Endpoint) -> Contender:
    """Of a model behind an endpoint: it is what its address and name say."""
    identity = {
        "kind": str(Who.ENDPOINT),
        "url": endpoint.base_url.rstrip("/"),
        "model": endpoint.model,
    }
    about = f"{endpoint.model} at {endpoint.base_url}"
    return Contender(identity, about, knows_rules=False, endpoint=endpoint)


def weights_contender(
    checkpoint: Checkpoint, weights: str, cfg: RunConfig, about: str
) -> Contender:
    """Of a model that samples here. weights: their digest."""
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
    """Return a commit's weights as a policy.

    cfg: settings of the engine. Errors: ValueError if the model cannot read as many tokens as
    the settings ask for.
    """
    from agentgym.models.architecture import read_architecture, require_positions
    from agentgym.models.checkpoint import load_checkpoint, policy_digest

    about = f"{manifest.step} commit {manifest.seq}"
    checkpoint = load_checkpoint(store, manifest)
    architecture = read_architecture(checkpoint.architecture)
    require_positions(architecture, cfg.model.context_tokens, about)
    contender = weights_contender(checkpoint, policy_digest(manifest), cfg, about)
    return replace(contender, version=int(manifest.state.get("global_step", 0)))


def folder_contender(folder: Path, cfg: RunConfig, about: str) -> Contender:
    """Of a folder of the Hugging Face layout. Errors: ConfigError, ValueError."""
    from agentgym.models.folder import folder_digest, is_of_ours, load_folder

    checkpoint = load_folder(folder, cfg.model)
    contender = weights_contender(checkpoint, folder_digest(folder), cfg, about)
    return replace(contender, knows_rules=is_of_ours(folder))


def prompts_digest(instructions: str) -> str:
    """Of what episodes begin with; empty where they begin with nothing."""
    return sha256(instructions.encode()) if instructions else ""


def env_version(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The source and options of an environment that is installed here."""
    source = source_digest(environment_modules(name))
    return {"options": json.loads(canonical_json(options)), "source": source}


class RecordedPlayer(ScriptedPlayer):
    """What was done before, done again."""

    def __init__(self, actions: tuple[str, ...] | None) -> None:
        super().__init__([Said(action, action) for action in actions or ()])
        self._missing = actions is None

    async def act(self, session: Any, sampling: Sampling) -> Said | None:
        if self._missing:
            raise PlayerFailed("no attempt at it counted, so there is nothing to grade", final=True)
        return await super().act(session, sampling)


def recorded_contender(
    of: str, records: str, actions: Mapping[tuple[str, int], tuple[str, ...]], about: str
) -> Contender:
    """The actions of an evaluation. of: its digest; records: that of what it holds."""
    identity = {"kind": str(Who.RECORDED), "of": of, "records": records}
    return Contender(
        identity,
        f"{about}, graded again",
        player_of=lambda item, sample: RecordedPlayer(actions.get((item.item_id, sample))),
    )
