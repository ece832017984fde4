"""The index file, and the fields it keeps of an episode."""

import subprocess
import sys

import pytest

from agentgym.records import to_json
from agentgym.types import Learned, Turn
from agentgym.viewer.index import (
    COLUMNS,
    MAX_TEXT,
    SORTS,
    Address,
    Index,
    IndexDamaged,
    row_of,
    words_of,
)
from tests.agentgym.viewer.conftest import KEPT, episode


def row(trajectory, committed=77.0):
    return row_of(to_json(trajectory), (1, 2, 0, 3, 40, 50), committed)


def test_a_row_tells_what_lists_filter_and_sort_by():
    own = row(episode(17, 2, learned=KEPT))
    assert (own.step_id, own.seq, own.file, own.line, own.start, own.size) == (1, 2, 0, 3, 40, 50)
    assert (own.env, own.task_id, own.item, own.sample) == ("babyai", 17, "babyai_17", 2)
    assert (own.at, own.version, own.oldest, own.family) == (5, 4, 4, "go")
    assert (own.turns, own.tokens, own.said, own.max_turns) == (2, 8, 4, 4)
    assert (own.reward, own.success, own.advantage, own.kept) == (1.0, 1, 1.0, 1)
    assert (own.began, own.wall, own.excluded, own.error) == (1017.0, 2.0, "", "")
    assert len(COLUMNS) == 31


def test_what_is_not_known_is_none_and_a_commit_dates_what_has_no_time():
    own = row(episode(step=0, reward=None, timing={}, learned=Learned(excluded="cut")))
    assert (own.at, own.reward, own.advantage, own.kept) == (4, None, None, 0)
    assert (own.began, own.excluded) == (77.0, "cut")


def test_refused_actions_are_counted():
    turns = (Turn("fly", "no", 0.0, info={"invalid": True}), Turn("go", "yes", 0.0))
    assert row(episode(turns=turns)).invalid == 1


def test_words_are_those_of_reply_and_observation_up_to_a_limit():
    turns = (Turn("left", "o" * (MAX_TEXT + 9), 0.0, reply="I think: left"),)
    words = words_of(to_json(episode(turns=turns, first_observation="start \ud800")))
    assert words.startswith("start \\ud800\nI think: left\nooo")
    assert words.count("o") == MAX_TEXT


def test_an_address_is_text_and_back():
    address = Address(f"stage-1-{'a' * 16}", 12, 1, 5)
    assert str(address) == f"stage-1-{'a' * 16}.12.a5"
    assert Address.parse(str(address)) == address


@pytest.mark.parametrize(
    "text", ["", "stage-1.0.t1", f"../x-{'a' * 16}.0.t1", f"s-{'a' * 16}.0.x1", f"s-{'a' * 16}.0.t"]
)
def test_what_is_no_address_is_refused(text):
    with pytest.raises(ValueError, match="names no episode"):
        Address.parse(text)


def test_a_reader_cannot_write(tmp_path):
    index = Index(tmp_path / "index.sqlite", "/store")
    with pytest.raises(Exception, match="readonly"):
        index.reader.execute("DELETE FROM meta")
    index.close()


def test_every_sort_has_an_index_of_its_own(tmp_path):
    index = Index(tmp_path / "index.sqlite", "/store")
    for key in SORTS.values():
        sql = f"SELECT * FROM episodes WHERE ({key}, id) < (1, 1) ORDER BY {key} DESC, id DESC"
        (plan,) = index.reader.execute(f"EXPLAIN QUERY PLAN {sql} LIMIT 5").fetchall()
        assert "USING INDEX sort_" in plan["detail"]
    index.close()


def test_facets_are_counted_from_an_index_alone(tmp_path):
    index = Index(tmp_path / "index.sqlite", "/store")
    columns = "step_id, env, split, family, status, success, excluded, kept"
    (plan,) = index.reader.execute(
        f"EXPLAIN QUERY PLAN SELECT {columns}, count(*) FROM episodes GROUP BY {columns}"
    ).fetchall()
    assert plan["detail"] == "SCAN episodes USING COVERING INDEX by_facet"
    index.close()


def test_a_reader_of_an_index_that_was_made_anew_reads_the_new_one(tmp_path):
    index = Index(tmp_path / "index.sqlite", "/store")
    before = index.stamp
    index.remake()
    assert index.stamp != before
    index.close()


ENDED = """
import os, sys
from pathlib import Path
from agentgym.viewer.index import Index
index = Index(Path(sys.argv[1]), "/store")
index.reader.execute("SELECT count(*) FROM runs").fetchone()
with index.writing() as connection:
    rows = [(f"r{number}" + "a name " * 50, 1.0, 0) for number in range(1000)]
    connection.executemany("INSERT INTO runs VALUES (?, ?, ?)", rows)
os._exit(0)
"""


def test_an_index_is_whole_after_its_viewer_was_interrupted(tmp_path, caplog):
    path = tmp_path / "index.sqlite"
    subprocess.run([sys.executable, "-c", ENDED, str(path)], timeout=60, check=True)
    assert path.with_name("index.sqlite-wal").stat().st_size > path.stat().st_size
    index = Index(path, "/store")
    assert index.reader.execute("SELECT count(*) FROM runs").fetchone()[0] == 1000
    assert "damaged" not in caplog.text
    index.close()


def test_writing_to_a_damaged_file_is_told_as_such(tmp_path):
    index = Index(tmp_path / "index.sqlite", "/store")
    index.close()
    index.path.write_bytes(b"SQLite format 3\0" + b"x" * 5000)
    index.writes = True
    with pytest.raises(IndexDamaged), index.writing() as connection:
        connection.execute("INSERT INTO meta VALUES ('a', 'b')")
    index.writes = False
