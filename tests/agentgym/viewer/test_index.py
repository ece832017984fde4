"""The file of the index."""

import subprocess
import sys

import pytest

from agentgym.viewer.index import SORTS, Index, IndexDamaged


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
    rows = [(f"r{number}", "a title " * 50, 1.0, 0) for number in range(1000)]
    connection.executemany("INSERT INTO runs VALUES (?, ?, ?, ?)", rows)
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
