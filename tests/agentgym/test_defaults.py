"""Every process keeps its state in the project and sends no telemetry."""

import gc
import io
import json
import os
import subprocess
import sys
import urllib.request

import httpx
import pytest
import requests

from agentgym.console.progress import PlainConsole
from agentgym.defaults import COLLECT_AFTER, set_process_defaults
from tests.answering import Handler, http_server


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


class Answers(Handler):
    def do_GET(self):
        self.send(b"here")


@pytest.fixture
def own_server():
    """Address of a server on loopback."""
    with http_server(Answers) as address:
        yield address


@pytest.mark.parametrize("listed", [{}, {"NO_PROXY": "corp.example"}, {"no_proxy": "corp.example"}])
def test_behind_an_office_proxy_servers_of_this_machine_are_asked_directly(
    own_server, listed, tmp_path, monkeypatch
):
    away = "http://127.0.0.1:9"  # nothing listens there
    proxies = dict.fromkeys(("HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "ALL_PROXY"), away)
    monkeypatch.setattr(os, "environ", {**proxies, **listed})
    set_process_defaults(tmp_path)
    # Prefect uses httpx, MLflow and Ray requests, and address checks urllib
    assert httpx.get(own_server).text == "here"
    assert requests.get(own_server, timeout=10).text == "here"
    assert urllib.request.urlopen(own_server, timeout=10).read() == b"here"
    # other hosts, such as a bucket on S3, use the proxy that the user named
    assert not urllib.request.proxy_bypass("s3.eu-west-1.amazonaws.com")
    assert urllib.request.getproxies()["https"] == away
    assert bool(urllib.request.proxy_bypass("corp.example")) == bool(listed)


def test_no_proxy_at_all_stays_so(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "environ", {"NO_PROXY": "*"})
    set_process_defaults(tmp_path)
    assert os.environ["NO_PROXY"] == os.environ["no_proxy"] == "*"


def test_what_an_ascii_terminal_cannot_show_is_spelled_out(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "environ", {})
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", terminal)
    set_process_defaults(tmp_path)
    PlainConsole(file=terminal).print("5 of 9 · 3 %")
    print("é", file=terminal, flush=True)
    assert terminal.buffer.getvalue() == b"5 of 9 \\xb7 3 %\n\\xe9\n"


SCRIPT = """
import json, resource
import torch
from agentgym.defaults import keep_blocks, return_memory

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096 >> 20

keep_blocks()
torch.ones(1 << 20)
faults = -resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(60):
    torch.ones(1 << 20)  # 4 MiB
faults += resource.getrusage(resource.RUSAGE_SELF).ru_minflt
small, large = [], []
for _ in range(60):
    large.append(torch.ones(1 << 20))
    small.append(torch.ones(1 << 10))  # stays, so that no end of the heap is free
before = resident()
del large
return_memory()
print(json.dumps([before - resident(), faults]))
"""


@pytest.fixture(scope="module")
def measured():
    """(MiB returned of 240 that were freed, page faults of 60 blocks of 4 MiB in turn)."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True, timeout=120
    )
    return json.loads(done.stdout)


@pytest.mark.integration
def test_blocks_go_back_to_the_system_between_rollouts_and_updates(measured):
    assert measured[0] > 200


def test_a_block_that_is_used_again_costs_no_new_pages(measured):
    assert measured[1] < 20_000  # 61,440 pages are used
