"""Tests for importing trajectories in AgentGym's layout: parsing, refusals, and tracking by DVC."""

import json
import shutil
from pathlib import Path

import pytest

from agentgym.cli import main
from agentgym.config import ConfigError, load_config
from agentgym.data.items import DataError, load_splits
from agentgym.data.published import check_pin
from agentgym.data.trajectories import (
    Recorded,
    chosen,
    decode,
    encode,
    input_digest,
    load_trajectories,
    outside,
    read_file,
)
from agentgym.types import Item

ROOT = Path(__file__).parents[3]
INSTRUCTIONS = [
    {"from": "human", "loss": None, "value": "You are in a maze. Answer with Thought and Action."},
    {
        "from": "gpt",
        "loss": False,
        "value": "OK. I'll follow your instructions and try my best to solve the task.",
    },
]


def human(value, loss=None):
    return {"from": "human", "loss": loss, "value": value}


def gpt(value, loss=True):
    return {"from": "gpt", "loss": loss, "value": value}


def row(item_id, *replies, opening=INSTRUCTIONS):
    """Return a published row: instructions, acknowledgment, then observations and replies."""
    said = [message for reply in replies for message in (human("you see"), gpt(reply))]
    return {"item_id": item_id, "conversations": [*opening, *said, human("done")]}


@pytest.fixture
def write(tmp_path):
    def write(rows, name="published.json"):
        path = tmp_path / name
        path.write_text(rows if isinstance(rows, str) else json.dumps(rows))
        return path

    return write


@pytest.fixture
def lists(tmp_path):
    """A dataset of 40 train and 5 test items; some train items are for validation."""
    for name, first, count in (
        ("train/babyai_train.json", 0, 40),
        ("eval/babyai_test.json", 100, 5),
    ):
        (tmp_path / "lists" / name).parent.mkdir(parents=True)
        (tmp_path / "lists" / name).write_text(
            json.dumps([{"item_id": f"babyai_{task}"} for task in range(first, first + count)])
        )
    return load_splits(tmp_path / "lists", "babyai", validation_fraction=0.2, seed=0)


def test_what_the_agent_said_is_read_without_the_manual_the_promise_and_a_system_text(write):
    react = "Thought:\nI turn.\n\nAction:\nturn left"
    rows = [
        row("babyai_3", react, "Action: move forward"),
        row("alfworld_trial_T1_12", "go", opening=()),
        row(
            "babyai_4",
            "left",
            opening=[{"from": "system", "loss": None, "value": "be good"}, *INSTRUCTIONS],
        ),
        # the reply is missing
        {"item_id": "babyai_5", "conversations": [human("you see"), gpt("left", None)]},
    ]
    found, recorded, refused = read_file(write(rows))
    assert (found, refused) == (rows, [])
    assert [(each.item.item_id, each.replies) for each in recorded] == [
        ("babyai_3", (react, "Action: move forward")),
        ("alfworld_12", ("go",)),
        ("babyai_4", ("left",)),
        ("babyai_5", ("left",)),
    ]
    assert decode(encode(recorded)) == recorded


REFUSED = [
    ({"item_id": "babyai_1", "conversations": None}, "conversations is null, not a list"),
    (row("babyai", "left"), 'item_id "babyai" is not `<env>_<index>`'),
    (row("../babyai_1", "left"), 'item_id "../babyai_1" is not `<env>_<index>`'),
    ({"conversations": INSTRUCTIONS}, "item_id null is not `<env>_<index>`"),
    (row("babyai_1"), "holds no reply of the agent"),
    (
        {"item_id": "babyai_1", "conversations": [human("a"), human("b")]},
        "message 1 is from human; human and gpt must take turns, human first",
    ),
    (
        {"item_id": "babyai_1", "conversations": [human("a"), {"from": "robot", "value": "b"}]},
        'message 1 is from "robot"',
    ),
    ({"item_id": "babyai_1", "conversations": [human("a"), "left"]}, "message 1 is from null"),
    (
        {"item_id": "babyai_1", "conversations": [human("a"), {"from": "\ud83d", "value": "b"}]},
        r'message 1 is from "\ud83d"; expected human or gpt',
    ),
    (
        {"item_id": "babyai_1", "conversations": [human("a"), gpt(["left"])]},
        'message 1 has the value ["left"], which is no text',
    ),
    ({"item_id": "babyai_1", "conversations": [human("a"), gpt("\ud83d")]}, "which is no text"),
    (row("babyai_1", "x" * 16_385), "message 3 has 16385 characters; an environment reads 16384"),
    (
        {"item_id": "babyai_1", "conversations": [*INSTRUCTIONS, human("a"), gpt("left", False)]},
        "message 3 is an action with loss false",
    ),
    (
        {"item_id": "babyai_1", "conversations": [human("a"), gpt("left", "yes")]},
        'message 1 has the loss "yes"',
    ),
    (row("babyai_0", "left"), "repeats row 0"),
]


@pytest.mark.parametrize(("bad", "reason"), REFUSED, ids=[reason[:30] for _, reason in REFUSED])
def test_a_row_that_cannot_be_learned_from_is_refused_with_its_reason_and_the_others_are_read(
    write, bad, reason
):
    _, recorded, (refusal,) = read_file(
        write([row("babyai_0", "left"), bad, row("babyai_0", "right")])
    )
    assert refusal.row == 1
    assert reason in str(refusal)
    assert str(refusal).startswith("published.json row 1: ")
    assert [each.row for each in recorded] == [0, 2]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[", "is not valid JSON"),
        ("[" * 100_000, "is not valid JSON"),
        ("[]", "must hold a list of objects with item_id and conversations, got an empty list"),
        ('{"item_id": "babyai_1"}', "got dict"),
        ("[5]", "row 0 is 5"),
    ],
)
def test_a_file_of_another_kind_is_refused_whole(write, content, message):
    with pytest.raises(DataError, match=message):
        read_file(write(content))


def test_an_item_that_is_held_out_or_in_no_list_is_refused(write, lists):
    _, recorded, _ = read_file(
        write(
            [
                row("babyai_1", "left"),
                row("babyai_102", "left"),
                row("babyai_77", "left"),
                row("chess_1", "e4"),
            ]
        )
    )
    assert [
        str(refusal).partition(": ")[2] for refusal in outside(recorded, {"babyai": lists})
    ] == [
        "babyai_102 is a test item; learning from it, the test is not held out",
        "babyai_77 is not in the train list of babyai",
        "there are no item lists of chess",
    ]


def test_a_run_learns_from_train_items_alone(tmp_path, write, lists):
    held = lists.validation[0].item_id
    write(
        [row(item.item_id, "left") for item in (*lists.train, *lists.validation)],
        "babyai_trajectories.json",
    )
    loaded = load_trajectories(tmp_path, {"babyai": lists})
    assert [each.item for each in loaded] == list(lists.train)
    write([row(held, "left")], "babyai_trajectories.json")
    with pytest.raises(DataError, match="holds no trajectory of a train item of babyai"):
        load_trajectories(tmp_path, {"babyai": lists})
    write([row("babyai_1", "left"), row("babyai_101", "left")], "babyai_trajectories.json")
    with pytest.raises(
        DataError, match=r"babyai_trajectories\.json row 1: babyai_101 is a test item"
    ):
        load_trajectories(tmp_path, {"babyai": lists})
    with pytest.raises(
        DataError,
        match=(
            r"chess_trajectories\.json does not exist; bring it with `agentgym data"
            r" import-trajectories`"
        ),
    ):
        load_trajectories(tmp_path, {"chess": lists})


def test_trajectories_of_an_item_stay_together_and_environments_take_turns():
    said = [
        Recorded(Item(env, task), (str(n),))
        for env in ("a", "b")
        for task in (1, 2)
        for n in range(2)
    ]
    found = chosen(said, {"a": 1.0, "b": 1.0}, [3, 2, 1, 0], 6)
    assert [(each.item.item_id, each.replies[0]) for each in found] == [
        (item, reply) for item in ("a_2", "b_2", "a_1") for reply in ("0", "1")
    ]


def test_the_content_of_the_files_is_in_the_keys_only_where_it_is_read(tmp_path, write, lists):
    write([row("babyai_1", "left")], "babyai_trajectories.json")
    set_ = [f"data.path={tmp_path / 'lists'}", f"data.trajectories={tmp_path}"]
    expert, reading = (
        load_config(ROOT / "params.yaml", [*set_, f"warm_start.source={source}"])
        for source in ("expert", "trajectories")
    )
    before = [input_digest(cfg) for cfg in (expert, reading)]
    write([row("babyai_1", "right")], "babyai_trajectories.json")
    after = [input_digest(cfg) for cfg in (expert, reading)]
    assert before[0] == after[0]
    assert before[1] != after[1]


def test_trajectories_need_a_warm_start():
    with pytest.raises(
        ConfigError,
        match=r"warm_start\.source trajectories with warm_start\.enabled false reads none",
    ):
        load_config(
            ROOT / "params.yaml", ["warm_start.source=trajectories", "warm_start.enabled=false"]
        )


@pytest.mark.timeout(300)
def test_imported_trajectories_are_pinned_by_dvc_and_what_is_refused_is_told(
    dvc_project, write, lists, tmp_path, capsys
):
    params = ("--params", str(ROOT / "params.yaml"), "--set", f"data.path={tmp_path / 'lists'}")

    def cli(*words):
        code = main(["data", *words, *params])
        return code, capsys.readouterr()

    good, bad = (
        row("babyai_1", "left", "Thought: é\nAction: right"),
        {"item_id": "babyai_2", "conversations": None},
    )
    file = str(write([good, bad, row("chess_7", "e4")]))
    code, said = cli("import-trajectories", file)
    assert code == 2
    assert said.err.startswith(
        "error: published.json row 1: conversations is null, not a list; published.json row 2:"
        " there are no item lists"
    )
    out = Path("data/trajectories/imported")
    assert not out.exists()
    code, said = cli("import-trajectories", file, "--drop-refused")
    assert code == 0
    assert "left out: published.json row 1: conversations is null" in said.out
    assert "babyai: 1 trajectories" in said.out
    assert json.loads((out / "babyai_trajectories.json").read_text()) == [good]
    assert Path(f"{out}.dvc").is_file()
    check_pin(out)
    first = Path(f"{out}.dvc").read_text()
    assert cli("import-trajectories", file, "--drop-refused")[0] == 0  # nothing new
    assert Path(f"{out}.dvc").read_text() == first
    # a new import replaces the rows
    assert cli("import-trajectories", str(write([row("babyai_3", "left")])))[0] == 0
    assert Path(f"{out}.dvc").read_text() != first
    assert sorted(path.name for path in out.parent.iterdir()) == [
        ".gitignore",
        "imported",
        "imported.dvc",
    ]
    out.joinpath("babyai_trajectories.json").write_text(json.dumps([row("babyai_1", "left")]))
    settings = ("warm_start.source=trajectories", "evaluation.num_items=5")
    fitting = (*settings, "rollout.items_per_step=8")
    code, said = cli("validate", *(part for each in fitting for part in ("--set", each)))
    assert code == 2
    assert (
        "digest mismatch: data/trajectories/imported is not what data/trajectories/imported.dvc"
        " pins" in said.err
    )
    (out / "README.md").write_text("mine")
    code, said = cli("import-trajectories", file, "--drop-refused")
    assert code == 2
    assert (
        "data/trajectories/imported holds README.md, which is none of *_trajectories.json"
        in said.err
    )
    shutil.rmtree(out)
    code, said = cli("import-trajectories", file, "--drop-refused")
    assert code == 2
    assert "run `dvc pull data/trajectories/imported.dvc` first" in said.err
    code, said = cli(
        "import-trajectories",
        str(write([row("babyai_3", "left")], "a.json")),
        str(write([row("babyai_3", "left")], "b.json")),
    )
    assert code == 2
    assert "b.json row 0: repeats a.json row 0" in said.err
    Path("mine").mkdir()
    code, said = cli("import-trajectories", file, "--drop-refused", "--out", "mine")
    assert code == 2
    assert "mine exists and is not tracked by DVC" in said.err
