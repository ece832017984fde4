"""What one process of several holds and waits for, where a large model is built, committed and
resumed: `python benchmarks/checkpoints.py [--out FILE]`.

A model of 0.5 billion parameters is made on the spot and trained for an optimizer step by one
process and by two (gloo). Memory is the anonymous part of each process above what it had before the
model, at its peak in each phase; time is compared with a copy of as many bytes on the same disk.
Before a commit, a resume and a copy the page cache is emptied, where that is allowed, and memory
that is free is touched: a virtual machine hands it back to its host, from where it comes at up to
two seconds a GB. Commit, resume and copy take turns, and medians are compared, because other
machines use the same disk.
Writes docs/results/checkpoints.json; fails above the limits.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from pipeline import ROOT, machine

from agentgym.algorithms.batch import Batch
from agentgym.config import OptimizerConfig
from agentgym.learner.learner import LocalLearner
from agentgym.learner.plan import LearnerPlan
from agentgym.learner.process_group import ProcessGroup, SingleProcess
from agentgym.models.checkpoint import OPTIMIZER, WEIGHTS
from agentgym.models.empty import empty_model
from agentgym.models.tensorfiles import Snapshot, StoredTensors, TensorFile
from agentgym.store.manifest import Blob, Manifest
from agentgym.store.place import StorePlace
from agentgym.store.runstore import folder_name

LARGE = {  # of Qwen2.5-0.5B
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "num_hidden_layers": 24,
    "vocab_size": 151936,
}
MEMORY_LIMIT, TIME_LIMIT = 0.65, 1.5
PHASES = ("build", "commit", "resume")
TIMED = ("commit", "resume", "copy")
STEP, KEY = "stage-1", "c" * 64
SAMPLE_S = 0.002
COPY_BYTES = 16 << 20
SETTLED_BYTES = 4 << 30
SPARED_BYTES = 1 << 30  # of free memory that is left untouched
TOUCHED = 8  # times a model's weights: two copies of them and of the optimizer, and room
LIMIT_S = 1800.0
ROUNDS = 3
Start = Callable[[list[str]], Any]  # of a process, which can be waited for and killed


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "docs/results/checkpoints.json")
    parser.add_argument("--folder", type=Path, help="on the disk that is measured")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=chosen.folder) as folder:
        result = compared(Path(folder), LARGE, ROUNDS)
    result = {"machine": machine(), "command": "python benchmarks/checkpoints.py", **result}
    chosen.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    sys.stdout.write(json.dumps(result, indent=1) + "\n")
    within = [
        *(each <= MEMORY_LIMIT for each in result["memory_of_two_to_one"].values()),
        *(each <= TIME_LIMIT for row in result["ranks"] for each in row["time_to_copy"].values()),
    ]
    return 0 if all(within) else 1


def compared(
    folder: Path, size: dict[str, int], num_rounds: int, start: Start = subprocess.Popen
) -> dict[str, Any]:
    """Both numbers of processes, one after the other, on a model of this size."""
    text = architecture(size)
    place = StorePlace(str(folder / "store"), 30.0)
    weights = made(place, text)
    rows = []
    for num_ranks in (1, 2):
        rounds = [
            of_round(folder / f"{num_ranks}-{each}", num_ranks, place, text, weights, start)
            for each in range(num_rounds)
        ]
        seconds = {phase: [each["seconds"][phase] for each in rounds] for phase in TIMED}
        medians = {phase: statistics.median(each) for phase, each in seconds.items()}
        rows.append(
            {
                "ranks": num_ranks,
                "bytes": rounds[0]["bytes"],
                "anonymous_mib_above_idle": {
                    phase: [max(each["mib"][phase]) for each in rounds] for phase in PHASES
                },
                "seconds": seconds,
                "time_to_copy": {
                    phase: round(medians[phase] / medians["copy"], 2)
                    for phase in ("commit", "resume")
                },
            }
        )
    one, two = rows
    return {
        "num_parameters": sum(each.numel() for each in empty(text).parameters()),
        "ranks": rows,
        "memory_of_two_to_one": {
            phase: round(
                max(two["anonymous_mib_above_idle"][phase])
                / min(one["anonymous_mib_above_idle"][phase]),
                3,
            )
            for phase in PHASES
        },
    }


def of_round(
    folder: Path,
    num_ranks: int,
    place: StorePlace,
    architecture: str,
    weights: dict[str, Any],
    start: Start,
) -> dict[str, Any]:
    """What a commit, a copy and a resume take, once. folder: begins the names of what is made."""

    def told(phase: str, kept: dict[str, Any]) -> list[dict[str, Any]]:
        place_of = folder.with_name(f"{folder.name}-{phase}")
        return ranks(place_of, num_ranks, architecture, weights, kept, start=start)

    first = told("first", {})
    kept = {name: blob for each in first for name, blob in each["blobs"].items()}
    settle(weights)
    copy_s = copied(folder.with_name("copy"), place, kept)
    again = told("again", kept)
    removed(place, kept)
    return {
        "bytes": sum(blob["size"] for blob in kept.values()),
        "mib": {
            "build": [each["build_mib"] for each in first],
            "commit": [each["commit_mib"] for each in first],
            "resume": [each["build_mib"] for each in again],
        },
        "seconds": {
            "commit": max(each["commit_s"] for each in first),
            "resume": max(each["build_s"] for each in again),
            "copy": round(copy_s, 2),
        },
    }


def architecture(size: Mapping[str, Any]) -> str:
    """config.json of a Qwen2."""
    return json.dumps(
        {
            "architectures": ["Qwen2ForCausalLM"],
            "model_type": "qwen2",
            "tie_word_embeddings": True,
            "max_position_embeddings": 4096,
            **size,
        }
    )


def removed(place: StorePlace, blobs: Mapping[str, Any]) -> None:
    for blob in blobs.values():
        (Path(place.root) / folder_of() / "blobs" / blob["digest"]).unlink(missing_ok=True)


def empty(architecture: str) -> Any:
    return empty_model(architecture, torch.float32)


def folder_of() -> str:
    return f"steps/{folder_name(STEP, KEY)}"


def made(place: StorePlace, architecture: str) -> dict[str, Any]:
    """Drawn weights, stored. Result: their blobs."""
    with place.open().open(STEP, KEY):
        pass  # makes the folder
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: torch.randn(each.shape, generator=generator).mul_(0.02)
        if each.ndim > 1
        else torch.ones(each.shape)
        for name, each in empty(architecture).named_parameters()
    }
    written = Snapshot({WEIGHTS: TensorFile.of(tensors)}).write(place, STEP, KEY)
    return {name: blob.model_dump() for name, blob in written.items()}


def ranks(
    folder: Path,
    size: int,
    architecture: str,
    weights: dict[str, Any],
    kept: dict[str, Any],
    program: Path = Path(__file__),
    start: Start = subprocess.Popen,
) -> list[dict[str, Any]]:
    """What each process tells of a step from these weights, or of a resume from what was kept, if
    something was. program: whose `--rank FOLDER RANK SIZE` it is; start: what begins one.
    """
    folder.mkdir()
    asked = {
        "root": str(folder.parent / "store"),
        "architecture": architecture,
        "weights": weights,
        "blobs": kept or weights,
        "resumes": bool(kept),
    }
    (folder / "asked.json").write_text(json.dumps(asked), encoding="utf-8")
    processes = [
        start([sys.executable, str(program), "--rank", str(folder), str(rank), str(size)])
        for rank in range(size)
    ]
    try:
        codes = [process.wait(LIMIT_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
    if any(codes):
        raise RuntimeError(f"processes ended with codes {codes}")
    return [
        json.loads((folder / f"told-{rank}.json").read_text(encoding="utf-8"))
        for rank in range(size)
    ]


def asked_of(
    folder: Path, rank: int, size: int
) -> tuple[dict[str, Any], StorePlace, LearnerPlan, ProcessGroup]:
    """What `ranks` asks for, where it is stored, and the processes it is asked of."""
    asked = json.loads((folder / "asked.json").read_text(encoding="utf-8"))
    manifest = Manifest(
        step=STEP,
        key=KEY,
        seq=0,
        done=False,
        parents={},
        config={},
        state={},
        blobs={name: Blob(**blob) for name, blob in asked["blobs"].items()},
        results={},
    )
    place = StorePlace(asked["root"], 30.0)
    store = place.open()
    states = {OPTIMIZER: StoredTensors.of(store, manifest, OPTIMIZER)} if asked["resumes"] else {}
    plan = LearnerPlan(
        asked["architecture"],
        StoredTensors.of(store, manifest, WEIGHTS),
        OptimizerConfig(lr=1e-5, warmup_steps=0),
        10,
        optimizer_states=states,
    )
    group = joined(folder, rank, size)
    # what is loaded at the first use is no part of a model
    LocalLearner(empty(SMALL), plan.optimizer, total_steps=1, ranks=group).snapshot()
    return asked, place, plan, group


def rank_main(folder: Path, rank: int, size: int) -> None:
    torch.set_num_threads(1)
    asked, place, plan, group = asked_of(folder, rank, size)
    told: dict[str, Any] = {}
    settle(asked["weights"], rank, size)
    with measured(told, "build"):
        learner = plan.build(group)
    if not asked["resumes"]:
        learner.sft_step(batch(), step=1)
        settle(asked["weights"], rank, size)
        with measured(told, "commit"):
            written = learner.snapshot().write(place, STEP, KEY)
        told["blobs"] = {name: blob.model_dump() for name, blob in written.items()}
    (folder / f"told-{rank}.json").write_text(json.dumps(told), encoding="utf-8")
    if size > 1:
        dist.destroy_process_group()


SMALL = json.dumps(
    {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "tie_word_embeddings": True,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "num_hidden_layers": 1,
        "vocab_size": 16,
    }
)


def joined(folder: Path, rank: int, size: int) -> ProcessGroup:
    if size == 1:
        return SingleProcess()
    from agentgym.learner.sharded import Sharded

    meeting = f"file://{folder}/meeting"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=size)
    return Sharded(torch.device("cpu"))


def batch() -> Batch:
    """Two short sequences: the step is there for the optimizer's state."""
    starts = torch.tensor([0, 8, 16])
    mask = torch.ones(16, dtype=torch.bool)
    mask[starts[:-1]] = False
    zeros, groups = torch.zeros(16), torch.arange(2)
    return Batch(torch.arange(16), starts, mask, zeros, zeros, groups, groups.bool(), 1.0)


@contextlib.contextmanager
def measured(told: dict[str, Any], phase: str) -> Iterator[None]:
    """Seconds of the block, and the peak of anonymous memory above what was there at the first."""
    told.setdefault("idle_kib", anonymous_kib())
    peak, over = [anonymous_kib()], threading.Event()

    def watch() -> None:
        while not over.wait(SAMPLE_S):
            peak[0] = max(peak[0], anonymous_kib())

    watcher, began = threading.Thread(target=watch), time.perf_counter()
    watcher.start()
    try:
        yield
    finally:
        told[f"{phase}_s"] = round(time.perf_counter() - began, 2)
        over.set()
        watcher.join()
        told[f"{phase}_mib"] = round((peak[0] - told["idle_kib"]) / 1024)


def anonymous_kib() -> int:
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1])
    raise RuntimeError("no RssAnon in /proc/self/status")


def settle(weights: Mapping[str, Any], rank: int = 0, size: int = 1) -> None:
    """See above; entered by all ranks. weights: the blobs of a model's. A small one's times mean
    nothing anyway, and others may be at work on the machine.
    """
    most = TOUCHED * sum(blob["size"] for blob in weights.values())
    if most < SETTLED_BYTES:
        return
    if rank == 0:
        os.sync()
        with contextlib.suppress(OSError):
            Path("/proc/sys/vm/drop_caches").write_text("3\n", encoding="utf-8")
        command = [sys.executable, "-c", TOUCH, str(most)]
        subprocess.run(command, check=True, timeout=LIMIT_S)
    if size > 1:
        dist.barrier()


# in a process of its own, whose memory is free again when it ends
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


def copied(target: Path, place: StorePlace, kept: dict[str, Any]) -> float:
    """Seconds that the disk needs to copy these files and make the copies durable."""
    target.mkdir()
    began = time.perf_counter()
    for blob in kept.values():
        source = Path(place.root) / folder_of() / "blobs" / blob["digest"]
        with source.open("rb") as read, (target / blob["digest"]).open("wb") as write:
            shutil.copyfileobj(read, write, COPY_BYTES)
            write.flush()
            os.fsync(write.fileno())
    seconds = time.perf_counter() - began
    shutil.rmtree(target)
    return seconds


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        rank_main(Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
        sys.exit()
    sys.exit(main())
