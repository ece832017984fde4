"""How a policy that was not trained here is asked: it is told the rules and has room to answer.

A checkpoint of ours is asked as it was trained, perhaps without instructions and in six tokens.
Any other model knows neither the rules nor that its reply must be so short.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from agentgym.config import RunConfig
from agentgym.evaluation.protocol import EnvProtocol, EvaluationProtocol
from agentgym.rollouts.guide import Guide
from agentgym.store.manifest import sha256

REACT = """\
Answer in this form. First think, then name one action, alone on its line:
Thought: your thoughts
Action: your action"""
# least tokens where nobody says how many: of a reply, of an observation, of all that comes before,
# of a worked example
REPLY, OBSERVATION = EnvProtocol.model_fields["max_new_tokens"].default, 512
FIRST, EXAMPLE = 1024, 1024
# fields of a protocol that are the policy's own, and the settings of a run they come from
OWN = {
    "instructions": "rollout.instructions",
    "max_new_tokens": "rollout.max_new_tokens",
    "context_tokens": "model.context_tokens",
}


def with_room(
    protocol: EvaluationProtocol, cfg: RunConfig, kept: Collection[str], window: int | None
) -> EvaluationProtocol:
    """The protocol with instructions and with tokens for every turn.

    cfg: the run whose protocol it is; kept: fields that somebody chose, which stay; window: tokens
    that the model can read at most, where that is known.
    """
    observation = max(cfg.rollout.observation_tokens, OBSERVATION)
    envs = tuple(_with_room(each, observation, kept, window) for each in protocol.envs)
    return protocol.model_copy(update={"envs": envs})


def _with_room(
    each: EnvProtocol, observation: int, kept: Collection[str], window: int | None
) -> EnvProtocol:
    reply, context = each.max_new_tokens, each.context_tokens
    if "max_new_tokens" not in kept:
        reply = max(reply, REPLY)
    if "context_tokens" not in kept:
        wanted = FIRST + each.examples * EXAMPLE + each.max_turns * (reply + observation)
        context = max(context, wanted if window is None else min(wanted, window))
    if "max_new_tokens" not in kept:
        reply = min(reply, max(each.max_new_tokens, context // 2))
    instructions = each.instructions if "instructions" in kept else True
    fields = {"max_new_tokens": reply, "context_tokens": context, "instructions": instructions}
    return EnvProtocol.model_validate({**each.model_dump(), **fields})


def told_by(guides: Mapping[str, Guide], protocol: EvaluationProtocol) -> dict[str, str]:
    """Return what the servers tell under the protocol, by environment: instructions and worked
    examples. Errors: ConfigError where an environment offers too few of these.
    """
    return {
        each.env.name: guides[each.env.name].opening(
            each.env.name, each.examples, each.action_format
        )
        for each in protocol.envs
    }


def instructions_of(protocol: EvaluationProtocol, told: Mapping[str, str]) -> dict[str, str]:
    """Return the text that episodes begin with, by environment: instructions, worked examples and,
    unless the action alone is the reply, the form of a reply.

    told: the result of `told_by`.
    """
    return {
        each.env.name: "\n\n".join(
            filter(None, (told[each.env.name], REACT if each.action_format == "react" else ""))
        )
        for each in protocol.envs
        if each.instructions
    }


def differences(
    protocol: EvaluationProtocol,
    asked: EvaluationProtocol,
    told: Mapping[str, str],
    instructions: Mapping[str, str],
) -> dict[str, dict[str, Any]]:
    """What a policy is asked otherwise than the protocol says, by environment: part of its
    identity, so that results by one protocol stay comparable.

    told: what others would be told; instructions: what it is told.
    """
    return {
        own.env.name: {
            "instructions": sha256(text.encode()) if text else "",
            "max_new_tokens": own.max_new_tokens,
            "context_tokens": own.context_tokens,
        }
        for each, own in zip(protocol.envs, asked.envs, strict=True)
        for text in (instructions.get(own.env.name, ""),)
        if own != each or text != (told[own.env.name] if each.instructions else "")
    }


def lines(asked: EvaluationProtocol, instructions: Mapping[str, str]) -> Iterator[str]:
    """Yield a line per environment that tells people how such a policy is asked."""
    for each in asked.envs:
        name, text = each.env.name, instructions.get(each.env.name, "")
        begins = f"{len(text)} characters of instructions" if text else "no instructions"
        if each.instructions and not text:
            begins += " (its servers have none)"
        yield (
            f"{name}: this model was not trained here. It gets {begins}, at most"
            f" {each.max_new_tokens} tokens a reply and {each.context_tokens} an episode, action"
            f" format {each.action_format}; --instructions, --max-new-tokens, --context-tokens and"
            " --action-format change that"
        )
