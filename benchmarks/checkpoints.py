"""Memory and time per process when a large model is built, committed and resumed.

`python benchmarks/checkpoints.py [--out FILE]`. A model of 0.5 billion parameters is created and
trained for one optimizer step by one process and by two (gloo). Memory is each process's anonymous
memory above its value before the model, at its peak in each phase; time is compared with a copy of
as many bytes on the same disk.
Before a commit, a resume and a copy the page cache is dropped, if that is permitted, and free
memory is touched: a virtual machine returns it to its host, and getting it back takes up to two
seconds a GB. Commit, resume and copy alternate, and medians are compared, because other machines
use the same disk.
Writes docs/results/checkpoints.json; fails above the limits.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from harness import parser_of, read, repeated, write

from agentgym.algorithms.batch import Batch
from agentgym.config import OptimizerConfig
from agentgym.learner.learner import LocalLearner
from agentgym.learner.process_group import ProcessGroup
from agentgym.learner.start import LearnerPlan
from agentgym.models.architecture import WEIGHTS
from agentgym.models.checkpoint import OPTIMIZER
from agentgym.models.model import empty_model
from agentgym.models.tensorfiles import Snapshot, StoredTensors, TensorFile
from agentgym.store.manifest import Blob, Manifest
from agentgym.store.runstore import StorePlace, folder_name


def shape_of(width: int, mlp: int, heads: int, kv: int, layers: int, vocab: int) -> dict[str, Any]:
    """Return the sizes of a Qwen2 model; with the larger vocabulary its head is not tied."""
    return {
        "hidden_size": width,
        "intermediate_size": mlp,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "num_hidden_layers": layers,
        "vocab_size": vocab,
        "tie_word_embeddings": vocab < 152_064,
    }


LARGE = shape_of(896, 4864, 14, 2, 24, 151_936)  # Qwen2.5-0.5B
SMALL = shape_of(16, 16, 1, 1, 1, 16)
MEMORY_LIMIT, TIME_LIMIT = 0.65, 1.5
PHASES = ("build", "commit", "resume")
TIMED = ("commit", "resume", "copy")
STEP, KEY = "stage-1", "c" * 64
FOLDER = f"steps/{folder_name(STEP, KEY)}"  # in the store
SAMPLE_S = 0.002
COPY_BYTES = 16 << 20
SETTLED_BYTES = 4 << 30
SPARED_BYTES = 1 << 30  # free memory that stays untouched
TOUCHED = 8  # multiple of the weights' size: two copies of weights and optimizer, and a reserve
LIMIT_S = 1800.0
ROUNDS = 3


def main() -> int:
    chosen = parser_of(__doc__, "checkpoints.json").parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = compared(Path(folder), LARGE, ROUNDS)
    write(chosen.out, result)
    print(json.dumps(result, indent=1))
    memory = max(result["memory_of_two_to_one"].values())
    time_to_copy = max(max(row["time_to_copy"].values()) for row in result["ranks"])
    return int(memory > MEMORY_LIMIT or time_to_copy > TIME_LIMIT)


def compared(folder: Path, size: dict[str, int], num_rounds: int) -> dict[str, Any]:
    """Measure one process, then two, on a model of this size."""
    text = architecture(size)
    store_place = StorePlace(str(folder / "store"), 30.0)
    weights = made(store_place, text)
    rows = []
    for num_ranks in (1, 2):
        prefixes = [folder / f"{num_ranks}-{number}" for number in range(num_rounds)]
        rounds = [of_round(prefix, num_ranks, store_place, text, weights) for prefix in prefixes]
        mib = {phase: [one[f"{phase}_mib"] for one in rounds] for phase in PHASES}
        seconds = {phase: [one[f"{phase}_s"] for one in rounds] for phase in TIMED}
        median = {phase: statistics.median(values) for phase, values in seconds.items()}
        to_copy = {phase: round(median[phase] / median["copy"], 2) for phase in TIMED[:2]}
        row = {"ranks": num_ranks, "bytes": rounds[0]["bytes"], "anonymous_mib_above_idle": mib}
        rows.append({**row, "seconds": seconds, "time_to_copy": to_copy})
    one, two = (row["anonymous_mib_above_idle"] for row in rows)
    shares = {phase: round(max(two[phase]) / min(one[phase]), 3) for phase in PHASES}
    num_parameters = sum(parameter.numel() for parameter in empty_model(text).parameters())
    return {"num_parameters": num_parameters, "ranks": rows, "memory_of_two_to_one": shares}


def of_round(
    folder: Path, num_ranks: int, store_place: StorePlace, text: str, weights: dict[str, Any]
) -> dict[str, Any]:
    """Measure one commit, copy and resume. folder: prefix of the created folders' names."""

    def most(rank_results: list[dict[str, Any]], name: str) -> Any:
        return max(rank_result[name] for rank_result in rank_results)

    first = ranks(folder.with_name(f"{folder.name}-first"), num_ranks, text, weights, {})
    blobs = {name: blob for rank_result in first for name, blob in rank_result["blobs"].items()}
    settle(weights)
    copy_s = copied(folder.with_name("copy"), store_place, blobs)
    resumed = ranks(folder.with_name(f"{folder.name}-again"), num_ranks, text, weights, blobs)
    removed(store_place, blobs)
    return {
        "bytes": sum(blob["size"] for blob in blobs.values()),
        "build_mib": most(first, "build_mib"),
        "commit_mib": most(first, "commit_mib"),
        "resume_mib": most(resumed, "build_mib"),
        "commit_s": most(first, "commit_s"),
        "resume_s": most(resumed, "build_s"),
        "copy_s": round(copy_s, 2),
    }


def architecture(size: Mapping[str, Any]) -> str:
    """Return the config.json of a Qwen2 model."""
    fixed = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
    sizes = {"tie_word_embeddings": True, "max_position_embeddings": 4096, **size}
    return json.dumps(fixed | sizes)


def removed(store_place: StorePlace, blobs: Mapping[str, Any]) -> None:
    for blob in blobs.values():
        (Path(store_place.root) / FOLDER / "blobs" / blob["digest"]).unlink(missing_ok=True)


def made(store_place: StorePlace, architecture: str) -> dict[str, Any]:
    """Store randomly drawn weights; return their blobs."""
    with store_place.open().open(STEP, KEY):
        pass  # creates the folder
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: torch.randn(parameter.shape, generator=generator).mul_(0.02)
        if parameter.ndim > 1
        else torch.ones(parameter.shape)
        for name, parameter in empty_model(architecture).named_parameters()
    }
    written = Snapshot({WEIGHTS: TensorFile.of(tensors)}).write(store_place, STEP, KEY)
    return {name: blob.model_dump() for name, blob in written.items()}


def ranks(
    folder: Path,
    size: int,
    architecture: str,
    weights: dict[str, Any],
    blobs: dict[str, Any],
    program: Path = Path(__file__),
) -> list[dict[str, Any]]:
    """Run the processes; return their measurements of a step from these weights, or of a
    resume from `blobs` if there are any.
    program: the script that accepts `--rank FOLDER RANK SIZE`.
    """
    folder.mkdir()
    request = {"root": str(folder.parent / "store"), "architecture": architecture}
    request |= {"weights": weights, "blobs": blobs or weights, "resumes": bool(blobs)}
    (folder / "asked.json").write_text(json.dumps(request), encoding="utf-8")
    command = [sys.executable, str(program), "--rank", str(folder)]
    processes = [subprocess.Popen([*command, str(rank), str(size)]) for rank in range(size)]
    try:
        codes = [process.wait(LIMIT_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
    if any(codes):
        raise RuntimeError(f"processes ended with codes {codes}")
    return [read(folder / f"told-{rank}.json") for rank in range(size)]


def asked_of(
    folder: Path, rank: int, size: int
) -> tuple[dict[str, Any], StorePlace, LearnerPlan, ProcessGroup]:
    """Read the request of `ranks`. Return (request, store, learner plan, process group)."""
    request = read(folder / "asked.json")
    nothing: dict[str, Any] = {name: {} for name in ("parents", "config", "state", "results")}
    blobs = {name: Blob(**blob) for name, blob in request["blobs"].items()}
    manifest = Manifest(step=STEP, key=KEY, seq=0, done=False, blobs=blobs, **nothing)
    store_place = StorePlace(request["root"], 30.0)
    store = store_place.open()
    states = {OPTIMIZER: StoredTensors.of(store, manifest, OPTIMIZER)} if request["resumes"] else {}
    plan = LearnerPlan(
        request["architecture"],
        StoredTensors.of(store, manifest, WEIGHTS),
        OptimizerConfig(lr=1e-5, warmup_steps=0),
        10,
        optimizer_states=states,
    )
    group = joined(folder, rank, size)
    # warm up: code loaded at the first use is not part of a model's memory
    small = empty_model(architecture(SMALL), torch.float32)
    LocalLearner(small, plan.optimizer, total_steps=1, ranks=group).snapshot()
    return request, store_place, plan, group


def rank_main(folder: Path, rank: int, size: int) -> None:
    torch.set_num_threads(1)
    request, store_place, plan, group = asked_of(folder, rank, size)
    measurements: dict[str, Any] = {}
    settle(request["weights"], rank, size)
    with measured(measurements, "build"):
        learner = plan.build(group)
    if not request["resumes"]:
        learner.sft_step(batch(), step=1)
        settle(request["weights"], rank, size)
        with measured(measurements, "commit"):
            written = learner.snapshot().write(store_place, STEP, KEY)
        measurements["blobs"] = {name: blob.model_dump() for name, blob in written.items()}
    leave(folder, rank, measurements)


def leave(folder: Path, rank: int, measurements: dict[str, Any]) -> None:
    """Write a rank's measurements for `ranks`; leave the process group."""
    (folder / f"told-{rank}.json").write_text(json.dumps(measurements), encoding="utf-8")
    if dist.is_initialized():
        dist.destroy_process_group()


def main_of(rank_main: Callable[[Path, int, int], None], main: Callable[[], int]) -> None:
    """Run a program that starts itself as its ranks."""
    if sys.argv[1:2] == ["--rank"]:
        rank_main(Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
        sys.exit()
    sys.exit(main())


def joined(folder: Path, rank: int, size: int) -> ProcessGroup:
    if size == 1:
        return ProcessGroup()
    from agentgym.learner.sharded import Sharded

    meeting = f"file://{folder}/meeting"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=size)
    return Sharded(torch.device("cpu"))


def batch() -> Batch:
    """Return two short sequences: the step is only needed to create the optimizer's state."""
    starts = torch.tensor([0, 8, 16])
    mask = torch.ones(16, dtype=torch.bool)
    mask[starts[:-1]] = False
    zeros, groups = torch.zeros(16), torch.arange(2)
    return Batch(torch.arange(16), starts, mask, zeros, zeros, groups, groups.bool(), 1.0)


@contextlib.contextmanager
def measured(measurements: dict[str, Any], phase: str) -> Iterator[None]:
    """Measure the block's seconds and its peak of anonymous memory above the first value."""
    measurements.setdefault("idle_kib", anonymous_kib())
    peak, began = [anonymous_kib()], time.perf_counter()

    def look() -> None:
        peak[0] = max(peak[0], anonymous_kib())

    with repeated(look, SAMPLE_S):
        yield
        measurements[f"{phase}_s"] = round(time.perf_counter() - began, 2)
    measurements[f"{phase}_mib"] = round((peak[0] - measurements["idle_kib"]) / 1024)


def anonymous_kib() -> int:
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(status.partition("RssAnon:")[2].split()[0])


def settle(weights: Mapping[str, Any], rank: int = 0, size: int = 1) -> None:
    """Drop the page cache and touch free memory, see the module's docstring; all ranks enter.

    weights: the blobs of a model. A small model is skipped: its times mean nothing, and other
    programs may use the machine.
    """
    size_to_touch = TOUCHED * sum(blob["size"] for blob in weights.values())
    if size_to_touch < SETTLED_BYTES:
        return
    if rank == 0:
        os.sync()
        with contextlib.suppress(OSError):
            Path("/proc/sys/vm/drop_caches").write_text("3\n", encoding="utf-8")
        command = [sys.executable, "-c", TOUCH, str(size_to_touch)]
        subprocess.run(command, check=True, timeout=LIMIT_S)
    if size > 1:
        dist.barrier()


# in a separate process, so that the memory is free again when it ends
TOUCH = f"""
import mmap, pathlib, sys
lines = pathlib.Path("/proc/meminfo").read_text().splitlines()
free = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemFree:"))
size = min(int(sys.argv[1]), free - {SPARED_BYTES})
if size > 0:
    with mmap.mmap(-1, size) as memory:
        for start in range(0, size, mmap.PAGESIZE):
            memory[start] = 1
"""


def copied(target: Path, store_place: StorePlace, blobs: dict[str, Any]) -> float:
    """Return the seconds that the disk needs to copy these files durably."""
    target.mkdir()
    began = time.perf_counter()
    for blob in blobs.values():
        source = Path(store_place.root) / FOLDER / "blobs" / blob["digest"]
        with source.open("rb") as read, (target / blob["digest"]).open("wb") as write:
            shutil.copyfileobj(read, write, COPY_BYTES)
            write.flush()
            os.fsync(write.fileno())
    seconds = time.perf_counter() - began
    shutil.rmtree(target)
    return seconds


if __name__ == "__main__":
    main_of(rank_main, main)
