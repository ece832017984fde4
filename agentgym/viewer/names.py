"""Names of runs, checkpoints and evaluations for people: `stage-3 of r9c3…, grpo, seed 1`."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from agentgym.evaluation.history import Version
from agentgym.evaluation.record import STEP as EVALUATION
from agentgym.pages import moment
from agentgym.viewer.index import config_of


@dataclass(frozen=True, slots=True)
class Names:
    """Names of what the index has at one moment. Rows are of its table `steps`."""

    runs: Mapping[str, str]  # run -> its name with recipe and seed; an evaluation's policy and time
    about: Mapping[str, str]  # run -> recipe, horizon and seed; "" for an evaluation alone
    steps: Mapping[int, str]  # id -> the step with its run, or the policy and time of an evaluation
    results: Mapping[int, str]  # id of an evaluation -> the checkpoint or policy that it plays
    checkpoints: Mapping[str, str]  # digest of a step's newest commit -> name of the step

    def run(self, run: str) -> str:
        return self.runs.get(run, run)

    def step(self, row: sqlite3.Row) -> str:
        return self.steps.get(row["id"], row["name"])

    def result(self, row: sqlite3.Row) -> str:
        return self.results.get(row["id"], row["name"])

    def version(self, version: Version) -> str:
        """Return the name of the checkpoint of a registered model's version, or of its run."""
        run = f"of r{version.run_key[:12]}" if version.run_key else ""
        return self.checkpoints.get(version.checkpoint, run)


def names_of(reader: sqlite3.Connection) -> Names:
    """Return the names of all runs and steps of an index.
    A step of several runs is named by the first of them, with the settings that all of them share.
    """
    rows = {row["id"]: row for row in reader.execute("SELECT * FROM steps")}
    members: dict[str, list[sqlite3.Row]] = {}
    runs_of: dict[int, list[str]] = {}
    for run, step_id in reader.execute("SELECT run, step_id FROM run_steps ORDER BY run"):
        members.setdefault(run, []).append(rows[step_id])
        runs_of.setdefault(step_id, []).append(run)
    facts = {run: _facts(steps) for run, steps in members.items()}

    def owned(step_id: int) -> str:
        runs = runs_of.get(step_id)
        if not runs:
            return ""
        others = f" and {len(runs) - 1} more" if len(runs) > 1 else ""
        shared = set(facts[runs[0]]).intersection(*(facts[run] for run in runs))
        common = [fact for fact in facts[runs[0]][::2] if fact and fact in shared]
        return ", ".join((f" of {runs[0]}{others}", *common))

    steps = {step_id: f"{row['name']}{owned(step_id)}" for step_id, row in rows.items()}
    results, weights = {}, {}
    for step_id, row in rows.items():
        if checkpoint := config_of(row["results"]).get("checkpoint"):
            results[step_id] = weights[_weights(row)] = f"{checkpoint}{owned(step_id)}"
    weights[""] = ""
    runs = {run: ", ".join(filter(None, (run, *facts[run][::2]))) for run in members}
    for step_id, row in rows.items():
        if row["name"] == EVALUATION:
            results[step_id] = weights.get(_weights(row)) or row["policy"] or row["name"]
            steps[step_id] = f"{results[step_id]}, {moment(row['created'])[:16]}"
            runs |= dict.fromkeys(runs_of.get(step_id, ()), steps[step_id])
    about = {run: ", ".join(filter(None, facts[run])) for run in members}
    checkpoints = {row["digest"]: steps[step_id] for step_id, row in rows.items() if row["digest"]}
    return Names(runs, about, steps, results, checkpoints)


def identity_of(row: sqlite3.Row) -> dict[str, Any]:
    """Return the settings that identify an evaluation: of its plan or, if an earlier version made
    it, of its step.
    """
    return config_of(row["identity"] or row["config"])


def _weights(row: sqlite3.Row) -> str:
    """Return the digest of the weights that an evaluation plays; "" for another policy."""
    policy = identity_of(row).get("policy")
    return str(policy.get("weights", "")) if isinstance(policy, dict) else ""


def _facts(steps: Iterable[sqlite3.Row]) -> tuple[str, str, str]:
    """Return recipe, horizon and seed of a run's steps; "" for what no step states."""
    recipe = horizon = seed = ""
    for row in steps:
        config = config_of(row["config"])
        seed = f"seed {config['seed']}" if "seed" in config else seed
        if isinstance(algorithm := config.get("algorithm"), dict):
            turns = " > ".join(map(str, config.get("horizon", {}).get("max_turns", ())))
            recipe, horizon = str(algorithm.get("recipe", "")), f"max_turns {turns}"
    return recipe, horizon, seed
