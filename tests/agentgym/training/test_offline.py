"""Data of the recipes without online sampling, one step of each by hand, and a killed stage."""

import signal
import sys
from dataclasses import replace

import pytest
import torch
from torch.nn.functional import logsigmoid

from agentgym.algorithms.batch import to_batch
from agentgym.audit import audit
from agentgym.config import ConfigError, LearnerConfig, OptimizerConfig, load_config
from agentgym.data.check import load_data
from agentgym.learner.learner import LocalLearner
from agentgym.models.architecture import WEIGHTS
from agentgym.models.checkpoint import OPTIMIZER, load_checkpoint
from agentgym.models.model import weights_of
from agentgym.pipeline.run import run_step
from agentgym.pipeline.table import finished, open_store, steps_of
from agentgym.records import TRAJECTORIES, decode_trajectories, encode_trajectories
from agentgym.steps.context import StepContext
from agentgym.steps.step import stages
from agentgym.store.keys import package_folders, source_files
from agentgym.store.manifest import Blob, Manifest, encode_commit
from agentgym.training import offline
from agentgym.training.offline import dataset_of, preference_pairs, successes
from agentgym.types import Item, Status, Trajectory
from tests.completed import completed
from tests.first_steps import BEFORE_AND_EVALUATED

DRIVER = """
import os, signal, sys
import agentgym.store.posix as posix
from agentgym.config import load_config
from agentgym.steps.context import StepContext
from agentgym.pipeline.run import run_step

params, fatal = sys.argv[1], int(sys.argv[2])
create = posix.create_exclusively


def fatal_create(temp, path):
    if path.parent.name == "manifests" and int(path.stem) == fatal:
        os.kill(os.getpid(), signal.SIGKILL)
    return create(temp, path)


posix.create_exclusively = fatal_create
print(run_step("stage-1", load_config(params)))
"""


def episode(task, sample, reward, ids=(5, 9, 33, 12), mask=(0, 0, 1, 1), status=Status.TERMINATED):
    return Trajectory(
        item=Item("babyai", task),
        sample=sample,
        step=1,
        max_turns=5,
        status=status,
        reward=reward if status.is_valid else None,
        success=bool(reward) and status.is_valid,
        first_observation="",
        turns=(),
        input_ids=tuple(ids),
        action_mask=tuple(map(bool, mask)),
        logprobs=(0.0,) * len(ids),
    )


def names(pairs):
    return [tuple((each.item.task_id, each.sample) for each in pair) for pair in pairs]


def test_a_pair_is_a_higher_reward_before_a_lower_one_of_the_same_item():
    mixed = [episode(1, sample, reward) for sample, reward in enumerate([1.0, 0.0, 1.0, 0.0])]
    solved = [episode(2, sample, 1.0) for sample in range(3)]
    failed = [episode(3, sample, 0.0) for sample in range(3)]
    graded = [episode(4, sample, reward) for sample, reward in enumerate([0.5, 0.9, 0.5])]
    interleaved = [solved[0], mixed[0], graded[0], *mixed[1:], *failed, *solved[1:], *graded[1:]]
    pairs = preference_pairs(interleaved, per_item=9, seed=0, step=1)
    # grouped by item in order; items 2 and 3 have equal rewards and give no pair
    won = [((1, 0), (1, 1)), ((1, 0), (1, 3)), ((1, 2), (1, 1)), ((1, 2), (1, 3))]
    assert names(pairs) == [*won, ((4, 1), (4, 0)), ((4, 1), (4, 2))]


def test_rewards_that_differ_by_rounding_make_no_pair():
    group = [
        episode(1, sample, reward) for sample, reward in enumerate([0.66, 0.6600000000000001, 0.67])
    ]
    assert names(preference_pairs(group, per_item=9, seed=0, step=1)) == [
        ((1, 2), (1, 0)),
        ((1, 2), (1, 1)),
    ]


def test_pairs_of_an_item_are_bounded_and_drawn_from_seed_and_step_alone():
    # 4 winners, 4 losers: 16 pairs
    group = [episode(1, sample, float(sample % 2)) for sample in range(8)]
    drawn = {
        (seed, step): names(preference_pairs(group, per_item=3, seed=seed, step=step))
        for seed in (0, 1)
        for step in (1, 21)
    }
    assert all(len(pairs) == len(set(pairs)) == 3 for pairs in drawn.values())
    assert all(
        winner[1] % 2 == 1 and loser[1] % 2 == 0
        for pairs in drawn.values()
        for winner, loser in pairs
    )
    assert len({tuple(pairs) for pairs in drawn.values()}) == 4
    assert names(preference_pairs(group, per_item=3, seed=0, step=1)) == drawn[0, 1]
    assert len(preference_pairs(group, per_item=99, seed=0, step=1)) == 16


def test_of_each_item_the_first_successes_are_kept():
    group = [episode(task, sample, float(sample > 1)) for task in (1, 2) for sample in range(5)] + [
        episode(3, 0, 0.0)
    ]
    assert [(each.item.task_id, each.sample) for each in successes(group, per_item=2)] == [
        (1, 2),
        (1, 3),
        (2, 2),
        (2, 3),
    ]


def test_failed_environments_and_masked_cuts_make_no_pair(tmp_path, tiny_params):
    group = [
        episode(1, 0, 1.0),
        episode(1, 1, 0.0, status=Status.ENV_ERROR),
        episode(1, 2, 0.0, status=Status.MAX_TURNS),
        episode(1, 3, 0.0, mask=(0, 0, 0, 0)),
    ]
    cfg = load_config(tiny_params(tmp_path, algorithm={"recipe": "dpo"}))
    stage = stages(cfg.horizon)[0]
    assert names(dataset_of(cfg, stage, group)) == [((1, 0), (1, 2))]
    masked = load_config(tiny_params(tmp_path, algorithm={"recipe": "dpo", "truncated": "mask"}))
    assert dataset_of(masked, stage, group) == []


# rows of two turns: actions, an observation between them, actions
PAIRS = [
    (
        episode(1, 0, 1.0, [5, 9, 33, 12, 40, 41], [0, 0, 1, 1, 0, 1]),
        episode(1, 1, 0.0, [5, 9, 12, 7, 30], [0, 0, 1, 0, 1]),
    ),
    (
        episode(2, 0, 1.0, [6, 30, 31], [0, 1, 1]),
        episode(2, 1, 0.0, [6, 30, 7, 8, 50], [0, 1, 0, 0, 1]),
    ),
    (
        episode(3, 0, 1.0, [6, 35], [0, 1]),
        episode(3, 1, 0.0, [5, 9, 18, 19, 20, 21, 22], [0, 0, 1, 0, 0, 1, 1]),
    ),
]


@pytest.fixture
def learner_and_pairs(make_model):
    """Return a function that makes (learner, pairs with another policy's log-probabilities)."""

    def make(**settings):
        learner = LocalLearner(
            make_model(0),
            OptimizerConfig(lr=1e-2, warmup_steps=0, grad_clip=1e9),
            total_steps=10,
            settings=LearnerConfig(**settings),
        )
        batch = to_batch([each for pair in PAIRS for each in pair])
        return learner, replace(
            batch,
            logprobs=LocalLearner(make_model(1), OptimizerConfig(), total_steps=1).score(batch),
        )

    return make


def gradients(model):
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def test_the_mask_keeps_the_actions_of_all_turns_of_both_sides():
    batch = to_batch([each for pair in PAIRS for each in pair])
    counts = torch.zeros(6).index_add_(0, batch.sequence, batch.action_mask.float())
    assert counts.tolist() == [3, 2, 2, 2, 1, 3]
    assert batch.select(torch.tensor([4, 5])).action_mask.tolist() == [
        bool(m) for m in (0, 1, 0, 0, 1, 0, 0, 1, 1)
    ]


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_one_preference_step_has_the_gradient_of_the_formula(learner_and_pairs, plain, smoothing):
    learner, batch = learner_and_pairs()
    twin, beta, losses = plain(learner.model), 0.3, []
    reference = dict(enumerate(torch.tensor_split(batch.logprobs, batch.starts[1:-1])))

    def gain(trajectory, row):
        logp = torch.log_softmax(twin(torch.tensor([trajectory.input_ids])).logits[0].float(), -1)
        places = [place for place, action in enumerate(trajectory.action_mask) if action]
        return sum(
            logp[place - 1, trajectory.input_ids[place]] - reference[row][place] for place in places
        )

    for index, (chosen, rejected) in enumerate(PAIRS):
        z = beta * (gain(chosen, 2 * index) - gain(rejected, 2 * index + 1))
        losses.append(-(1 - smoothing) * logsigmoid(z) - smoothing * logsigmoid(-z))
    loss = sum(losses) / len(PAIRS)
    loss.backward()
    metrics = learner.dpo_step(batch, batch.logprobs, beta=beta, label_smoothing=smoothing, step=1)
    assert metrics["dpo/loss"] == pytest.approx(loss.item(), abs=1e-4)
    expected = gradients(twin)
    for name, gradient in gradients(learner.model).items():
        torch.testing.assert_close(gradient, expected[name], atol=1e-3, rtol=1e-2, msg=name)
    assert metrics["dpo/grad_norm"] > 0.1


@pytest.mark.parametrize("tokens", [1, 12, 20])
def test_micro_batches_keep_pairs_together_and_change_no_gradient(learner_and_pairs, tokens):
    (whole, batch), (split, _) = learner_and_pairs(), learner_and_pairs(micro_batch_tokens=tokens)
    metrics = whole.dpo_step(batch, batch.logprobs, beta=0.3, label_smoothing=0.0, step=1)
    parts = [part for part, _ in split.passes.shares(split.passes.deal(batch, torch.arange(6), 2))]
    assert len(parts) > 1
    assert all(part[0] % 2 == 0 and len(part) % 2 == 0 for part in parts)
    assert split.dpo_step(
        batch, batch.logprobs, beta=0.3, label_smoothing=0.0, step=1
    ) == pytest.approx(metrics, abs=1e-4)
    expected = gradients(whole.model)
    for name, gradient in gradients(split.model).items():
        torch.testing.assert_close(gradient, expected[name], atol=1e-4, rtol=1e-3, msg=name)


def test_a_preference_step_widens_the_margin(learner_and_pairs):
    learner, batch = learner_and_pairs()
    # the reference is the policy itself: the margin starts at 0
    batch = replace(batch, logprobs=learner.score(batch))
    first = learner.dpo_step(batch, batch.logprobs, beta=0.3, label_smoothing=0.0, step=1)
    second = learner.dpo_step(batch, batch.logprobs, beta=0.3, label_smoothing=0.0, step=2)
    assert first["dpo/loss"] == pytest.approx(0.693147, abs=1e-4)
    assert first["dpo/margin"] == pytest.approx(0, abs=1e-4)
    assert second["dpo/margin"] > 0.01


def test_a_stage_is_computed_by_its_own_loop_and_keyed_by_what_it_reads(tmp_path, tiny_params):
    params = tiny_params(tmp_path)
    steps = {
        recipe: steps_of(load_config(params, [f"algorithm.recipe={recipe}"]))
        for recipe in ("grpo", "dpo", "agent_evol", "sft")
    }
    sources = {
        recipe: source_files(table["stage-1"].modules, package_folders())
        for recipe, table in steps.items()
    }
    assert "agentgym.training.rl" in sources["grpo"]
    assert "agentgym.training.offline" not in sources["grpo"]
    for recipe in ("dpo", "agent_evol", "sft"):
        assert "agentgym.training.offline" in sources[recipe]
        assert "agentgym.training.rl" not in sources[recipe]
    assert steps["dpo"]["stage-2"].parents == ("prepare", "stage-1")
    assert steps["sft"]["stage-2"].parents == ("prepare", "stage-1", "demonstrate")
    assert steps["agent_evol"]["stage-1"].parents == ("prepare", "warm-start", "demonstrate")
    assert steps["agent_evol"]["stage-2"].parents == (
        "prepare",
        "stage-1",
        "warm-start",
        "demonstrate",
    )


def test_a_stage_that_would_meet_an_item_twice_is_bad_input(tmp_path, tiny_params):
    cfg = load_config(tiny_params(tmp_path, algorithm={"recipe": "dpo", "num_items": 100}))
    with pytest.raises(
        ConfigError,
        match=r"^algorithm.num_items 100 is more than a third of the \d+ train items of babyai",
    ):
        load_data(cfg)


@pytest.fixture
def begin(copy_run, tmp_path, tiny_params, tiny_endpoint):
    """Return a function of a name: params of a deterministic run, finished up to its first stage.
    Each of its optimizer steps commits.
    """

    def make(name, recipe="dpo"):
        validation = {"every": 1, "num_items": 4, "max_turns": 7}
        params = tiny_params(
            copy_run(tmp_path / name, half=True),
            endpoint=tiny_endpoint,
            deterministic=True,
            algorithm={"recipe": recipe},
            validation=validation,
        )
        assert {str(run_step(each, load_config(params))) for each in BEFORE_AND_EVALUATED} == {
            "done"
        }
        return params

    return make


def history(cfg, name="stage-1"):
    store = open_store(cfg)
    return store.history(name, finished(cfg, store)[name].key)


@pytest.mark.slow
def test_a_killed_preference_stage_ends_where_an_untouched_one_does(begin):
    untouched, params = load_config(begin("untouched")), begin("killed")
    assert str(run_step("stage-1", untouched)) == "ran"
    script = params.parent / "driver.py"
    script.write_text(DRIVER)
    # in the second part of the exploration; after the weights and before their manifest
    for fatal in (1, 3):
        command = [sys.executable, str(script), str(params), str(fatal)]
        done = completed(*command, timeout=300)
        assert done.returncode == -signal.SIGKILL, done.stderr
    cfg = load_config(params)
    assert str(run_step("stage-1", cfg)) == "resumed at commit 3"
    ours, theirs = history(untouched), history(cfg)
    assert [commit.digest for commit in ours] == [commit.digest for commit in theirs]
    assert WEIGHTS in ours[-1].blobs
    assert OPTIMIZER not in ours[-1].blobs  # no stage resumes a finished one
    assert ours[-1].blobs[WEIGHTS] == theirs[-1].blobs[WEIGHTS] != ours[-2].blobs[WEIGHTS]
    assert [len(commit.state["consumed"]) for commit in theirs] == [6, 2, 0, 0]
    logs = [
        [decode_trajectories(open_store(each).read(m, TRAJECTORIES)) for m in history(each)]
        for each in (untouched, cfg)
    ]
    assert logs[0] == logs[1]
    for each in (untouched, cfg):
        report = audit(each, num_episodes=4)
        assert report.ok, report.to_json()


def test_a_forged_reward_of_an_explored_episode_is_found(begin):
    cfg = load_config(begin("forged"))
    run_step("stage-1", cfg)
    commit, store = history(cfg)[0], open_store(cfg)
    episodes = decode_trajectories(store.read(commit, TRAJECTORIES))
    index, failed = next(
        (index, each) for index, each in enumerate(episodes) if each.status is Status.MAX_TURNS
    )
    turns = (*failed.turns[:-1], replace(failed.turns[-1], reward=1.0))
    episodes[index] = replace(
        failed, turns=turns, reward=1.0, success=True, status=Status.TERMINATED
    )
    data, folder = (
        encode_trajectories(episodes),
        next((cfg.store.path / "steps").glob(f"stage-1-{commit.key[:16]}")),
    )
    (folder / "blobs" / Blob.of(data).digest).write_bytes(data)
    forged = Manifest.model_copy(
        commit, update={"records": {**commit.records, TRAJECTORIES: Blob.of(data)}}
    )
    (folder / "manifests" / "000000.json").write_bytes(encode_commit([forged]))
    said = {
        check.name: " | ".join(check.failures)
        for check in audit(cfg, num_episodes=999).checks
        if not check.ok
    }
    # later commits name the original one
    assert said.keys() == {"replay", "numbers", "records"}
    where = f"stage-1 commit 0 {failed.item.item_id} sample {failed.sample}"
    assert f"{where} turn {len(turns)}: (observation, reward)" in said["replay"]
    assert "stage-1 commit 2 step 1: rollout/success" in said["numbers"]


class Context:
    """The part of a step's context that reads earlier results."""

    def __init__(self, cfg):
        self.cfg, self.store = cfg, open_store(cfg)
        self.parents = finished(cfg, self.store)
        self.start = self.parents["warm-start"]

    read, tensors, tensors_of = StepContext.read, StepContext.tensors, StepContext.tensors_of
    policy, adapter = StepContext.policy, StepContext.adapter


def test_only_self_training_begins_anew_in_every_stage_and_only_imitation_keeps_its_optimizer(
    begin, content
):
    params = begin("learners")
    # with the settings that trained stage-1
    context = Context(load_config(params, ["algorithm.recipe=grpo", "validation.every=2"]))
    warm, trained = context.parents["warm-start"], context.parents["stage-1"]
    wanted = {"dpo": trained, "sft": trained, "agent_evol": warm}
    for recipe, source in wanted.items():
        context.cfg = load_config(params, [f"algorithm.recipe={recipe}"])
        made = offline._plan_learner(
            context,
            stages(context.cfg.horizon)[1],
            trained,
            None,
            load_checkpoint(context.store, trained),
        ).build()
        expected = weights_of(load_checkpoint(context.store, source).model)
        assert all(
            torch.equal(tensor, expected[name]) for name, tensor in weights_of(made.model).items()
        ), recipe
        assert (content(made)[OPTIMIZER] == context.read(trained, OPTIMIZER)) is (recipe == "sft")
        resumed = offline._plan_learner(
            context,
            stages(context.cfg.horizon)[1],
            warm,
            trained,
            load_checkpoint(context.store, trained),
        ).build()
        assert content(resumed)[OPTIMIZER] == context.read(trained, OPTIMIZER)


@pytest.mark.parametrize(
    ("recipe", "lacking"), [("dpo", "pair of different rewards"), ("agent_evol", "success")]
)
def test_a_stage_without_anything_to_learn_from_says_what_it_found(
    tmp_path, tiny_params, recipe, lacking
):
    class Empty:
        cfg = load_config(tiny_params(tmp_path, algorithm={"recipe": recipe}))

    episodes = [episode(1, sample, 0.0) for sample in range(4)]
    with pytest.raises(
        RuntimeError,
        match=(
            rf"stage 1: no {lacking} among 4 episodes of 8 items at max_turns 5 \(success 0.00\);"
            r" raise"
        ),
    ):
        raise offline.nothing_to_learn(Empty.cfg, stages(Empty.cfg.horizon)[0], episodes)
