"""Find models by name: the policies of an evaluation (checkpoints, registered models, folders,
endpoints), and a commit to export for Hugging Face or, its adapter alone, for peft.
"""

from __future__ import annotations

import asyncio
import json
import logging
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from agentgym.config import ConfigError, RunConfig, first_of
from agentgym.evaluation.policies import (
    Contender,
    PolicyKind,
    PolicyName,
    adapted_lines,
    checkpoint_contender,
    endpoint_contender,
    folder_contender,
    instructions_of,
    plain_contender,
    with_room,
)
from agentgym.evaluation.protocol import EvaluationProtocol, EvaluationRequest
from agentgym.models.architecture import has_weights
from agentgym.pipeline.table import begun, known_steps, open_store, run_key, run_label
from agentgym.rollouts.policies.engines import check_engine
from agentgym.rollouts.policies.hosted import Endpoint, only_model
from agentgym.rollouts.policies.prices import load_tariff
from agentgym.store.manifest import Manifest
from agentgym.store.runstore import RunStore
from agentgym.tracking.deliver import delivered_steps, tracker_of

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Invited:
    """A policy that is ready, the protocol it plays by, and the settings of servers and engine."""

    contender: Contender
    protocol: EvaluationProtocol
    cfg: RunConfig

    def instructions(self, rules: Mapping[str, str]) -> dict[str, str]:
        """Return environment -> instructions that begin its episodes.
        rules: environment -> instructions that its server sends.
        """
        if not self.contender.knows_rules:
            return instructions_of(self.protocol, rules)
        names = [settings.env.name for settings in self.protocol.envs if settings.instructions]
        return {env: rules[env] for env in names}

    def lines(self, rules: Mapping[str, str]) -> list[str]:
        """Return a line per environment on the policy's prompts; [] if it was trained here.
        rules: see `instructions`.
        """
        if self.contender.knows_rules:
            return []
        return list(adapted_lines(self.protocol, self.instructions(rules)))


def invite(run: RunConfig, protocol: EvaluationProtocol, request: EvaluationRequest) -> Invited:
    """Return a policy ready to play; its model may be downloaded.

    If the request names no protocol, a model that was not trained here gets the rules, enough
    tokens to answer and, in the engine `torch`, fewer episodes at a time for the same memory,
    unless the request sets these. Errors: ConfigError.
    """
    playing = playing_config(run, protocol, request.engine)
    contender = contender_of(run, playing, request)
    if contender.knows_rules or request.protocol:
        return Invited(contender, protocol, playing)
    fixed = {*request.changes, *request.kept}
    roomy = with_room(protocol, run, fixed, _window(contender))
    if (
        "concurrency" not in fixed
        and playing.rollout.engine == "torch"
        and contender.checkpoint is not None
    ):
        # longer episodes: the memory that the engine reserves for all in flight must not grow
        before, now = (max(env.context_tokens for env in p.envs) for p in (protocol, roomy))
        num = max(1, roomy.concurrency * before // now)
        roomy = roomy.model_copy(update={"concurrency": num})
    return Invited(contender, roomy, playing_config(run, roomy, request.engine))


def _window(contender: Contender) -> int | None:
    """Context length of the model in tokens; None if it is not known."""
    if contender.checkpoint is None:
        return None
    architecture = json.loads(contender.checkpoint.architecture)
    window = {**architecture, **architecture.get("text_config", {})}.get("max_position_embeddings")
    return window if isinstance(window, int) else None


def playing_config(cfg: RunConfig, protocol: EvaluationProtocol, engine: str) -> RunConfig:
    """Return the run's settings changed to those of the protocol. engine: empty for the run's.
    Errors: ConfigError if the engine is not available or does not support the protocol.
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
        at_once = request.max_concurrency, request.max_per_minute
        limits = request.timeout_s, request.max_retries, *at_once, tariff, request.max_cost
        return Endpoint(request.policy, model, request.key_variable, *limits)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _registered(cfg: RunConfig, name: PolicyName, folder: Path) -> Path:
    """Copy a version's files below `folder` and return the model's folder. Log a warning if they
    could not be compared with those registered. Errors: ConfigError, also if they were changed.
    """
    from agentgym.evaluation.registry import Promotions, fetch_registered
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
    """Return the policy's folder; if there is none of its name, download the weights and texts of
    that repository from the Hub. Errors: ConfigError.
    """
    if Path(name.name).is_dir():
        return Path(name.name)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        patterns = ["*.json", "*.safetensors", "*.txt", "*.jinja"]
        return Path(snapshot_download(name.name, revision=name.of or None, allow_patterns=patterns))
    except (OSError, HfHubHTTPError, HFValidationError) as error:
        reason = str(error).strip().splitlines()[0][:200]
        raise ConfigError(f"policy {name.text} cannot be had from the Hub: {reason}") from None


def commit_of(cfg: RunConfig, store: RunStore, name: str, *, run: str = "") -> Manifest:
    """Return a step's newest commit. run: see `agentgym.pipeline.export`.
    Errors: ConfigError for an unknown run or step, or if the commit has no weights.
    """
    steps = delivered_steps(cfg).get(key_of_run(cfg, run)) if run else None
    if steps is None:
        known_steps(cfg, name)
        heads = begun(cfg, store)
    else:
        heads = {head.step: head for head in store.heads() if (head.step, head.key[:16]) in steps}
    manifest = heads.get(name)
    if manifest is None or not has_weights(manifest):
        having = [step for step, head in heads.items() if has_weights(head)]
        known = delivered_steps(cfg).items()
        runs = first_of([f"r{key[:12]}" for key, there in known if name in dict(there)])
        raise ConfigError(
            f"step {name} of run {run or run_label(cfg)} has no commit with weights; its steps with"
            f" weights: {', '.join(having) or 'none'}; runs with this step: {runs or 'none'}"
        )
    return manifest


def key_of_run(cfg: RunConfig, run: str) -> str:
    """Return the first digits, 16 or more, of the key of a run that was delivered from this state
    folder, or of the configured run.
    run: the beginning of its name; empty: the configured run.
    Errors: ConfigError if not exactly one run has this name.
    """
    known = delivered_steps(cfg)
    matching = [key for key in known if key.startswith(run.removeprefix("r"))]
    if not run or (not matching and run_key(cfg).startswith(run.removeprefix("r"))):
        return run_key(cfg)
    if len(matching) != 1:
        there = ", ".join(f"r{key[:12]}" for key in matching or known) or "no run"
        what = "is several" if matching else "is none"
        raise ConfigError(f"run {run} {what} of those known under {cfg.state_dir}: {there}")
    return matching[0]
