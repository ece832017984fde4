"""Episodes as parquet: one row per attempt, for any content."""

from agentgym.evaluation import record
from agentgym.types import Item, Status, Trajectory, Turn, Usage


def attempt(number, status, turns=()):
    return Trajectory(
        Item("babyai", 3),
        2,
        0,
        5,
        status,
        1.0 if status.is_valid else None,
        status.is_valid,
        "go",
        turns,
        (),
        (),
        (),
        num_attempts=number,
        error=None if status.is_valid else "gone",
        usage=Usage(1, 0, 5, 1, 2),
        timing={"wall_s": 1.5, "began_s": 10.0},
    )


def test_each_attempt_is_a_row_that_comes_back(tmp_path, monkeypatch):
    monkeypatch.setattr(record, "ROWS", 2)  # more than one row group
    turn = Turn("left", "wall", 1.0, info={"family": "GoToObj", "n": [1]}, generate_s=0.5)
    played = [
        attempt(1, Status.ENV_ERROR),
        attempt(2, Status.TERMINATED, (turn, turn)),
        attempt(1, Status.MAX_TURNS),
    ]
    assert record.write_episodes(tmp_path / "e.parquet", played) == 3
    rows = list(record.read_episodes(tmp_path / "e.parquet"))
    assert rows == [record.to_row(each) for each in played]
    assert [row["outcome"] for row in rows] == ["env_error", "scored", "truncated"]
    assert [row["counts"] for row in rows] == [False, True, True]
    assert rows[1]["turns"][0]["info"] == '{"family": "GoToObj", "n": [1]}'
    assert rows[1]["usage"]["cached_tokens"] == 1


def test_no_episode_at_all_is_a_file_too(tmp_path):
    assert record.write_episodes(tmp_path / "e.parquet", []) == 0
    assert list(record.read_episodes(tmp_path / "e.parquet")) == []
