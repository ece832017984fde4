"""Files are whole and durable or absent, and a full disk is reported as such."""

import errno
import os

import pytest

from agentgym.store.posix import (
    TEMP_PREFIX,
    StoreFull,
    create_exclusively,
    full_disk_told,
    make_folder,
    write_temp,
)


def test_a_name_is_given_once(tmp_path):
    first, second = write_temp(tmp_path, b"first"), write_temp(tmp_path, b"second")
    assert first.name.startswith(TEMP_PREFIX)
    assert create_exclusively(first, tmp_path / "name")
    assert not create_exclusively(second, tmp_path / "name")
    assert (tmp_path / "name").read_bytes() == b"first"


def test_a_link_that_was_made_and_looked_refused_counts_as_made(tmp_path):
    temp = write_temp(tmp_path, b"content")
    os.link(temp, tmp_path / "name")  # the response was lost
    assert create_exclusively(temp, tmp_path / "name")


@pytest.fixture
def failing(monkeypatch):
    """Return a function of (name, number) that makes os.<name> fail with that errno."""

    def arrange(name, number):
        def fail(*_, **__):
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(os, name, fail)

    return arrange


def test_a_file_system_without_links_is_told_with_what_to_do(tmp_path, failing):
    temp = write_temp(tmp_path, b"content")
    failing("link", errno.EPERM)
    with pytest.raises(OSError, match=r"put store\.path on a file system that has hard links"):
        create_exclusively(temp, tmp_path / "name")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_leaves_nothing_and_is_what_is_told_of_a_server_that_failed(
    tmp_path, failing, number
):
    failing("fsync", number)
    with pytest.raises(
        StoreFull, match=r"no space left for 3 bytes .* the last commit stays valid"
    ):
        write_temp(tmp_path, b"abc")
    with pytest.raises(StoreFull), full_disk_told(tmp_path):
        raise RuntimeError("a server's database")
    assert list(tmp_path.iterdir()) == []


def test_another_failure_is_told_as_itself(tmp_path, failing):
    with pytest.raises(RuntimeError, match="itself"), full_disk_told(tmp_path):
        raise RuntimeError("itself")
    failing("fsync", errno.EIO)
    with pytest.raises(OSError, match="Input/output error") as error:
        write_temp(tmp_path, b"abc")
    assert not isinstance(error.value, StoreFull)


def test_folders_are_made_with_what_is_missing_above(tmp_path):
    make_folder(tmp_path / "a/b/c")
    make_folder(tmp_path / "a/b/c")
    assert (tmp_path / "a/b/c").is_dir()
