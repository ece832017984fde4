"""Demonstrations are encoded as the policy would sample them, and used in seeded order."""

import asyncio
from dataclasses import replace

import pytest

from agentgym.data.trajectories import Recorded
from agentgym.models.chat import ChatRenderer
from agentgym.rollouts.episode import (
    Episode,
    EpisodeSettings,
    PlayerReply,
    extract_action,
    run_episode,
)
from agentgym.rollouts.players import ScriptedPlayer
from agentgym.training.demonstrations import replies_of, tokenized
from agentgym.training.initial import texts_of
from agentgym.training.sft import demo_indices
from agentgym.types import Item
from tests.agentgym.rollouts.test_episode import Reply, Session

SETTINGS = EpisodeSettings(
    seed=0, step=0, max_turns=9, temperature=1.0, max_new_tokens=6, context_tokens=256
)


def played(lines, replies, settings=SETTINGS, sample=0):
    """Return a conversation without tokens, and the actions that the environment received."""
    session = Session(replies)
    episode = Episode(Item("babyai", 4), sample, settings, session.observation)
    status = asyncio.run(run_episode(ScriptedPlayer(lines), session, episode))
    return episode.finish(status), session.actions


@pytest.mark.parametrize("action_format", ["plain", "react"])
def test_a_demonstration_is_rendered_as_a_rollout_reads_it(tokenizer, action_format):
    renderer = ChatRenderer(tokenizer)
    settings = replace(SETTINGS, action_format=action_format, instructions={"babyai": "rules"})
    lines = [PlayerReply("turn left", "turn left"), PlayerReply("move forward", "move forward")]
    replies = [Reply(info={"room": 1}), Reply("done", 1.0, terminated=True, success=True)]
    text, actions = played(lines, replies, settings)
    assert actions == ["turn left", "move forward"]
    assert text.input_ids == ()
    demo = tokenized(text, renderer, settings)
    assert [turn.info for turn in demo.turns] == [{"room": 1}, {}]
    assert demo.timing == {}
    assert not any(turn.env_s or turn.generate_s for turn in demo.turns)
    spans = [demo.input_ids[turn.start : turn.end] for turn in demo.turns]
    assert [extract_action(renderer.text(span), action_format) for span in spans] == [
        "turn left",
        "move forward",
    ]
    assert all(span[-1] == renderer.stop_id for span in spans)
    assert [i for i, action in enumerate(demo.action_mask) if action] == [
        i for turn in demo.turns for i in range(turn.start, turn.end)
    ]
    assert list(demo.input_ids[: demo.turns[0].start]) == renderer.start("task: go", "rules")
    between = demo.input_ids[demo.turns[0].end : demo.turns[1].start]
    assert list(between) == renderer.bridge(Reply().observation, stopped=True)
    assert (demo.reward, demo.success) == (1.0, True)


THOUGHT = "Thought:\nThe ball is to my left.\n\nAction:\nturn left"


def test_a_recorded_thought_is_learned_with_its_action_where_replies_have_thoughts(tokenizer):
    renderer = ChatRenderer(tokenizer)
    recorded = Recorded(Item("babyai", 4), (THOUGHT, "Action: move forward", "drop "))
    said = replies_of(recorded, "react")
    assert said == [
        PlayerReply(THOUGHT, "turn left"),
        PlayerReply("Action: move forward", "move forward"),
        PlayerReply("drop", "drop"),
    ]
    assert [(each.text, each.action) for each in replies_of(recorded, "plain")] == [
        (action, action) for action in ("turn left", "move forward", "drop")
    ]
    settings = replace(SETTINGS, action_format="react")
    text, actions = played(said, [Reply()] * 3, settings, sample=3)
    assert actions == ["turn left", "move forward", "drop"]
    assert not text.success
    demo = tokenized(text, renderer, settings)
    spans = [demo.input_ids[turn.start : turn.end] for turn in demo.turns]
    assert [renderer.text(span) for span in spans] == [
        THOUGHT,
        "Action: move forward",
        "Action: drop",
    ]
    assert [extract_action(renderer.text(span), "react") for span in spans] == [
        "turn left",
        "move forward",
        "drop",
    ]
    assert sum(demo.action_mask) == sum(map(len, spans))
    assert demo.sample == 3
    assert THOUGHT in texts_of(text)


def test_every_epoch_shows_every_demonstration_once_in_another_order():
    rows = [row for step in range(1, 8) for row in demo_indices(0, step, 10, 4)]  # 28 of 3 epochs
    assert sorted(rows[:10]) == sorted(rows[10:20]) == list(range(10))
    assert rows[:10] != rows[10:20]
    assert len(set(rows[20:])) == 8


def test_the_rows_of_a_step_depend_on_seed_and_step_alone():
    assert demo_indices(0, 5, 10, 4) == demo_indices(0, 5, 10, 4)
    assert demo_indices(0, 5, 10, 4) != demo_indices(1, 5, 10, 4)
    assert len(demo_indices(0, 1, 3, 8)) == 8  # fewer demonstrations than a batch holds
