"""One episode with a scripted policy and a scripted environment is recorded as played."""

import asyncio
import copy
from dataclasses import dataclass, field, replace

import pytest

from agentgym.models.chat import ChatRenderer
from agentgym.models.model import weights_of
from agentgym.models.transport import InProcess
from agentgym.records import from_json, to_json
from agentgym.rollouts.episode import (
    Episode,
    EpisodeSettings,
    TokenPlayer,
    extract_action,
    reply_naming,
    run_episode,
)
from agentgym.rollouts.policies.torch import TorchPolicy
from agentgym.types import Completion, Item, Status

SETTINGS = EpisodeSettings(
    seed=0, step=3, max_turns=4, temperature=0.7, max_new_tokens=6, context_tokens=256
)


@dataclass
class Reply:
    observation: str = "you see a red ball"
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False
    success: bool = False
    info: dict = field(default_factory=dict)


class Session:
    """Session that returns the given replies in order."""

    def __init__(self, replies):
        self.observation = "task: go"
        self.replies, self.actions = iter(replies), []

    async def step(self, action):
        self.actions.append(action)
        return next(self.replies)


class Scripted:
    """Policy that returns the given completions in order and records its prompts."""

    def __init__(self, completions):
        self.completions, self.asked = iter(completions), []

    async def generate(self, prompt_ids, sampling):
        self.asked.append((list(prompt_ids), sampling))
        return next(self.completions)

    async def publish(self, delivery): ...


@pytest.fixture(scope="module")
def renderer(tokenizer):
    return ChatRenderer(tokenizer)


def says(renderer, text, version=0, stop=True):
    ids = tuple(renderer.action_ids(text)) if stop else tuple(renderer.action_ids(text)[:-1])
    return Completion(
        ids, tuple(-0.1 * (i + 1) for i in range(len(ids))), "stop" if stop else "length", version
    )


def play(renderer, completions, replies, settings=SETTINGS):
    policy, session = Scripted(completions), Session(replies)
    episode = Episode(Item("babyai", 17), 2, settings, session.observation)
    status = asyncio.run(run_episode(TokenPlayer(policy, renderer), session, episode))
    return episode.finish(status), policy, session


def test_a_terminated_episode_holds_tokens_mask_rewards_and_versions(renderer):
    completions = [
        says(renderer, "turn left", version=4),
        says(renderer, "move forward", version=5),
    ]
    trajectory, _, session = play(
        renderer,
        completions,
        [Reply("you see", 0.25), Reply("done", 0.5, terminated=True, success=True)],
    )
    assert (trajectory.status, trajectory.reward, trajectory.success) == (
        Status.TERMINATED,
        0.75,
        True,
    )
    assert session.actions == ["turn left", "move forward"]
    first, second = completions[0].ids, completions[1].ids
    opening, bridge = renderer.start("task: go"), renderer.bridge("you see", stopped=True)
    # the last observation gets no answer
    assert trajectory.input_ids == (*opening, *first, *bridge, *second)
    assert trajectory.action_mask == (
        *[False] * len(opening),
        *[True] * len(first),
        *[False] * len(bridge),
        *[True] * len(second),
    )
    assert trajectory.logprobs == (
        *[0.0] * len(opening),
        *completions[0].logprobs,
        *[0.0] * len(bridge),
        *completions[1].logprobs,
    )
    assert [(turn.version, turn.observation, turn.reward) for turn in trajectory.turns] == [
        (4, "you see", 0.25),
        (5, "done", 0.5),
    ]
    assert [trajectory.input_ids[turn.start : turn.end] for turn in trajectory.turns] == [
        first,
        second,
    ]


def test_each_turn_is_asked_with_its_own_key_and_the_whole_history(renderer):
    trajectory, policy, _ = play(renderer, [says(renderer, "turn left")] * 4, [Reply()] * 4)
    assert trajectory.status == Status.MAX_TURNS
    assert [tuple(sampling.key) for _, sampling in policy.asked] == [
        (0, 3, "babyai_17", 2, turn) for turn in range(4)
    ]
    assert {(sampling.temperature, sampling.max_new_tokens) for _, sampling in policy.asked} == {
        (0.7, 6)
    }
    for (prompt, _), turn in zip(policy.asked, trajectory.turns, strict=True):
        assert tuple(prompt) == trajectory.input_ids[: turn.start]


def test_sampled_ids_are_never_encoded_again(renderer, tokenizer):
    """Use letters one by one, which is not how the tokenizer encodes the word."""
    letters = (*tokenizer.convert_tokens_to_ids(list("turn")), renderer.stop_id)
    assert list(letters) != renderer.action_ids("turn")
    trajectory, _, session = play(
        renderer, [Completion(letters, (-1.0,) * 5, "stop", 0)], [Reply(terminated=True)]
    )
    assert session.actions == ["turn"]
    assert trajectory.input_ids[-5:] == letters


def test_a_cut_action_is_closed_by_tokens_nobody_sampled(renderer):
    trajectory, _, _ = play(
        renderer,
        [says(renderer, "turn", stop=False), says(renderer, "left")],
        [Reply("x"), Reply(terminated=True)],
    )
    end = trajectory.turns[0].end
    assert trajectory.input_ids[end] == renderer.stop_id
    assert trajectory.action_mask[end - 1 : end + 1] == (True, False)


def test_a_turn_after_another_stop_token_ends_as_the_template_ends_it(tokenizer):
    renderer = ChatRenderer(tokenizer, eos_ids=[tokenizer.pad_token_id])
    other = (*renderer.action_ids("turn")[:-1], tokenizer.pad_token_id)
    trajectory, _, session = play(
        renderer,
        [Completion(other, (-1.0,) * len(other), "stop", 0), says(renderer, "left")],
        [Reply("x"), Reply(terminated=True)],
    )
    end = trajectory.turns[0].end
    assert trajectory.input_ids[end - 1 : end + 1] == (tokenizer.pad_token_id, renderer.stop_id)
    assert trajectory.action_mask[end - 1 : end + 1] == (True, False)
    assert session.actions == ["turn", "left"]


def test_an_episode_cut_by_the_horizon_keeps_its_reward_so_far(renderer):
    trajectory, _, session = play(
        renderer, [says(renderer, "a")] * 2, [Reply(reward=0.5)] * 2, replace(SETTINGS, max_turns=2)
    )
    assert (trajectory.status, trajectory.reward, trajectory.success, len(session.actions)) == (
        Status.MAX_TURNS,
        1.0,
        False,
        2,
    )


def test_a_trajectory_never_exceeds_the_context(renderer):
    settings = replace(SETTINGS, context_tokens=40)
    long = "you see a red ball. " * 50
    trajectory, _, session = play(
        renderer, [says(renderer, "a")] * 4, [Reply("x"), Reply(long)], settings
    )
    assert trajectory.status == Status.MAX_TOKENS
    assert session.actions == ["a", "a"]
    assert len(trajectory.input_ids) <= 40
    assert trajectory.action_mask[-1]


@pytest.mark.parametrize("status", [Status.MAX_TURNS, Status.MAX_TOKENS])
@pytest.mark.parametrize("spare", [0, -1])
def test_a_critic_is_shown_the_last_observation_of_a_cut_episode_where_it_fits(
    renderer, status, spare
):
    action, bridge = says(renderer, "a"), renderer.bridge("x", stopped=True)
    needed = len(renderer.start("task: go")) + len(action.ids) + len(bridge)
    settings = replace(
        SETTINGS, read_last=True, max_new_tokens=len(action.ids), context_tokens=needed + spare
    )
    if status is Status.MAX_TURNS:
        settings = replace(settings, max_turns=1)
    trajectory, _, _ = play(renderer, [action], [Reply("x")], settings)
    assert trajectory.status == status
    if spare == 0:
        assert list(trajectory.input_ids[trajectory.turns[0].end :]) == bridge
        assert not any(trajectory.action_mask[trajectory.turns[0].end :])
    else:
        assert len(trajectory.input_ids) == trajectory.turns[0].end
    blind, _, _ = play(renderer, [action], [Reply("x")], replace(settings, read_last=False))
    assert (blind.status, len(blind.input_ids)) == (status, trajectory.turns[0].end)


def test_a_first_observation_beyond_the_context_is_an_episode_without_actions(renderer):
    trajectory, policy, _ = play(renderer, [], [], replace(SETTINGS, context_tokens=8))
    assert (trajectory.status, trajectory.turns, policy.asked) == (Status.MAX_TOKENS, (), [])
    assert not any(trajectory.action_mask)


def test_an_exact_fit_is_played(renderer):
    needed = len(renderer.start("task: go")) + SETTINGS.max_new_tokens
    for context, status in ((needed, Status.TERMINATED), (needed - 1, Status.MAX_TOKENS)):
        trajectory, _, _ = play(
            renderer,
            [says(renderer, "a")],
            [Reply(terminated=True)],
            replace(SETTINGS, context_tokens=context),
        )
        assert trajectory.status == status


def test_the_simulators_own_limit_is_a_cut_and_no_end_of_the_task(renderer):
    replies = [Reply("first", 0.25), Reply("last", 0.5, truncated=True, success=True)]
    completions = [says(renderer, "a"), says(renderer, "b")]
    shown = (
        *renderer.start("task: go"),
        *completions[0].ids,
        *renderer.bridge("first", stopped=True),
        *completions[1].ids,
    )
    for read_last, seen in ((False, ()), (True, tuple(renderer.bridge("last", stopped=True)))):
        trajectory, _, session = play(
            renderer, completions, replies, replace(SETTINGS, read_last=read_last)
        )
        assert (trajectory.status, trajectory.reward, trajectory.success) == (
            Status.ENV_LIMIT,
            0.75,
            True,
        )
        assert trajectory.status.is_valid
        assert session.actions == ["a", "b"]
        # a critic evaluates the state where the simulator stopped
        assert trajectory.input_ids == (*shown, *seen)


@pytest.mark.parametrize(
    ("reply", "status"),
    [
        (Reply(truncated=True), Status.ENV_LIMIT),  # if both limits hold, the environment's
        # the task is over: no future value
        (Reply(terminated=True, truncated=True), Status.TERMINATED),
        (Reply(), Status.MAX_TURNS),
    ],
)
def test_on_the_last_turn_the_environment_is_heard_first(renderer, reply, status):
    trajectory, _, _ = play(
        renderer, [says(renderer, "a")], [reply], replace(SETTINGS, max_turns=1)
    )
    assert trajectory.status == status


def test_a_trajectory_stored_before_there_was_a_name_for_that_cut_still_loads(renderer):
    trajectory, _, _ = play(renderer, [says(renderer, "a")], [Reply(terminated=True)])
    assert from_json({**to_json(trajectory), "status": "terminated"}).status is Status.TERMINATED


def test_the_manual_comes_first_where_there_is_one(renderer):
    trajectory, _, _ = play(
        renderer,
        [says(renderer, "a")],
        [Reply(terminated=True)],
        replace(SETTINGS, instructions={"babyai": "rules"}),
    )
    assert list(trajectory.input_ids[: trajectory.turns[0].start]) == renderer.start(
        "task: go", "rules"
    )


def test_a_failed_environment_leaves_no_reward_and_no_success(renderer):
    trajectory, _, _ = play(
        renderer, [says(renderer, "a")], [Reply(reward=1.0, terminated=True, success=True)]
    )
    episode = Episode(
        Item("babyai", 1), 0, SETTINGS, "", turns=list(trajectory.turns), success=True
    )
    for status in (Status.ENV_ERROR, Status.TIMEOUT):
        assert (episode.finish(status).reward, episode.finish(status).success) == (None, False)
    assert (
        episode.finish(Status.TERMINATED).reward,
        episode.finish(Status.TERMINATED).success,
    ) == (1.0, True)


def test_of_a_share_of_the_actions_the_log_probabilities_are_asked_for_by_key(renderer):
    settings = replace(SETTINGS, engine_logprobs=0.5, max_turns=40, context_tokens=4096)
    replies = [says(renderer, "turn left")] * 40
    _, policy, _ = play(renderer, replies, [Reply()] * 40, settings)
    wanted = [sampling.logprobs for _, sampling in policy.asked]
    assert 10 < sum(wanted) < 30
    assert wanted == [sampling.key.is_drawn(0.5) for _, sampling in policy.asked]
    assert all(sampling.key.is_drawn(1.0) for _, sampling in policy.asked)
    given = [
        reply if is_wanted else replace(reply, logprobs=())
        for reply, is_wanted in zip(replies, wanted, strict=True)
    ]
    trajectory, _, _ = play(renderer, given, [Reply()] * 40, settings)
    assert [turn.has_logprobs for turn in trajectory.turns] == wanted
    for turn, reply in zip(trajectory.turns, replies, strict=True):
        span = slice(turn.start, turn.end)
        known = reply.logprobs if turn.has_logprobs else (None,) * len(reply.ids)
        assert tuple(trajectory.engine_logprobs[span]) == known
        assert trajectory.logprobs[span] == tuple(number or 0.0 for number in known)
    assert from_json(to_json(trajectory)) == trajectory


def test_a_trajectory_survives_the_way_through_json(renderer):
    import json

    trajectory, _, _ = play(renderer, [says(renderer, "é")], [Reply("ü", 0.1, terminated=True)])
    assert from_json(json.loads(json.dumps(to_json(trajectory)))) == trajectory


@pytest.mark.parametrize(
    ("reply", "action_format", "action"),
    [
        (" turn left \n", "plain", "turn left"),
        ("Thought: I go.\nAction: turn left\nmore", "react", "turn left"),
        ("Action: a\nAction:\n b ", "react", "b"),
        ("turn left", "react", ""),
        ("Action:", "react", ""),
        ("<think>\nleft?\n</think>\n\nturn right", "plain", "turn right"),
        ("so left.\n</think>\n\nturn right", "plain", "turn right"),
        ("<think>\nAction: a\n</think>\n\nAction: b", "react", "b"),
        ("<think>\nAction: a", "react", ""),
        ("<think>\nI could", "plain", ""),
    ],
)
def test_the_action_a_reply_names(reply, action_format, action):
    assert extract_action(reply, action_format) == action


@pytest.mark.parametrize(
    ("reply", "plain", "react"),
    [
        ("I look around. Action: drop may be wrong, so", "", ""),
        ("left or right?\n</think>\nturn left", "turn left", ""),
        ("left?\n</think>\n\nAction: turn left", "Action: turn left", "turn left"),
        ("left?\n</think>\n<think>\nAction: right", "", ""),
        ("", "", ""),
    ],
)
def test_a_thought_that_the_prompt_opened_is_no_action_before_its_end(
    renderer, reply, plain, react
):
    opened = copy.copy(renderer)
    opened.opens_thought = True
    for action_format, action in (("plain", plain), ("react", react)):
        assert extract_action(reply, action_format, opens_thought=True) == action
        settings = replace(SETTINGS, action_format=action_format)
        end = [Reply("no", terminated=True)]
        trajectory, _, session = play(opened, [says(renderer, reply)], end, settings)
        assert session.actions == [action]
        assert trajectory.turns[0].action == action
        assert (trajectory.turns[0].reply or action) == reply


@pytest.mark.parametrize("action_format", ["plain", "react"])
def test_a_demonstrated_reply_names_its_action(action_format):
    assert extract_action(reply_naming("turn left", action_format), action_format) == "turn left"


def test_each_turn_of_an_episode_that_spans_a_publish_keeps_the_version_that_sampled_it(
    renderer, make_model
):
    policy = TorchPolicy(make_model(0), stop_ids=renderer.stop_ids, num_slots=2, context_tokens=256)

    class Publishing(Session):
        """Session that publishes new weights during its second and its third reply."""

        async def step(self, action):
            reply = await super().step(action)
            if len(self.actions) in (2, 3):
                version = len(self.actions) - 1
                await policy.publish(InProcess(weights_of(make_model(version)), version))
            return reply

    session = Publishing([Reply()] * 4)
    episode = Episode(Item("babyai", 17), 2, SETTINGS, session.observation)
    asyncio.run(run_episode(TokenPlayer(policy, renderer), session, episode))
    trajectory = episode.finish(Status.MAX_TURNS)
    assert [turn.version for turn in trajectory.turns] == [0, 0, 1, 2]
    assert trajectory.versions == (0, 1, 2)
    for version in trajectory.versions:
        fresh = TorchPolicy(
            make_model(version), stop_ids=renderer.stop_ids, num_slots=2, context_tokens=256
        )
        for number, turn in enumerate(trajectory.turns):
            sampling = SETTINGS.sampling(trajectory.item, trajectory.sample, number)
            said = asyncio.run(fresh.generate(list(trajectory.input_ids[: turn.start]), sampling))
            sampled = trajectory.logprobs[turn.start : turn.end]
            # equal to a sample of the recorded version's weights, and of no others
            same = said.ids == trajectory.input_ids[turn.start : turn.end]
            same = same and said.logprobs == pytest.approx(sampled, abs=1e-5)
            assert same == (version == turn.version)
