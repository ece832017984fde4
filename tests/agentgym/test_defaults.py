"""Every process of ours keeps its state in the project and tells nobody of it."""

import gc
import os

from agentgym.defaults import COLLECT_AFTER, set_process_defaults


def test_state_lies_in_the_project_and_nothing_is_sent(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "environ", {})
    set_process_defaults(tmp_path)
    said = dict(os.environ)
    places = {name: value for name, value in said.items() if value.startswith("/")}
    assert {"PREFECT_HOME", "HF_HOME", "MPLCONFIGDIR", "DVC_SITE_CACHE_DIR"} <= places.keys()
    assert all(value.startswith(f"{tmp_path}/") for value in places.values())
    assert (said["DO_NOT_TRACK"], said["OMP_NUM_THREADS"]) == ("1", "1")
    assert said["PREFECT_SERVER_ANALYTICS_ENABLED"] == "false"


def test_what_somebody_has_set_stays(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "environ", {"OMP_NUM_THREADS": "4", "HF_HOME": "/theirs"})
    set_process_defaults(tmp_path)
    assert (os.environ["OMP_NUM_THREADS"], os.environ["HF_HOME"]) == ("4", "/theirs")


def test_garbage_is_looked_for_less_often_than_imports_make_objects(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "environ", {})
    before = gc.get_threshold()
    try:
        set_process_defaults(tmp_path)
        assert gc.get_threshold() == COLLECT_AFTER > (700, 10, 10)
        assert gc.isenabled()
    finally:
        gc.set_threshold(*before)
