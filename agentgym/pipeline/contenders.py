"""Who is asked to play, made ready: checkpoints, registered models, folders, endpoints."""

from __future__ import annotations

import asyncio
import json
import logging
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from agentgym.config import ConfigError, RunConfig
from agentgym.evaluation import asking
from agentgym.evaluation.policies import (
    Contender,
    PolicyName,
    Who,
    checkpoint_contender,
    endpoint_contender,
    folder_contender,
    plain_contender,
)
from agentgym.evaluation.protocol import EvaluationProtocol
from agentgym.evaluation.request import EvaluationRequest
from agentgym.pipeline.table import open_store
from agentgym.rollouts.policies.engines import check_engine
from agentgym.rollouts.policies.hosted import Endpoint, only_model
from agentgym.rollouts.policies.prices import load_tariff

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Invited:
    """A policy, how it is asked, and the settings that servers and an engine are opened with."""

    contender: Contender
    protocol: EvaluationProtocol
    cfg: RunConfig

    def instructions(self, told: Mapping[str, str]) -> dict[str, str]:
        """What episodes begin with, by environment. told: the servers' instructions."""
        if not self.contender.knows_rules:
            return asking.instructions_of(self.protocol, told)
        asked = [each.env.name for each in self.protocol.envs if each.instructions]
        return {env: told[env] for env in asked}

    def lines(self, told: Mapping[str, str]) -> list[str]:
        """How a model is asked that was not trained here, for people; empty for any other."""
        given = self.instructions(told)
        return [] if self.contender.knows_rules else list(asking.lines(self.protocol, given))


def invite(run: RunConfig, protocol: EvaluationProtocol, request: EvaluationRequest) -> Invited:
    """Make a policy ready. A model that was not trained here, by the protocol of a run, is told the
    rules and has room to answer. Errors: ConfigError.
    """
    playing = playing_config(run, protocol, request.engine)
    contender = contender_of(run, playing, request)
    if contender.knows_rules or request.protocol:
        return Invited(contender, protocol, playing)
    kept = {*request.changes, *request.kept}
    asked = asking.with_room(protocol, run, kept, _window(contender))
    if (
        "concurrency" not in kept
        and playing.rollout.engine == "torch"
        and contender.checkpoint is not None
    ):
        asked = _in_as_much_memory(asked, protocol)
    return Invited(contender, asked, playing_config(run, asked, request.engine))


def _window(contender: Contender) -> int | None:
    """Tokens that the model can read at most; None where that is not known."""
    if contender.checkpoint is None:
        return None
    told = json.loads(contender.checkpoint.architecture)
    window = {**told, **told.get("text_config", {})}.get("max_position_embeddings")
    return window if isinstance(window, int) else None


def _in_as_much_memory(asked: EvaluationProtocol, as_of: EvaluationProtocol) -> EvaluationProtocol:
    """With fewer episodes in flight where each is longer: the engine keeps room for all of them."""
    before, now = (max(each.context_tokens for each in one.envs) for one in (as_of, asked))
    num = max(1, asked.concurrency * before // now)
    return asked.model_copy(update={"concurrency": num})


def playing_config(cfg: RunConfig, protocol: EvaluationProtocol, engine: str) -> RunConfig:
    """The run's settings as far as servers and an engine are concerned, for this protocol."""
    first, *others = protocol.env_configs
    name = engine or cfg.rollout.engine
    if protocol.deterministic and name != "torch":
        raise ConfigError(f"deterministic is nothing the engine {name} promises; use torch")
    rollout = cfg.rollout.model_copy(
        update={
            "engine": name,
            "engine_dtype": "auto" if name == "torch" else cfg.rollout.engine_dtype,
            "concurrency": protocol.concurrency,
            "instructions": True,  # they are asked for; each environment says whether it wants them
        }
    )
    context = max(each.context_tokens for each in protocol.envs)
    playing = cfg.model_copy(
        update={
            "env": first,
            "mix": tuple(others),
            "rollout": rollout,
            "model": cfg.model.model_copy(update={"context_tokens": context}),
            "deterministic": protocol.deterministic,
            "compute": "inline",
        }
    )
    check_engine(playing)
    return playing


def contender_of(run: RunConfig, cfg: RunConfig, request: EvaluationRequest) -> Contender:
    """run: whose checkpoints are meant where none is named; cfg: how an engine is set up.
    Errors: ConfigError where it is not there, or not supported here.
    """
    name = PolicyName.parse(request.policy)
    if name.who in (Who.EXPERT, Who.RANDOM, Who.ECHO):
        return plain_contender(name)
    if name.who is Who.ENDPOINT:
        return endpoint_contender(_endpoint(request))
    if name.who is Who.RUN:
        return _of_run(run, cfg, name)
    if name.who is Who.REGISTRY:
        with tempfile.TemporaryDirectory(prefix="agentgym-model-") as folder:
            return folder_contender(_registered(cfg, name, Path(folder)), cfg, name.text)
    return folder_contender(_model_folder(name), cfg, name.text)


def _endpoint(request: EvaluationRequest) -> Endpoint:
    try:
        model = request.model or asyncio.run(only_model(request.policy, request.key_variable))
        tariff = load_tariff(request.prices, model) if request.prices else None
        return Endpoint(
            request.policy,
            model,
            request.key_variable,
            request.timeout_s,
            request.max_retries,
            request.max_concurrency,
            request.max_per_minute,
            tariff,
            request.max_cost,
        )
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _of_run(run: RunConfig, cfg: RunConfig, name: PolicyName) -> Contender:
    from agentgym.pipeline.export import commit_of

    store = open_store(cfg)
    return checkpoint_contender(cfg, store, commit_of(run, store, name.name, run=name.of))


def _registered(cfg: RunConfig, name: PolicyName, folder: Path) -> Path:
    """The registered version's files, copied there, each as it was registered.
    Errors: ConfigError.
    """
    from agentgym.evaluation.promotion import Promotions
    from agentgym.evaluation.registered import fetch_registered
    from agentgym.tracking.deliver import tracker_of
    from agentgym.tracking.mlflow import reaching
    from agentgym.tracking.registry import ModelChanged, version_meant

    with reaching(cfg.tracking_uri):
        tracker = tracker_of(cfg)
        try:
            number = version_meant(tracker, name.name, name.of)
            promotions = Promotions(open_store(cfg), tracker, name.name, cfg.registry.alias)
            path, left_out = fetch_registered(promotions, number, folder)
        except (LookupError, ModelChanged) as error:
            raise ConfigError(f"policy {name.text}: {error}") from None
    if left_out:
        logger.warning("not checked: %s", left_out)
    return path


def _model_folder(name: PolicyName) -> Path:
    """A folder as it is; a repository of the Hub, brought here. Errors: ConfigError."""
    if Path(name.name).is_dir():
        return Path(name.name)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        return Path(
            snapshot_download(
                name.name,
                revision=name.of or None,
                allow_patterns=["*.json", "*.safetensors", "*.txt", "*.jinja"],
            )
        )
    except (OSError, HfHubHTTPError, HFValidationError) as error:
        reason = str(error).strip().splitlines()[0][:200]
        raise ConfigError(f"policy {name.text} cannot be had from the Hub: {reason}") from None
