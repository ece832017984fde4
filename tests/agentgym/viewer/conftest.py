"""Stores with hand-written episodes, and viewers of them."""

import pytest

from agentgym.config import RunConfig, load_config
from agentgym.records import TRAJECTORIES, encode_trajectories
from agentgym.store.runstore import StorePlace
from agentgym.types import Item, Learned, Status, Trajectory, Turn
from agentgym.viewer.viewer import Viewer

SCRIPT = "<script>alert(1)</script>"
ESCAPE = "\x1b[31mred\x1b]0;title\x07"
BIDI = "user\u202egnp.exe\u2066"
HOSTILE = f"{SCRIPT}{ESCAPE}{BIDI}\u200bhidden\ud800 <img src=x onerror=alert(2)>"


def episode(task=0, sample=0, *, actions=("turn left", "move forward"), **changes):
    """Return an episode of two turns: 3 tokens read, 2 sampled, 1 read, 2 sampled."""
    turns = tuple(
        Turn(action, f"see: {action} done", 0.0, 3 * n + 3, 3 * n + 5, 4, info={"family": "go"})
        for n, action in enumerate(actions)
    )
    mask = (False,) * 3 + ((True, True, False) * len(actions))[:-1]
    fields = {
        "item": Item("babyai", task),
        "sample": sample,
        "step": 5,
        "max_turns": 4,
        "status": Status.TERMINATED,
        "reward": 1.0,
        "success": True,
        "first_observation": "goal: go to the red ball",
        "turns": turns,
        "input_ids": tuple(range(10, 10 + len(mask))),
        "action_mask": mask,
        "logprobs": tuple(-0.5 if own else 0.0 for own in mask),
        "timing": {"began_s": 1000.0 + task, "wall_s": 2.0},
    }
    return Trajectory(**{**fields, **changes})


def failed(task=0, sample=0, **changes):
    fields = {"status": Status.MAX_TURNS, "reward": 0.0, "success": False}
    return episode(task, sample, **{**fields, **changes})


KEPT = Learned(
    logprobs=(-0.5, -1.0, -0.5, -0.5),
    advantages=(1.0,) * 4,
    ratios=(1.2, 1, 0.8, 1),
    entropies=(0.6, 0.0, 0.7, 0.25),
)
TRAINING = {
    "env": {"name": "babyai", "options": {}, "dialect": "native"},
    "mix": [],
    "algorithm": {"recipe": "grpo"},
    "horizon": {"max_turns": [4]},
    "seed": 7,
}


class Made:
    """Store in a folder or on S3; `add` commits episodes to one of its steps."""

    def __init__(self, folder, uri=""):
        self.folder, self.uri = folder, uri
        self.store = StorePlace(uri or str(folder / "store"), lease_ttl_s=30.0).open()

    def add(self, episodes, *, step="stage-1", key="a", config=TRAINING, records=None, **told):
        """Commit episodes to a step. Return the manifest."""
        data = {TRAJECTORIES: encode_trajectories(episodes)} if episodes else {}
        with self.store.open(step, key * 64) as writer:
            fields = {
                "done": False,
                "state": {"global_step": 5, "max_turns": 4},
                "parents": {},
                "config": config,
                "blobs": {},
                "results": {},
                "timings": {},
            }
            return writer.commit(records={**data, **(records or {})}, **{**fields, **told})

    def cfg(self, *overrides) -> RunConfig:
        own = [f"store.path={self.folder / 'store'}", f'store.uri="{self.uri}"']
        return load_config("params.yaml", [*own, *overrides])


@pytest.fixture
def made(tmp_path):
    return Made(tmp_path)


@pytest.fixture
def view(made):
    """Return a function of overrides that opens a refreshed Viewer; the fixture closes all."""
    opened = []

    def open_viewer(*overrides):
        viewer = Viewer.open(made.cfg(*overrides))
        opened.append(viewer)
        viewer.refresh()
        viewer.indexing = None
        return viewer

    yield open_viewer
    for viewer in opened:
        viewer.close()
