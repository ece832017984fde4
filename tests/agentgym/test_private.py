"""Only the owner can access the state folder, whatever existed before and whatever writes there."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from agentgym.config import ConfigError
from agentgym.private import private_folder, private_state, with_login, without_login, write_private
from tests.completed import completed

NOBODY = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def makes_like_dvc(folder):
    """Create a folder as `dvc` does: mode 0777 with umask 0, including its parents."""
    code = (
        f"import os; os.umask(0); os.makedirs({str(folder)!r}, mode=0o777, exist_ok=True);"
        f" open({str(folder / 'cache.db')!r}, 'w')"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_new_folder_is_the_owners_and_so_is_what_any_program_makes_in_it(tmp_path):
    state = private_folder(tmp_path / "deep" / ".agentgym")
    assert mode(state) == 0o700
    makes_like_dvc(state / "dvc" / "repo")
    (state / "logs").mkdir()
    (state / "logs/run.log").write_text("text")
    try:
        os.getxattr(state, "system.posix_acl_default")
    except OSError:
        pytest.skip("this file system has no ACLs; the folder's own mode keeps others out")
    below = {str(path.relative_to(state)): oct(mode(path)) for path in state.rglob("*")}
    folders = dict.fromkeys(("dvc", "dvc/repo", "logs"), oct(0o700))
    assert below == {**folders, "dvc/repo/cache.db": oct(0o600), "logs/run.log": oct(0o600)}
    beside = tmp_path / "outputs"
    beside.write_text("others may read what is published")
    assert mode(beside) == 0o666 & ~current_umask()


def current_umask():
    umask = os.umask(0)
    os.umask(umask)
    return umask


@pytest.mark.parametrize("before", [0o755, 0o777, 0o1777, 0o770])
def test_a_wider_one_is_tightened(tmp_path, before):
    state = tmp_path / ".agentgym"
    makes_like_dvc(state / "dvc")
    state.chmod(before)
    private_folder(state)
    assert mode(state) == 0o700


@as_root
def test_what_another_user_left_in_an_open_one_is_named(tmp_path):
    makes_like_dvc(tmp_path / ".agentgym/dvc/repo")
    planted = tmp_path / ".agentgym/dvc/repo/cache.db"
    os.chown(planted, NOBODY, NOBODY)
    for _ in range(2):  # the next command must not accept it
        with pytest.raises(
            ConfigError, match=f"was open to others, and .*{planted} belongs to user {NOBODY}"
        ):
            private_folder(tmp_path / ".agentgym")
    assert mode(tmp_path / ".agentgym") & 0o077 == 0  # closed, so nothing more can be planted
    planted.unlink()
    private_folder(tmp_path / ".agentgym")
    assert mode(tmp_path / ".agentgym") == 0o700


@as_root
def test_another_users_folder_or_link_is_refused(tmp_path):
    theirs, link = tmp_path / "theirs", tmp_path / "link"
    theirs.mkdir()
    os.chown(theirs, NOBODY, NOBODY)
    link.symlink_to(theirs)
    for path in (theirs, link):
        with pytest.raises(ConfigError, match=f"belongs to user {NOBODY}, this is user 0"):
            private_folder(path)
    mine = tmp_path / "mine"
    mine.mkdir()
    link.unlink()
    link.symlink_to(mine)
    os.chown(link, NOBODY, NOBODY, follow_symlinks=False)
    with pytest.raises(ConfigError, match="belongs to user"):
        private_folder(link)


def test_a_link_to_a_folder_of_ones_own_is_followed_one_to_a_shared_place_is_not(tmp_path):
    disk, shared, link = tmp_path / "disk", tmp_path / "shared", tmp_path / ".agentgym"
    disk.mkdir()
    shared.mkdir()
    shared.chmod(0o1777)
    link.symlink_to(disk)
    private_folder(link)
    assert mode(disk) == 0o700
    link.unlink()
    link.symlink_to(shared)
    with pytest.raises(ConfigError, match="where everybody can write"):
        private_folder(link)
    assert mode(shared) == 0o1777
    link.unlink()
    link.symlink_to(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="cannot be used for state"):
        private_folder(link)
    link.unlink()
    link.write_text("")
    with pytest.raises(ConfigError, match="is no folder"):
        private_folder(link)


def test_a_configured_place_is_private_unless_it_holds_other_things(tmp_path):
    new, known, mixed, shared = (tmp_path / name for name in ("new", "known", "mixed", "shared"))
    assert mode(private_state(new)) == 0o700
    (known / "store").mkdir(parents=True)
    (known / "mlflow.db-wal").touch()
    known.chmod(0o755)
    assert mode(private_state(known)) == 0o700
    (mixed / "store").mkdir(parents=True)
    (mixed / "thesis.tex").touch()
    mixed.chmod(0o755)
    assert mode(private_state(mixed)) == 0o755
    (shared / "store").mkdir(parents=True)
    (shared / "somebody").touch()
    shared.chmod(0o1777)
    with pytest.raises(
        ConfigError, match=f"everybody can write in it; set store.path to {shared}/agentgym/store"
    ):
        private_state(shared)


def test_a_secret_is_never_readable_by_others_not_even_for_a_moment(tmp_path):
    path = tmp_path / "services.json"
    path.write_text("old")
    path.chmod(0o644)
    umask = os.umask(0)
    try:
        write_private(path, b"new")
    finally:
        os.umask(umask)
    assert (path.read_bytes(), mode(path)) == (b"new", 0o600)
    assert list(tmp_path.iterdir()) == [path]


def test_an_address_takes_a_login_and_a_message_loses_it():
    url = with_login("http://127.0.0.1:5000/api?x=1", "agentgym:word")
    assert url == "http://agentgym:word@127.0.0.1:5000/api?x=1"
    assert with_login(url, "agentgym:other") == "http://agentgym:other@127.0.0.1:5000/api?x=1"
    assert (
        without_login(f"no answer at {url}: refused")
        == "no answer at http://127.0.0.1:5000/api?x=1: refused"
    )


@as_root
def test_a_command_in_a_project_with_another_users_state_says_so_and_does_nothing(tmp_path):
    (tmp_path / ".agentgym").mkdir()
    os.chown(tmp_path / ".agentgym", NOBODY, NOBODY)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    params = str(Path(__file__).parents[2] / "params.yaml")
    for words in (
        ("-m", "flows.pipeline"),
        ("-m", "services", "up"),
        ("-m", "agentgym", "doctor", "--params", params),
    ):
        ended = completed(sys.executable, *words, cwd=tmp_path, env=environment)
        assert (ended.returncode, ended.stdout) == (2, "")
        assert len(ended.stderr.splitlines()) <= 2
        assert ended.stderr.startswith(
            f"error: .agentgym belongs to user {NOBODY}, this is user 0;"
        )
    assert list((tmp_path / ".agentgym").iterdir()) == []
