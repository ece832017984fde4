"""A stored run knows its configuration: commands that name it need no overrides."""

import json
import re
import shlex
import shutil

import pytest
import yaml

from agentgym.cli import main
from agentgym.commands.evaluate import run_meant
from agentgym.config import ConfigError, EnvConfig, config_digest, load_config
from agentgym.pipeline.stored_config import (
    STEP,
    config_of_run,
    find_run,
    how_to_find,
    keep_run,
    require_run,
)
from agentgym.pipeline.table import open_store, run_key
from agentgym.store.manifest import decode_commit, encode_commit

pytestmark = pytest.mark.integration


@pytest.fixture
def bare(copy_run, tiny_params, tiny_endpoint, tmp_path):
    """A copy of a finished run, its name, and options that give its store and data only."""
    folder = copy_run(tmp_path / "run")
    tiny_params(folder, deterministic=True)
    made = yaml.safe_load((folder / "params.yaml").read_text())
    own = {name: made[name] for name in ("extends", "data", "store")}
    own["env"] = {"endpoints": [tiny_endpoint]}
    (folder / "bare.yaml").write_text(yaml.safe_dump(own))
    run = f"r{run_key(load_config(folder / 'params.yaml'))[:12]}"
    return folder, run, ["--params", str(folder / "bare.yaml")]


def test_a_run_with_overrides_is_audited_planned_and_exported_by_its_name_alone(
    bare, tmp_path, capsys
):
    _, run, options = bare
    assert main(["plan", *options, "--set", "evaluation.num_items=12"]) == 0
    assert "skip" not in capsys.readouterr().out  # without the name it is another run
    assert main(["plan", run, *options]) == 0
    planned = capsys.readouterr().out.splitlines()
    assert planned[0].startswith(f"run {run}, all steps are done in ")
    assert {line.split()[0] for line in planned[1:] if line.startswith("  ")} == {"skip"}
    few = ["--episodes", "1", "--rescore", "1"]
    assert main(["audit", run, *few, *options]) == 0, capsys.readouterr().out
    assert "audit passed" in capsys.readouterr().out
    for step, number in (
        ("prepare", r"train \d+ · validation \d+"),
        ("demonstrate", r"expert_success [\d.]+ · num_demos \d+ · num_played \d+"),
        ("initialize", r"num_parameters \d+ · vocab_size \d+"),
        ("stage-1", r"rollout_success [\d.]+"),
        ("evaluate-stage-1", r"avg_at_\d [\d.]+ · greedy [\d.]+ · .*coverage [\d.]+"),
    ):
        assert main(["step", step, "--run", run, *options]) == 0
        said = capsys.readouterr().out
        assert re.search(f"^{step}: done · .*{number}.* · manifest [0-9a-f]{{12}}$", said, re.M), (
            said
        )
    assert main(["export", run, "stage-1", str(tmp_path / "model"), *options]) == 0


def test_a_checkpoint_named_by_its_run_is_evaluated_as_that_run_evaluates(bare, capsys):
    _, run, options = bare
    few = ["--num-items", "2", "--num-samples", "1", "--json"]
    assert main(["evaluate", f"{run}:stage-1", *few, *options]) == 0, capsys.readouterr().err
    settings = json.loads(capsys.readouterr().out)["about"]["settings"]
    assert [each["max_turns"] for each in settings["envs"]] == [7]  # 12 without the run's name
    assert settings["deterministic"] is True


def test_a_checkpoint_named_by_its_run_is_watched_as_that_run_plays(bare, capsys):
    _, run, options = bare
    assert main(["play", "--model", f"{run}:stage-1", *options]) == 0, capsys.readouterr().err
    assert ", at most 7 turns\n" in capsys.readouterr().out  # 12 without the run's name


@pytest.mark.parametrize(
    ("policy", "run"),
    [("r0123abcd:stage-1", "r0123abcd"), (":stage-1", ""), ("expert", ""), ("echo:go", "")],
)
def test_the_run_is_read_off_the_policy_that_is_evaluated(policy, run):
    assert run_meant(policy) == run


def test_a_colleague_with_the_same_store_exports_a_run_by_its_name(bare, tmp_path):
    folder, run, options = bare
    shutil.rmtree(folder / "delivered")  # as if another machine had delivered to MLflow
    assert main(["export", run, "stage-1", str(tmp_path / "model"), *options]) == 0


def test_of_a_run_of_an_earlier_version_the_error_says_which_overrides_are_missing(bare, capsys):
    folder, run, options = bare
    for path in (folder / "store/steps").glob(f"{STEP}-*"):
        shutil.rmtree(path)
    assert main(["audit", run, *options]) == 2
    said = capsys.readouterr().err
    assert f"run {run} is not the run of this configuration and source" in said
    missing = said.splitlines()[0].partition("settings that are missing here: add ")[2]
    missing = shlex.split(missing)
    assert "optimizer.warmup_steps=1" in missing
    assert "deterministic=true" in missing
    assert main(["plan", run, *options, *missing]) == 0, capsys.readouterr().err
    assert capsys.readouterr().out.startswith(f"run {run}, ")


def test_an_override_that_says_otherwise_than_the_run_is_refused_and_named(bare, capsys):
    _, run, options = bare
    assert main(["audit", run, *options, "--set", "optimizer.lr=0.25"]) == 2
    said = capsys.readouterr().err
    assert "optimizer.lr 0.25" not in said.partition(" -> ")[0]
    assert "optimizer.lr 0.0005 -> 0.25" in said


def test_where_things_are_is_the_owners_to_say_and_not_the_runs(bare):
    folder, run, _ = bare
    mine = yaml.safe_load((folder / "bare.yaml").read_text())
    mine |= {"env": {"endpoints": ["http://127.0.0.1:9"], "max_sessions": 300}}
    mine |= {"tracking": {"uri": f"sqlite:///{folder}/mine.db"}}
    (folder / "mine.yaml").write_text(yaml.safe_dump(mine))
    cfg = load_config(folder / "mine.yaml")
    found = config_of_run(run, cfg, str(folder / "mine.yaml"))
    made = load_config(folder / "params.yaml")
    assert found.semantic() == made.semantic()
    assert (found.store, found.tracking, found.alarms) == (cfg.store, cfg.tracking, cfg.alarms)
    assert found.env.endpoints == ("http://127.0.0.1:9",)
    assert found.env.max_sessions == 300
    kept = find_run(open_store(cfg), run).config["config"]
    assert not {"store", "tracking", "ray", "kuberay", "kubernetes"} & {
        name for name, value in kept.items() if value
    }
    assert "endpoints" not in kept["env"]


def test_endpoints_of_one_environment_are_not_asked_for_another(bare):
    folder, run, _ = bare
    mine = yaml.safe_load((folder / "bare.yaml").read_text())
    mine |= {"env": {"name": "textcraft", "endpoints": ["http://127.0.0.1:9"]}}
    (folder / "mine.yaml").write_text(yaml.safe_dump(mine))
    found = config_of_run(run, load_config(folder / "mine.yaml"), str(folder / "mine.yaml"))
    assert (found.env.name, found.env.endpoints) == ("babyai", ())


def test_a_record_that_somebody_changed_is_not_believed(bare, capsys):
    folder, run, options = bare
    (path,) = (folder / "store/steps").glob(f"{STEP}-*/manifests/*.json")
    (kept,) = decode_commit(path.read_bytes())
    other = {**kept.config["config"], "model": {**kept.config["config"]["model"], "name": "x/y"}}
    config = {**kept.config, "config": other}
    path.write_bytes(encode_commit([kept.model_copy(update={"config": config})]))
    assert main(["plan", run, *options]) == 2
    assert f"keeps of run {run} was changed" in capsys.readouterr().err


def test_a_run_whose_source_has_changed_since_is_planned_and_not_trained(bare, capsys, monkeypatch):
    from agentgym.pipeline import table

    folder, run, options = bare
    true = table.source_digest
    monkeypatch.setattr(table, "source_digest", lambda modules: true(modules)[::-1])
    assert main(["plan", run, *options]) == 0
    assert "source code changed" in capsys.readouterr().out
    assert main(["step", "stage-1", "--run", run, *options]) == 2
    assert "the source of demonstrate and" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="is not the run of this configuration and source"):
        require_run(load_config(folder / "params.yaml"), run)


def test_what_a_run_was_asked_for_is_kept_once_and_is_no_garbage(bare, capsys):
    folder, _, _ = bare
    cfg = load_config(folder / "params.yaml")
    store = open_store(cfg)
    (head,) = store.heads(STEP)
    keep_run(cfg, store)
    assert store.heads(STEP) == [head]
    assert head.key == run_key(cfg)
    assert main(["gc", "--params", str(folder / "params.yaml")]) == 0
    assert any(
        line.startswith("keep") and line.endswith("what a run was asked for")
        for line in capsys.readouterr().out.splitlines()
    )


@pytest.mark.parametrize(
    ("params", "overrides", "options"),
    [
        ("params.yaml", ("optimizer.lr=0.1", "seed=3"), ""),
        ("params.yaml", ("alarms.entropy.action=off", "pipeline.parallel=2"), ""),
        ("other.yaml", (), " --params other.yaml"),
        ("params.yaml", ("seed=1", "store.path=a b/store"), " --set 'store.path=a b/store'"),
        ("params.yaml", ("env.endpoints=[http://h:1]",), " --set 'env.endpoints=[http://h:1]'"),
        ("params.yaml", ("tracking.uri=http://me:secret@h",), " --set tracking.uri=http://h"),
        ("params.yaml", ("algorithm.chunk_items=8", "env.options={}"), ""),
    ],
)
def test_a_printed_command_names_only_what_the_run_does_not_know(params, overrides, options):
    assert how_to_find(params, overrides, load_config("params.yaml")) == options


def test_a_run_of_a_made_store_brings_no_address_no_path_and_no_variable(
    tmp_path, tiny_params, capsys
):
    params = str(tiny_params(tmp_path, endpoint="http://127.0.0.1:8"))
    cfg = load_config(params)
    store, options = open_store(cfg), ["--params", params]
    keep_run(cfg, store)
    (head,) = store.heads(STEP)
    kept, env = head.config, head.config["config"]["env"]

    def made(**changes):
        """Store a consistent record with these changes. Return the run's name."""
        config = {**kept, "config": {**kept["config"], **changes}}
        with store.open(STEP, config_digest(config)) as writer:
            nothing = {name: {} for name in ("state", "parents", "blobs", "records", "results")}
            writer.commit(done=True, config=config, timings={}, **nothing)
        return f"r{config_digest(config)[:12]}"

    elsewhere = {"endpoints": ["http://127.0.0.1:9"], "request_timeout_s": 1.0}
    sent = made(env={**env, **elsewhere}, tracking={"uri": "http://127.0.0.1:9"}, compute="ray")
    found = config_of_run(sent, cfg, params)
    assert found.semantic() == cfg.semantic()
    assert (found.env, found.tracking, found.compute) == (cfg.env, cfg.tracking, cfg.compute)
    judge = {"base_url": "http://127.0.0.1:9", "model": "m", "api_key_env": "AGENTGYM_SECRET_X"}
    asks = made(env={**env, "name": "webarena", "options": {"judge": judge}})
    assert main(["audit", asks, *options]) == 2
    said = capsys.readouterr().err
    assert f"run {asks} cannot be had as it was: webarena as on record would use judge" in said
    assert "AGENTGYM_SECRET_X" in said
    same = [f"env={json.dumps({'name': 'webarena', 'options': {'judge': judge}})}"]
    trusted = config_of_run(asks, load_config(params, same), params, same)
    assert trusted.env.options == {"judge": judge}


def test_how_to_find_a_run_names_what_an_environment_of_ones_own_would_use():
    cfg = load_config("params.yaml")
    own = cfg.model_copy(update={"env": EnvConfig(name="mine", options={"limit": 100})})
    overrides = ["env.name=mine", "env.options={limit: 100}", "seed=3"]
    told = " --set env.name=mine --set 'env.options={limit: 100}'"
    assert how_to_find("params.yaml", overrides, own) == told
    assert how_to_find("params.yaml", ["env.options.view=compact"], cfg) == ""
