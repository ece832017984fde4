"""Installed packages are the documented ones: the images' locks, the pins and the lists of
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

sys.path[0] = str(ROOT / "tools")
from advisories import judge  # noqa: E402
from licences import LICENCES, complete  # noqa: E402

sys.path.pop(0)

THIRD_PARTY = ROOT / "THIRD_PARTY.md"
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


COPYLEFT = re.compile(r"GPL|LGPL|MPL|EPL|CDDL|EUPL|Mozilla Public|General Public")


def licences(component):
    """Return all license texts of a listed component."""
    found = []
    for each in component.get("licenses", ()):
        found += [each.get("expression", ""), *each.get("license", {}).values()]
    return " ".join(found)


def test_every_component_of_the_trainer_has_a_licence_and_copyleft_ones_are_in_third_party():
    listing = json.loads((ROOT / "docs/sbom/agentgym-flow.cdx.json").read_text())["components"]
    assert [each["name"] for each in listing if not licences(each).strip()] == []
    copyleft = {each["name"] for each in listing if COPYLEFT.search(licences(each))}
    assert {"pygit2", "certifi", "pygame-ce"} <= copyleft
    told = re.search("under copyleft licenses.*?\n\n## ", THIRD_PARTY.read_text(), re.DOTALL)[0]
    assert set(re.findall(r"`([\w-]+)`", " ".join(re.findall(r"^\| (`.*?) \|", told, re.M)))) == (
        copyleft
    )


def test_a_component_without_a_licence_stops_the_list_until_somebody_reads_its_files():
    bare = [{"name": name} for name in LICENCES]
    listed = complete({"components": [*bare, {"name": "free", "licenses": [{"id": "MIT"}]}]})
    assert all(each["licenses"] for each in listed["components"])
    with pytest.raises(ValueError, match="unheard-of: no licence is declared; read the package's"):
        complete({"components": [{"name": each} for each in (*LICENCES, "unheard-of")]})
    with pytest.raises(ValueError, match="declared or gone; remove the line"):
        complete({"components": []})


def audited(*dependencies, stderr="", stdout=None, code=0):
    """Return a completed pip-audit command with this output."""
    text = json.dumps({"dependencies": dependencies, "fixes": []}) if stdout is None else stdout
    return subprocess.CompletedProcess([], code, text, stderr)


def advisory(*numbers, fixed=()):
    found = {"id": numbers[0], "aliases": list(numbers[1:]), "fix_versions": list(fixed)}
    return {"name": "diskcache", "version": "5.6.3", "vulns": [found]}


def test_an_advisory_fails_until_security_md_answers_it_under_any_of_its_numbers(capsys):
    answers = (ROOT / "SECURITY.md").read_text()
    known = advisory("GHSA-w8v5-vhqr-4h9v", "CVE-2025-69872")
    assert judge(["diskcache==5.6.3"], audited(known, code=1), answers) == 0
    assert "known  diskcache 5.6.3: GHSA-w8v5-vhqr-4h9v CVE-2025-69872" in capsys.readouterr().out
    new = advisory("PYSEC-2031-7", fixed=["6.0"])
    assert judge(["diskcache==5.6.3"], audited(new, code=1), answers) == 1
    assert "NEW  diskcache 5.6.3: PYSEC-2031-7, fixed in 6.0" in capsys.readouterr().out


def test_a_service_that_cannot_be_reached_is_told_and_fails_nothing(capsys):
    away = "requests.exceptions.ConnectionError: ... Failed to resolve 'pypi.org'"
    pins = ["a==1", "b==2"]
    assert judge(pins, audited(stdout="", stderr=away, code=1), "") == 0
    assert "NOT CHECKED: 2 components, for example: the service" in capsys.readouterr().out
    mirror = {"name": "a", "skip_reason": "Dependency not found on PyPI: a (1)"}
    seen = {"name": "b", "version": "2", "vulns": []}
    assert judge(pins, audited(mirror, seen), "") == 0
    said = capsys.readouterr().out
    assert "2 pinned components: 1 looked at" in said
    assert "NOT CHECKED: 1 components, for example: Dependency not found on PyPI: a (1)" in said
    assert judge(pins, audited(stdout="", stderr="error: no such option", code=2), "") == 2


def test_third_party_names_every_file_that_is_made_of_others_work():
    said = THIRD_PARTY.read_text()
    for path in re.findall(r"`((?:envs|data|docs)/[^`]+)`", said):
        assert (ROOT / path).exists(), path
    for file in (
        "envs/textcraft/recipes.json",
        "envs/sciworld/gold.json.gz",
        "envs/sciworld/slots.jar",
    ):
        assert f"`{file}`" in said


def test_no_text_has_a_reader_install_a_distribution_that_nobody_published():
    """The name's owner on an index could run code on readers' machines; `-e '.[extra]'` installs
    the checkout. `pyproject.toml` contains the name, but pip never looks it up.
    """
    wanted = re.compile(r"agentgym[-_.]flow\[|pip install[\s\"'`]+agentgym")
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True
    ).stdout
    names = set(listed.decode().split("\0")) - {"", "pyproject.toml", "CHANGELOG.md"}
    texts = {name: (ROOT / name).read_bytes().decode("utf-8", "ignore") for name in names}
    assert wanted.search('pip install"\n            " \'agentgym-flow' + "[vllm]'")
    assert sorted(name for name, text in texts.items() if wanted.search(text)) == []


def test_every_claim_of_security_md_names_a_test_that_there_is():
    text = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", text)
    assert len(named) > 20
    missing = [
        f"{path}::{name}"
        for path, name in named
        if not (ROOT / path).is_file()
        or (name and f"def {name}(" not in (ROOT / path).read_text(encoding="utf-8"))
    ]
    assert missing == []
