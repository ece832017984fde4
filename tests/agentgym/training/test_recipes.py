"""Every recipe in a whole tiny run: it trains, resumes, and passes the audit."""

import shutil

import pytest
import torch
from safetensors.torch import load as load_safetensors

from agentgym.algorithms.recipe import RECIPES
from agentgym.audit import audit
from agentgym.config import ActorCriticConfig, ConfigError, load_config
from agentgym.models.architecture import WEIGHTS
from agentgym.models.checkpoint import OPTIMIZER, load_checkpoint
from agentgym.pipeline.run import run_step
from agentgym.pipeline.table import finished, open_store
from agentgym.records import TRAJECTORIES, decode_trajectories
from agentgym.steps.context import METRICS, StepContext
from agentgym.tracking.points import decode_points
from agentgym.types import Status
from tests.first_steps import BEFORE
from tests.pretrained import AS_TINY

# the first of a process may wait for runs that others make
pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

ALGORITHM = {"critic_warmup_steps": 1}


@pytest.fixture
def begin(started, tmp_path, tiny_params, tiny_endpoint):
    """Return a function of changes: configuration of a run that continues from `started`."""

    def make(**changes):
        folder = tmp_path / "run"
        if not folder.exists():
            shutil.copytree(started, folder)
        return load_config(tiny_params(folder, endpoint=tiny_endpoint, **changes))

    return make


def points(cfg, name):
    store = open_store(cfg)
    final = finished(cfg, store)[name]
    logged = [commit for commit in store.history(name, final.key) if METRICS in commit.records]
    return [point for commit in logged for point in decode_points(store.read(commit, METRICS))]


# one recipe for each training loop; the others differ in losses and advantages alone
USUAL = ("grpo", "ppo", "sft", "dpo", "agent_evol")


@pytest.mark.parametrize(
    "recipe",
    [
        recipe if recipe in USUAL else pytest.param(recipe, marks=pytest.mark.slow)
        for recipe in sorted(RECIPES)
    ],
)
def test_each_recipe_trains_two_stages_and_passes_the_audit(begin, recipe):
    cfg = begin(algorithm={"recipe": recipe, **(ALGORITHM if "ppo" in recipe else {})})
    assert [str(run_step(name, cfg)) for name in (*BEFORE, "stage-1", "stage-2")] == ["done"] * len(
        BEFORE
    ) + ["ran"] * 2
    report = audit(cfg, num_episodes=4)
    assert report.ok, [check.failures for check in report.checks if not check.ok]
    metrics = [point.metrics for name in ("stage-1", "stage-2") for point in points(cfg, name)]
    assert len(metrics) == 4
    loop = cfg.algorithm.loop
    learned = "actor" if loop.samples_every_step else "dpo" if loop.prefers else "sft"
    norm = f"{learned}/grad_norm"
    assert any(row.get(norm, 0.0) > 0 for row in metrics)
    if isinstance(cfg.algorithm, ActorCriticConfig):
        assert "actor/loss" not in metrics[0]  # only the critic trains during warm-up
        assert all(row["critic/grad_norm"] > 0 for row in metrics[:1])


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param(
            {"algorithm": {"recipe": "ppo", "truncated": "bootstrap", **ALGORITHM}},
            marks=pytest.mark.slow,
        ),
        pytest.param({"algorithm": {"recipe": "grpo", "kl_coef": 0.01}}, marks=pytest.mark.slow),
        pytest.param(
            {"algorithm": {"recipe": "rloo", "kl_coef": 0.01, "entropy_coef": 0.01}},
            marks=pytest.mark.slow,
        ),
        {
            "algorithm": {
                "recipe": "grpo",
                "truncated": "mask",
                "shuffle_rewards": True,
                "aggregation": "sequence",
            }
        },
        {
            "rollout": {
                "items_per_step": 4,
                "group_size": 4,
                "temperature": 0.7,
                "concurrency": 8,
                "max_staleness": 1,
            }
        },
        {
            "horizon": {
                "kind": "adaptive",
                "max_turns": [5, 7],
                "stage_steps": [4],
                "window": 1,
                "min_gain": 1.0,
            }
        },
    ],
    ids=["bootstrap", "kl in loss", "kl in reward", "mask", "staleness", "adaptive"],
)
def test_options_of_training_pass_the_audit_too(begin, changes):
    cfg = begin(**changes)
    for name in (*BEFORE, "stage-1", *(() if "horizon" in changes else ("stage-2",))):
        run_step(name, cfg)
    report = audit(cfg, num_episodes=4)
    assert report.ok, [check.failures for check in report.checks if not check.ok]
    if "horizon" in changes:  # a gain of 1 is impossible: two steps at each level
        assert [point.metrics["rollout/max_turns"] for point in points(cfg, "stage-1")] == [
            5,
            5,
            7,
            7,
        ]
    if cfg.algorithm.kl_coef:
        rows = [
            point.metrics["actor/reference_kl"]
            for name in ("stage-1", "stage-2")
            for point in points(cfg, name)
        ]
        assert rows[0] == pytest.approx(0, abs=1e-6)  # the reference is the start of training,
        assert rows[-1] > 1e-6  # also in the second stage
    if cfg.rollout.max_staleness:
        # a stage begins with current weights; all later steps are one update behind
        assert [point.metrics["sync/staleness_max"] for point in points(cfg, "stage-1")] == [0, 1]


def test_bootstrapped_episodes_cut_by_the_context_pass_the_audit(
    tmp_path, tiny_params, tiny_endpoint
):
    small = [
        "warm_start.num_demos=20",
        "warm_start.steps=10",
        "horizon.stage_steps=[2,1]",
        "validation.every=0",
    ]
    # observations exceed these limits
    narrow = ["model.context_tokens=104", "rollout.observation_tokens=7"]
    params = tiny_params(
        tmp_path,
        endpoint=tiny_endpoint,
        algorithm={"recipe": "ppo", "truncated": "bootstrap", **ALGORITHM},
    )
    cfg = load_config(params, [*small, *narrow])
    for name in ("prepare", "demonstrate", "initialize", "warm-start", "stage-1"):
        run_step(name, cfg)
    store = open_store(cfg)
    final = finished(cfg, store)["stage-1"]
    episodes = [
        e
        for commit in store.history("stage-1", final.key)
        for e in decode_trajectories(store.read(commit, TRAJECTORIES))
    ]
    cut = [e for e in episodes if e.status is Status.MAX_TOKENS and e.item.split == "train"]
    # the last observation fits in some episodes only
    assert {e.action_mask[-1] for e in cut} == {True, False}
    report = audit(cfg, num_episodes=4)
    assert report.ok, [check.failures for check in report.checks if not check.ok]


@pytest.mark.slow
def test_a_model_in_bfloat16_resumes_to_the_bit_with_its_master_weights(
    started, tmp_path, tiny_params, tiny_endpoint, monkeypatch
):
    warm = load_config(tiny_params(started))
    checkpoint = load_checkpoint(open_store(warm), finished(warm, open_store(warm))["warm-start"])
    checkpoint.model.bfloat16().save_pretrained(tmp_path / "model")
    checkpoint.tokenizer.save_pretrained(tmp_path / "model")
    # bfloat16 forwards differ with their shapes: the engine decodes token by token
    changes = [
        "deterministic=true",
        *AS_TINY,
        "model.source=hub",
        f"model.name={tmp_path / 'model'}",
        "warm_start.enabled=false",
    ]
    changes += ["optimizer.lr=1e-5", "horizon.stage_steps=[3,1]", "validation.every=0"]
    finals, step_taken = [], StepContext.step_taken

    def fatal(*arguments, **named):
        step_taken(*arguments, **named)
        raise KeyboardInterrupt

    for killed in (False, True):
        cfg = load_config(tiny_params(tmp_path / str(killed), endpoint=tiny_endpoint), changes)
        for name in ("prepare", "initialize"):
            run_step(name, cfg)
        if killed:
            monkeypatch.setattr(StepContext, "step_taken", fatal)
            with pytest.raises(KeyboardInterrupt):
                run_step("stage-1", cfg)
            monkeypatch.undo()
        assert str(run_step("stage-1", cfg)) == ("resumed at commit 1" if killed else "ran")
        finals.append(finished(cfg, open_store(cfg))["stage-1"])
    assert finals[0].digest == finals[1].digest
    state, weights = (
        load_safetensors(open_store(cfg).read(finals[1], name)) for name in (OPTIMIZER, WEIGHTS)
    )
    assert all(
        torch.equal(state[f"{name}:master"].bfloat16(), tensor) for name, tensor in weights.items()
    )
    assert any(
        not torch.equal(state[f"{name}:master"], tensor.float()) for name, tensor in weights.items()
    )


@pytest.mark.slow
def test_a_stage_that_was_trained_without_the_critic_is_named(whole_run):
    from agentgym.training import rl

    params = whole_run / "params.yaml"
    store = open_store(cfg := load_config(params))
    start = finished(cfg, store)["stage-1"]

    class Context:
        tensors_of = StepContext.tensors_of

    context = Context()
    context.cfg = load_config(params, ["algorithm.recipe=ppo"])
    with pytest.raises(
        ConfigError,
        match=r"recipe ppo needs a critic, and stage-1 commit 1 has no critic\.safetensors",
    ):
        rl.plan_learner(context, start, rl.load_checkpoint(store, start))
