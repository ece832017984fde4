"""The container without Docker: run the Dockerfile's copy and install steps in an empty
environment, and serve from it.
"""

import json
import os
import re
import shutil
import subprocess
import time
import urllib.request
import venv
from pathlib import Path

import pytest

from tests.completed import completed

pytestmark = pytest.mark.integration
ROOT = Path(__file__).parents[2]
ABSENT = ("torch", "ray", "prefect", "mlflow", "transformers", "agentgym", "dvc", "vllm")
DOCKERFILE = (ROOT / "envs/Dockerfile").read_text()


def commands(word):
    """Arguments of the Dockerfile lines that begin with `word`, continued lines joined."""
    return re.findall(rf"^{word} (.+)$", DOCKERFILE.replace("\\\n", " "), re.MULTILINE)


def build(env, place):
    """Run the Dockerfile's steps on the files it names. Return the Python of the built image."""
    srv = place / "srv"
    srv.mkdir()
    for copied in commands("COPY"):
        *sources, target = copied.split()
        for source in sources:
            end = srv / target
            if (ROOT / source).is_dir():
                shutil.copytree(ROOT / source, end, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(ROOT / source, end)
    venv.create(place / "venv", with_pip=True)
    clean = {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTHONPATH", "VIRTUAL_ENV")
    }
    environment = {**clean, "PATH": f"{place}/venv/bin:{os.environ['PATH']}", "ENV": env}
    installs = next(run for run in commands("RUN") if "pip install" in run)
    done = completed("sh", "-ec", installs, cwd=srv, env=environment, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    return srv, environment


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("env", ["textcraft", "babyai", "sciworld", "searchqa", "webarena"])
def test_the_image_serves_its_environment_and_holds_nothing_of_the_trainer(env, tmp_path):
    srv, environment = build(env, tmp_path)
    python = f"{tmp_path}/venv/bin/python"
    code = (
        f"import importlib.util as u, json; print(json.dumps([n for n in {ABSENT!r} if"
        " u.find_spec(n)]))"
    )
    found = completed(python, "-c", code, cwd=srv, env=environment, check=True)
    assert json.loads(found.stdout) == []
    entry = (
        json.loads(commands("ENTRYPOINT")[0])[2]
        .replace("--host 0.0.0.0", "--host 127.0.0.1")
        .replace("--port 8000", "--port 0")
    )
    probe = json.loads(re.search(r"CMD (\[.+\])", DOCKERFILE)[1])
    port_file, log = tmp_path / "port", tmp_path / "log"
    command = ["/bin/sh", "-c", entry, "serve", "--port-file", str(port_file)]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, cwd=srv, env={**environment, "NAME": env}, stdout=output, stderr=output
        )
    try:
        deadline = time.monotonic() + 60
        while True:
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            port = port_file.read_text().strip() if port_file.exists() else "1"
            health = [part.replace("8000", port) for part in probe]
            if (
                subprocess.run(health, env=environment, capture_output=True, check=False).returncode
                == 0
            ):
                break
            time.sleep(0.2)
        info = json.load(urllib.request.urlopen(f"http://127.0.0.1:{port}/info", timeout=5))
        assert info["env"] == env
        assert info["pid"] == process.pid  # it is process 1 of a container and receives the signals
        loaded = Path(f"/proc/{process.pid}/maps").read_text()
        assert not [name for name in ABSENT if f"/{name}/" in loaded]
    finally:
        process.terminate()
        assert process.wait(30) == 0
    assert "Traceback" not in log.read_text()


def test_the_image_does_not_run_as_root_and_is_checked():
    assert commands("USER") == ["10001"]
    assert commands("HEALTHCHECK")
    assert "torch" not in DOCKERFILE
