"""`agentgym audit | compare`: verify and compare runs by their commits in the store."""

from __future__ import annotations

import argparse
import json
import shlex
from pathlib import Path
from typing import Any

from agentgym.commands.parser import Commands, add_owner_pipe, add_pointers, seed, some
from agentgym.config import ConfigError, RunConfig, load_config
from agentgym.console.ending import say


def add(commands: Commands) -> None:
    about = "verify a run: replay episodes, rescore them, repeat optimizer steps"
    audit = commands.add("audit", _audit, about, takes_run=True)
    option, every = audit.add_argument, "or all (default: %(default)s)"
    count: dict[str, Any] = {"type": some, "metavar": "N"}
    option("--episodes", **count, default=32, help=f"logged episodes to replay per step, {every}")
    rescored = f"episodes to rescore per set of weights, {every}"
    option("--rescore", **count, default="all", help=rescored)
    option(
        "--updates",
        type=int,
        default=0,
        metavar="N",
        help="take the optimizer steps of warm start and stages that have at most N of them again,"
        " which proves their weights; exit code 3 if some are left out (default: %(default)s,"
        " none)",
    )
    drawn = "of the draws, to repeat an audit (default: a new one, which is printed)"
    option("--seed", type=seed, help=drawn)
    kept = "leave the verdict in the store: a failure bars the gate"
    option("--keep", action="store_true", help=kept)
    add_owner_pipe(audit)
    add_pointers(audit, "")
    option("--json", action="store_true")

    about = "which of two results or more is better; or the table of a comparison of runs"
    option = commands.add("compare", _compare, about, params=False).add_argument
    option(
        "words",
        nargs="*",
        metavar="RESULT RESULT ... | FILE | key.path=value",
        help="results (the beginnings of their digests, steps of a run such as :stage-3, or"
        " folders), the first one being the baseline; or a comparison's file (default:"
        " comparisons/default.yaml) and overrides, as for flows.compare",
    )
    option("--confidence", type=float, help="of results (default: the protocol's)")
    option(
        "--out",
        type=Path,
        metavar="FOLDER",
        help="of files to write: page and figures of results; table and figures of a comparison, as"
        " Markdown, JSON, LaTeX, CSV, PNG and SVG",
    )
    option("--json", action="store_true")
    option("--params", help="whose store has the results (default: params.yaml)")


NOT_PROVEN = 3  # exit code if nothing is wrong, but the evidence of a decision is missing


def _audit(cfg: RunConfig, arguments: argparse.Namespace) -> int:
    from agentgym.audit import audit
    from agentgym.console.progress import Bars, PlainConsole
    from agentgym.pipeline.stored_config import keep_audit
    from agentgym.pipeline.table import open_store

    with Bars(PlainConsole(stderr=True)) as bars:
        report = audit(
            cfg,
            run=arguments.of_run,
            num_episodes=arguments.episodes,
            num_rescored=arguments.rescore,
            num_updates=arguments.updates,
            seed=arguments.seed,
            pointers=arguments.pointers,
            progress=bars,
        )
    if arguments.keep:
        keep_audit(open_store(cfg), report.to_json())
    if arguments.json:
        say(json.dumps(report.to_json(), indent=1))
    else:
        for line in report.lines():
            say(line, indent=10)
        verdict = "FAILED" if not report.ok else "passed" if report.is_proven else "NOT PROVEN"
        say(f"audit {verdict}; to repeat it: --seed {report.seed}")
    return 1 if not report.ok else 0 if report.is_proven else NOT_PROVEN


def _compare(cfg: RunConfig, arguments: argparse.Namespace) -> int:
    words = [word for word in arguments.words if "=" not in word]
    if len(words) > 1 or (words and Path(words[0]).suffix not in (".yaml", ".yml")):
        if arguments.params is None and Path("params.yaml").is_file():
            cfg = load_config("params.yaml", arguments.set)
        return _compare_results(cfg, arguments)
    return _compare_runs(arguments)


def _compare_results(cfg: RunConfig, arguments: argparse.Namespace) -> int:
    """Compare two or more results, print the comparison as text or JSON, and write it, with page
    and figures, to the folder `--out` if given. Return 0.
    Errors: ConfigError for a bad confidence level or results that cannot be compared.
    """
    from agentgym.comparison.versus import files, find_result, lines, table_markdown, versus
    from agentgym.store.posix import write_whole

    level = arguments.confidence
    if level is not None and not 0.5 < level < 1:
        raise ConfigError(f"--confidence {level:g} is no level such as 0.95")
    comparison = versus([find_result(word, cfg) for word in arguments.words], confidence=level)
    data = json.dumps(comparison, indent=1, allow_nan=False)
    if arguments.out is not None:
        output_files = {"comparison.json": f"{data}\n".encode(), **files(comparison)}
        for name, content in output_files.items():
            write_whole(arguments.out / name, content)
    if arguments.json:
        say(data)
        return 0
    for line in lines(comparison):
        say(line, indent=4)
    if len(comparison["contrasts"]) > 1:
        say(table_markdown(comparison), end="")
    if arguments.out is not None:
        say(f"page and figures in {arguments.out}")
    return 0


def _compare_runs(arguments: argparse.Namespace) -> int:
    from agentgym.comparison.described import file_and_overrides, load_comparison
    from agentgym.comparison.matrix import cells_of
    from agentgym.comparison.results import read_rows, table
    from agentgym.comparison.tables import result_files, table_markdown
    from agentgym.store.posix import write_whole

    file, overrides = file_and_overrides(arguments.words)
    comparison = load_comparison(file)
    cells = cells_of(comparison, (*overrides, *arguments.set))
    result = table(comparison, cells, *read_rows(cells))
    if arguments.out is not None:
        for name, content in result_files(result).items():
            write_whole(arguments.out / name, content)
    if arguments.json:
        say(json.dumps(result, indent=1))
        return 0
    say(table_markdown(result), end="")
    if result["missing"]:
        words = shlex.join((file, *overrides, *arguments.set))
        say(f"\nnext     python -m flows.compare {words}")
    return 0
