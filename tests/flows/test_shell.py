"""Bad input ends with one line and exit code 2 before anything starts."""

import io
import json
import logging
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from agentgym.config import ConfigError, load_config
from agentgym.pipeline.stored_config import how_to_find
from agentgym.pipeline.table import steps_of
from agentgym.steps.step import Kind
from agentgym.store.lease import LeaseHeld
from flows import shell
from flows.common import is_any
from flows.pipeline import pipeline

ROOT = Path(__file__).parents[2]
PIPELINE = partial(shell.main, "flows.pipeline", pipeline, is_any)


@pytest.mark.parametrize(
    ("override", "line"),
    [
        (
            "rollout.gruop_size=4",
            "unknown key rollout.gruop_size; did you mean rollout.group_size?",
        ),
        ("optimizer.lr=fast", "optimizer.lr: input should be a valid number"),
        ("horizon.max_turns=[12,8,5]", "horizon.max_turns [12, 8, 5] must not decrease"),
        ("rollout.group_size=1", "leaves grpo nothing to compare"),
        ("model.context_tokens=64", "is too small for 12 turns"),
        (
            "algorithm.recipe=gpro",
            "algorithm.recipe 'gpro' is unknown; known: agent_evol, cispo, dapo",
        ),
        ("no-equals-sign", "must look like key.path=value"),
        ("env.options.veiw=compact", "env: babyai has no option 'veiw'; did you mean 'view'?"),
        ("env.name=chess", "env: unknown environment 'chess'"),
        ("env.name=foo.bar", "env.name: string should match pattern"),
        ("registry.model_name=org/model", "registry.model_name: string should match pattern"),
        (
            "model.source=hub model.name=/no/model",
            "model.name '/no/model' is neither a folder with a model",
        ),
        ("evaluation.k=[]", "evaluation.k: tuple should have at least 1 item"),
        (
            "data.path=nowhere",
            "data.path nowhere does not exist, and there is no nowhere.dvc to pull it by",
        ),
        (
            "warm_start.source=trajectories",
            (
                "data.trajectories data/trajectories/imported does not exist, and there is no"
                " data/trajectories/"
            ),
        ),
    ],
)
def test_a_wrong_parameter_is_one_line_and_starts_nothing(fresh, override, line):
    ended = fresh.call(PIPELINE, *override.split())
    assert (ended.returncode, ended.stdout) == (2, "")
    assert line in ended.stderr
    _, page = ended.stderr.splitlines()
    assert page.startswith("see ")
    assert not (fresh.folder / ".agentgym/store").exists()


def test_a_wrong_parameter_is_one_line_of_the_command_too(fresh):
    ended = fresh.pipeline("data.path=nowhere")
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.startswith("error: data.path nowhere does not exist")
    _, page = ended.stderr.splitlines()
    assert page.startswith("see ")
    assert {path.name for path in (fresh.folder / ".agentgym").iterdir()} <= {"prefect"}


def test_an_eval_item_in_the_train_file_is_named_and_starts_nothing(pulled):
    train = pulled.folder / "data/AgentGym-RL-Data-ID/train/babyai_train.json"
    items = json.loads(train.read_text())
    leaked = json.loads(
        (pulled.folder / "data/AgentGym-RL-Data-ID/eval/babyai_test.json").read_text()
    )[3]
    train.write_text(json.dumps([*items, leaked]))
    ended = pulled.call(PIPELINE)
    assert ended.returncode == 2
    assert leaked["item_id"] in ended.stderr
    _, page = ended.stderr.splitlines()
    assert page.startswith("see ")
    assert not (pulled.folder / ".agentgym/store").exists()


def test_more_test_items_than_there_are_start_nothing(pulled):
    ended = pulled.call(PIPELINE, "evaluation.num_items=1000")
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr == (
        "error: evaluation.num_items 1000 is more than the 600 test items of babyai; lower it\n"
        "see docs/reference/errors-configuration.md#configerror\n"
    )


def test_what_cannot_be_written_leaves_nothing_beside_it(pulled):
    (pulled.folder / "taken").mkdir()
    before = set(pulled.folder.iterdir())
    assert pulled.run("agentgym", "step", "prepare", "--out", "taken").returncode == 1
    assert set(pulled.folder.iterdir()) - before <= {pulled.folder / ".agentgym"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--episodes", "0"), "0 is not positive"),
        (("--seed", "-1"), "-1 is no seed"),
        (("--seed", str(2**64)), "is no seed; expected 0 to 9223372036854775807"),
    ],
)
def test_an_audit_of_no_episode_or_with_no_seed_is_refused(fresh, words, said):
    ended = fresh.run("agentgym", "audit", *words)
    assert ended.returncode == 2
    assert said in ended.stderr


@pytest.mark.slow
def test_two_pipelines_may_start_at_once(fresh):
    start = (
        "from pathlib import Path; from services.prefect_server import prefect_api;"
        " prefect_api(Path('.agentgym')).__enter__()"
    )
    both = [fresh.start("python", "-c", f"import flows; {start}") for _ in range(2)]
    for process in both:
        said, _ = process.communicate(timeout=120)
        assert process.returncode == 0, said


def test_a_step_whose_parent_is_not_done_says_which_to_run(pulled):
    ended = pulled.run("agentgym", "step", "stage-2")
    assert ended.returncode == 2
    assert "step stage-2 needs prepare, stage-1 first; run `agentgym step prepare`" in ended.stderr


def test_a_dataset_that_was_not_pulled_is_named_with_the_command_that_pulls_it(fresh):
    ended = fresh.run("agentgym", "plan")
    assert ended.returncode == 2
    assert "dataset not pulled" in ended.stderr
    assert "dvc pull data/AgentGym-RL-Data-ID.dvc" in ended.stderr


def test_the_summary_of_three_values_of_k_fits_80_columns(monkeypatch):
    cfg = load_config(ROOT / "params.yaml", ["evaluation.num_samples=4", "evaluation.k=[1,2,4]"])
    wide = {"mean": 1.0, "low": 0.995, "high": 1.0, "num_items": 8}
    keys = ("greedy", "avg_at_4", "pass_at_1", "pass_at_2", "pass_at_4")
    results = {"summary": dict.fromkeys(keys, wide), "coverage": 1.0}
    paired = {"paired": {"baseline": "evaluate-warm-start", "avg_at_4": wide}}
    done = {}
    for name, step in steps_of(cfg).items():
        if step.kind is Kind.EVALUATE:
            more = paired if "stage" in name else {}
            found = {**results, **more, "checkpoint": step.checkpoint}
            done[name] = SimpleNamespace(results=found, timings={"wall_s": 100.0})
    registered = {"model": "agentgym-babyai", "version": "1", "alias": "champion"}
    for name, found in (("register", registered), ("report", {})):
        done[name] = SimpleNamespace(results=found, timings={})
    monkeypatch.setattr(shell, "run_label", lambda _: f"r{'0' * 12}")  # the data may not be pulled
    monkeypatch.setattr(shell, "export_report", lambda *_: "report.html")
    monkeypatch.setattr(shell, "alarm_lines", lambda *_: [])
    monkeypatch.setattr(shell, "sentence", lambda _: "moves to version 1")
    said = io.StringIO()
    options = how_to_find("params.yaml", ["seed=3", "store.path=other/store"], cfg)
    tracking = cfg.tracking.model_copy(update={"uri": "https://user:secret@mlflow.example.com/"})
    cfg = cfg.model_copy(update={"tracking": tracking})
    shell.summarise(cfg, done, Console(file=said, width=80), options=options)
    assert f"check    agentgym audit r{'0' * 12} --set store.path=other/store\n" in said.getvalue()
    assert "compare  https://mlflow.example.com MLflow, run r0000" in said.getvalue()
    table = said.getvalue().splitlines()[:6]
    titles = ["success,", "%", "greedy", "avg@4", "pass@2", "pass@4", "avg@4", "gain"]
    assert table[0].split() == titles
    assert max(map(len, table)) <= 80
    counted = [(line.count("100.0"), "gain" in line) for line in table]
    assert [each[0] for each in counted[1:]] == [4, 4, 5, 5, 5]  # no row is wrapped
    assert table[1].startswith("untrained ")


@pytest.mark.parametrize(
    ("error", "num_lines"),
    [
        (LeaseHeld("step stage-1 is held by process 7"), 0),
        (ConfigError("seed: too large"), 0),
        (AssertionError("a bug"), 1),
    ],
)
def test_a_step_that_somebody_else_runs_shows_no_traceback_before_its_line(error, num_lines):
    """Records are as Prefect's engines log them; a bug keeps its traceback."""
    logger = logging.getLogger("prefect.task_runs")
    try:
        raise error
    except Exception:
        told = (f"Task run failed with exception: {error!r}", (), sys.exc_info())
        record = logger.makeRecord(logger.name, logging.ERROR, "", 0, *told)
    end = logger.makeRecord(
        logger.name, logging.ERROR, "", 0, "Finished in state Failed()", (), None
    )
    shown = [each for each in (record, end) if shell._worth_a_line(each)]
    assert len(shown) == num_lines
