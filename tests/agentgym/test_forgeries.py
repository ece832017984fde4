"""What a forger who recomputes every digest, number, page and tag cannot do without being found."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest

from agentgym.audit import audit
from agentgym.audit.excluded import MAX_CHANCE, _check_chance, at_most
from agentgym.audit.report import Checks
from agentgym.cli import main
from agentgym.config import load_config
from agentgym.evaluation.publish import PAGE
from agentgym.pipeline.dvc import pointer
from agentgym.pipeline.run import run_step
from agentgym.pipeline.table import finished, open_store, steps_of
from agentgym.records import TRAJECTORIES, decode_trajectories
from agentgym.rollouts.policies.torch import TorchPolicy
from agentgym.steps.context import METRICS
from agentgym.steps.step import Outcome
from agentgym.store.manifest import Manifest, ManifestError
from agentgym.tracking.points import decode_points, encode_points
from agentgym.types import Item, Status, Trajectory, Turn

LAST = "evaluate-stage-2"


def named(seq, episode):
    return f"{LAST} commit {seq} {episode.item.item_id} sample {episode.sample}"


def failures(forger, step=LAST):
    return [each for each in forger.evaluation(step) if not each[2].success]


def success_of(forger, wanted, step=LAST):
    """A successful sample of the same item, or of any."""
    found = [e for _, _, e in forger.evaluation(step) if e.success and e.sample and wanted(e)]
    return found[0] if found else None


def winning(episode):
    """The same episode, had its last action been rewarded."""
    turns = (*episode.turns[:-1], replace(episode.turns[-1], reward=1.0))
    return replace(episode, turns=turns, reward=1.0, success=True, status=Status.TERMINATED)


def relabelled(episode, like):
    """Another episode under the name of this one."""
    return replace(like, item=episode.item, sample=episode.sample, temperature=episode.temperature)


def the_old_draw(forger, seq, count):
    """Which episodes of a commit every audit used to replay: a function of the seed."""
    salt = int.from_bytes(LAST.encode(), "little") % 2**63 + seq + 1
    drawn = np.random.Generator(np.random.Philox(key=[forger.cfg.seed, salt]))
    return set(drawn.permutation(len(forger.episodes(LAST, seq)))[:count].tolist())


# --- the forgeries: each changes the last evaluation and says which episode it changed first
# --------------------------


def success_in_last_turns_that_no_replay_looked_at(forger):
    changed = {
        (seq, i): winning(e)
        for seq, i, e in failures(forger)
        if i not in the_old_draw(forger, seq, 4)
    }
    forger.reevaluate(LAST, changed)
    (seq, _), episode = next(iter(changed.items()))
    return named(seq, episode)


def failures_relabelled_as_crashes(forger):
    """With the last action left without an answer, as an honest crash leaves it."""

    def crashed(e):
        told = "http://127.0.0.1:1/step session 01234567: unreachable: connection refused"
        end = e.turns[-1].end
        cut = {name: getattr(e, name)[:end] for name in ("input_ids", "action_mask", "logprobs")}
        attempts = forger.cfg.rollout.max_attempts
        return replace(
            e,
            turns=e.turns[:-1],
            status=Status.ENV_ERROR,
            reward=None,
            num_attempts=attempts,
            error=told,
            **cut,
        )

    changed = {(seq, i): crashed(e) for seq, i, e in failures(forger)}
    forger.reevaluate(LAST, changed)
    return LAST


def copies_of_a_successful_sample(forger):
    for seq, i, e in failures(forger):
        if e.sample and (other := success_of(forger, lambda o, e=e: o.item == e.item)):
            forger.reevaluate(LAST, {(seq, i): relabelled(e, other)})
            return named(seq, e)
    raise AssertionError("no item with a success and a failure")


def greedy_episodes_that_were_samples(forger):
    for seq, i, e in forger.evaluation(LAST):
        if not e.sample and (
            other := success_of(
                forger, lambda o, e=e: o.item == e.item and o.input_ids != e.input_ids
            )
        ):
            forger.reevaluate(LAST, {(seq, i): relabelled(e, other)})
            return named(seq, e)
    raise AssertionError("no sampled success that differs from its greedy episode")


def a_success_of_another_item(forger):
    seq, i, e = next(
        each
        for each in failures(forger)
        if each[2].sample and each[1] not in the_old_draw(forger, each[0], 4)
    )
    other = success_of(forger, lambda o: o.item != e.item)
    forger.reevaluate(LAST, {(seq, i): relabelled(e, other)})
    return named(seq, e)


def played_anew(forger, **changes):
    """The last evaluation under other settings, from the same checkpoint: commit -> episodes."""
    here = forger.cfg.state_dir
    there = shutil.copytree(here, here.with_name(f"{here.name}-anew"))
    overrides = [
        f"store.path={there / 'store'}",
        *(f"evaluation.{name}={value}" for name, value in changes.items()),
    ]
    cfg = load_config(here / "params.yaml", overrides)
    run_step("evaluate-warm-start", cfg)  # its baseline
    run_step(LAST, cfg)
    store = open_store(cfg)
    commits = store.history(LAST, finished(cfg, store)[LAST].key)
    return {commit.seq: decode_trajectories(store.read(commit, TRAJECTORIES)) for commit in commits}


def the_best_of_many_seeds(forger):
    anew = played_anew(forger, seed=2)
    changed = {
        (seq, i): e for seq, episodes in anew.items() for i, e in enumerate(episodes) if e.sample
    }
    forger.reevaluate(LAST, changed)
    return f"{LAST} commit 0"


def a_longer_horizon(forger):
    """Whoever had failed by the horizon plays on."""
    anew = played_anew(forger, max_turns=11)
    changed = {
        (seq, i): replace(e, max_turns=forger.cfg.evaluation.max_turns)
        for seq, episodes in anew.items()
        for i, e in enumerate(episodes)
        if e.status is Status.TERMINATED
    }
    late = next((key, e) for key, e in changed.items() if len(e.turns) > e.max_turns)
    forger.reevaluate(LAST, changed)
    return named(late[0][0], late[1])


def higher_numbers_on_the_page(forger):
    data = forger.blob("report", 0, PAGE).read_bytes()
    final = forger.commits(LAST)[-1].results["summary"]["greedy"]["mean"]
    shown = f"{100 * final:.1f}".encode()
    assert shown in data
    forged = data.replace(shown, b"99.2")
    forger.rewrite("report", 0, PAGE, forged)
    for path in (forger.cfg.state_dir / "mlflow-artifacts").rglob(PAGE):
        path.write_bytes(forged)
    forger.report = lambda: None
    return f"{PAGE} without its pictures"


def higher_numbers_on_the_registered_model(forger):
    forger.sql("update model_version_tags set value = '0.9920' where key = 'eval.greedy'")
    return "tag eval.greedy"


FORGERIES = {
    success_in_last_turns_that_no_replay_looked_at: {"replay"},
    failures_relabelled_as_crashes: {"excluded"},
    copies_of_a_successful_sample: {"sampling"},
    greedy_episodes_that_were_samples: {"sampling"},
    a_success_of_another_item: {"sampling", "replay"},
    the_best_of_many_seeds: {"sampling"},
    a_longer_horizon: {"episodes"},
    higher_numbers_on_the_page: {"numbers"},
    higher_numbers_on_the_registered_model: {"registry"},
}


@pytest.mark.parametrize(
    ("forgery", "checks"), FORGERIES.items(), ids=lambda each: getattr(each, "__name__", None)
)
def test_a_forged_run_is_found_and_the_culprit_named(forger, forgery, checks):
    where = forgery(forger)
    said = forger.caught(*checks, num_episodes=None, seed=1)
    assert where in " | ".join(said.values()), said


def test_equal_texts_alone_are_honest(forger):
    """A policy that leaves little to chance says the same twice; the random numbers tell that
    from a copy.
    """
    texts = [(e.item, e.input_ids) for _, _, e in forger.evaluation(LAST)]
    assert len(set(texts)) < len(texts)
    said = {check.name: check for check in audit(forger.cfg, num_episodes=1).checks}
    assert said["sampling"].ok
    assert said["sampling"].counted > 1000
    # the tokens of the second step of each stage were sampled by weights that the stage's end
    # pruned
    num_pruned = sum(
        e.item.split == "train" for step in ("stage-1", "stage-2") for e in forger.episodes(step, 1)
    )
    assert (
        said["sampling"].note
        == f"{num_pruned} episodes of pruned weights are not (store.keep_checkpoints)"
    )


def test_each_audit_draws_anew_and_its_seed_repeats_it(forger, capsys):
    params = ["--params", str(forger.cfg.state_dir / "params.yaml")]
    command = ["audit", "--json", "--episodes", "8", *params]
    reports = []
    for more in ((), (), ("--seed", "5"), ("--seed", "5")):
        assert main([*command, *more]) == 0
        reports.append(json.loads(capsys.readouterr().out))
    assert reports[0]["seed"] != reports[1]["seed"]
    assert reports[2]["seed"] == reports[3]["seed"] == 5
    counted = [
        next(c["counted"] for c in report["checks"] if c["name"] == "replay") for report in reports
    ]
    # comparisons made, of other turns where other episodes are drawn
    assert counted[2] == counted[3]
    assert main(["audit", "--episodes", "all", "--rescore", "1", *params]) == 0
    shown = capsys.readouterr().out
    everything = sum(
        len(forger.episodes(step, c.seq)) for step in STEPS for c in forger.commits(step)
    )
    num_demos = len(
        decode_trajectories(forger.blob("initialize", 0, "demos.jsonl.gz").read_bytes())
    )
    told = (
        f"{everything + num_demos} of {everything + num_demos} episodes, 0 env_error replayed to"
        " their end, 0 timeout replayed"
    )
    assert told in shown
    assert "audit passed; to repeat it: --seed " in shown


STEPS = (
    "evaluate-initialize",
    "evaluate-warm-start",
    "stage-1",
    "evaluate-stage-1",
    "stage-2",
    LAST,
)


def test_an_engine_that_does_not_repeat_its_draws_is_said_to_be_unchecked(
    forger, monkeypatch, capsys
):
    copies_of_a_successful_sample(forger)
    forger.report()
    monkeypatch.setattr(TorchPolicy, "repeats_draws", False)
    assert (
        main(
            [
                "audit",
                "--episodes",
                "1",
                "--seed",
                "1",
                "--params",
                str(forger.cfg.state_dir / "params.yaml"),
            ]
        )
        == 0
    )
    assert (
        "-       sampling     not checked: engine torch does not repeat its draws"
        in capsys.readouterr().out
    )


def test_what_was_left_out_is_held_to_the_limit_and_played_to_its_real_end(forger):
    failures_relabelled_as_crashes(forger)
    report = audit(forger.cfg, num_episodes=1)
    excluded = next(check for check in report.checks if check.name == "excluded")
    assert any(
        f"{LAST} commit" in each and "rollout.max_env_error_frac is 0.1" in each
        for each in excluded.failures
    )
    num = sum(not e.status.is_valid for _, _, e in forger.evaluation(LAST))
    assert f"{num} env_error, 0 timeout of " in excluded.note
    assert (
        f"{LAST}: of {num} left out, played again 0 succeed, {num} do not, 0 fail again, 0"
        " cannot be" in excluded.note
    )
    assert "100.0% of what counts" in excluded.note
    assert f"{num} env_error replayed to their end" in next(
        check.note for check in report.checks if check.name == "replay"
    )


def test_a_crash_after_the_environment_had_ended_the_task_is_none(forger):
    """A failure under another name, in an episode that had come to its end."""
    seq, index, episode = next(
        each for each in forger.evaluation(LAST) if each[2].status is Status.TERMINATED
    )
    attempts = forger.cfg.rollout.max_attempts
    crashed = replace(
        episode,
        status=Status.ENV_ERROR,
        reward=None,
        success=False,
        num_attempts=attempts,
        error="unreachable",
    )
    forger.reevaluate(LAST, {(seq, index): crashed})
    said = {
        check.name: " | ".join(check.failures)
        for check in audit(forger.cfg, num_episodes=1).checks
        if not check.ok
    }
    assert (
        f"{named(seq, episode)}: env_error of an episode that the environment ended"
        in said["replay"]
    )


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"num_attempts": 1}, "attempts, all of rollout.max_attempts: expected 3, got 1"),
        ({"error": None}, "an error that says what failed"),
        ({"success": True}, "success of an episode that is left out"),
    ],
)
def test_a_crash_that_no_collection_would_have_recorded_is_none(forger, changes, told):
    seq, index, episode = failures(forger)[0]
    crash = {
        "status": Status.ENV_ERROR,
        "reward": None,
        "num_attempts": 3,
        "error": "unreachable",
        "turns": episode.turns[:-1],
    }
    where = forger.edit(LAST, seq, index, **{**crash, **changes})
    said = {
        check.name: " | ".join(check.failures)
        for check in audit(forger.cfg, num_episodes=1).checks
        if not check.ok
    }
    assert f"{where}: {told}" in said["episodes"]


def an_episode(task, status, success, num_turns):
    turns = tuple(Turn("left", "", 0.0, 1, 2, 0) for _ in range(num_turns))
    return Trajectory(
        Item("babyai", task, "test"),
        1,
        0,
        12,
        status,
        1.0 if success else 0.0,
        success,
        "",
        turns,
        (),
        (),
        (),
    )


def test_crashes_that_fall_on_failures_alone_are_somebodys_choice():
    """As in the run that was forged: 301 of 2,560 relabelled, 91.6 % success became 100 %."""
    valid = [an_episode(task, Status.TERMINATED, True, 6) for task in range(500)]
    left_out = [an_episode(task, Status.ENV_ERROR, False, 11) for task in range(60)]
    checks = Checks("excluded")
    _check_chance(
        LAST,
        Status.ENV_ERROR,
        {f"babyai_{task}": [False] for task in range(60)},
        left_out,
        valid,
        checks,
    )
    assert (
        "env_error on 60 items, of which played again 0 would have succeeded" in checks.failures[0]
    )


def test_crashes_that_fall_as_chance_has_it_are_none():
    """A server that dies takes neighbours with it: all samples of few items, failures or not."""
    valid = [
        an_episode(task, Status.TERMINATED, task % 3 > 0, 4 if task % 3 else 12)
        for task in range(300)
    ]
    left_out = [an_episode(task, Status.ENV_ERROR, False, 5) for task in range(8)]
    for outcomes in ([False] * 4, [True] * 4, [True, False, True, True]):
        checks = Checks("excluded")
        _check_chance(
            LAST,
            Status.ENV_ERROR,
            {f"babyai_{task}": outcomes for task in range(8)},
            left_out,
            valid,
            checks,
        )
        assert checks.num_failures == 0, checks.failures


def test_deadlines_pass_in_long_episodes_which_fail():
    short = [an_episode(task, Status.TERMINATED, True, 3) for task in range(400)]
    long = [an_episode(task, Status.MAX_TURNS, False, 12) for task in range(40)]
    left_out = [an_episode(task, Status.TIMEOUT, False, 11) for task in range(30)]
    checks = Checks("excluded")
    _check_chance(
        LAST,
        Status.TIMEOUT,
        {f"babyai_{task}": [False] for task in range(30)},
        left_out,
        [*short, *long],
        checks,
    )
    assert checks.num_failures == 0, checks.failures


def test_the_chance_of_few_hits_is_that_of_a_binomial():
    assert at_most(0, 3, 0.5) == pytest.approx(1 / 8)
    assert at_most(1, 3, 0.5) == pytest.approx(4 / 8)
    assert at_most(3, 3, 0.2) == pytest.approx(1.0)
    assert at_most(0, 20, 0.5) < MAX_CHANCE < at_most(0, 19, 0.5)


def test_a_pointer_in_git_pins_what_the_first_digest_leaves_out(forger, tmp_path):
    """Clock times were made shorter, and every digest and tag was put right."""
    kept = tmp_path / "outputs"
    kept.mkdir()
    done, table = finished(forger.cfg, open_store(forger.cfg)), steps_of(forger.cfg)
    for name in ("prepare", "stage-1"):
        (kept / f"{name}.json").write_text(
            pointer(forger.cfg, Outcome(table[name], done[name], "done"))
        )
    honest = audit(forger.cfg, num_episodes=1, pointers=kept)
    assert honest.ok, [check for check in honest.checks if not check.ok]
    assert "2 pointers in" in next(check.note for check in honest.checks if check.name == "records")
    points = decode_points(forger.blob("stage-1", 0, METRICS).read_bytes())
    points[0].metrics["time/step_s"] /= 2
    for table_name in ("metrics", "latest_metrics"):
        values = (points[0].metrics["time/step_s"], points[0].time_ms)
        forger.sql(
            f"update {table_name} set value = ? where key = 'time/step_s' and timestamp = ?",
            *values,
        )
    forger.rewrite("stage-1", 0, METRICS, encode_points(points))
    forger.report()
    assert audit(forger.cfg, num_episodes=1).ok  # a store speaks for itself
    said = {
        check.name: check.failures
        for check in audit(forger.cfg, num_episodes=1, pointers=kept).checks
        if not check.ok
    }
    assert list(said) == ["records"]
    assert f"{kept / 'stage-1.json'}: records_digest: expected" in said["records"][0]


def test_a_commit_that_was_exchanged_breaks_the_chain(forger):
    path = forger.folder("stage-1") / "manifests" / "000000.json"
    path.write_bytes(forger.commits("stage-1")[0].model_copy(update={"created_at": 1.0}).to_bytes())
    records = next(
        check for check in audit(forger.cfg, num_episodes=1).checks if check.name == "records"
    )
    assert "stage-1 commit 1: records digest of the commit before: expected" in records.failures[0]


def test_a_store_from_before_the_second_digest_is_told_from_one_that_has_it(forger):
    for path in forger.steps.glob("*/manifests/*.json"):
        tree = json.loads(path.read_bytes())
        del tree["follows"], tree["records_digest"]
        path.write_text(json.dumps(tree))
        assert Manifest.from_bytes(path.read_bytes()).digest == tree["digest"]
    report = audit(forger.cfg, num_episodes=1)
    assert report.ok, [check for check in report.checks if not check.ok]
    note = next(check.note for check in report.checks if check.name == "records")
    num = len(report.steps)
    assert (
        f"not pinned: {num} of {num} steps, prepare first; they were written before manifests had a"
        " records digest" in note
    )


def test_a_report_whose_names_lead_out_of_its_folder_is_not_exported(forger):
    """Whoever handed over the store would have written to the home of its reader."""
    from flows.shell import _export_report

    path = forger.folder("report") / "manifests" / "000000.json"
    tree = json.loads(path.read_bytes())
    tree["records"]["../../../escaped"] = tree["records"][PAGE]
    del tree["follows"], tree["records_digest"]  # no digest is in its way
    path.write_text(json.dumps(tree))
    with pytest.raises(ManifestError, match=r"name '../../../escaped' is no plain file name"):
        _export_report(forger.cfg, finished(forger.cfg, open_store(forger.cfg))["report"])
    assert not (forger.cfg.state_dir / "escaped").exists()
    assert not (forger.cfg.state_dir.parent / "escaped").exists()
