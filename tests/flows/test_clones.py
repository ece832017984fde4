"""The tests' clone contains only tracked files, without the results of a run."""

import subprocess
from pathlib import Path

import yaml


def test_a_clone_has_tracked_files_alone(make_clone, tmp_path, monkeypatch):
    """After `make pipeline` and `dvc repro` the folder has pointers and a lock file."""
    here = tmp_path / "here"
    here.mkdir()
    tracked = ["params.yaml", "flows.py"]
    sections = yaml.safe_load(Path("params.yaml").read_text())
    (here / "params.yaml").write_text(yaml.safe_dump(sections))
    (here / "flows.py").write_text("")
    for words in (("init", "-q"), ("add", *tracked)):
        subprocess.run(["git", *words], cwd=here, check=True)
    (here / "dvc.lock").write_text("{}")
    (here / "outputs").mkdir()
    (here / "outputs/prepare.json").write_text("{}")
    monkeypatch.setitem(make_clone.__globals__, "ROOT", here)
    (tmp_path / "place").mkdir()
    made = make_clone(tmp_path / "place")
    found = {path.name for path in made.folder.iterdir()} - {".git"}
    assert found == set(tracked)
