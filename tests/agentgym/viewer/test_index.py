"""The file of the index."""

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


def test_writing_to_a_damaged_file_is_told_as_such(tmp_path):
    index = Index(tmp_path / "index.sqlite", "/store")
    index.close()
    index.path.write_bytes(b"SQLite format 3\0" + b"x" * 5000)
    index.writes = True
    with pytest.raises(IndexDamaged), index.writing() as connection:
        connection.execute("INSERT INTO meta VALUES ('a', 'b')")
    index.writes = False
