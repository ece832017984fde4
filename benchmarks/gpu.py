"""vLLM and the learner on one GPU, in one go: `python benchmarks/gpu.py [CASE ...]`.

Cases run in the order of their value, and each result is written to docs/results/gpu.json as it
comes, with its machine and versions; cases that did not run keep their entries in the file.
`--budget SECONDS` begins no case that a lease of that length would cut off.
`--dry` runs every case's code on the CPU with a tiny model and writes nothing: its figures mean
nothing. Run it with the Python of an environment that has vLLM. Ratios are taken within one run, in
turns. No case takes more than 80 GB.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import textwrap
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import gpu_engine as engine
import gpu_learner as learner
import torch
from gpu_learner import DRY, GPU, Size
from harness import RESULTS, in_a_process, machine, parser_of, read, write

OUT = RESULTS / "gpu.json"


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--budget", type=float, default=math.inf, metavar="SECONDS")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if unknown := set(chosen.cases) - CASES.keys():
        parser.error(f"no case {', '.join(sorted(unknown))}; there are {', '.join(CASES)}")
    if not chosen.dry and not torch.cuda.is_available():
        parser.error("no CUDA device here; --dry runs the code on the CPU")
    size, names = DRY if chosen.dry else GPU, chosen.cases or list(CASES)
    if chosen.child:
        chosen.child.write_text(json.dumps(CASES[names[0]](size)), encoding="utf-8")
        return 0
    failed, ends_at = False, time.monotonic() + chosen.budget
    for name in names:  # each in its own process, which frees its GPU memory
        left = ends_at - time.monotonic()
        if left < EXPECTED_S[name]:
            print(f"{name}: skipped, {left:.0f} s are left and {EXPECTED_S[name]} are needed")
            continue
        words = [__file__, name, *["--dry"] * chosen.dry, "--child"]
        result = in_a_process(words, timeout_s=min(1800.0, left))
        failed |= result is None
        print(f"{name}: {json.dumps(result, indent=1)}", flush=True)
        if result is not None and not chosen.dry:
            keep(name, result)
    return int(failed)


def table(results: dict[str, Any]) -> str:
    """Return the list of docs/how-to/gpu-first-hour.md. results: the content of OUT, or empty."""
    cases = results.get("cases", {})
    rows = []
    for name, case in CASES.items():
        result = cases.get(name, {})
        figures = "; ".join(
            f"{key} {value}" for key, value in result.items() if isinstance(value, int | float)
        )
        if figures:
            figures += f" ({result['machine']['gpu']}, `{result['command']}`)"
        for text, mark in (
            (f"`{name}`: {(case.__doc__ or '').rstrip('.')}", "- "),
            (figures or "not run", "  - "),
        ):
            indent = " " * len(mark)
            rows += textwrap.wrap(text, 98, initial_indent=mark, subsequent_indent=indent)
    return "\n".join(rows)


def keep(name: str, result: Any) -> None:
    cases, here = read(OUT, {"cases": {}})["cases"], machine()
    here["gpu"] = torch.cuda.get_device_name()
    here["packages"] |= {"vllm": version("vllm"), "cuda": torch.version.cuda}
    cases[name] = {**result, "machine": here, "command": "python benchmarks/gpu.py"}
    write(OUT, {"cases": cases})


# the most valuable first; seconds on an H200, imports included, those of new cases are estimates
EXPECTED: tuple[tuple[Callable[[Size], dict[str, Any]], int], ...] = (
    (learner.case_ceilings, 15),
    (engine.case_publish, 150),
    (engine.case_rollouts, 150),
    (engine.case_logprobs, 120),
    (learner.case_step, 60),
    (learner.case_optimizer, 30),
    (learner.case_training, 120),
    (learner.case_head, 30),
    (engine.case_start, 180),
    (engine.case_real, 280),
    (learner.case_varlen, 30),
    (learner.case_training_7b, 60),
    (engine.case_mismatch, 110),
    (engine.case_staged, 700),
)
CASES = {case.__name__.removeprefix("case_"): case for case, _ in EXPECTED}
EXPECTED_S = {name: seconds for name, (_, seconds) in zip(CASES, EXPECTED, strict=True)}


if __name__ == "__main__":
    sys.exit(main())
