"""Episodes replayed on real servers."""

import pytest

from agentgym.types import Item, Status, Turn
from agentgym.viewer.drawing import drawing_of
from agentgym.viewer.query import Query
from agentgym.viewer.replay import MAX_WAITING, Missing, Replays, Servers, environment_of
from tests.agentgym.viewer.conftest import TRAINING, episode


def played(gold, env, task, **changes):
    """Return an expert's episode, as it would be recorded."""
    first, turns = gold(env, task)
    told = tuple(Turn(action, own.observation, own.reward, info=own.info) for action, own in turns)
    fields = {
        "item": Item(env, task),
        "turns": told,
        "first_observation": first,
        "reward": sum(turn.reward for turn in told),
        "max_turns": 40,
        "input_ids": (),
        "action_mask": (),
        "logprobs": (),
    }
    return episode(task, **{**fields, **changes})


@pytest.fixture(scope="module")
def endpoints(serving):
    """Real servers in threads."""
    with serving("babyai") as (babyai, _), serving("textcraft") as (textcraft, _):
        yield {"babyai": babyai, "textcraft": textcraft}


@pytest.fixture
def replays(made, view, endpoints):
    """Return a function of (env, episodes): (viewer, [Found])."""

    def open_viewer(env, episodes):
        config = {**TRAINING, "env": {"name": env, "options": {}, "dialect": "native"}}
        made.add(episodes, config=config)
        viewer = view(f"env.name={env}", f"env.endpoints=[{endpoints[env]}]", "env.options={}")
        rows = viewer.lists.all(Query(sort="item", up=True), 100)
        return viewer, list(viewer.bodies.read(sorted(rows, key=lambda row: row["line"])))

    return open_viewer


def test_babyai_is_drawn_at_every_turn_and_agrees(replays, gold):
    viewer, (found,) = replays("babyai", [played(gold, "babyai", 3)])
    assert viewer.replays.find(found) is None
    told = viewer.replays.now(found)
    turns = len(found.episode.turns)
    assert (told.agrees, told.said) == (True, f"played again, {turns} turns agree with the record")
    drawings = [drawing_of(shot) for shot in told.shots]
    assert [each.kind for each in drawings] == ["grid"] * (turns + 1)
    assert len({each.agent for each in drawings}) > 1
    assert viewer.replays.find(found) == told  # the result is kept
    assert viewer.replays.now(found) == told


def test_textcraft_is_drawn_too(replays, gold):
    viewer, (found,) = replays("textcraft", [played(gold, "textcraft", 5)])
    told = viewer.replays.now(found)
    assert told.agrees
    last = drawing_of(told.shots[-1])
    assert last.kind == "craft"
    assert last.held


def test_where_replay_and_record_differ_is_told(replays, gold):
    right = played(gold, "babyai", 3)
    changed = right.turns[1].__class__(right.turns[1].action, "see: a dragon", 0.0)
    lies = [
        played(gold, "babyai", 3, turns=(right.turns[0], changed, *right.turns[2:])),
        played(gold, "babyai", 3, first_observation="goal: fly"),
        played(gold, "babyai", 3, turns=(*right.turns, Turn("turn left", "more", 0.0))),
        played(gold, "babyai", 3, status=Status.MAX_TURNS),
        played(gold, "babyai", 3, turns=right.turns[:-1], status=Status.MAX_TURNS),
    ]
    viewer, found = replays("babyai", lies)
    told = [viewer.replays.now(each) for each in found]
    assert [each.agrees for each in told] == [False, False, False, False, True]
    assert "at turn 2: observation is now" in told[0].said
    assert "on record 'see: a dragon'" in told[0].said
    assert told[0].shots[2].differs
    assert not told[0].shots[1].differs
    assert "at the beginning: first observation" in told[1].said
    assert "had ended the task at turn" in told[2].said
    assert told[3].said == "the replay ends as terminated, the record as max_turns"


def test_an_episode_whose_environment_failed_is_drawn_as_far_as_it_went(replays, gold):
    right = played(gold, "babyai", 3)
    cut = played(
        gold,
        "babyai",
        3,
        turns=right.turns[:1],
        status=Status.ENV_ERROR,
        reward=None,
        success=False,
    )
    viewer, (found,) = replays("babyai", [cut])
    assert viewer.replays.now(found).agrees


def test_a_missing_environment_is_told_and_the_record_stays(made, view, gold):
    config = {**TRAINING, "env": {"name": "nothing-here", "options": {}}}
    made.add([played(gold, "babyai", 3, item=Item("nothing-here", 3))], config=config)
    viewer = view()
    (found,) = viewer.bodies.read(viewer.lists.all(Query(), 1))
    told = viewer.replays.now(found)
    assert told.agrees is None
    assert told.said.startswith("environment nothing-here cannot be had here: ")
    assert told.said.endswith("what is shown is the record")
    assert told.shots == []


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({}, "does not say how"),
        ({"env": {"name": "other"}}, "does not say how"),
        ({"env": {"name": "babyai", "options": 3}}, "are refused"),
    ],
)
def test_a_step_that_does_not_say_its_environment_is_told(config, said):
    with pytest.raises(Missing, match=said):
        environment_of(config, "babyai")


def test_an_environment_is_found_where_training_and_evaluations_say_it():
    craft = {"env": {"name": "textcraft", "options": {"min_depth": 2}}}
    for config in (
        {"env": {"name": "babyai"}, "mix": [craft["env"]]},
        {"protocol": {"envs": [craft]}},
    ):
        env = environment_of(config, "textcraft")
        assert (env.name, env.options) == ("textcraft", {"min_depth": 2})


def test_a_server_elsewhere_that_is_not_named_is_missing(made):
    servers = Servers(made.cfg())
    env = environment_of({"env": {"name": "babyai", "dialect": "agentgym"}}, "babyai")
    with pytest.raises(Missing, match="was served elsewhere"), servers.use(env):
        pass


def test_a_server_is_shared_and_ended_once_nobody_uses_it(made, endpoints):
    now = [0.0]
    cfg = made.cfg(f"env.endpoints=[{endpoints['babyai']}]", "env.options={}")
    servers = Servers(cfg, clock=lambda: now[0])
    env = cfg.envs[0]
    with servers.use(env) as first, servers.use(env) as second:
        assert first is second
        servers.end_idle(0.0)
        assert len(servers._open) == 1
    now[0] = 100.0
    servers.end_idle(101.0)
    assert len(servers._open) == 1
    servers.end_idle(99.0)
    assert servers._open == {}


def test_drawings_that_were_kept_in_a_damaged_file_are_made_again(tmp_path, made):
    file = tmp_path / "replays.sqlite"
    file.write_bytes(b"noise " * 2000)
    replays = Replays(file, Servers(made.cfg()))
    replays.close()
    assert file.read_bytes().startswith(b"SQLite format 3")


def test_so_many_wait_and_no_more(replays, gold, monkeypatch):
    viewer, found = replays("babyai", [played(gold, "babyai", n) for n in range(MAX_WAITING + 2)])
    import threading

    go = threading.Event()
    monkeypatch.setattr(viewer.replays, "_play", lambda each: go.wait(20))
    said = [viewer.replays.ask(each) for each in found]
    assert said == [True] * MAX_WAITING + [False] * 2
    assert viewer.replays.is_waiting(found[0])
    go.set()
