"""Memory and time per rank for models of 1.5, 7 and 32 billion parameters on 1 to 64 ranks.

No machine of that size is available: the learner's own code builds, trains, publishes and commits
on paper (see on_paper.py), and the bytes are those of its modules' tensors. A model of 0.5 billion
parameters is also trained for real, in one process, in two and in four (gloo): one process
calibrates the error of the paper, the others check that it is then within LIMIT. Seconds are bytes
at BANDWIDTHS, without overlap, arithmetic not counted.
`--check FILE` uses the real runs of an earlier result, `--models FILE` the large models.
Writes docs/results/scale.json and the tables of docs/reference/memory-per-rank.md; fails above the
limit.
"""

from __future__ import annotations

import ctypes
import gc
import json
import sys
import tempfile
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import checkpoints
import torch
from harness import ROOT, parser_of, read, table, write
from on_paper import HOST, Ledger, PaperHost, Traffic, paper_group
from packed import batch_of

from agentgym.algorithms.batch import Batch
from agentgym.config import LearnerConfig, OptimizerConfig
from agentgym.learner.learner import LocalLearner
from agentgym.learner.start import LearnerPlan
from agentgym.models import attention
from agentgym.models.model import empty_model

PAGE = ROOT / "docs/reference/memory-per-rank.md"
BEGIN, END = "<!-- written by benchmarks/scale.py -->", "<!-- to here -->"
PHASES = ("build", "update", "publish", "commit")
RANKS = (1, 8, 64)
CHECKED = (1, 2, 4)
LIMIT = 0.15
NODE = 8  # ranks of one machine
# bytes a second
BANDWIDTHS = {
    "node": 300e9,  # a GPU's share of a collective among those of one machine
    "network": 40e9,  # its share of a collective among several machines
    "bus": 25e9,  # between a GPU and host memory
    "store": 2e9,  # of one machine, reading or writing
    "broadcast": 5e9,  # from rank 0 to the rollout workers
    "digest": 1.5e9,  # sha256 of one process
}
# from the published config.json; the head is a tenth to a half of the parameters
MODELS = {
    "0.5B": checkpoints.shape_of(896, 4864, 14, 2, 24, 151_936),
    "1.5B": checkpoints.shape_of(1536, 8960, 12, 2, 28, 151_936),
    "7B": checkpoints.shape_of(3584, 18_944, 28, 4, 28, 152_064),
    "32B": checkpoints.shape_of(5120, 27_648, 40, 8, 64, 152_064),
}
SIZES = ("1.5B", "7B", "32B")
SEQUENCE = 2_048  # tokens
ACTIONS = 0.3  # of the tokens
# glibc frees larger blocks immediately, so that a process's memory is that of its tensors
M_MMAP_THRESHOLD, MMAP_THRESHOLD = -3, 1 << 20
STEP = "AdamW's temporaries"
CHECKED_TOKENS = 256  # of each rank's sequence in real runs


@dataclass(frozen=True)
class Load:
    micro_batch_tokens: int = 16_384
    checkpointing: bool = True
    offload: bool = False


# the default one at all RANKS, the others at NODE ranks
LOADS = (Load(), Load(checkpointing=False), Load(offload=True))


def main() -> int:
    parser = parser_of(__doc__, "scale.json")
    parser.add_argument("--check", type=Path, help="an earlier result whose real runs are used")
    parser.add_argument("--models", type=Path, help="an earlier result whose large models are used")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    shape = MODELS["0.5B"]
    if chosen.check:
        real = read(chosen.check)["check"]["real"]
    else:
        with tempfile.TemporaryDirectory() as folder:
            real = {str(size): really(Path(folder), shape, size) for size in CHECKED}
            print(json.dumps(real), file=sys.stderr)
    check = compared(real, {ranks: as_real(shape, int(ranks)) for ranks in real}, shape)
    print(json.dumps(check, indent=1))
    known = read(chosen.models)["models"] if chosen.models else {}
    result = {
        "check": check,
        "bandwidths": BANDWIDTHS,
        "sequence_tokens": SEQUENCE,
        "actions": ACTIONS,
        "models": {name: known.get(name) or at_scale(MODELS[name]) for name in SIZES},
    }
    write(chosen.out, result)
    page = PAGE.read_text(encoding="utf-8")
    before, after = page.partition(BEGIN)[0], page.partition(END)[2]
    PAGE.write_text(before + BEGIN + told_of(result) + END + after, encoding="utf-8")
    return 0 if check["worst"] <= LIMIT else 1


# on paper


def at_scale(shape: dict[str, Any]) -> dict[str, Any]:
    """Compute every number of ranks with the default load, and every load at NODE ranks."""
    configurations = [(ranks, Load()) for ranks in RANKS] + [(NODE, load) for load in LOADS[1:]]
    rows = []
    for ranks, load in configurations:
        paper = on_paper(shape, ranks, load)
        rows.append({"ranks": ranks, **vars(load), **paper, "seconds": seconds(paper, ranks)})
        print(rows[-1], file=sys.stderr)
    return {"shape": shape, "rows": rows}


def on_paper(shape: dict[str, Any], ranks: int, load: Load) -> dict[str, Any]:
    """Compute the first rank on GPUs in bfloat16. A rank has one micro-batch per update."""
    settings = LearnerConfig(
        micro_batch_tokens=load.micro_batch_tokens,
        activation_checkpointing=load.checkpointing,
        offload_optimizer=load.offload,
    )
    lengths = [SEQUENCE] * (load.micro_batch_tokens // SEQUENCE) * ranks
    batch = batch_of(lengths, seed=0, vocabulary=shape["vocab_size"], action_frac=ACTIONS)
    original = attention.has_kernel
    try:
        attention.has_kernel = lambda *_: True
        return traced(shape, torch.bfloat16, ranks, settings, batch, on_gpu=True)
    finally:
        attention.has_kernel = original


def traced(
    shape: dict[str, Any],
    dtype: torch.dtype,
    ranks: int,
    settings: LearnerConfig,
    batch: Batch,
    *,
    on_gpu: bool,
) -> dict[str, Any]:
    """Return the bytes by kind at the peak of each phase, and the bytes that it moves."""
    ledger = Ledger(shape["vocab_size"], on_gpu=on_gpu)
    measurements: dict[str, Any] = {"bytes": {}, "moved": {}}

    @contextmanager
    def phase(name: str) -> Iterator[None]:
        ledger.begin()
        yield
        measurements["bytes"][name], measurements["moved"][name] = ledger.most(), dict(ledger.moved)

    with paper_group(ranks) as group, ledger:
        with phase("build"), ledger.of("weights"):
            learner = plan_of(shape, dtype, settings).build(group)
        measurements["bytes_read"] = group.bytes_read
        begun(learner, ledger, on_gpu)
        with phase("update"):
            optimized = learner._policy
            learner.sft_step(batch, step=2)
            ledger.are("gradients", [master.grad for master in optimized._masters.values()])
        with phase("publish"), ledger.of("gathered weights"):
            host_weights = learner.weights_on_host()
            measurements["bytes_published"] = sum(tensor.nbytes for tensor in host_weights.values())
            del host_weights
        with phase("commit"):
            snapshot = learner.snapshot()
            measurements["bytes_committed"] = snapshot.size
            del snapshot
    del learner, optimized
    gc.collect()
    return measurements


class Somewhere:
    """Location of stored weights whose values are never read."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def require_fit(self, tensors: Any) -> None: ...


def plan_of(shape: dict[str, Any], dtype: torch.dtype, settings: LearnerConfig) -> LearnerPlan:
    stored: Any = Somewhere(dtype)
    optimizer = OptimizerConfig(lr=1e-5, warmup_steps=0)
    return LearnerPlan(checkpoints.architecture(shape), stored, optimizer, 10, settings=settings)


def begun(learner: LocalLearner, ledger: Ledger, on_gpu: bool) -> None:
    """Create the learner's masters and moments, as every update after the first has them."""
    optimized = learner._policy
    if optimized._host is not None:
        optimized._host = PaperHost(learner.ranks, ledger)
    with ledger.of("master weights"):
        masters = optimized._masters
    for optimizer in optimized._optimizers.values():
        for group in optimizer.param_groups:
            group["foreach"] = on_gpu  # as torch does on GPUs; temporary tensors depend on it
    for master in masters.values():
        master.grad = torch.zeros_like(master)
    with ledger.of("moments"):
        optimized.optimizer_step(1, 0.0)
    optimized.zero_grad()
    step = optimized.optimizer_step

    def stepped(*arguments: Any) -> float:
        with ledger.of(STEP):
            return step(*arguments)

    optimized.optimizer_step = stepped  # type: ignore[method-assign]


def seconds(measurements: dict[str, Any], ranks: int) -> dict[str, float]:
    """Return the seconds of one rank, computed from bytes; see the module's docstring."""
    at, share = BANDWIDTHS, min(ranks, NODE)

    def collective(phase: str) -> float:
        size = sum(measurements["moved"][phase].values())
        return size * (ranks - 1) / ranks / at["node" if ranks <= NODE else "network"]

    published, committed, read = (
        measurements[f"bytes_{kind}"] for kind in ("published", "committed", "read")
    )
    return {
        # each rank digests its share of the files before it reads rows
        "build": read * (2 * share / at["store"] + 1 / at["digest"]),
        "exchange": collective("update"),
        "gather": collective("publish") + published / at["bus"],
        # sha256 on both sides
        "send": published * (2 / at["digest"] + 1 / at["broadcast"]),
        "copy": committed / at["bus"],
        "write": committed * (share / at["store"] + 1 / at["digest"]),
    }


# for real


def really(folder: Path, shape: dict[str, Any], size: int) -> dict[str, Any]:
    """Return each phase's peak in MiB over all ranks, and the bytes that a rank moved."""
    text = checkpoints.architecture(shape)
    store_place = checkpoints.StorePlace(str(folder / "store"), 30.0)
    weights = checkpoints.made(store_place, text)
    program = Path(__file__).resolve()
    rank_results = checkpoints.ranks(folder / f"{size}", size, text, weights, {}, program)
    for blobs in (weights, *(rank_result["blobs"] for rank_result in rank_results)):
        checkpoints.removed(store_place, blobs)
    mib = {phase: max(result[f"{phase}_mib"] for result in rank_results) for phase in PHASES}
    return {"mib": mib, "moved": rank_results[0]["moved"]}


def rank_main(folder: Path, rank: int, size: int) -> None:
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, MMAP_THRESHOLD)
    torch.set_num_threads(1)
    _, store_place, plan, group = checkpoints.asked_of(folder, rank, size)
    measurements: dict[str, Any] = {}

    @contextmanager
    def phase(name: str) -> Iterator[None]:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # memory that the previous phase freed
        with checkpoints.measured(measurements, name):
            yield

    settings = replace(plan, settings=LearnerConfig(micro_batch_tokens=CHECKED_TOKENS))
    with phase("build"):
        learner = settings.build(group)
    learner.sft_step(checkpoints.batch(), step=1)
    batch, traffic = checked_batch(size), Traffic()
    with phase("update"), traffic:
        learner.sft_step(batch, step=2)
    measurements["moved"] = {name: size for name, size in traffic.moved.items() if size}
    with phase("publish"):
        learner.weights_on_host()
    with phase("commit"):
        written = learner.snapshot().write(store_place, checkpoints.STEP, checkpoints.KEY)
    measurements["blobs"] = {name: blob.model_dump() for name, blob in written.items()}
    checkpoints.leave(folder, rank, measurements)


def checked_batch(ranks: int) -> Batch:
    return batch_of([CHECKED_TOKENS] * ranks, seed=0, vocabulary=1_000, action_frac=ACTIONS)


def as_real(shape: dict[str, Any], ranks: int) -> dict[str, Any]:
    """Compute on paper the same values as `really` measures."""
    settings = LearnerConfig(micro_batch_tokens=CHECKED_TOKENS)
    return traced(shape, torch.float32, ranks, settings, checked_batch(ranks), on_gpu=False)


def compared(real: dict[str, Any], paper: dict[str, Any], shape: dict[str, Any]) -> dict[str, Any]:
    """Compare real runs with paper multiplied by one rank's calibration factors."""
    mib = {
        ranks: {phase: sum(run["bytes"][phase].values()) / 2**20 for phase in PHASES}
        for ranks, run in paper.items()
    }
    factors = {phase: real["1"]["mib"][phase] / mib["1"][phase] for phase in PHASES}

    def error(ranks: str, phase: str) -> float:
        return round(factors[phase] * mib[ranks][phase] / real[ranks]["mib"][phase] - 1, 3)

    off = {
        ranks: {phase: error(ranks, phase) for phase in PHASES} for ranks in real if ranks != "1"
    }
    for ranks, traced_run in paper.items():
        assert traced_run["moved"]["update"] == real[ranks]["moved"], (ranks, traced_run["moved"])
    model = empty_model(checkpoints.architecture(shape))
    return {
        "shape": shape,
        "num_parameters": sum(parameter.numel() for parameter in model.parameters()),
        "tokens_of_a_rank": CHECKED_TOKENS,
        "real": real,
        "paper_mib": {
            ranks: {phase: round(row[phase]) for phase in row} for ranks, row in mib.items()
        },
        "factors": {phase: round(factor, 3) for phase, factor in factors.items()},
        "off": off,
        "worst": max(abs(error) for row in off.values() for error in row.values()),
    }


# tables of docs/reference/memory-per-rank.md


def told_of(result: dict[str, Any]) -> str:
    check, expected = result["check"], {str(ranks) for ranks in CHECKED}
    off = [
        f"{ranks} ranks are within {100 * max(map(abs, row.values())):.1f} %"
        for ranks, row in check["off"].items()
    ]
    not_run = sorted(expected - check["real"].keys())
    missing = f"; {' and '.join(not_run)} ranks: not run." if not_run else "."
    text = (
        f"A model of {check['num_parameters'] / 1e9:.2f} billion parameters was trained for real on"
        " a CPU. One process gives the factor between the real and the computed memory. With this"
        f" factor, {' and '.join(off)} of the computed memory"
        f" ([results](../results/scale.json), limit {100 * LIMIT:.0f} %){missing}"
    )
    lines = textwrap.wrap(text, 98, break_long_words=False, break_on_hyphens=False)
    num_rows = sum(len(model["rows"]) for model in result["models"].values())
    if left_out := len(SIZES) * (len(RANKS) + len(LOADS) - 1) - num_rows:
        lines.append(f"In the tables below {left_out} rows are missing: not run.")
    parts = [
        lines,
        ["## Phases"],
        ranks_table(result),
        ["## An update at 8 ranks"],
        loads_table(result, ("weights", "master weights", "moments", "gradients", HOST)),
        ["Temporary memory of the same updates:"],
        loads_table(
            result,
            ("gathered weights", "exchanged gradients", "activations", "logits", STEP),
        ),
    ]
    return "\n\n" + "\n\n".join(map("\n".join, parts)) + "\n\n"


def ranks_table(result: dict[str, Any]) -> list[str]:
    titles = ("model", "ranks", "build", "update", "publish", "host", "exchange s")
    rows = []
    for name, model in result["models"].items():
        for row in [row for row in model["rows"] if vars(Load()).items() <= row.items()]:
            took = row["seconds"]
            cells = [gib(result, row, phase) for phase in ("build", "update", "publish")]
            cells += [f"{row['bytes']['commit'][HOST] / 2**30:.1f}", f"{took['exchange']:.2f}"]
            cells += [f"{took['gather'] + took['send']:.1f}", f"{took['copy']:.2f}"]
            rows.append((name, row["ranks"], *cells, f"{took['write']:.0f}"))
    return table((*titles, "publish s", "commit s", "written s"), rows, "|---" * 10 + "|")


def gib(result: dict[str, Any], row: dict[str, Any], phase: str) -> str:
    """Return GiB on the device, multiplied by the calibration factor."""
    size_on_device = sum(size for kind, size in row["bytes"][phase].items() if kind != HOST)
    return f"{size_on_device * max(1.0, result['check']['factors'][phase]) / 2**30:.1f}"


def loads_table(result: dict[str, Any], kinds: Sequence[str]) -> list[str]:
    """Return a table of these kinds of memory in an update, in GiB, at NODE ranks."""
    titles = ("model", "blocks", *("AdamW" if kind == STEP else kind for kind in kinds))
    rows = []
    for name, model in result["models"].items():
        for row in [candidate for candidate in model["rows"] if candidate["ranks"] == NODE]:
            blocks = "checkpointed" if row["checkpointing"] else "whole"
            blocks += ", states on the host" if row["offload"] else ""
            sizes = (f"{row['bytes']['update'].get(kind, 0) / 2**30:.1f}" for kind in kinds)
            rows.append((name, blocks, *sizes))
    return table(titles, rows, "|---" * len(titles) + "|")


if __name__ == "__main__":
    checkpoints.main_of(rank_main, main)
