"""The guides of docs/how-to/add-*.md, followed word by word on a copy of the sources."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from agentgym.config import load_config
from agentgym.pipeline.table import open_store
from agentgym.steps.context import METRICS
from agentgym.tracking.points import decode_points

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs/how-to"


def section(page, heading):
    """Return the text of a page's section; the whole page without a heading."""
    text = (PAGES / page).read_text()
    if not heading:
        return text
    return re.search(rf"^## {heading}\n(.*?)(?=^## |\Z)", text, re.DOTALL | re.MULTILINE)[1]


GUIDES = {
    "An advantage": section("add-an-advantage-or-loss.md", "An advantage"),
    "A loss": section("add-an-advantage-or-loss.md", "A loss"),
    "A training loop": section("add-a-training-loop.md", ""),
    "An environment": section("add-a-built-in-environment.md", ""),
    "A step": section("add-to-the-pipeline.md", "A step"),
    "A metric": section("add-to-the-pipeline.md", "A metric"),
}
# an instruction: a paragraph with the position, then the block to insert
BLOCK = re.compile(
    r"(?P<where>(?:^[^\n`][^\n]*\n)*^[^\n]*:)\n\n```(?P<language>\w+)\n(?P<text>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)
FENCE = re.compile(r"^```\w+$", re.MULTILINE)
PLACE = re.compile(
    r"^(?:New file `(?P<new>[^`]+)`|In `(?P<file>[^`]+)`,"
    r" (?:(?P<how>before|after|in place of) the line (?P<begins>that begins with )?`(?P<line>.+)`"
    r"|at its end)):$"
)
COPIED = (
    "agentgym",
    "envs",
    "sites",
    "services",
    "tasks",
    "flows",
    "tests",
    "data/make_standin.py",
)
SHORT = {
    "deterministic": True,  # results do not depend on the load of the machine
    "warm_start": {"num_demos": 60, "steps": 80, "batch_size": 16, "optimizer": {"lr": 0.005}},
    "horizon": {"kind": "fixed", "max_turns": [5], "stage_steps": [2]},
    "evaluation": {"num_items": 6, "num_samples": 1, "k": [1], "max_turns": 5},
    "validation": {"every": 0},
}
# runs commands of the program until one fails, and prints their outputs
MAIN = """
import ast, contextlib, io, json, sys
from agentgym.cli import main
printed = []
for words in ast.literal_eval(sys.argv[1]):
    with contextlib.redirect_stdout(io.StringIO()) as output:
        code = main(words)
    printed.append(output.getvalue())
    if code:
        sys.exit(f"{words}: {code}: {output.getvalue()}")
print(json.dumps(printed))
"""


@dataclass
class Copy:
    """Copy of the sources, as a reader of the guides has them."""

    folder: Path
    touched: set[str] = field(default_factory=set)
    commands: list[str] = field(default_factory=list)

    def follow(self, guide):
        """Insert every block of the guide at its position, then format the files."""
        for block in BLOCK.finditer(GUIDES[guide]):
            if block["language"] == "sh":
                self.commands += block["text"].splitlines()
                continue
            place = place_of(block)
            assert place, f"{guide}: no position for a block in: {block['where']}"
            path = self.folder / (place["new"] or place["file"])
            if place["new"]:
                assert not path.exists()
                path.parent.mkdir(exist_ok=True)
                path.write_text(block["text"])
            else:
                path.write_text(inserted(path.read_text(), place, block["text"]))
            self.touched.add(str(path.relative_to(self.folder)))
        self.run(f"ruff format --quiet {self.python()}")
        return self

    def python(self):
        return " ".join(name for name in sorted(self.touched) if name.endswith(".py"))

    def counted(self):
        """Return the files that count in the page's table."""
        return {name for name in self.touched if not name.startswith("tests/")}

    def run(self, command, code=0, **more):
        """Run one line of the page. Return its output."""
        return self.ended(["bash", "-o", "pipefail", "-c", command], code, **more)

    def ended(self, words, code=0, **more):
        ended = subprocess.run(
            words,
            cwd=self.folder,
            env={
                **os.environ,
                "PYTHONPATH": str(self.folder),
                "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            },
            capture_output=True,
            text=True,
            check=False,
            **more,
        )
        assert ended.returncode == code, f"{ended.args}\n{ended.stdout}{ended.stderr}"
        return ended.stdout

    def run_all(self):
        """Return the outputs of all commands.
        Commands of `agentgym` share one process, which pays for its imports once.
        """
        others = [line for line in self.commands if not line.startswith("agentgym ")]
        outputs = {line: self.run(line) for line in others}
        ours = [shlex.split(line)[1:] for line in self.commands if line not in others]
        printed = iter(json.loads(self.ended(["python", "-c", MAIN, repr(ours)])))
        return [outputs[line] if line in outputs else next(printed) for line in self.commands]

    def points(self, step="stage-1", **algorithm):
        """Return the metrics of a step's commits under these settings, in order."""
        store = open_store(load_config(self.folder / "params.yaml"))
        (head,) = (
            each
            for each in store.heads(step)
            if algorithm.items() <= each.config.get("algorithm", {}).items()
        )
        return [
            point.metrics
            for commit in store.history(step, head.key)
            for point in decode_points(store.read(commit, METRICS))
        ]


def place_of(block):
    """Return the match of PLACE in a block's paragraph, None if it names no position."""
    return PLACE.search(" ".join(block["where"].split()))


def inserted(text, place, block):
    if place["how"] is None:
        return f"{text}\n\n{block}"
    lines = text.splitlines(keepends=True)
    is_named = str.startswith if place["begins"] else str.__eq__
    (at,) = (at for at, line in enumerate(lines) if is_named(line.strip(), place["line"]))
    first, last = {"before": (at, at), "after": (at + 1, at + 1), "in place of": (at, at + 1)}[
        place["how"]
    ]
    return "".join([*lines[:first], block, *lines[last:]])


@pytest.fixture(scope="module")
def make_copy(tiny_params, empty_ledger):
    def make(folder):
        for name in COPIED:
            source, target = ROOT / name, folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            if source.is_dir():
                shutil.copytree(source, target)  # compiled files included
            else:
                shutil.copy(source, target)
        shutil.copy(ROOT / "pyproject.toml", folder)
        shutil.copy(empty_ledger, folder)
        tiny_params(folder, **SHORT)
        return Copy(folder)

    return make


@pytest.fixture
def copy(make_copy, tmp_path):
    return make_copy(tmp_path / "project")


# guides whose commands run one after the other. `A step` is last: it evaluates, and an audit of a
# run before that step would find another run's evaluations.
TRAINING = ("A metric", "An advantage", "A loss", "A training loop", "A step")


@pytest.fixture(scope="module")
def followed(make_copy, tmp_path_factory):
    """A copy that follows these guides, and the outputs of their commands by guide.
    Together they train in one process from one warm start.
    """
    copy, outputs = make_copy(tmp_path_factory.mktemp("followed") / "project"), {}
    lines = {}
    for guide in TRAINING:
        copy.commands = []
        lines[guide] = copy.follow(guide).commands
    copy.commands = [line for guide in TRAINING for line in lines[guide]]
    printed = iter(copy.run_all())
    for guide in TRAINING:
        outputs[guide] = {" ".join(line.split()[:2]): next(printed) for line in lines[guide]}
    return copy, outputs


@pytest.mark.parametrize(
    ("guide", "files"),
    [
        ("An advantage", {"agentgym/algorithms/advantages.py", "agentgym/algorithms/recipe.py"}),
        ("A loss", {"agentgym/algorithms/losses.py", "agentgym/algorithms/recipe.py"}),
        (
            "A training loop",
            {
                "agentgym/algorithms/recipe.py",
                "agentgym/config/algorithm.py",
                "agentgym/training/rejection.py",
            },
        ),
        (
            "A step",
            {
                "agentgym/evaluation/unsolved.py",
                "agentgym/pipeline/table.py",
                "agentgym/steps/step.py",
            },
        ),
        ("A metric", {"agentgym/rollouts/collect.py"}),
    ],
)
def test_a_guide_alone_touches_these_files_and_leaves_nothing_undefined(copy, guide, files):
    copy.follow(guide)
    assert copy.counted() == files
    copy.run(f"ruff check {copy.python()}")


@pytest.mark.slow
def test_an_advantage_of_the_guide_trains(followed):
    copy, outputs = followed
    assert "1 passed" in outputs["An advantage"]["python -m"]
    assert "stage-1: ran" in outputs["An advantage"]["agentgym step"]
    assert any(row.get("actor/grad_norm", 0.0) > 0 for row in copy.points(recipe="max_rl"))


@pytest.mark.slow
def test_a_loss_of_the_guide_trains(followed):
    copy, outputs = followed
    assert "1 passed" in outputs["A loss"]["python -m"]
    assert "stage-1: ran" in outputs["A loss"]["agentgym step"]
    rows = copy.points(recipe="gmpo")
    assert any(row.get("actor/grad_norm", 0.0) > 0 and "actor/clip_frac" in row for row in rows)


@pytest.mark.slow
def test_a_training_loop_of_the_guide_trains_and_its_run_passes_the_audit(followed):
    copy, outputs = followed
    assert "stage-1: ran" in outputs["A training loop"]["agentgym step"]
    assert "audit passed" in outputs["A training loop"]["agentgym audit"]
    rows = copy.points(recipe="raft")
    assert len(rows) == 2
    assert any(row["actor/num_kept"] > 0 and row["sft/grad_norm"] > 0 for row in rows)


@pytest.mark.slow
def test_a_step_of_the_guide_is_in_the_table_runs_once_and_is_in_dvc_yaml(followed):
    copy, outputs = followed
    assert re.search(r"run +unsolved +after evaluate-stage-1", outputs["A step"]["agentgym plan"])
    assert "unsolved: ran" in outputs["A step"]["agentgym step"]
    assert "python -m agentgym step unsolved" in (copy.folder / "dvc.yaml").read_text()
    (row,) = copy.points(step="unsolved")
    assert 0.0 <= row["unsolved/frac"] <= 1.0
    assert re.search(r"skip +unsolved +done", copy.run("agentgym plan"))


@pytest.mark.slow
def test_a_metric_of_the_guide_arrives_in_the_points_of_the_step(followed):
    copy, outputs = followed
    assert "audit passed" in outputs["A metric"]["agentgym audit"]
    rows = copy.points(recipe="grpo")
    assert len(rows) == 2
    assert all(0.0 <= row["rollout/repeat_frac"] <= 1.0 for row in rows)


@pytest.mark.slow
def test_an_environment_is_three_files_is_served_and_trained_on(copy, tiny_params):
    tiny_params(copy.folder, **SHORT, data={"path": "data/AgentGym-RL-Data-ID"})
    copy.follow("An environment")
    assert copy.counted() == {
        "data/make_standin.py",
        "envs/hanoi/README.md",
        "envs/hanoi/__init__.py",
    }
    outputs = dict(zip(copy.commands, copy.run_all(), strict=True))
    (identities,) = (text for line, text in outputs.items() if line.startswith("echo "))
    first, last, beyond = json.loads(identities)
    assert first != last
    assert beyond is None  # four discs have 80 tasks
    assert any("stage-1: ran" in text for text in outputs.values())
    train, test = (
        [each["item_id"] for each in json.loads((copy.folder / "data" / name).read_text())]
        for name in (
            "AgentGym-RL-Data-ID/train/hanoi_train.json",
            "AgentGym-RL-Data-ID/eval/hanoi_test.json",
        )
    )
    assert sorted(train + test) == sorted(f"hanoi_{task}" for task in range(80))


def test_the_new_environment_plays_an_episode_over_http(copy):
    copy.follow("An environment")
    server = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "envs",
            *["serve", "hanoi", "--expert", "--owner-pipe", "--port-file", "port"],
        ],
        cwd=copy.folder,
        env={**os.environ, "PYTHONPATH": str(copy.folder)},
        stdin=subprocess.PIPE,
    )
    try:
        copy.run("until test -s port; do sleep 0.1; done", timeout=60)
        address = f"http://127.0.0.1:{(copy.folder / 'port').read_text().strip()}"
        opened = ask(f"{address}/create", request_key="one", task_id=0)
        assert opened["observation"].endswith("pegs of discs 1 to 4: 1 1 1 1")
        session, turn = opened["session_id"], 0
        wrong = ask(f"{address}/step", session_id=session, turn=1, action="move 2 3")
        assert wrong["observation"] == "invalid action"
        reply = wrong
        for turn in range(2, 17):  # 2^4 - 1 moves
            assert not reply["terminated"]
            action = ask(f"{address}/expert", session_id=session)["action"]
            reply = ask(f"{address}/step", session_id=session, turn=turn, action=action)
        assert reply["success"]
        assert reply["reward"] == 1.0
    finally:
        server.stdin.close()
        server.wait(30)


def ask(url, **message):
    request = urllib.request.Request(
        url, json.dumps(message).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(
        request, timeout=30
    ) as r:
        return json.load(r)


@pytest.mark.parametrize("guide", GUIDES)
def test_every_block_of_a_guide_is_followed(guide):
    assert len(BLOCK.findall(GUIDES[guide])) == len(FENCE.findall(GUIDES[guide])) > 1


def test_the_table_says_how_many_files_each_guide_touches(copy):
    page = (PAGES / "add-to-the-algorithms.md").read_text()
    counts = {}
    for guide in GUIDES:
        before = copy.counted()
        copy.follow(guide)
        blocks = BLOCK.finditer(GUIDES[guide])
        places = [place_of(block) for block in blocks if block["language"] != "sh"]
        files = {place["new"] or place["file"] for place in places}
        counts[guide] = len([name for name in files if not name.startswith("tests/")])
        assert before <= copy.counted()
    counted = re.findall(r"^\| an? (?:built-in )?(.+?) \| (\d) \|", page, re.MULTILINE)
    assert {name: int(count) for name, count in counted} == {
        guide.partition(" ")[2]: count for guide, count in counts.items()
    }
    assert counts["An advantage"] == counts["A loss"] == 2
    assert counts["A training loop"] == counts["An environment"] == 3
    # all guides together, after `ruff format`
    copy.run(f"ruff check {copy.python()}")
    copy.run("lint-imports")


@pytest.mark.slow
def test_what_the_guides_write_is_typed(copy):
    for guide in GUIDES:
        copy.follow(guide)
    copy.run(f"mypy --cache-dir {ROOT}/.mypy_cache")
