"""Tests for the two evaluations of a trained cell: they are run, found again and reported."""

import json

import numpy as np
import pytest
import yaml

from agentgym.comparison.described import load_comparison
from agentgym.comparison.evaluations import read_judged
from agentgym.comparison.matrix import cells_of, run_cell
from agentgym.comparison.results import read_rows, table
from agentgym.comparison.tables import result_files, table_markdown
from agentgym.config import load_config
from agentgym.evaluation.intervals import clustered_interval, crossed_interval, family_codes
from agentgym.evaluation.protocol import EvaluationRequest
from agentgym.evaluation.record import attempts_of
from agentgym.pipeline.policy_evaluation import answered, evaluate_policy
from agentgym.pipeline.table import open_store
from tests.agentgym.evaluation.cut import truncate

pytestmark = pytest.mark.integration
CHANGES = {"num_samples": 3, "max_turns": 6, "greedy": False}


@pytest.fixture(scope="module")
def described(tmp_path_factory, copy_run, tiny_params, tiny_endpoint):
    """A comparison whose only cell is a finished run without its evaluations."""
    folder = copy_run(tmp_path_factory.mktemp("column"))
    tiny_params(
        folder, endpoint=tiny_endpoint, deterministic=True, alarms={"entropy": {"min": 10.0}}
    )
    tree = {
        "name": "one",
        "seeds": [0],
        "recipes": {"grpo": {}},
        "horizons": {"growing": {}},
        "environments": {"a room": {"params": "params.yaml"}},
        "changes": CHANGES,
    }
    (folder / "one.yaml").write_text(yaml.safe_dump(tree))
    return load_comparison(folder / "one.yaml")


@pytest.fixture(scope="module")
def judged(described):
    """The evaluated cell and its table."""
    (cell,) = cells_of(described)
    assert cell.answers() is None
    for step in cell.judged:
        request = EvaluationRequest(policy=f":{step}", changes=CHANGES)
        evaluate_policy(cell.cfg, request)
    rows, missing = read_rows([cell])
    assert not missing
    return cell, table(described, [cell], rows, missing)


def test_an_evaluation_is_found_by_what_is_asked_and_by_nothing_less(judged):
    cell, _ = judged
    answers = cell.answers()
    assert list(answers) == ["warm-start", "stage-2"]
    assert cell.is_done()
    for change in ({"num_samples": 2}, {"max_turns": 5}, {"items": {"num": 11}}, {"seed": 10}):
        (asked,) = cell.protocol.envs
        own = {name: value for name, value in change.items() if name != "seed"}
        if "items" in own:
            own["items"] = asked.items.model_copy(update=own["items"])
        other = cell.protocol.model_copy(
            update={
                "envs": (asked.model_copy(update=own),),
                **({"seed": 10} if "seed" in change else {}),
            }
        )
        assert answered(cell.cfg, ":stage-2", other) is None, change
    assert answered(cell.cfg, ":stage-1", cell.protocol) is None


def test_its_table_has_what_the_evaluation_says_and_its_curves_are_those_of_truncation(judged):
    cell, found = judged
    read = read_judged(cell, cell.answers())
    (row,) = found["rows"]
    assert (row["environment"], row["method"]) == ("a room", "grpo growing")
    for part, step in (("success", "stage-2"), ("start", "warm-start")):
        said = read[step].result.numbers["babyai"]["summary"]
        assert list(row[part]) == ["avg_at_3", "pass_at_2", "pass_at_3"]
        for key, estimate in row[part].items():
            for name in ("mean", "low", "high"):
                assert estimate[name] == pytest.approx(said[key][name], abs=1e-5)
    assert [each["mean"] for each in row["pass_at"]][1:] == pytest.approx(
        [row["success"][f"pass_at_{k}"]["mean"] for k in (2, 3)], abs=1e-5
    )
    store, answer = open_store(cell.cfg), cell.answers()["stage-2"]
    episodes = list(attempts_of(store, store.history(answer.step, answer.key)))
    assert len(episodes) == 36
    for horizon, each in zip(row["turns"]["budgets"], row["turns"]["success"], strict=True):
        cut = [truncate(episode, horizon).success for episode in episodes]
        assert each["mean"] == pytest.approx(np.mean(cut), abs=1e-6)
    assert row["cost"]["sampled_tokens"][0] > 0


def test_a_table_is_told_as_text_and_figures(judged):
    _, found = judged
    assert json.loads(json.dumps(found)) == found
    files = result_files(found)
    assert set(files) == {f"one.{end}" for end in ("json", "md", "csv", "tex")} | {
        f"one{end}.{form}" for end in ("", "_turns", "_pass", "_curves") for form in ("png", "svg")
    }
    assert files["one.md"].decode() == table_markdown(found)
    assert "| grpo    | growing |" in table_markdown(found)


def test_several_seeds_are_seeds_and_items_and_one_is_what_its_evaluation_says(judged):
    cell, _ = judged
    first = read_judged(cell, cell.answers())["stage-2"]
    values = first.per_item["avg_at_3"]
    codes = family_codes(first.table.families)
    alone = crossed_interval(values[None], kind="share", confidence=0.95, codes=codes)
    own = clustered_interval(values, first.table.families, kind="share", confidence=0.95)
    assert alone == own
    twice = np.stack([values, values])
    both = crossed_interval(twice, kind="share", confidence=0.95, codes=codes)
    assert both.mean == alone.mean


@pytest.mark.slow
def test_a_cells_evaluations_run_in_processes_of_their_own(described, judged):
    cell, _ = judged
    other = load_config(described.environments["a room"].params)
    assert other.semantic() == cell.cfg.semantic()
    (cell,) = cells_of(described.model_copy(update={"changes": {**CHANGES, "num_samples": 1}}))
    assert cell.answers() is None
    run_cell(cell, wait_s=10)
    assert list(cell.answers()) == ["warm-start", "stage-2"]
