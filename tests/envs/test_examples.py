"""The worked examples are real episodes, and none of them is an item."""

import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest

from envs import babyai, searchqa, textcraft
from envs import examples as shared
from envs.babyai.world import Options as BabyAI
from envs.babyai.world import World as Grid
from envs.env import ExpertFailed
from envs.registry import load_spec
from envs.searchqa import questions, retrievers
from envs.searchqa.world import Episode
from envs.searchqa.world import Options as SearchQA
from envs.textcraft.recipes import Book, load_book
from envs.textcraft.world import Options as TextCraft
from envs.textcraft.world import World as Workshop
from envs.wire import Example, ExampleTurn, InfoReply

STANDIN = Path(__file__).parents[2] / "data/make_standin.py"


def replayed(simulator, task_id, example):
    """Carry out the example's actions. Return the example made again, and its success."""
    first, results = simulator.reset(task_id), []
    for turn in example.turns:
        results.append(simulator.step(turn.action))
    turns = [
        ExampleTurn(action=turn.action, observation=result.observation)
        for turn, result in zip(example.turns, results, strict=True)
    ]
    assert not any(result.info.get("invalid") for result in results)
    assert [result.terminated for result in results].index(True) == len(results) - 1
    return Example(observation=first, turns=tuple(turns)), results[-1].success


@pytest.mark.parametrize("view", ["compact", "agentgym"])
@pytest.mark.parametrize("actions", ["low", "high"])
def test_babyais_are_solved_in_every_view_with_all_actions(view, actions):
    spec = load_spec("babyai", {"view": view, "actions": actions})
    offered = spec.examples()
    assert len(offered) == len(babyai.TASKS) == 2
    for (level, seed), example in zip(babyai.TASKS, offered, strict=True):
        world = Grid(BabyAI((level,), view, actions, "binary"))
        assert replayed(world, seed, example) == (example, True)


def test_textcrafts_are_solved():
    offered = load_spec("textcraft", {}).examples()
    options = TextCraft(textcraft.GOALS, textcraft.DISTRACTORS, max_steps=0)
    assert len(offered) == len(textcraft.GOALS) == 2
    for task, example in enumerate(offered):
        world = Workshop(Book(textcraft.RECIPES, "examples"), options)
        assert replayed(world, task, example) == (example, True)


@pytest.mark.parametrize("protocol", ["own", "agentgym"])
def test_searchqas_are_solved_with_as_many_documents_as_are_served(protocol):
    offered = load_spec("searchqa", {"protocol": protocol, "topk": 2}).examples()
    assert len(offered) == len(searchqa.QUESTIONS) == 2
    for task, example in enumerate(offered):
        options = SearchQA("strict", topk=2, max_doc_chars=0, protocol=protocol)
        episode = Episode(searchqa.QUESTIONS, retrievers.embedded(), options)
        assert replayed(episode, task, example) == (example, True)
        assert "Doc 2" in example.turns[0].observation
        assert "Doc 3" not in example.turns[0].observation
        thinks = all(turn.action.startswith("<think>") for turn in example.turns)
        assert thinks == (protocol == "agentgym")


def test_no_example_is_an_item():
    made = importlib.util.spec_from_file_location("make_standin", STANDIN)
    script = importlib.util.module_from_spec(made)
    made.loader.exec_module(script)
    task_ids = {
        env: {int(item.rpartition("_")[2]) for split in script.ids(env) for item in split}
        for env in ("babyai", "sciworld")
    }
    assert max(task_ids["babyai"]) < min(seed for _, seed in babyai.TASKS)
    from envs.sciworld.make_examples import TASKS

    assert not task_ids["sciworld"] & set(TASKS)
    assert not set(textcraft.GOALS) & set(load_book("invented:8000").goals)
    asked = questions.embedded()
    listed = [*asked.train, *asked.eval]
    for question in searchqa.QUESTIONS:
        way = [(hop.title, hop.finds) for hop in question.hops]
        assert all(way != [(hop.title, hop.finds) for hop in other.hops] for other in listed)


def test_an_unsolved_play_is_no_example():
    class Lost:
        def next_action(self):
            return "inventory"

    def play():
        return shared.played(load_spec("textcraft", {"max_steps": 1}).make(), 0, expert=Lost)

    with pytest.raises(ExpertFailed, match="task 0 is not solved"):
        play()
    assert shared.solved([play]) == ()


def test_a_question_that_the_options_documents_do_not_answer_is_left_out():
    offered = load_spec("searchqa", {"topk": 1, "max_doc_chars": 240}).examples()
    assert len(offered) < len(searchqa.QUESTIONS)


def test_an_environment_of_ones_own_need_not_offer_any():
    assert replace(load_spec("textcraft", {}), examples=tuple).examples() == ()
    assert InfoReply.model_fields["examples"].default == ()


def test_a_script_that_ends_before_its_task_is_an_expert_that_failed():
    script = shared.Script(["left"])
    assert script.next_action() == "left"
    with pytest.raises(ExpertFailed, match="the script ended before the task did"):
        script.next_action()
