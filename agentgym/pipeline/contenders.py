"""The policies of an evaluation, made ready: checkpoints, registered models, folders, endpoints."""

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
    PolicyKind,
    PolicyName,
    checkpoint_contender,
    endpoint_contender,
    folder_contender,
    plain_contender,
)
from agentgym.evaluation.protocol import EvaluationProtocol, EvaluationRequest
from agentgym.pipeline.table import open_store
from agentgym.rollouts.policies.engines import check_engine
from agentgym.rollouts.policies.hosted import Endpoint, only_model
from agentgym.rollouts.policies.prices import load_tariff

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Invited:
    """A policy that is ready, the protocol it plays by, and the settings of servers and engine."""

    contender: Contender
    protocol: EvaluationProtocol
    cfg: RunConfig

    def instructions(self, rules: Mapping[str, str]) -> dict[str, str]:
        """Return the instructions that episodes begin with, by environment.

        rules: the instructions that servers send, by environment.
        """
        if not self.contender.knows_rules:
            return asking.instructions_of(self.protocol, rules)
        names = [settings.env.name for settings in self.protocol.envs if settings.instructions]
        return {env: rules[env] for env in names}

    def lines(self, rules: Mapping[str, str]) -> list[str]:
        """Return lines about the prompts of a policy that does not know the rules; else []."""
        instructions = self.instructions(rules)
        return [] if self.contender.knows_rules else list(asking.lines(self.protocol, instructions))


def invite(run: RunConfig, protocol: EvaluationProtocol, request: EvaluationRequest) -> Invited:
    """Return a policy ready to play; its model may be downloaded.

    A model that was not trained here gets the rules and enough tokens to answer, if the protocol is
    that of a run. Errors: ConfigError.
    """
    playing = playing_config(run, protocol, request.engine)
    contender = contender_of(run, playing, request)
    if contender.knows_rules or request.protocol:
        return Invited(contender, protocol, playing)
    fixed = {*request.changes, *request.kept}
    roomy = asking.with_room(protocol, run, fixed, _window(contender))
    if (
        "concurrency" not in fixed
        and playing.rollout.engine == "torch"
        and contender.checkpoint is not None
    ):
        roomy = _in_as_much_memory(roomy, protocol)
    return Invited(contender, roomy, playing_config(run, roomy, request.engine))


def _window(contender: Contender) -> int | None:
    """Context length of the model in tokens; None if it is not known."""
    if contender.checkpoint is None:
        return None
    architecture = json.loads(contender.checkpoint.architecture)
    window = {**architecture, **architecture.get("text_config", {})}.get("max_position_embeddings")
    return window if isinstance(window, int) else None


def _in_as_much_memory(longer: EvaluationProtocol, as_of: EvaluationProtocol) -> EvaluationProtocol:
    """Return `longer` with fewer episodes in flight, because each of them may be longer.

    The memory that the engine reserves for all of them is then no larger than for `as_of`.
    """
    before, now = (max(env.context_tokens for env in protocol.envs) for protocol in (as_of, longer))
    num = max(1, longer.concurrency * before // now)
    return longer.model_copy(update={"concurrency": num})


def playing_config(cfg: RunConfig, protocol: EvaluationProtocol, engine: str) -> RunConfig:
    """Return the run's settings with those that servers and an engine take from the protocol.

    engine: empty: the run's. Errors: ConfigError.
    """
    first, *others = protocol.env_configs
    name = engine or cfg.rollout.engine
    if protocol.deterministic and name != "torch":
        raise ConfigError(f"deterministic is nothing the engine {name} promises; use torch")
    rollout = cfg.rollout.model_copy(
        update={
            "engine": name,
            "engine_dtype": "auto" if name == "torch" else cfg.rollout.engine_dtype,
            "concurrency": protocol.concurrency,
            "instructions": True,  # servers send them; the protocol decides for each environment
        }
    )
    context = max(env.context_tokens for env in protocol.envs)
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
    """Return the policy that a request names. Files of a registered or published model are fetched.

    run: its checkpoints are used if the request names no run. cfg: settings of the engine.
    Errors: ConfigError if the policy is missing or not supported here.
    """
    name = PolicyName.parse(request.policy)
    if name.who in (PolicyKind.EXPERT, PolicyKind.RANDOM, PolicyKind.ECHO):
        return plain_contender(name)
    if name.who is PolicyKind.ENDPOINT:
        return endpoint_contender(_endpoint(request))
    if name.who is PolicyKind.RUN:
        from agentgym.pipeline.export import commit_of

        store = open_store(cfg)
        return checkpoint_contender(cfg, store, commit_of(run, store, name.name, run=name.of))
    if name.who is PolicyKind.REGISTRY:
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


def _registered(cfg: RunConfig, name: PolicyName, folder: Path) -> Path:
    """Copy the registered version's files below `folder` and check that none was changed.

    Result: the folder with the model. Errors: ConfigError.
    """
    from agentgym.evaluation.promotion import Promotions
    from agentgym.evaluation.version_files import fetch_registered
    from agentgym.tracking.deliver import tracker_of
    from agentgym.tracking.reaching import reaching
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
    """Return a local folder, or download a repository from the Hub. Errors: ConfigError."""
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
