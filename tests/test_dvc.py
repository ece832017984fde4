"""Data goes to a remote and comes back complete, and other users cannot read DVC's files."""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import boto3
import pytest

from agentgym.data.published import check_pin, import_dataset, run_dvc
from tests.completed import completed

ROOT = Path(__file__).parents[1]


def content(folder):
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.mark.parametrize("kind", ["local", "s3"])
def test_a_tracked_dataset_goes_to_a_remote_and_comes_back_whole(
    kind, dvc_project, tmp_path, request
):
    remote = request.getfixturevalue("s3_uri") if kind == "s3" else str(tmp_path / "remote")
    folder = Path("data/lists")
    for name in ("train/babyai_train.json", "eval/babyai_test.json"):
        (folder / name).parent.mkdir(parents=True)
        (folder / name).write_text(f'[{{"item_id": "babyai_{len(name)}"}}]')
    before = content(folder)
    for command in (
        ("add", "-q", str(folder)),
        ("remote", "add", "-q", "--default", "shelf", remote),
        ("push", "-q"),
    ):
        run_dvc(*command, timeout_s=240)
    if kind == "s3":
        prefix = remote.removeprefix("s3://tests/")
        objects = [
            found.key.removeprefix(prefix)
            for found in boto3.resource("s3").Bucket("tests").objects.filter(Prefix=prefix)
        ]
    else:
        objects = list(content(Path(remote)))
    assert len(objects) == 3  # two lists and the list of the folder
    shutil.rmtree(folder)
    shutil.rmtree(".dvc/cache")
    run_dvc("pull", "-q", timeout_s=240)
    assert content(folder) == before
    check_pin(folder)


def test_an_imported_dataset_is_never_pushed_and_comes_back_from_where_it_was_imported(
    hub, dvc_project, tmp_path
):
    """The license forbids redistribution, and a remote inside the repository is distributed."""
    sha = hub.commit({"train/babyai_train.json": b"[]", "eval/babyai_test.json": b"[]"})
    folder = import_dataset(hub.url, sha, Path("data/lists")).path
    before = content(folder)
    run_dvc("remote", "add", "-q", "--default", "shelf", str(tmp_path / "remote"), timeout_s=240)
    run_dvc("push", "-q", timeout_s=240)
    assert not (tmp_path / "remote").exists()
    shutil.rmtree(folder)
    shutil.rmtree(".dvc/cache")
    run_dvc("pull", "-q", timeout_s=240)
    assert (
        content(folder)
        == before
        == {"train/babyai_train.json": b"[]", "eval/babyai_test.json": b"[]"}
    )
    check_pin(folder)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")
def test_another_user_reaches_nothing_that_dvc_unpickles(empty_dvc_project):
    with tempfile.TemporaryDirectory() as place:
        Path(place).chmod(0o755)  # other users may enter, unlike pytest's folders
        folder = shutil.copytree(empty_dvc_project, Path(place, "project"))
        (folder / "numbers.txt").write_text("1 2 3")
        environment = {
            name: value for name, value in os.environ.items() if not name.startswith("DVC_")
        }
        environment["PYTHONPATH"] = str(ROOT)
        command = (
            "import flows; from agentgym.data.published import run_dvc;"
            " run_dvc('add', 'numbers.txt', timeout_s=120)"
        )
        subprocess.run([sys.executable, "-c", command], cwd=folder, env=environment, check=True)
        caches = list((folder / ".agentgym/dvc/repo").glob("*/*"))
        assert caches, "DVC keeps its caches elsewhere"
        attempt = (
            "for path in .agentgym .agentgym/dvc .agentgym/dvc/repo; do ls $path; echo x >"
            " $path/planted; done; cat numbers.txt"
        )
        theirs = completed(
            "sh", "-c", attempt, cwd=folder, user=65534, group=65534, extra_groups=[]
        )
        assert theirs.stdout == "1 2 3"
        assert not list(folder.rglob("planted"))
