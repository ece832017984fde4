"""The image of flow runs, jobs and services, as far as it can be tested without containers: its
files exist, its install steps work in an empty environment, and its commands run.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "k8s/Dockerfile").read_text()
STEPS = [
    (line.partition(" ")[0], line.partition(" ")[2])
    for line in re.sub(r"\\\n\s*", "", TEXT).splitlines()
    if line and not line.startswith("#")
]
SYSTEM = ("apt-get", "useradd")  # need root in the image; not run here


def of(kind):
    return [rest for name, rest in STEPS if name == kind]


def copied():
    """Yield (source, target in /app) of every COPY."""
    for words in map(shlex.split, of("COPY")):
        *sources, target = words
        for source in sources:
            place = target.removeprefix("./")
            yield source, place if place not in ("", ".") else source


def test_every_file_that_is_copied_is_there_and_is_sent_to_the_builder():
    allowed = {
        line.removeprefix("!")
        for line in (ROOT / "k8s/Dockerfile.dockerignore").read_text().splitlines()
        if line.startswith("!")
    }
    sources = {source for source, _ in copied()}
    assert [each for each in sources if not (ROOT / each).exists()] == []
    assert sources == allowed


def test_every_package_of_ours_is_in_it():
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")} - {"tests"}
    assert packages <= {target for _, target in copied()}


def test_it_has_no_browser_and_no_java_and_is_not_root():
    system = " ".join(each for each in of("RUN") if each.startswith("apt-get"))
    assert not re.search("jre|jdk|chromium|firefox|fonts", system)
    assert not re.search("playwright install", TEXT)
    (user,) = of("USER")
    template = json.loads((ROOT / "k8s/prefect/base-job-template.json").read_text())
    pod = template["job_configuration"]["job_manifest"]["spec"]["template"]["spec"]
    assert int(user) == pod["securityContext"]["runAsUser"]


def test_torch_and_all_else_are_the_pinned_ones():
    assert 'ARG TORCH="torch==' in TEXT
    pinned = dict(re.findall(r"^([\w.-]+)==(\S+)", (ROOT / "constraints.txt").read_text(), re.M))
    (torch,) = re.findall(r'ARG TORCH="torch==([\d.]+)"', TEXT)
    assert torch == pinned["torch"]
    installs = [each for each in of("RUN") if each.startswith("pip")]
    assert all("--constraint constraints.txt" in each or "$TORCH" in each for each in installs)


def test_pods_work_where_the_project_lies_in_it():
    (folder,) = of("WORKDIR")
    tree = yaml.safe_load((ROOT / "prefect.yaml").read_text())
    (pull,) = tree["definitions"]["kubernetes"]["pull"]
    assert pull["prefect.deployments.steps.set_working_directory"]["directory"] == folder


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_its_install_steps_work_in_an_empty_environment_and_its_commands_answer(tmp_path):
    app, venv = tmp_path / "app", tmp_path / "venv"
    app.mkdir()
    for source, target in copied():
        if (ROOT / source).is_dir():
            leave = shutil.ignore_patterns("__pycache__", "images.env")
            shutil.copytree(ROOT / source, app / target, ignore=leave)
        else:
            (app / target).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / source, app / target)
    subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True, timeout=120)
    arguments = dict(re.findall(r'^ARG (\w+)="(.+)"$', TEXT, re.M))
    kept = ("PIP_", "HTTP", "http", "SSL", "REQUESTS", "LANG", "TMPDIR", "UV_")
    environment = {k: v for k, v in os.environ.items() if k.startswith(kept)}
    environment |= {
        **arguments,
        "PATH": f"{venv}/bin:/usr/bin:/bin",
        "HOME": str(tmp_path),
        "PIP_CONFIG_FILE": os.environ.get("PIP_CONFIG_FILE", str(Path.home() / ".pip/pip.conf")),
    }

    def run(command, timeout=1800):
        done = subprocess.run(
            ["sh", "-c", command],
            cwd=app,
            env=environment,
            capture_output=True,
            text=True,
            timeout=timeout,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
        return done.stdout

    for command in of("RUN"):
        if not command.startswith(SYSTEM):
            run(command)
    answers = {
        shlex.join(json.loads(of("CMD")[0])): "step",
        "prefect version": "3.7",
        "python -m services.pods --help": "set-up",
        "ray --version": "2.",
        "agentgym plan --set compute=inline": "prepare",
    }
    run("dvc pull data/AgentGym-RL-Data-ID.dvc")
    for command, said in answers.items():
        assert said in run(command, timeout=300), command
