"""Instructions and token limits for a policy that was not trained here.

A checkpoint of ours plays as it was trained, perhaps without instructions and in six tokens.
Any other model knows neither the rules nor that its reply must be so short.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from agentgym.config import RunConfig
from agentgym.evaluation.protocol import EnvProtocol, EvaluationProtocol
from agentgym.rollouts.episode import Guide
from agentgym.store.manifest import sha256

REACT = """\
Answer in this form. First think, then name one action, alone on its line:
Thought: your thoughts
Action: your action"""
# default minimum tokens: of a reply, of an observation, of the text before the first turn, of a
# worked example
REPLY, OBSERVATION = EnvProtocol.model_fields["max_new_tokens"].default, 512
FIRST, EXAMPLE = 1024, 1024
# protocol fields that belong to the policy, and the run settings that they come from
OWN = {
    "instructions": "rollout.instructions",
    "max_new_tokens": "rollout.max_new_tokens",
    "context_tokens": "model.context_tokens",
}


def with_room(
    protocol: EvaluationProtocol, cfg: RunConfig, kept: Collection[str], window: int | None
) -> EvaluationProtocol:
    """Return the protocol with instructions on and token limits raised to leave room for all turns.

    cfg: the run whose protocol it is; kept: fields that the user chose, which stay as they are;
    window: the model's context length in tokens, if known; no limit is raised above it.
    """
    observation = max(cfg.rollout.observation_tokens, OBSERVATION)
    envs = tuple(
        _with_room(env_protocol, observation, kept, window) for env_protocol in protocol.envs
    )
    return protocol.model_copy(update={"envs": envs})


def _with_room(
    env_protocol: EnvProtocol, observation: int, kept: Collection[str], window: int | None
) -> EnvProtocol:
    reply, context = env_protocol.max_new_tokens, env_protocol.context_tokens
    if "max_new_tokens" not in kept:
        reply = max(reply, REPLY)
    if "context_tokens" not in kept:
        wanted = (
            FIRST + env_protocol.examples * EXAMPLE + env_protocol.max_turns * (reply + observation)
        )
        context = max(context, wanted if window is None else min(wanted, window))
    if "max_new_tokens" not in kept:
        reply = min(reply, max(env_protocol.max_new_tokens, context // 2))
    instructions = env_protocol.instructions if "instructions" in kept else True
    fields = {"max_new_tokens": reply, "context_tokens": context, "instructions": instructions}
    return EnvProtocol.model_validate({**env_protocol.model_dump(), **fields})


def told_by(guides: Mapping[str, Guide], protocol: EvaluationProtocol) -> dict[str, str]:
    """Return the servers' instructions and worked examples under the protocol, by environment.
    Errors: ConfigError if an environment offers too few examples.
    """
    return {
        env_protocol.env.name: guides[env_protocol.env.name].opening(
            env_protocol.env.name, env_protocol.examples, env_protocol.action_format
        )
        for env_protocol in protocol.envs
    }


def instructions_of(protocol: EvaluationProtocol, openings: Mapping[str, str]) -> dict[str, str]:
    """Return the text that episodes begin with, by environment: instructions, worked examples and,
    in the action format "react", the form of a reply.

    Environments without `instructions` are left out. openings: the result of `told_by`.
    """
    return {
        env_protocol.env.name: "\n\n".join(
            filter(
                None,
                (
                    openings[env_protocol.env.name],
                    REACT if env_protocol.action_format == "react" else "",
                ),
            )
        )
        for env_protocol in protocol.envs
        if env_protocol.instructions
    }


def differences(
    protocol: EvaluationProtocol,
    changed: EvaluationProtocol,
    openings: Mapping[str, str],
    instructions: Mapping[str, str],
) -> dict[str, dict[str, Any]]:
    """Return a policy's token limits and its instructions' digest, by environment, if they differ
    from the protocol's.

    They are part of the policy's identity, so that results by one protocol stay comparable.
    changed: the protocol as this policy gets it; openings: the result of `told_by`, as other
    policies get it; instructions: the text that this policy gets.
    """
    return {
        adapted.env.name: {
            "instructions": sha256(text.encode()) if text else "",
            "max_new_tokens": adapted.max_new_tokens,
            "context_tokens": adapted.context_tokens,
        }
        for standard, adapted in zip(protocol.envs, changed.envs, strict=True)
        for text in (instructions.get(adapted.env.name, ""),)
        if adapted != standard
        or text != (openings[adapted.env.name] if standard.instructions else "")
    }


def lines(changed: EvaluationProtocol, instructions: Mapping[str, str]) -> Iterator[str]:
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
