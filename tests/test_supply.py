"""What is installed is what is written down: the images' locks, the pins and the lists of
components agree.
"""

import json
import re
import subprocess
import sys
from importlib.metadata import requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name as canonical

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "envs"))
from requirements import requirements  # noqa: E402  (a script that needs nothing else of envs)

sys.path.pop(0)

ENVS = sorted(path.stem for path in (ROOT / "envs/locks").glob("*.txt"))
PIN = re.compile(r"^([A-Za-z0-9._-]+)==([^\s;]+)(.*)$", re.MULTILINE)


def pins(path):
    return {canonical(name): version for name, version, _ in PIN.findall(path.read_text())}


PINNED = pins(ROOT / "constraints.txt")


def components(name):
    found = json.loads((ROOT / f"docs/sbom/{name}.cdx.json").read_text())["components"]
    return {canonical(each["name"]): each["version"].partition("+")[0] for each in found}


def test_every_environment_has_a_lock():
    servers = {path.parent.name for path in (ROOT / "envs").glob("*/README.md")}
    assert set(ENVS) == servers


@pytest.mark.parametrize("env", ENVS)
def test_a_lock_holds_the_pinned_versions_each_with_its_digests(env):
    lock = ROOT / f"envs/locks/{env}.txt"
    locked = pins(lock)
    assert {name: version for name, version in locked.items() if PINNED.get(name) != version} == {}
    entries = re.split(r"\n(?=\S)", lock.read_text().strip())
    assert len(entries) == len(locked)
    assert all(re.search(r"--hash=sha256:[0-9a-f]{64}", entry) for entry in entries)


@pytest.mark.parametrize("env", ENVS)
def test_a_lock_holds_all_that_its_server_needs_and_that_those_need(env):
    locked = pins(ROOT / f"envs/locks/{env}.txt")
    waiting = [Requirement(line) for line in requirements(env, ROOT / "pyproject.toml")]
    seen = set()
    while waiting:
        requirement = waiting.pop()
        name = canonical(requirement.name)
        extras = requirement.extras or {""}
        if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
            continue
        assert requirement.specifier.contains(locked[name]), requirement
        if (name, *sorted(extras)) in seen:
            continue
        seen.add((name, *sorted(extras)))
        for line in requires(name) or ():
            further = Requirement(line)
            if not further.marker or any(
                further.marker.evaluate({"extra": extra}) for extra in extras
            ):
                further.marker = None
                waiting.append(further)


@pytest.mark.parametrize("env", ENVS)
def test_the_components_of_an_image_are_those_of_its_lock(env):
    assert components(f"env-{env}") == pins(ROOT / f"envs/locks/{env}.txt")


def test_the_components_of_the_trainer_are_the_pinned_ones():
    listed = components("agentgym-flow")
    assert {
        name: version for name, version in listed.items() if PINNED.get(name, version) != version
    } == {}
    direct = {
        canonical(Requirement(line).name)
        for line in requires("agentgym-flow")
        if "extra" not in line
    }
    assert direct - {"agentgym-flow"} <= set(listed)


def test_third_party_names_every_file_that_is_made_of_others_work():
    said = (ROOT / "THIRD_PARTY.md").read_text()
    for path in re.findall(r"`((?:envs|data|docs)/[^`]+)`", said):
        assert (ROOT / path).exists(), path
    for file in (
        "envs/textcraft/recipes.json",
        "envs/sciworld/gold.json.gz",
        "envs/sciworld/slots.jar",
    ):
        assert f"`{file}`" in said


def test_no_text_has_a_reader_install_a_distribution_that_nobody_published():
    """Whoever takes the name on an index would run code on readers' machines; `-e '.[extra]'` from
    the checkout is ours. `pyproject.toml` names itself, which pip never looks up.
    """
    wanted = re.compile(r"agentgym[-_.]flow\[|pip install[\s\"'`]+agentgym")
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True
    ).stdout
    names = set(listed.decode().split("\0")) - {"", "pyproject.toml", "CHANGELOG.md"}
    texts = {name: (ROOT / name).read_bytes().decode("utf-8", "ignore") for name in names}
    assert wanted.search('pip install"\n            " \'agentgym-flow' + "[vllm]'")
    assert sorted(name for name, text in texts.items() if wanted.search(text)) == []
