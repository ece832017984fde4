"""Tests for importing the dataset with real DVC and git, and a stand-in for the Hub.
The stand-in speaks git over HTTP and Git LFS.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
import yaml

from agentgym.cli import main
from agentgym.config import ConfigError
from agentgym.data import published as dataset
from agentgym.data.items import DataError
from agentgym.data.published import DvcError, check_pin, import_dataset, run_dvc

ROOT = Path(__file__).parents[3]

# a level in which these ids are all different worlds
MANY_WORLDS = ("--set", "env.options.levels=[GoToLocalS8N7]")


def items(env, first, count):
    return json.dumps(
        [{"item_id": f"{env}_{task}"} for task in range(first, first + count)]
    ).encode()


LISTS = {
    "README.md": b"---\nlicense: cc-by-nc-4.0\n---\n",
    "train/babyai_train.json": items("babyai", 0, 810),
    "eval/babyai_test.json": items("babyai", 5000, 90),
    "train/searchqa_train.json": items("searchqa", 0, 5000),
    "eval/searchqa_test.json": items("searchqa", 9000, 400),
    "eval/alfworld_test.json": b'[{"item_id": "alfworld_look_at_obj-1"}]',  # not ours: left alone
}


@pytest.fixture
def imported(hub, dvc_project):
    """Return (result of importing LISTS, commit id)."""
    sha = hub.commit(LISTS)
    return import_dataset(hub.url, sha, Path("data/lists")), sha


def cli(*arguments):
    return main(["data", *arguments, "--params", str(ROOT / "params.yaml")])


def test_a_branch_is_resolved_and_its_commit_pinned_with_the_licence(hub, dvc_project, capsys):
    sha = hub.commit(LISTS, large=("train/searchqa_train.json",))
    assert cli("import", "--rev", "main", "--url", hub.url) == 0
    said = capsys.readouterr().out
    out = Path("data/hub/AgentGym-RL-Data-ID")
    assert {
        path.relative_to(out).as_posix(): path.read_bytes()
        for path in out.rglob("*.*")
        if path.name != ".gitattributes"
    } == LISTS
    pin = yaml.safe_load(Path(f"{out}.dvc").read_text())
    assert pin["deps"][0]["repo"] == {"url": hub.url, "rev": sha, "rev_lock": sha}
    assert pin["meta"] == {"license": "CC-BY-NC-4.0"}
    assert f"{hub.url} at {sha} imported into {out}\nlicence: CC-BY-NC-4.0\nbabyai: " in said
    assert "warning: data/hub/AgentGym-RL-Data-ID/train/webarena_train.json does not exist" in said
    assert said.endswith(f"keep in git: {out}.dvc; to train on it: --set data.path={out}\n")
    assert "babyai: 810" not in said  # as many as published: no warning
    assert subprocess.run(["git", "check-ignore", "-q", str(out)]).returncode == 0
    # the run's data path may point into it; its pin is checked there
    assert (
        cli(
            "validate",
            "--set",
            f"data.path={out}",
            "--set",
            "evaluation.num_items=90",
            *MANY_WORLDS,
        )
        == 0
    )


def test_the_same_import_again_does_nothing_and_brings_back_a_lost_folder(
    hub, imported, monkeypatch
):
    first, sha = imported
    # a later commit on the branch does not move the pin
    hub.commit({"eval/babyai_test.json": items("babyai", 7000, 90)})
    before = {path: path.stat().st_mtime_ns for path in Path("data").rglob("*")}
    with monkeypatch.context() as patch:
        patch.setattr(dataset, "run_dvc", lambda *_, **__: pytest.fail("DVC was asked"))
        patch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("git was asked"))
        again = import_dataset(hub.url, sha, Path("data/lists"))
    assert (again.sha, again.is_new, first.is_new) == (sha, False, True)
    assert {path: path.stat().st_mtime_ns for path in Path("data").rglob("*")} == before
    shutil.rmtree("data/lists")
    assert not import_dataset(hub.url, sha, Path("data/lists")).is_new
    assert Path("data/lists/eval/babyai_test.json").read_bytes() == LISTS["eval/babyai_test.json"]


def test_what_is_there_is_not_overwritten(hub, imported):
    _, sha = imported
    newer = hub.commit({"eval/babyai_test.json": items("babyai", 7000, 90)})
    with pytest.raises(
        ConfigError,
        match=(
            rf"lists\.dvc pins {hub.url} at {sha}, not {hub.url} at {newer}; .*--out, or run `dvc"
            r" remove "
        ),
    ):
        import_dataset(hub.url, "main", Path("data/lists"))
    Path("data/mine").mkdir()
    with pytest.raises(ConfigError, match="data/mine exists and was not imported; move it away"):
        import_dataset(hub.url, sha, Path("data/mine"))
    Path("data/mine/a").write_text("a")
    run_dvc("add", "-q", "data/mine", timeout_s=120)
    with pytest.raises(ConfigError, match=r"mine\.dvc tracks a folder that was not imported"):
        import_dataset(hub.url, sha, Path("data/mine"))
    Path("data/lists/eval/babyai_test.json").write_bytes(b"[]")
    with pytest.raises(
        DataError, match=r"digest mismatch: data/lists is not what data/lists\.dvc pins"
    ):
        import_dataset(hub.url, sha, Path("data/lists"))


def test_wrong_revisions_places_and_folders_are_one_line_and_leave_nothing(
    hub, dvc_project, capsys, monkeypatch
):
    sha = hub.commit(LISTS)
    hub.git("tag", "-a", "v1", "-m", "first")
    none = "http://127.0.0.1:9/none"
    for arguments, expected in (
        (
            ("--rev", "v2", "--url", hub.url),
            (
                f"{hub.url} has no branch or tag 'v2'; it has main, v1; a commit id must have all"
                " of its 40 digits"
            ),
        ),
        (("--rev", sha[:12], "--url", hub.url), f"has no branch or tag '{sha[:12]}'"),
        (
            ("--rev", "0" * 40, "--url", hub.url),
            f"{hub.url} has no commit {'0' * 40}; give one that a branch or tag of it contains",
        ),
        (("--rev=--all", "--url", hub.url), "revision '--all' is no name of a commit"),
        (("--rev", "main", "--url", none), f"{none} cannot be read as a git repository (fatal: "),
        (("--rev", "main", "--url", str(dvc_project)), "has no branch or tag 'main'; it has none"),
        (
            ("--rev", "main", "--url", hub.url, "--out", "../data"),
            f"--out ../data is outside of the DVC project {dvc_project}",
        ),
    ):
        assert cli("import", *arguments) == 2
        said = capsys.readouterr().err
        assert said.startswith("error: ")
        assert expected in said
        assert said.count("\n") == 2  # the error, and its page
    assert [
        path
        for path in dvc_project.rglob("*")
        if path.is_file() and ".git/" not in str(path) and ".dvc" not in path.parts
    ] == [dvc_project / ".dvcignore"]
    monkeypatch.chdir(dvc_project.parent)
    assert cli("import", "--rev", sha, "--url", hub.url) == 2
    assert "is not inside a DVC project; run this in a clone" in capsys.readouterr().err


@pytest.mark.slow
def test_an_annotated_tag_means_its_commit(hub, dvc_project):
    sha = hub.commit(LISTS)
    hub.git("tag", "-a", "v1", "-m", "first")
    assert hub.git("rev-parse", "v1") != sha
    assert import_dataset(hub.url, "v1", Path("data/lists")).sha == sha
    # a folder can be the repository; its name is no evidence of a licence
    other = hub.repository.rename(hub.folder / "elsewhere")
    assert import_dataset(str(other), "v1", Path("data/other")).licence is None
    assert "meta" not in yaml.safe_load(Path("data/other.dvc").read_text())


@pytest.mark.slow
def test_large_files_that_cannot_be_fetched_are_not_pinned_as_their_pointers(hub, dvc_project):
    sha = hub.commit(LISTS, large=("train/searchqa_train.json",))
    with pytest.raises(
        DvcError,
        match=(
            r"train/searchqa_train\.json of file://.* is in Git LFS, and its content could not be"
            r" fetched"
        ),
    ):
        import_dataset(str(hub.repository), sha, Path("data/lists"))
    assert not Path("data/lists.dvc").exists()
    kept, hub.large = hub.large, {}
    with pytest.raises(DvcError, match="could not be fetched"):
        import_dataset(hub.url, sha, Path("data/lists"))
    hub.large = kept
    assert import_dataset(hub.url, sha, Path("data/lists")).is_new  # continues the import
    assert (
        Path("data/lists/train/searchqa_train.json").read_bytes()
        == LISTS["train/searchqa_train.json"]
    )


def test_lists_that_are_not_what_they_should_be_are_refused_after_the_import(
    hub, dvc_project, capsys
):
    sha = hub.commit({**LISTS, "eval/babyai_test.json": items("babyai", 805, 90)})
    for _ in range(2):
        assert cli("import", "--rev", sha, "--url", hub.url) == 2
        assert (
            "babyai_805, babyai_806, babyai_807, babyai_808, babyai_809 are in the train and in the"
            " eval list" in capsys.readouterr().err
        )


def test_a_killed_import_leaves_no_process_and_the_same_command_goes_on(hub, dvc_project):
    sha = hub.commit(LISTS, large=("train/searchqa_train.json",))
    asked, go_on = threading.Event(), threading.Event()

    class Slow(dict):
        def __contains__(self, oid):
            asked.set()
            go_on.wait(60)
            return super().__contains__(oid)

    hub.large = Slow(hub.large)
    command = [
        sys.executable,
        "-m",
        "agentgym",
        "data",
        "import",
        "--rev",
        sha,
        "--url",
        hub.url,
        "--out",
        "data/lists",
    ]
    command += ["--params", str(ROOT / "params.yaml")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as importing:
        assert asked.wait(120)
        children = psutil.Process(importing.pid).children(recursive=True)
        assert children
        importing.send_signal(signal.SIGKILL)
    go_on.set()
    _, alive = psutil.wait_procs(children, timeout=60)
    assert alive == []
    assert not Path("data/lists.dvc").exists()
    Path("data/lists").mkdir(exist_ok=True)
    Path("data/lists/half").write_text("half")  # an import killed later would leave this
    assert import_dataset(hub.url, sha, Path("data/lists")).is_new
    assert not Path("data/lists/half").exists()
    assert sorted(os.listdir("data")) == [".gitignore", "lists", "lists.dvc"]


def test_a_dvc_that_hangs_is_ended_in_time(dvc_project):
    began = time.monotonic()
    with pytest.raises(DvcError, match=r"`dvc version` did not end within 0\.01 s"):
        run_dvc("version", timeout_s=0.01)
    assert time.monotonic() - began < 30


@pytest.mark.slow
def test_a_folder_that_was_changed_is_told_from_the_pinned_one(dvc_project, capsys):
    folder = Path("data/own")
    for name, data in (
        ("train/babyai_train.json", items("babyai", 0, 900)),
        ("eval/babyai_test.json", items("babyai", 5000, 600)),
    ):
        (folder / name).parent.mkdir(parents=True)
        (folder / name).write_bytes(data)
    check_pin(folder)  # the folder has no pin yet
    run_dvc("add", "-q", str(folder), timeout_s=120)
    check_pin(folder)
    assert cli("validate", "--set", f"data.path={folder}", *MANY_WORLDS) == 0
    assert "babyai: " in capsys.readouterr().out
    (folder / "eval/babyai_test.json").write_bytes(items("babyai", 5001, 600))
    assert cli("validate", "--set", f"data.path={folder}") == 2
    said = capsys.readouterr().err
    pinned = yaml.safe_load(Path("data/own.dvc").read_text())["outs"][0]["md5"]
    assert (
        f"error: digest mismatch: data/own is not what data/own.dvc pins: expected md5 {pinned},"
        " got " in said
    )
    assert (
        "`dvc checkout --force data/own.dvc` brings the pinned ones back and `dvc add data/own`"
        " pins the new ones" in said
    )
    run_dvc("checkout", "--force", "-q", "data/own.dvc", timeout_s=120)
    check_pin(folder)
    run_dvc("remove", "-q", "data/own.dvc", timeout_s=120)
    shutil.rmtree(folder)
    assert cli("validate", "--set", f"data.path={folder}") == 2
    assert (
        "error: data/own does not exist, and there is no data/own.dvc to pull it by; set data.path"
        in capsys.readouterr().err
    )
