"""Messages of the data task if the dataset is not available as pinned by the repository."""

import shutil
from pathlib import Path

import pytest

from agentgym.config import ConfigError
from agentgym.data.items import DataError
from agentgym.data.published import DvcError, run_dvc
from tasks import dataset
from tasks.dataset import pull_data

DATA = Path("data/lists")


@pytest.fixture(scope="module")
def pushed(empty_dvc_project, tmp_path_factory):
    """Return a project whose dataset is in its remote and not in its cache."""
    project = shutil.copytree(empty_dvc_project, tmp_path_factory.mktemp("pushed") / "project")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(project)
        (DATA / "train").mkdir(parents=True)
        (DATA / "train/babyai_train.json").write_text("[1]")
        (DATA / "train/babyai_test.json").write_text("[2]")
        for command in (
            ("add", "-q", str(DATA)),
            ("remote", "add", "-q", "--default", "shelf", "remote"),
            ("push", "-q"),
        ):
            run_dvc(*command, timeout_s=240)
    shutil.rmtree(project / ".dvc/cache")
    shutil.rmtree(project / ".dvc/tmp")
    return project


@pytest.fixture
def remote(pushed, tmp_path, monkeypatch):
    """Change to a copy of such a project. Return its remote's folder."""
    monkeypatch.chdir(shutil.copytree(pushed, tmp_path / "project"))
    return Path("remote")


def objects(remote, text):
    return [path for path in remote.rglob("*") if path.is_file() and path.read_text() == text]


def test_a_dataset_as_it_is_pinned_needs_no_dvc_and_a_lost_one_is_pulled(remote, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(dataset, "run_dvc", lambda *_, **__: pytest.fail("DVC was asked"))
        assert pull_data.fn(DATA) == "data/lists is what data/lists.dvc pins"
    shutil.rmtree(DATA)
    pull_data.fn(DATA)
    assert (DATA / "train/babyai_train.json").read_text() == "[1]"


def test_a_folder_of_one_s_own_is_left_alone_and_none_at_all_is_named(dvc_project):
    Path("mine").mkdir()
    assert pull_data.fn(Path("mine")) == "mine is not tracked by DVC"
    with pytest.raises(
        ConfigError,
        match=r"data\.path nowhere does not exist, and there is no nowhere\.dvc to pull it by",
    ):
        pull_data.fn(Path("nowhere"))


def test_a_dataset_that_cannot_be_pulled_is_said_so(remote):
    shutil.rmtree(DATA)
    [one] = objects(remote, "[1]")
    one.unlink()
    expected = (
        r"^dataset not pulled: `dvc pull data/lists\.dvc` failed \(1\): .*; see that the remote can"
        r" be reached .*, or set data\.path"
    )
    with pytest.raises(DvcError, match=expected):
        pull_data.fn(DATA)
    shutil.rmtree(remote)
    with pytest.raises(DvcError, match=expected):
        pull_data.fn(DATA)


def test_files_that_were_changed_here_are_a_digest_mismatch_and_stay(remote):
    (DATA / "train/babyai_train.json").write_text("[9]")
    with pytest.raises(
        DataError,
        match=(
            r"digest mismatch: data/lists is not what data/lists\.dvc pins: expected md5 .*, got"
            r" .*; if the files"
        ),
    ):
        pull_data.fn(DATA)
    assert (DATA / "train/babyai_train.json").read_text() == "[9]"


def test_files_that_came_damaged_from_the_remote_are_a_digest_mismatch(remote):
    shutil.rmtree(DATA)
    [one] = objects(remote, "[1]")
    one.chmod(0o644)
    one.write_text("[X]")
    with pytest.raises(
        DataError,
        match=(
            r"digest mismatch: .*; if `dvc pull` brought them, its remote is damaged: delete them"
            r" and \.dvc/cache"
        ),
    ):
        pull_data.fn(DATA)


def test_the_project_s_own_remote_hands_out_nothing_damaged():
    """With `verify` DVC checks a download before it accepts it."""
    config = (Path(__file__).parents[2] / ".dvc/config").read_text()
    assert "verify = true" in config.partition("['remote \"embedded\"']")[2]
