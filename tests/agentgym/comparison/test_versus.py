"""Tests for `agentgym compare` of results: matching, text, figures and errors."""

import json
import re

import numpy as np
import pytest

from agentgym.cli import main
from agentgym.comparison.versus import (
    PAGE,
    NamedResult,
    files,
    lines,
    overall,
    table_markdown,
    versus,
)
from agentgym.config import ConfigError
from agentgym.evaluation.numbers import numbers_of
from agentgym.evaluation.protocol import protocol_from
from agentgym.evaluation.result import Outcome, Result, Slot
from agentgym.types import Usage

PROTOCOL = protocol_from(
    {"envs": [{"env": {"name": "babyai"}, "max_turns": 8}, {"env": {"name": "textcraft"}}]}, {}
)


def result(name, gain, seed=1, **about):
    """Return a result of 60 items of two environments, two samples each; `gain` adds to success."""
    generator, slots = np.random.default_rng(seed), []
    for env in ("babyai", "textcraft"):
        for item in range(60):
            for sample in (1, 2):
                won = bool(generator.random() < (item % 10) / 20 + gain)
                slots.append(
                    Slot(
                        env,
                        f"{env}_{item}",
                        sample,
                        outcome=Outcome.SCORED if won else Outcome.TRUNCATED,
                        success=won,
                        reward=float(won),
                        num_turns=2 + item % 5 if won else 8,
                        usage=Usage(num_calls=1, output_tokens=10 + item),
                        wall_s=0.5,
                    )
                )
    identity = {"policy": {"name": name}, "protocol": PROTOCOL.semantic(), "prompts": "p"}
    told = {"policy": name, "min_coverage": 0.95, **about}
    return Result(identity, tuple(slots), numbers_of(slots, PROTOCOL), told)


@pytest.fixture(scope="module")
def found():
    named = [
        NamedResult(name, result(name, gain, seed))
        for name, gain, seed in (("plain <b>", 0.0, 1), ("strong $x$", 0.4, 2), ("twin", 0.0, 3))
    ]
    return versus(named)


def test_the_first_result_is_the_baseline_and_a_better_one_is_told_apart(found):
    assert [each["verdict"] for each in found["contrasts"]] == ["better", "not shown"]
    better = found["contrasts"][0]["envs"]["babyai"]
    assert better["clusters"] == "items"
    assert len(better["wins"]) + len(better["losses"]) + better["num_ties"] == 60
    assert better["detectable_with"]["200"] == pytest.approx(better["detectable"] * 0.3**0.5)
    told = "\n".join(lines(found))
    assert "strong $x$ is better than plain <b>" in told
    assert "twin is not shown to differ from plain <b>" in told
    assert re.search(r"a difference like this one takes \d+ items to show", told)
    assert table_markdown(found).count(" better |") == 2


def test_a_result_beside_itself_is_the_same_policy():
    one = NamedResult("one", result("one", 0.2))
    contrast = versus([one, NamedResult("again", one.result)])["contrasts"][0]
    assert (contrast["same_policy"], contrast["verdict"]) == (True, "not shown")
    assert contrast["envs"]["babyai"]["num_ties"] == 60


@pytest.mark.integration
def test_the_page_is_one_file_without_script_or_network_and_escapes_names(found):
    written = files(found)
    page = written[PAGE].decode()
    assert "default-src 'none'" in page
    assert "<script" not in page
    assert "<b>" not in page
    assert "plain &lt;b&gt;" in page
    assert not re.search(r"(src|href)=.https?:", page)
    assert {"differences.png", "babyai_turns.png", "babyai_tokens.png"} <= written.keys()
    assert {"differences.svg", "babyai_turns.svg", "babyai_tokens.svg"} <= written.keys()
    assert json.loads(json.dumps(found, allow_nan=False)) is not None


def test_curves_end_at_the_success_of_the_whole(found):
    for each in found["results"]:
        own = each["envs"]["babyai"]
        by_axis = {curve["axis"]: curve for curve in own["curves"]}
        assert by_axis["turns"]["budgets"] == list(range(1, 9))
        for curve in by_axis.values():
            assert curve["success"][-1]["mean"] == pytest.approx(
                own["summary"]["avg_at_2"]["mean"], abs=1e-5
            )


def test_a_policy_that_is_told_its_horizon_has_no_curve_against_turns(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    rows = [{"env": "babyai", "first_observation": "You have 8 turns left.", "turns": []}]
    kinds = pyarrow.schema(
        {
            "env": pyarrow.string(),
            "first_observation": pyarrow.string(),
            "turns": pyarrow.list_(pyarrow.struct({"observation": pyarrow.string()})),
        }
    )
    parquet.write_table(
        pyarrow.Table.from_pylist(rows, schema=kinds), tmp_path / "episodes.parquet"
    )
    named = [NamedResult("a", result("a", 0.1), tmp_path), NamedResult("b", result("b", 0.1, 2))]
    own = versus(named)["results"][0]["envs"]
    assert "told its horizon" in own["babyai"]["no_turns_curve"]
    assert [curve["axis"] for curve in own["babyai"]["curves"]] == ["tokens", "seconds"]
    assert own["textcraft"]["no_turns_curve"] == ""


def test_invalid_results_and_other_questions_are_refused():
    with pytest.raises(ConfigError, match="two results or more"):
        versus([NamedResult("a", result("a", 0.1))])
    good = result("a", 0.1)
    other = Result({**good.identity, "prompts": "q"}, good.slots, good.numbers, good.about)
    with pytest.raises(ConfigError, match='prompts: "p" and "q"'):
        versus([NamedResult("a", good), NamedResult("b", other)])
    failed = Slot("babyai", "babyai_0", 1, outcome=Outcome.ENV_ERROR)
    bad = Result(good.identity, (failed,) * 9 + good.slots[:1], {}, good.about)
    with pytest.raises(ConfigError, match=r"invalid: coverage 10\.0%"):
        versus([NamedResult("a", good), NamedResult("b", bad)])
    assert overall(["better", "worse"]) == "mixed"


@pytest.mark.integration
def test_the_command_compares_folders_and_beginnings_of_digests(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name, gain, seed in (("plain", 0.0, 1), ("strong", 0.4, 2)):
        (tmp_path / name).mkdir()
        result(name, gain, seed).save(tmp_path / name)
    assert main(["compare", "plain", "strong", "--out", "page"]) == 0
    told = "strong (strong), not checked: a file is better than plain (plain), not checked: a file"
    assert told in capsys.readouterr().out
    assert (tmp_path / "page" / PAGE).is_file()
    assert main(["compare", "plain", "strong/result.json", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["contrasts"][0]["verdict"] == "better"
    assert main(["compare", "plain", "nowhere"]) == 2
    assert "evaluation nowhere is none; there are: none" in capsys.readouterr().err
