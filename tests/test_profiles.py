"""profiles/train and profiles/eval: the published trainings and evaluations of AgentGym-RL, value
by value, and the stated deviations of each profile.

Sources: the repository WooooDyy/AgentGym-RL, at commit 82402a9; arXiv:2509.08755.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from agentgym.cli import main
from agentgym.config import RunConfig, load_config
from agentgym.data.items import PUBLISHED, PUBLISHED_COUNTS, DataError
from agentgym.evaluation.protocol import items_of, load_protocol
from envs.registry import load_spec

ROOT = Path(__file__).parents[1]
BASE = ROOT / "profiles/agentgym-rl.yaml"
TRAIN = ROOT / "profiles/train"
EVAL = ROOT / "profiles/eval"
FIGURE_8, FIGURE_9 = "agentgym-rl-interaction", "agentgym-rl-pass-at-k"


@dataclass(frozen=True)
class Script:
    """Values of one script under examples/train."""

    rounds: tuple[int, ...]  # algorithm.rounds_ctrl.rounds
    every: int  # algorithm.rounds_ctrl.steps_scaling_inter; 0: fixed
    n: int  # actor_rollout_ref.rollout.n
    batch: int  # data.train_batch_size
    mini: int  # actor_rollout_ref.actor.ppo_mini_batch_size
    epochs: int  # trainer.total_epochs
    length: int  # data.max_prompt_length + data.max_response_length
    tokens: int  # actor_rollout_ref.rollout.max_tokens, per turn


SCRIPTS = {
    "AgentGym-RL/babyai": Script((20,), 0, 8, 16, 8, 10, 1024 + 4096, 200),
    "AgentGym-RL/sciworld": Script((20,), 0, 8, 16, 8, 10, 1024 + 4096, 200),
    "AgentGym-RL/searchqa": Script((5,), 0, 4, 32, 8, 20, 1024 + 8192, 512),
    "AgentGym-RL/textcraft": Script((30,), 0, 8, 32, 8, 30, 512 + 10240, 512),
    "AgentGym-RL/webarena": Script((15,), 0, 4, 32, 4, 25, 750 + 14098, 512),
    "ScalingInter-RL/babyai": Script((6, 13, 20), 100, 4, 32, 8, 20, 512 + 8192, 512),
    "ScalingInter-RL/sciworld": Script((10, 20, 30), 100, 8, 16, 8, 10, 1024 + 8192, 200),
    "ScalingInter-RL/searchqa": Script((5, 8, 10), 100, 4, 32, 8, 20, 1024 + 8192, 512),
    "ScalingInter-RL/textcraft": Script((10, 20, 30), 100, 8, 32, 8, 30, 512 + 10240, 512),
    "ScalingInter-RL/webarena": Script((8, 12, 15), 80, 4, 32, 4, 25, 750 + 14098, 512),
}
# items of the published lists; searchqa's train list is all of nq and hotpotqa
TRAIN_ITEMS = {
    "babyai": 810,
    "sciworld": 2120,
    "searchqa": 79_168 + 90_447,
    "textcraft": 374,
    "webarena": 372,
}
EVAL_ITEMS = {"babyai": 90, "sciworld": 200, "searchqa": 400, "textcraft": 100, "webarena": 50}
# examples/eval: agentgym.max_rounds, rollout.max_tokens
EVALUATED = {
    "babyai": (20, 512),
    "sciworld": (30, 200),
    "searchqa": (30, 512),
    "textcraft": (30, 512),
    "webarena": (15, 512),
}
FIGURE_7_STEPS = 370  # training steps in the paper's curves of SearchQA

SHARED_DEVIATIONS = {
    "placement",
    "sampler correction",
    "token ids",
    "instructions",
    "reward placement",
    "failed episodes",
    "response length",
    "first update",
    "held-out items",
    "order of items",
    "number of steps",
    "greedy evaluation",
    "success",
    "episode time",
}
DEVIATIONS = {
    "babyai": {"max_tokens of the evaluation", "late success", "step limit"},
    "sciworld": {"order of objects"},
    "searchqa": {"number of passes", "sentences"},
    "textcraft": {"goals"},
    "webarena": {"observation", "judge"},
}


def profile_of(script):
    """Profile of a script: AgentGym-RL/babyai -> babyai-fixed.yaml."""
    method, env = script.split("/")
    return TRAIN / f"{env}-{'fixed' if method == 'AgentGym-RL' else 'scalinginter'}.yaml"


PROFILES = [pytest.param(script, id=script) for script in SCRIPTS]
FILES = sorted(TRAIN.glob("*.yaml"))
EACH_FILE = pytest.mark.parametrize("path", [pytest.param(path, id=path.stem) for path in FILES])


def test_there_is_a_profile_for_each_script_and_for_each_result_of_the_smaller_model():
    smaller = {TRAIN / f"{env}-fixed-3b.yaml" for env in TRAIN_ITEMS}
    assert set(FILES) == {profile_of(script) for script in SCRIPTS} | smaller


@pytest.mark.parametrize("script", PROFILES)
def test_a_profile_has_the_values_of_its_script(script):
    env, published = script.split("/")[1], SCRIPTS[script]
    cfg = load_config(profile_of(script))
    assert cfg.env.name == env
    assert cfg.horizon.kind == ("stepwise" if published.every else "fixed")
    assert cfg.horizon.max_turns == published.rounds
    assert cfg.horizon.stage_steps[:-1] == (published.every,) * (len(published.rounds) - 1)
    assert cfg.rollout.group_size == published.n
    assert cfg.rollout.items_per_step == published.batch
    assert cfg.algorithm.minibatches == published.batch // published.mini
    assert cfg.rollout.max_new_tokens == published.tokens
    assert cfg.rollout.concurrency >= published.n * published.batch  # all at once, as in the script
    # no published trajectory is truncated here
    assert cfg.model.context_tokens >= published.length
    steps = TRAIN_ITEMS[env] // published.batch * published.epochs
    if "number of passes" in DEVIATIONS[env]:
        assert (sum(cfg.horizon.stage_steps), steps) == (FIGURE_7_STEPS, 106_000)
    else:
        assert sum(cfg.horizon.stage_steps) == steps


@EACH_FILE
def test_a_profile_has_what_all_scripts_share(path):
    """Values of the scripts; their defaults are in verl/agent_trainer/config/ppo_trainer.yaml."""
    cfg = load_config(path)
    size = "3B" if path.stem.endswith("-3b") else "7B"
    assert (cfg.model.source, cfg.model.name) == ("hub", f"Qwen/Qwen2.5-{size}-Instruct")
    assert cfg.model.context_tokens == 32768  # rollout.max_model_len
    assert not cfg.warm_start.enabled
    assert cfg.rollout.temperature == 1.0
    algorithm = cfg.algorithm
    assert algorithm.recipe == "grpo"
    assert (algorithm.clip_low, algorithm.clip_high) == (0.2, 0.2)  # actor.clip_ratio
    assert (algorithm.kl_coef, algorithm.kl_estimator, algorithm.kl_place) == (0.001, "k3", "loss")
    assert algorithm.entropy_coef == 0.001
    assert algorithm.epochs == 1  # ppo_epochs is unused
    assert algorithm.aggregation == "sequence"  # ppo_micro_batch_size_per_gpu 1
    optimizer = cfg.optimizer
    assert (optimizer.lr, optimizer.schedule, optimizer.warmup_steps) == (1e-6, "constant", 0)
    assert (optimizer.betas, optimizer.weight_decay) == ((0.9, 0.999), 0.01)
    assert optimizer.grad_clip == 1.0
    assert cfg.learner.activation_checkpointing  # model.enable_gradient_checkpointing
    assert cfg.ray.num_ranks + cfg.ray.num_workers == 8  # trainer.n_gpus_per_node
    assert cfg.validation.every == 0  # trainer.test_freq is unused
    assert cfg.store.commit_every == 25  # trainer.save_freq
    assert cfg.lora.rank == 0


@EACH_FILE
def test_a_profile_is_evaluated_as_its_script_evaluates(path):
    cfg = load_config(path)
    rounds, tokens = EVALUATED[cfg.env.name]
    settings = cfg.evaluation
    assert (settings.max_turns, settings.num_samples, settings.k) == (rounds, 1, (1,))
    assert settings.temperature == 1.0
    assert settings.num_items == EVAL_ITEMS[cfg.env.name]
    # one setting bounds the actions of training and evaluation; if the scripts have two values, the
    # profile states this deviation
    differs = "max_tokens of the evaluation" in said_of(path)
    assert differs == (cfg.rollout.max_new_tokens != tokens)


@EACH_FILE
def test_an_action_is_read_as_the_client_of_the_environment_reads_it(path):
    """agentenv's clients: text after `Action:`, but searchqa and webarena send the raw reply."""
    cfg = load_config(path)
    assert cfg.rollout.instructions
    is_raw = cfg.env.name in ("searchqa", "webarena")
    assert cfg.rollout.action_format == ("plain" if is_raw else "react")


@EACH_FILE
def test_a_profile_says_what_it_does_not_follow(path):
    env = load_config(path).env.name
    own = DEVIATIONS[env]
    if path.stem == "babyai-scalinginter":  # its script trains with the evaluation's max_tokens
        own = own - {"max_tokens of the evaluation"}
    assert said_of(path) == SHARED_DEVIATIONS | own


def said_of(path):
    """Names of the deviations at the top of the profile and of the profile it extends."""
    text = path.read_text()
    top = text[: text.index("\nextends: ")]
    said = set(re.findall(r"^# - ([^:]+): ", top, re.MULTILINE))
    withdrawn = set(re.findall(r"^# As published: ([^;]+);", top, re.MULTILINE))
    if path != BASE:
        base = (path.parent / yaml.safe_load(text)["extends"]).resolve()
        said |= said_of(base) - withdrawn
    return said


def test_the_published_counts_are_these():
    assert {env: count for env, (_, count) in PUBLISHED_COUNTS.items()} == EVAL_ITEMS
    known = {env: count for env, (count, _) in PUBLISHED_COUNTS.items() if count}
    assert known == {env: count for env, count in TRAIN_ITEMS.items() if env != "searchqa"}


@EACH_FILE
def test_lists_that_are_not_there_are_named_with_what_brings_them(
    path, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    assert main(["plan", "--params", str(path)]) == 2
    env = load_config(path).env.name
    assert capsys.readouterr().err == (
        f"error: dataset not imported: {PUBLISHED}/train/{env}_train.json does not exist; run"
        " `agentgym data import --rev main`, or set data.path to a folder of lists\n"
        f"see {ROOT}/docs/reference/errors-configuration.md#dataerror\n"
    )


@EACH_FILE
def test_a_profile_is_planned(path, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    cfg = load_config(path)
    for split, first, count in (("train", 1000, 400), ("test", 0, EVAL_ITEMS[cfg.env.name])):
        folder = tmp_path / PUBLISHED / ("train" if split == "train" else "eval")
        folder.mkdir(parents=True)
        rows = [{"item_id": f"{cfg.env.name}_{first + number}"} for number in range(count)]
        (folder / f"{cfg.env.name}_{split}.json").write_text(json.dumps(rows))
    assert main(["plan", "--params", str(path), "--json"]) == 0
    steps = [step["name"] for step in json.loads(capsys.readouterr().out)["steps"]]
    stages = [f"stage-{index + 1}" for index in range(len(cfg.horizon.max_turns))]
    assert [name for name in steps if name.startswith("stage")] == stages
    assert f"evaluate-{stages[-1]}" in steps


@pytest.mark.parametrize("env", ["babyai", "textcraft"])
def test_the_options_of_an_environment_are_its_own(env):
    spec = load_spec(env, load_config(TRAIN / f"{env}-fixed.yaml").env.options)
    assert spec.name == env


@pytest.mark.parametrize(
    ("env", "missing"),
    [("searchqa", "no folder 'data/searchqa'"), ("webarena", "'data/webarena/test.raw.json'")],
)
def test_what_an_environment_needs_and_has_not_is_named(env, missing, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = load_config(TRAIN / f"{env}-fixed.yaml").env.options
    with pytest.raises(ValueError, match=f"{env} option .*{re.escape(missing)}"):
        load_spec(env, options)


@pytest.mark.parametrize("env", sorted(EVALUATED))
def test_the_published_evaluation_has_the_values_of_its_script(env):
    (asked,) = load_protocol("agentgym-rl", folder=EVAL).only([env]).envs
    rounds, tokens = EVALUATED[env]
    assert (asked.max_turns, asked.max_new_tokens) == (rounds, tokens)
    assert (asked.num_samples, asked.greedy, asked.temperature) == (1, False, 1.0)
    assert asked.items.file == PUBLISHED / f"eval/{env}_test.json"
    assert asked.items.num is None


@pytest.mark.parametrize(
    "name", ["agentgym-rl", "agentgym-rl-interaction", "agentgym-rl-pass-at-k"]
)
def test_an_environment_is_evaluated_as_it_is_trained_in(name):
    for asked in load_protocol(name, folder=EVAL).envs:
        trained = load_config(TRAIN / f"{asked.env.name}-fixed.yaml")
        assert asked.env == trained.env
        assert asked.context_tokens == trained.model.context_tokens
        assert asked.instructions == trained.rollout.instructions
        assert asked.action_format == trained.rollout.action_format
        assert asked.episode_timeout_s == trained.rollout.episode_timeout_s


def test_the_figures_have_the_turns_and_samples_of_the_paper():
    interaction = {each.env.name: each for each in load_protocol(FIGURE_8, folder=EVAL).envs}
    assert {env: each.max_turns for env, each in interaction.items()} == {
        "searchqa": 10,
        "sciworld": 30,
    }
    samples = {each.env.name: each for each in load_protocol(FIGURE_9, folder=EVAL).envs}
    assert {env: each.num_samples for env, each in samples.items()} == {
        "searchqa": 64,
        "sciworld": 64,
    }
    for env, each in samples.items():
        assert each.max_turns == EVALUATED[env][0]


def test_a_protocol_says_what_it_does_not_follow():
    departs = {
        path.stem: {
            line.partition(": ")[0] for line in load_protocol(path.stem, folder=EVAL).departs
        }
        for path in EVAL.glob("*.yaml")
        if load_protocol(path.stem, folder=EVAL).follows
    }
    assert departs == {
        "agentgym-rl": {
            "failed episodes",
            "success",
            "instructions",
            "response length",
            "environments",
            "SearchQA's turns",
            "TextCraft's and SciWorld's turns",
        },
        FIGURE_8: {"number of runs", "everything else"},
        FIGURE_9: {"pass@k", "turns", "everything else"},
    }


def test_published_items_that_are_not_there_are_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    protocol = load_protocol("agentgym-rl", folder=EVAL).only(["textcraft"])
    with pytest.raises(DataError, match=r"eval/textcraft_test\.json"):
        items_of(protocol, RunConfig())
