"""Check reported numbers: the audit computes them again from the stored episodes, with the
functions that reported them.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from agentgym.audit.findings import Checks
from agentgym.audit.stored_steps import StepRecord, final_of, load, place
from agentgym.config import RunConfig
from agentgym.data.check import load_data, load_recorded
from agentgym.data.items import SPLITS, Splits, splits_from_json
from agentgym.data.trajectories import RECORDED, Recorded, decode
from agentgym.evaluation.evaluator import (
    about,
    identity_of,
    items_of_step,
    protocol_of_step,
    slots_of,
    tasks_of_step,
)
from agentgym.evaluation.intervals import FAILED
from agentgym.evaluation.numbers import headline, metrics_of, paired
from agentgym.evaluation.policies import checkpoint_contender
from agentgym.evaluation.result import RESULT, Result
from agentgym.evaluation.stored import plan_of, stored_result
from agentgym.learner.optimizer import learning_rate
from agentgym.pipeline.table import run_key, steps_of
from agentgym.records import TRAJECTORIES
from agentgym.rollouts.collect import rollout_metrics, validation_metrics
from agentgym.steps.context import METRICS
from agentgym.steps.step import Kind
from agentgym.store.manifest import Manifest
from agentgym.store.runstore import RunStore
from agentgym.tracking.points import (
    ALARM,
    LIMIT,
    PROGRESS,
    RULES,
    Point,
    measured,
    progressed,
    with_flat_limits,
)
from agentgym.training.demonstrations import (
    expert_items,
    recorded_for,
    replies_of,
    tokenized_demonstrations,
)
from agentgym.training.observer import update_metrics
from agentgym.training.offline import (
    dataset_of,
    exploration_metrics,
    first_rate_step,
    optimizer_of,
    rate_steps,
)
from agentgym.types import Status, Trajectory

TIMES = re.compile(rb"<section><h2>Time</h2>.*?</section>", re.DOTALL)
SECONDS = re.compile(
    rb"(?<=<td)>(\d+\.\d s|\d+ min \d\d s|\d+ h \d\d min|\d+ %)(?=</td>)"
    rb'|(?<=<rect) width="\d+\.\d%"'
)
Results = dict[str, Result]  # evaluation step -> computed from its episodes


def read_splits(
    cfg: RunConfig, store: RunStore, steps: Sequence[StepRecord], checks: Checks
) -> Splits | None:
    """Return the run's recorded splits; compare them, and imported trajectories, with the data
    files. None if no splits are recorded, or if they cannot be read.
    Errors: ConfigError for invalid data; LookupError or ValueError for unreadable trajectories.
    """
    prepare = final_of(steps, Kind.PREPARE)
    if prepare is None:
        return None
    try:
        recorded = splits_from_json(store.read(prepare, "splits.json"))
    except (LookupError, ValueError):
        return None  # the content check reports it
    loaded = load_data(cfg)
    where, results = "prepare commit 0", prepare.results
    for name in SPLITS:
        items = getattr(loaded, name)
        checks.expect(where, f"{name} items", items, getattr(recorded, name))
        checks.expect(where, f"number of {name} items", len(items), results.get(name))
    if cfg.warm_start.source == "trajectories":
        imported = decode(store.read(prepare, RECORDED))
        checks.expect(where, "trajectories of others", load_recorded(cfg), imported)
        checks.expect(where, "number of trajectories", len(imported), results.get("trajectories"))
    return recorded


def check_numbers(
    record: StepRecord,
    steps: Sequence[StepRecord],
    splits: Splits,
    results: Results,
    checks: Checks,
) -> None:
    """Compute the numbers of one step again and compare them with the committed ones. Unfinished
    evaluations and reports are passed over.

    results: those of the evaluations before this step, one of which may be its baseline. If this
    step is an evaluation, its result is added.
    """
    kind = record.step.kind
    if kind is Kind.TRAIN:
        check_alarms(record, steps, checks)
    if kind is Kind.DEMONSTRATE:
        _check_demonstrations(record, splits, checks)
    elif kind is Kind.TRAIN and record.stage is None:
        _check_warm_start(record, checks)
    elif kind is Kind.TRAIN and not record.cfg.algorithm.loop.samples_every_step:
        _check_offline_stage(record, checks)
    elif kind is Kind.TRAIN:
        for commit in record.commits:
            _check_training(record, commit, checks)
    elif kind is Kind.EVALUATE and record.final is not None:
        _check_evaluation(record, splits, results, checks)
    elif kind is Kind.REPORT and record.final is not None:
        evaluations = [other.final for other in steps if other.step.kind is Kind.EVALUATE]
        known = [final.results for final in evaluations if final]
        for side in ("before", "after"):
            what = f"results {side}, as one of the evaluations'"
            checks.expect(record.at(record.final), what, True, record.final.results[side] in known)
        _check_report(record, record.final, checks)


def check_alarms(record: StepRecord, steps: Sequence[StepRecord], checks: Checks) -> None:
    """Compute the alarms logged by a training step again from the points up to them; each must have
    broken its limit. The turns and tokens so far are also computed again.

    steps: all steps of the run, in order; a stage continues the points of the stages before it.
    """
    history: list[Point] = []
    for other in steps:
        if other is record or (record.stage and other.stage):
            history += [point for points in other.points.values() for point in points]
        if other is record:
            break
    num_before = len(history) - sum(map(len, record.points.values()))
    for index, point in enumerate(history[num_before:], num_before + 1):
        where = f"{record.name} step {point.step}"
        logged = {name: value for name, value in point.metrics.items() if name.startswith(ALARM)}
        for name, rule in RULES.items():
            alarm, limit = (logged.pop(f"{ALARM}{name}{part}", None) for part in ("", LIMIT))
            if alarm is None and limit is None:
                continue
            value = measured(rule, history[:index])[1]
            checks.expect(where, f"{ALARM}{name}", value, alarm)
            broken = alarm is not None and limit is not None and rule.is_broken(alarm, limit)
            checks.expect(where, f"{ALARM}{name} breaks its limit {limit}", True, broken)
        checks.expect(where, "alarms that there are not", [], sorted(logged))
        cost = {name: value for name, value in point.metrics.items() if name.startswith(PROGRESS)}
        so_far = progressed(history[: index - 1], point)
        checks.expect(where, "turns and tokens so far", so_far, cost)


def _check_report(record: StepRecord, final: Manifest, checks: Checks) -> None:
    """Make the report's page and pictures again and compare them with the committed ones; a failure
    if they cannot be made or read.
    Skipped are pictures that another version of matplotlib drew, and the page's times if a step ran
    again after the report.
    """
    from agentgym.evaluation.publish import PAGE, report_files
    from agentgym.evaluation.report import drawn_by
    from agentgym.pages import picture_data

    cfg, store, where = record.cfg, record.store, record.at(final)
    try:
        remade = report_files(cfg, store, record.parents, run_key(cfg), steps_of(cfg))
        stored = {name: store.read(final, name) for name in remade}
    except (LookupError, ValueError, StopIteration, TypeError) as error:
        checks.fail(f"{where}: it cannot be made again: {type(error).__name__}: {error}")
        return
    page, shown = remade.pop(PAGE), stored.pop(PAGE)
    for name, picture in remade.items():
        # a picture that another matplotlib drew must not make the page differ as well
        page = page.replace(picture_data(picture).encode(), picture_data(stored[name]).encode())
        (here, ours), (there, theirs) = drawn_by(picture), drawn_by(stored[name])
        if ours != theirs and there not in ("", here):
            checks.skip(f"{name} of the report", f"{there[:60]!r} drew it and {here!r} is here")
        else:
            checks.expect(where, f"{name}, made again", True, ours == theirs)
    page, shown = (  # an earlier version may have written it; latin-1 takes any bytes
        with_flat_limits(text.decode("latin-1")).encode("latin-1") for text in (page, shown)
    )
    # steps whose last commit is later than the report about them
    parents = record.parents.items()
    ran_again = [name for name, parent in parents if parent.created_at > final.created_at]
    if page != shown and ran_again:
        page, shown = (
            TIMES.sub(lambda section: SECONDS.sub(b">", section[0]), text) for text in (page, shown)
        )
        checks.skip(
            "seconds in the report's section Time", f"{', '.join(ran_again)} ran again after it"
        )
    at = len(os.path.commonprefix([page, shown]))  # noqa: RUF071 (they are no paths)
    part = slice(0 if page == shown else max(0, at - 40), at + 100)
    checks.expect(where, f"{PAGE}, made again, from byte {part.start}", page[part], shown[part])


def _check_demonstrations(record: StepRecord, splits: Splits, checks: Checks) -> None:
    """Check the demonstrations: their items and samples, imported trajectories also by their
    actions, and the committed counts.
    """
    cfg, commit, episodes = record.cfg, record.commits[0], record.episodes.get(0, [])
    num_solved = sum(episode.success for episode in episodes)
    if cfg.warm_start.source == "trajectories":
        imported = decode(record.store.read(record.parents[record.step.data], RECORDED))
        recorded = recorded_for(cfg, imported)
        shown = [(trajectory.item, sample) for sample, trajectory in enumerate(recorded)]
        _check_recorded(record, recorded, checks)
    else:
        shown = [(item, 0) for item in expert_items(cfg, splits)]
    played = [(episode.item, episode.sample) for episode in episodes]
    checks.expect(record.at(commit), "items and samples shown", shown, played)
    expected = {
        "num_played": len(shown),
        "num_demos": num_solved,
        "expert_success": num_solved / len(shown),
    }
    for name, value in expected.items():
        checks.expect(record.at(commit), name, value, commit.results[name])


def _check_recorded(record: StepRecord, recorded: Sequence[Recorded], checks: Checks) -> None:
    """Check that each episode has the actions of its imported trajectory, up to the task's end."""
    commit, episodes = record.commits[0], record.episodes.get(0, [])
    for trajectory, episode in zip(recorded, episodes, strict=False):
        replies = replies_of(trajectory, record.cfg.rollout.action_format)
        actions = [reply.action for reply in replies]
        played = [turn.action for turn in episode.turns]
        if episode.status is Status.TERMINATED:
            actions = actions[: len(played)]
        checks.expect(place(record.at(commit), episode), "actions as imported", actions, played)


def _check_warm_start(record: StepRecord, checks: Checks) -> None:
    settings, step = record.cfg.warm_start, 0
    shown = record.parents[record.step.demonstrations]
    num_too_long = int(shown.results["num_played"]) - len(_tokenized(record))
    for commit in record.commits:
        where, last = record.at(commit), None
        for point in record.points.get(commit.seq, ()):
            step += 1
            checks.expect(where, "step of a point", step, point.step)
            rate = learning_rate(settings.optimizer, step, settings.steps)
            checks.expect(f"{where} step {step}", "sft/lr", rate, point.metrics.get("sft/lr"))
            last = point.metrics.get("sft/loss")
        checks.expect(where, "steps so far", step, commit.state["sft_step"])
        checks.expect(where, "loss", last, commit.results["loss"])
        checks.expect(where, "num_too_long", num_too_long, commit.results["num_too_long"])


def _tokenized(record: StepRecord) -> list[Trajectory]:
    """Return the demonstrations that a training step learned from, tokenized.

    Empty if they or their tokenizer cannot be read, which the content check reports.
    """
    checkpoint = load(record.store, record.checkpoint, weights=False)
    if checkpoint is None:
        return []
    try:
        demos = record.parents[record.step.demonstrations]
        return tokenized_demonstrations(record.cfg, record.store, demos, checkpoint.renderer)
    except (LookupError, ValueError):
        return []


def _check_training(record: StepRecord, commit: Manifest, checks: Checks) -> None:
    points, episodes = record.points.get(commit.seq), record.episodes.get(commit.seq)
    cfg, step, where = record.cfg, int(commit.state["global_step"]), record.at(commit)
    if not points or not episodes:
        checks.fail(f"{where}: it has no {METRICS if not points else TRAJECTORIES} to compare")
        return
    checks.expect(where, "steps of its points", [step], [point.step for point in points])
    logged = points[0].metrics
    played = [episode for episode in episodes if episode.item.split == "train"]
    expected = rollout_metrics(played) | update_metrics(played)
    expected["actor/lr"] = learning_rate(cfg.optimizer, step, sum(cfg.horizon.stage_steps))
    validation = [episode for episode in episodes if episode.item.split == "validation"]
    if validation:
        expected |= validation_metrics(validation)
    logged_names = {name for name in logged if name.startswith(("rollout/", "validation/"))}
    for name in sorted(expected.keys() | logged_names):
        checks.expect(where, name, expected.get(name), logged.get(name))


def _check_offline_stage(record: StepRecord, checks: Checks) -> None:
    cfg, stage = record.cfg, record.stage
    assert stage is not None
    compares = cfg.warm_start.source == "trajectories"
    compares = compares and record.step.demonstrations in record.parents
    recorded = _tokenized(record) if compares else []
    explored = [episode for _, episode in record.logged if episode.item.split == "train"]
    step, rate = stage.first_step - 1, "dpo/lr" if cfg.algorithm.loop.prefers else "sft/lr"
    for commit in record.commits:
        for point in record.points.get(commit.seq, ()):
            step += 1
            where = f"{record.at(commit)} step {step}"
            checks.expect(where, "step of a point", step, point.step)
            expected = {
                rate: learning_rate(
                    optimizer_of(cfg), step - first_rate_step(cfg, stage), rate_steps(cfg, stage)
                )
            }
            if explored and step == stage.first_step:
                expected |= exploration_metrics(
                    explored, dataset_of(cfg, stage, explored, recorded)
                )
            if cfg.validation.every and step % cfg.validation.every == 0:
                validation = [
                    episode
                    for episode in record.episodes.get(commit.seq, ())
                    if episode.item.split == "validation"
                ]
                expected |= validation_metrics(validation)
            logged_names = {
                name
                for name in point.metrics
                if name.startswith(("rollout/", "validation/")) or name.endswith("/lr")
            }
            for name in sorted(expected.keys() | logged_names):
                checks.expect(where, name, expected.get(name), point.metrics.get(name))
        checks.expect(record.at(commit), "steps so far", step, commit.state["global_step"])


def _check_evaluation(record: StepRecord, splits: Splits, results: Results, checks: Checks) -> None:
    """Check an evaluation's identity (policy, protocol, items, prompts), slots (items and samples),
    description, results and metrics. Unreadable records are a failure.
    Its result, computed again, is added to `results` under the step's name.
    """
    cfg, store, final, step = record.cfg, record.store, record.commits[-1], record.step
    settings = cfg.evaluation
    where, items = record.at(final), items_of_step(cfg, splits)
    protocol = protocol_of_step(cfg, items)
    try:
        tasks = tasks_of_step(store, record.parents[step.data], items)
        plan = plan_of(store, record.commits)
        checks.expect(where, "slots", slots_of(protocol, items, tasks), plan.slots)
        result = results[record.name] = stored_result(store, final)
        stored = Result.from_bytes(store.read(final, RESULT), where=where)
        expected = headline(result, settings.k, settings.confidence)
        metrics = metrics_of(expected, result)
        if step.baseline in results:
            gains = paired(results[step.baseline], result, settings.k, settings.confidence)
            expected["paired"] = {"baseline": step.baseline, **gains}
    except (LookupError, ValueError) as error:
        checks.fail(f"{where}: {error}")
        return
    instructions = plan.about["instructions"]
    if record.checkpoint is not None:
        contender = checkpoint_contender(cfg, store, record.checkpoint)
        all_instructions = {**dict.fromkeys(items, ""), **instructions}
        identity = identity_of(protocol, items, tasks, contender.identity, all_instructions)
        for name in sorted(identity.keys() | plan.identity.keys()):
            ours, theirs = (_without_packages(of.get(name)) for of in (identity, plan.identity))
            checks.expect(where, f"what is asked, {name}", ours, theirs)
        description = {**about(protocol, contender, instructions, ()), "valid": True}
        description = json.loads(json.dumps(description))
        checks.expect(where, "its own description", description, stored.about)
    expected = json.loads(json.dumps(expected)) | {
        "checkpoint": step.checkpoint,
        "num_items": sum(map(len, items.values())),
        "max_turns": settings.max_turns,
        "global_step": final.state["global_step"],
    }
    for part in ("summary", FAILED, "paired"):
        for name, value in expected.get(part, {}).items():
            reported = final.results.get(part, {}).get(name)
            checks.expect(where, f"results {part} {name}", value, reported)
    for name in sorted(expected.keys() | final.results.keys()):
        checks.expect(where, f"results {name}", expected.get(name), final.results.get(name))
    points = [point.metrics for point in record.points.get(final.seq, ())]
    checks.expect(where, "metrics", [metrics], points)


def _without_packages(part: Any) -> Any:
    """Return one part of an evaluation's identity without its entry `packages`: package versions
    may differ between two machines. A part that is no mapping stays as it is.
    """
    if isinstance(part, Mapping):
        return {name: value for name, value in part.items() if name != "packages"}
    return part
