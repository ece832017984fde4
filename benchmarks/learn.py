"""Evidence that training works, from comparisons/learn.yaml, offline.yaml and unlock.yaml.

`python benchmarks/learn.py [--parallel N]` runs these comparisons and judges them.
Writes docs/results/learn.json, .md and figures: the tables, a verdict with its figures on every
point of the proof, and which of the published claims hold at this scale.
Every sentence is generated from the figures.
`--only-read` judges the content of the store, `--from-items` the files of an earlier run in the
folder of results: learn_items.json.gz contains each item's outcome. `--continue` runs only the
cells that are missing in that folder, so that hours of work can be split over machines and days.
"""

from __future__ import annotations

import gzip
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from harness import RESULTS, ROOT, origin, parser_of, read, write

from agentgym.comparison.described import load_comparison
from agentgym.comparison.figures import AXES
from agentgym.comparison.matrix import Cell, cells_of
from agentgym.comparison.results import CellResult, Checkpoint, Estimate, Row, read_rows, table
from agentgym.comparison.tables import result_files, table_markdown
from agentgym.evaluation.intervals import FloatArray

# success that each recipe must reach, and its largest allowed fall from its own best
SUCCESS, FROM_BEST = 0.85, 0.10
ITEMS, SEEDS = 512, 5
FILES = ("comparisons/learn.yaml", "comparisons/offline.yaml", "comparisons/unlock.yaml")
ITEMS_FILE = "learn_items.json.gz"
SUPERVISED = ("sft", "dpo", "agent_evol")
# arXiv:2509.08755, Qwen2.5-7B on TextCraft, BabyAI, SciWorld (points): ScalingInter minus a fixed
# horizon
PUBLISHED_SCALING = {"ppo": (3.0, 3.34, 14.86), "reinforce++": (4.0, 3.33, 12.51)}
# the same, GRPO minus REINFORCE++ on TextCraft, BabyAI, SearchQA with 3B and 7B
PUBLISHED_GRPO = (47.0, 23.33, 12.5, 16.0, 7.78, 10.0)


@dataclass(frozen=True)
class Verdict:
    """One point of the proof. ok: None if it cannot be judged yet."""

    what: str
    ok: bool | None
    figures: str

    def __str__(self) -> str:
        word = {None: "not run", True: "pass", False: "FAIL"}[self.ok]
        return f"{word:<8}{self.what}: {self.figures}"


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--parallel", type=int, default=os.cpu_count())
    reads = parser.add_mutually_exclusive_group()
    reads.add_argument("--only-read", action="store_true", help="judge the content of the store")
    reads.add_argument("--from-items", action="store_true", help="judge the files of results")
    again = "do not repeat cells of an earlier run in the folder of results"
    parser.add_argument("--continue", dest="goes_on", action="store_true", help=again)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("overrides", nargs="*", metavar="key.path=value", help="for every cell")
    arguments = parser.parse_args()
    # raise on SIGTERM, so that the running comparison ends with this process
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    os.chdir(ROOT)
    rows: list[Row] = []
    tables = []
    for file in FILES:
        comparison = load_comparison(file)
        cells: Sequence[Cell] = cells_of(comparison, arguments.overrides)
        saved: list[Row] = []
        missing = list(cells)
        if arguments.from_items or (arguments.goes_on and (arguments.out / ITEMS_FILE).exists()):
            saved, missing = saved_rows(cells, arguments.out)
        if not (arguments.only_read or arguments.from_items) and missing:
            run(file, missing, arguments.parallel, arguments.overrides)
        if not arguments.from_items:
            played, missing = read_rows(missing)
            saved = merged(cells, saved, played)
        rows += saved
        tables.append(table(comparison, cells, saved, missing))
    verdicts, claims = judge(rows), published(rows)
    save_items(rows, arguments.out)
    publish(tables, verdicts, claims, arguments.out)
    print("\n".join(map(str, verdicts)), "", *claims, sep="\n")
    return 0 if all(verdict.ok for verdict in verdicts) else 1


def merged(cells: Sequence[Cell], *parts: Sequence[Row]) -> list[Row]:
    """Combine results from several sources into rows, in the cells' order."""
    known = {result.cell.title: result for rows in parts for row in rows for result in row.cells}
    by_row: dict[str, list[CellResult]] = {}
    for cell in cells:
        if cell.title in known:
            by_row.setdefault(cell.row, []).append(known[cell.title])
    return [Row(name, tuple(results)) for name, results in by_row.items()]


def only(file: str, missing: Sequence[Cell]) -> dict[str, Any]:
    """Return the comparison of a file, restricted to these cells."""
    tree: dict[str, Any] = yaml.safe_load((ROOT / file).read_text(encoding="utf-8"))
    extra = {
        one.get("name") or f"{one.get('recipe', '')} {one.get('horizon', '')}".strip(): one
        for one in tree.get("cells", ())
    }
    seeds: dict[str, list[int]] = {}
    for cell in missing:
        seeds.setdefault(cell.row, []).append(cell.seed)
        extra.setdefault(cell.row, {"recipe": cell.recipe, "horizon": cell.horizon})
    tree["params"] = str((ROOT / file).parent / tree["params"])
    tree["matrix"] = {"recipes": [], "horizons": []}
    tree["cells"] = [{**extra[row], "seeds": row_seeds} for row, row_seeds in seeds.items()]
    tree["contrasts"] = []
    return tree


def run(file: str, missing: Sequence[Cell], parallel: int, overrides: Sequence[str]) -> None:
    """Run these cells. A failed cell leaves its row out, and its verdict reports that."""
    with tempfile.TemporaryDirectory() as out:
        part = Path(out) / Path(file).name
        part.write_text(yaml.safe_dump(only(file, missing)), encoding="utf-8")
        command = [sys.executable, "-m", "flows.compare", str(part), "--parallel", str(parallel)]
        command += ["--out", out, *overrides]
        subprocess.run(command, check=False, timeout=24 * 3600)


def publish(
    tables: Sequence[dict[str, Any]], verdicts: Sequence[Verdict], claims: Sequence[str], out: Path
) -> None:
    """Write one JSON file with everything, one text, and the figures of each table."""
    out.mkdir(parents=True, exist_ok=True)
    for table_content in tables:
        for name, content in result_files(table_content).items():
            if name.endswith(".png"):
                (out / name).write_bytes(content)
    judged = {"verdicts": [asdict(verdict) for verdict in verdicts], "published_claims": claims}
    write(out / "learn.json", {**judged, "tables": tables})
    command = origin()["command"]
    text = ["# What it learns, and how sure that is", "", f"`{command}`", "", "## Verdicts", ""]
    text += ["| point | verdict | figures |", "| --- | --- | --- |"]
    words = {True: "pass", False: "**fail**", None: "not run"}
    text += [f"| {point.what} | {words[point.ok]} | {point.figures} |" for point in verdicts]
    text += ["", "## Published claims at this scale", "", *(f"- {claim}" for claim in claims)]
    for table_content in tables:
        name = table_content["name"]
        text += ["", table_markdown(table_content).replace("# ", "## ", 1)]
        text += [f"![results]({name}.png)", "", f"![learning curves]({name}_curves.png)"]
    (out / "learn.md").write_text("\n".join(text) + "\n", encoding="utf-8")


def save_items(rows: Sequence[Row], out: Path) -> None:
    """Save each item's outcome by cell, so that every interval can be recomputed without a run."""

    def plain(tables: Mapping[str, FloatArray] | None) -> Any:
        return tables and {
            key: [None if np.isnan(value) else round(float(value), 4) for value in values]
            for key, values in tables.items()
        }

    results = (result for row in rows for result in row.cells)
    items = {r.cell.title: {"after": plain(r.after), "start": plain(r.start)} for r in results}
    out.mkdir(parents=True, exist_ok=True)
    text = json.dumps(items, separators=(",", ":"))
    (out / ITEMS_FILE).write_bytes(gzip.compress(text.encode(), mtime=0))


def saved_rows(cells: Sequence[Cell], out: Path) -> tuple[list[Row], list[Cell]]:
    """Read rows like `compare.read_rows`, but from the files of an earlier run.
    Errors: OSError if there are none.
    """
    saved = json.loads(gzip.decompress((out / ITEMS_FILE).read_bytes()))
    tables = read(out / "learn.json")["tables"]
    known = {row["name"]: row for table_content in tables for row in table_content["rows"]}
    by_row: dict[str, list[CellResult]] = {}
    for cell in cells:
        if cell.title in saved:
            after, start = (
                one and {key: np.array(values, dtype=float) for key, values in one.items()}
                for one in (saved[cell.title][name] for name in ("after", "start"))
            )
            row = known[cell.row]
            at = row["seeds"].index(cell.seed)
            curve = row["curves"][at] if "curves" in row else {"success": []}
            axes = [axis for axis in AXES if axis in curve]  # earlier files contain fewer
            points = [
                Checkpoint({axis: curve[axis][index] for axis in axes}, success)
                for index, success in enumerate(curve["success"])
            ]
            cost = {axis: values[at] for axis, values in row.get("cost", {}).items()}
            result = CellResult(cell, after, start, tuple(points), cost, (), ())
            by_row.setdefault(cell.row, []).append(result)
    missing = [cell for cell in cells if cell.title not in saved]
    return [Row(name, tuple(results)) for name, results in by_row.items()], missing


def judge(rows: Sequence[Row]) -> list[Verdict]:
    """Return verdicts on every point of the proof, in its order."""
    named = {row.name: row for row in rows}
    recipes = by_recipe(rows)
    chosen = {recipe: best_validated(candidates) for recipe, candidates in recipes.items()}
    grpo = chosen.get("grpo")
    verdicts = [_design(rows), *(v for name, row in chosen.items() for v in _recipe(name, row))]
    verdicts.append(_temperature(rows, chosen))
    sft = next((row for row in rows if row.first.group == "sft"), None)
    verdicts.append(_supervised_control(sft, grpo))
    unlock = [named.get(f"{what}, locked door") for what in ("sft", "grpo ScalingInter")]
    verdicts.append(_supervised_control(*unlock, task="locked door"))
    verdicts.append(_shuffled(named.get("shuffled rewards")))
    hard = next((row for row in rows if row.first.group == "hard"), None)
    verdicts.append(_gains("greedy on a level with room", hard, "greedy"))
    for name in SUPERVISED:
        of_recipe = (row for row in rows if row.first.cfg.algorithm.recipe == name)
        row = next((row for row in of_recipe if not row.first.group), None)
        what = f"{name} improves on its own start"
        verdicts.append(_gains(what, row, average(row) if row else ""))
    return verdicts


def published(rows: Sequence[Row]) -> list[str]:
    """Return sentences that compare the paper's claims with these rows, by the intervals."""
    named = {row.name: row for row in rows}
    claims = []
    staged = [("ppo", ""), ("reinforce++", ""), ("grpo", ""), ("grpo", ", locked door")]
    for (recipe, task), horizon in itertools.product(staged, ("long", "short")):
        growing = named.get(f"{recipe} ScalingInter{task}")
        fixed = named.get(f"{recipe} {horizon}{task}")
        if growing and fixed:
            paper = "not published as a pair"
            if recipe in PUBLISHED_SCALING:
                paper = f"{span(PUBLISHED_SCALING[recipe])} over a fixed horizon"
            what = f"ScalingInter over fixed {horizon} with {recipe}{task} (paper: {paper})"
            claims.append(_claim(what, growing, fixed))
    for horizon in ("short", "long", "ScalingInter"):
        grpo, other = named.get(f"grpo {horizon}"), named.get(f"reinforce++ {horizon}")
        if grpo and other:
            what = f"GRPO over REINFORCE++, {horizon} (paper: {span(PUBLISHED_GRPO)})"
            claims.append(_claim(what, grpo, other))
    for recipe in ("grpo", "ppo", "reinforce++"):
        row = named.get(f"{recipe} long")
        if row:
            fall = max(best - last for best, last in _validations(row))
            shows = "shows" if fall > FROM_BEST else "does not show"
            claims.append(
                f"A long fixed horizon collapses after its peak (paper, one curve): {shows} with"
                f" {recipe}; of its seeds the one that falls furthest ends {100 * fall:.1f} points"
                " below its best validation success."
            )
    return claims


def span(gains: Sequence[float]) -> str:
    return f"{min(gains):+.1f} to {max(gains):+.1f} points"


def by_recipe(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Return the rows of each recipe on the common level; groups are controls and other levels."""
    recipe_rows: dict[str, list[Row]] = {}
    for row in rows:
        learned = row.first.cfg.algorithm.recipe not in SUPERVISED
        if learned and not row.first.group and row.gain("greedy") is not None:
            recipe_rows.setdefault(row.first.recipe, []).append(row)
    return recipe_rows


def best_validated(rows: Sequence[Row]) -> Row:
    """Return the row with the highest last validation success, mean over seeds."""
    return max(rows, key=lambda row: sum(last for _, last in _validations(row)) / len(row.cells))


def average(row: Row) -> str:
    return next(key for key in row.keys if key.startswith("avg"))


def points(estimate: Estimate) -> str:
    """Format an estimate in points, with its lowest seed."""
    mean, low, high = (100 * getattr(estimate.interval, end) for end in ("mean", "low", "high"))
    worst = f", least {100 * min(estimate.per_seed):+.1f}" if len(estimate.per_seed) > 1 else ""
    return f"{mean:+.1f} [{low:+.1f}, {high:+.1f}] points{worst}"


def _cpu_s(row: Row) -> float:
    return sum(cell.cost["cpu_s"] for cell in row.cells)


def _validations(row: Row) -> list[tuple[float, float]]:
    return [
        (max(point.success for point in cell.curve), cell.curve[-1].success)
        for cell in row.cells
        if cell.curve
    ]


def _design(rows: Sequence[Row]) -> Verdict:
    tested = [row for row in rows if row.first.cfg.evaluation.split == "test"]
    items = min((row.first.cfg.evaluation.num_items for row in tested), default=0)
    seeds = min((len(row.seeds) for row in tested), default=0)
    # all rows of a task must have the same horizon
    cfgs = [row.first.cfg for row in tested]
    turns = sorted({(str(cfg.env.options), cfg.evaluation.max_turns) for cfg in cfgs})
    ok = items >= ITEMS and seeds >= SEEDS and len(turns) == len({task for task, _ in turns})
    limits = [limit for _, limit in turns]
    figures = f"at least {items} items, {seeds} seeds, {limits} turns in {len(tested)} rows"
    return Verdict("test items, seeds, one horizon per task", ok, figures)


def _recipe(recipe: str, row: Row) -> list[Verdict]:
    success = row.success(average(row))
    falls = [best - last for best, last in _validations(row)]
    seeds = ", ".join(f"{100 * value:.1f}" for value in success.per_seed)
    worst = min(success.per_seed)
    seed = row.seeds[success.per_seed.index(worst)]
    ending = (
        f"{100 * success.interval.mean:.1f} % sampled (seeds {seeds}), worst: seed {seed} with"
        f" {100 * worst:.1f} %, with horizon {row.first.horizon}, chosen by validation"
    )
    near, nearest = None, "never validated"
    if falls:
        near, furthest = max(falls) <= FROM_BEST, f"{100 * max(falls):.1f} points below"
        nearest = f"at most {furthest} its best validation success, seed by seed"
    return [
        Verdict(
            f"{recipe} ends at {SUCCESS:.0%} or more with every seed", worst >= SUCCESS, ending
        ),
        Verdict(f"{recipe} ends near its own best", near, nearest),
    ]


def _temperature(rows: Sequence[Row], chosen: dict[str, Row]) -> Verdict:
    what = "control (a): the warm start at its best temperature is below every recipe"
    splits: dict[str, dict[float, Row]] = {"validation": {}, "test": {}}
    for row in rows:
        if row.first.group == "temperature":
            protocol = row.first.cfg.evaluation
            splits[protocol.split][protocol.temperature] = row
    validated, tested = splits.values()
    if not validated or not validated.keys() <= tested.keys() or not chosen:
        return Verdict(what, None, "its rows are not done")
    best = max(validated, key=lambda t: validated[t].success(average(validated[t])).interval.mean)
    start = tested[best]
    gaps = {recipe: row.minus(start, average(row)) for recipe, row in chosen.items()}
    least = min(gaps, key=lambda recipe: gaps[recipe].interval.low)
    figures = (
        f"temperature {best:g} of {sorted(validated)} by validation,"
        f" {100 * start.success(average(start)).interval.mean:.1f} % sampled on test items; the"
        f" smallest lead over it is {least}'s, {points(gaps[least])}"
    )
    return Verdict(what, gaps[least].interval.low > 0, figures)


def _supervised_control(sft: Row | None, grpo: Row | None, task: str = "") -> Verdict:
    what = f"{task or 'control (b)'}: SFT for the same CPU time is below GRPO"
    if sft is None or grpo is None:
        return Verdict(what, None, "its row is not done")
    sft_cpu_s, grpo_cpu_s = (_cpu_s(row) / len(row.cells) for row in (sft, grpo))
    gap = grpo.minus(sft, average(grpo))
    spent = f"CPU-seconds of training {grpo_cpu_s:.0f} and {sft_cpu_s:.0f}"
    figures = f"GRPO minus SFT {points(gap)}; {spent}"
    if sft_cpu_s < 0.95 * grpo_cpu_s:
        figures += ": SFT was given less; raise its stage_steps in its comparison"
        return Verdict(what, False, figures)
    return Verdict(what, gap.interval.low > 0, figures)


def _shuffled(row: Row | None) -> Verdict:
    what = "control (c): rewards shuffled across episodes show no gain"
    if row is None:
        return Verdict(what, None, "its row is not done")
    gains = {key: row.gain(key) for key in (average(row), "greedy")}
    named = ((key.replace("_at_", "@"), gain) for key, gain in gains.items())
    figures = ", ".join(f"{key} {points(gain)}" for key, gain in named if gain)
    none = all(gain is not None and gain.interval.low <= 0 for gain in gains.values())
    return Verdict(what, none, figures)


def _gains(what: str, row: Row | None, key: str) -> Verdict:
    gain = row.gain(key) if row else None
    start = row.start(key) if row else None
    if gain is None or start is None:
        return Verdict(what, None, "its row is not done")
    figures = f"from {100 * start.interval.mean:.1f} %, {points(gain)}"
    return Verdict(what, gain.interval.low > 0, figures)


def _claim(what: str, a: Row, b: Row) -> str:
    gap = a.minus(b, average(a))
    low, high = gap.interval.low, gap.interval.high
    shows = "does not show, the interval includes 0"
    if low > 0 or high < 0:
        shows = "shows" if low > 0 else "the opposite shows"
    cheaper = _cpu_s(a) / max(1e-9, _cpu_s(b))
    limit = a.limit(b, average(a))
    room = f" Both rows are at the {limit}: little could show." if limit else ""
    return f"{what}: {shows}, {points(gap)} sampled, for {cheaper:.2f} times the CPU-seconds.{room}"


if __name__ == "__main__":
    sys.exit(main())
