"""Training on few items: does it teach those or all items? `python benchmarks/same_items.py`.

Two runs start from one warm start: one samples the same items in every optimizer step, the other
new ones, as usual.
If the first learns and the second does not, the learner works, and its progress on a few episodes
of one item does not transfer to the next.
Writes docs/results/same_items.json.
"""

from __future__ import annotations

import itertools
import shutil
import statistics
import sys
import tempfile
from pathlib import Path
from unittest import mock

from harness import ROOT, config_in, parser_of, stage_points, write

from agentgym.config import RunConfig
from agentgym.data.items import ItemStream
from agentgym.pipeline.run import run_with_parents
from agentgym.types import Item

PROFILE = ROOT / "profiles/textcraft-cpu.yaml"
SETTINGS = (
    *("warm_start.steps=500", "rollout.items_per_step=8", "horizon.kind=fixed"),
    *("horizon.max_turns=[4]", "validation.every=0", "horizon.stage_steps=[40]"),
)
RATES = (3e-4, 1e-4)


def main() -> None:
    chosen = parser_of(__doc__, "same_items.json").parse_args()
    runs = []
    with tempfile.TemporaryDirectory() as folder:
        new, same = Path(folder) / "new", Path(folder) / "same"
        run_with_parents("warm-start", config_in(new, *SETTINGS, params=PROFILE))
        shutil.copytree(new, same)  # separate stores: step keys do not depend on the sampled items
        for store, rate in itertools.product((same, new), RATES):
            cfg = config_in(store, *SETTINGS, f"optimizer.lr={rate}", params=PROFILE)
            success = train(cfg, again=store == same)
            runs.append({"items": store.name, "lr": rate, "success": success})
            sys.stdout.write(f"{store.name:4} items, lr {rate:g}: {fifths(success)}\n")
    write(chosen.out, {"settings": SETTINGS, "runs": runs})


def train(cfg: RunConfig, *, again: bool) -> list[float]:
    """Train stage 1; return the success of the sampled episodes of each optimizer step."""
    first_items: list[Item] = []
    usual = ItemStream.next

    def first(stream: ItemStream, number: int) -> list[Item]:
        new = usual(stream, number)
        if not first_items:
            first_items.extend(new)
        return list(first_items)

    with mock.patch.object(ItemStream, "next", first if again else usual):
        run_with_parents("stage-1", cfg)
    return [point.metrics["rollout/success"] for point in stage_points(cfg)]


def fifths(values: list[float]) -> list[float]:
    """Return means over five parts of equal length, in order."""
    ends = [round(part * len(values) / 5) for part in range(6)]
    parts = itertools.pairwise(ends)
    return [round(statistics.mean(values[start:end]), 3) for start, end in parts]


if __name__ == "__main__":
    main()
