"""Tokens and log-probabilities that the weights did not sample are found."""

import copy
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load, save

from agentgym.audit import audit
from agentgym.audit.findings import Checks
from agentgym.audit.sampling import _Deviations, _Judge, check_sampling
from agentgym.audit.stored_steps import read_steps
from agentgym.config import load_config
from agentgym.models.architecture import WEIGHTS
from agentgym.models.attention import PackedSequences
from agentgym.models.checkpoint import load_checkpoint
from agentgym.pipeline.run import run_step
from agentgym.pipeline.table import open_store
from agentgym.steps.context import METRICS
from agentgym.store.manifest import Blob
from agentgym.tracking.points import decode_points
from tests.agentgym.audit.test_episodes import played
from tests.agentgym.conftest import TINY


def test_a_forged_token_with_its_action_is_not_what_the_weights_sampled(forger):
    index, episode = played(forger)
    turn = episode.turns[1]
    renderer = load_checkpoint(open_store(forger.cfg), forger.commits("warm-start")[-1]).renderer
    ids = list(episode.input_ids)
    ids[turn.start] = next(
        token
        for token in range(100, 300)
        if token != ids[turn.start]
        and renderer.action_ids(renderer.text([token, *ids[turn.start + 1 : turn.end]]).strip())
    )
    action = renderer.text(ids[turn.start : turn.end]).strip()
    turns = (episode.turns[0], replace(turn, action=action), *episode.turns[2:])
    where = forger.edit("stage-1", 0, index, input_ids=tuple(ids), turns=turns)
    said = {
        check.name: " | ".join(check.failures) for check in audit(forger.cfg).checks if not check.ok
    }
    assert said.keys() - {"replay"} == {"rescore", "sampling"}
    assert (
        f"{where} turn 2 token {turn.start} (id {ids[turn.start]}): log-probability"
        in said["rescore"]
    )


def test_a_forged_log_probability_is_not_the_weights(forger):
    index, episode = played(forger, "evaluate-warm-start", 1)
    logprobs = list(episode.logprobs)
    place = episode.turns[1].start
    logprobs[place] -= 0.01
    where = forger.edit("evaluate-warm-start", 1, index, logprobs=tuple(logprobs))
    assert f"{where} turn 2 token {place} " in forger.caught("rescore")["rescore"]


@pytest.mark.integration
def test_of_a_share_the_audit_judges_what_was_drawn_and_misses_what_was_held_back(
    tmp_path, tiny_params, tiny_endpoint
):
    changes = {
        "rollout": {**TINY["rollout"], "engine_logprobs": 0.5},
        "algorithm": {"correction": "none"},
        "deterministic": True,
    }
    cfg = load_config(tiny_params(tmp_path, endpoint=tiny_endpoint, **changes))
    for name in ("prepare", "demonstrate", "initialize", "warm-start", "stage-1"):
        run_step(name, cfg)

    store, ignored = open_store(cfg), Checks("others")
    (record,) = (r for r in read_steps(cfg, store, ignored, ignored) if r.name == "stage-1")

    def judged(**changes):
        """Judge the step with these changes to the first episode of its first commit."""
        rescore, sampling = Checks("rescore"), Checks("sampling")
        first, *others = record.episodes[0]
        episodes = {**record.episodes, 0: [replace(first, **changes), *others]}
        check_sampling(replace(record, episodes=episodes), None, 0, rescore, sampling)
        assert sampling.counted
        return rescore

    points = decode_points(store.read(record.commits[0], METRICS))
    assert {"mismatch/kl", "rollout/entropy"} <= set().union(*(point.metrics for point in points))
    turns = [turn for logged in record.episodes.values() for e in logged for turn in e.turns]
    pruned = sorted({turn.version for turn in turns})[1]  # between the first and the last weights
    has_logprobs = [turn.has_logprobs for turn in turns if turn.version != pruned]
    honest = judged()
    left_out = honest.left_out[
        "turns whose log-probabilities the engine was not asked for", "rollout.engine_logprobs 0.5"
    ]
    assert (honest.failures, honest.counted) == ([], sum(has_logprobs))
    assert 0 < left_out == len(has_logprobs) - honest.counted < len(has_logprobs)
    episode = record.episodes[0][0]
    index, turn = next((i, turn) for i, turn in enumerate(episode.turns) if turn.has_logprobs)
    logprobs = list(episode.logprobs)
    logprobs[turn.start : turn.end] = [0.0] * (turn.end - turn.start)
    forged = judged(logprobs=tuple(logprobs))
    assert f"turn {index + 1} token {turn.start} " in " ".join(forged.failures)
    held_back = [*episode.turns]
    held_back[index] = replace(turn, has_logprobs=False)
    forged = judged(logprobs=tuple(logprobs), turns=tuple(held_back))
    assert f"turn {index + 1}: no log-probabilities, and its sample" in " ".join(forged.failures)


def test_half_precision_beyond_a_hard_bound_is_judged_by_float32_arithmetic(forger):
    episode = replace(played(forger)[1], temperature=4.0)  # no token is near certain
    checkpoint = load_checkpoint(open_store(forger.cfg), forger.commits("warm-start")[-1])
    exact = copy.deepcopy(checkpoint.model.bfloat16()).float()
    checkpoint = replace(checkpoint, weights=checkpoint.model)
    assert checkpoint.dtype == torch.bfloat16

    def seen(usual):
        checks = Checks("rescore"), Checks("sampling")
        judge = _Judge(forger.cfg, checkpoint, forger.cfg.seed, [], *checks)
        judge._gaps = judge._outside = _Deviations(usual, judge.tolerance)
        version = episode.turns[0].version
        ((_, _, turns),) = judge.turns_of([("here", episode)], version)
        return torch.cat([turn.logprobs for turn in turns])

    ids = torch.tensor(episode.input_ids)
    layout = PackedSequences(torch.tensor([0, len(ids)]))
    with torch.no_grad():
        logits = exact(
            input_ids=ids[None], position_ids=layout.position[None], use_cache=False, layout=layout
        ).logits[0]
    logprobs = torch.log_softmax(logits[:-1] / episode.temperature, -1)
    logprobs = logprobs.gather(1, ids[1:, None])[:, 0][torch.tensor(episode.action_mask)[1:]]
    within, beyond = seen(usual=100.0), seen(usual=0.0)
    torch.testing.assert_close(beyond, logprobs, atol=1e-4, rtol=1e-4)
    assert (within - logprobs).abs().max() > 1e-3


def test_forged_weights_did_not_sample_the_evaluation_and_are_not_the_registered_model(forger):
    weights = load(forger.blob("stage-2", 1, WEIGHTS).read_bytes())
    name = next(name for name in weights if "mlp.down_proj" in name)
    weights[name] = weights[name] + 0.1 * torch.randn(
        weights[name].shape, generator=torch.Generator().manual_seed(0)
    )
    data = save(weights)
    forger.rewrite("stage-2", 1, WEIGHTS, data)
    old = forger.sql("select value from model_version_tags where key = 'weights.sha256'")[0][0]
    forger.sql("update model_version_tags set value = ? where value = ?", Blob.of(data).digest, old)
    said = forger.caught("rescore", "sampling", "registry", "numbers")
    # only its validation episodes: the evaluation is not among the first ten failures
    assert "stage-2 commit 1" in said["rescore"]
    assert "model.safetensors as stage-2 commit 1 exports it" in said["registry"]
