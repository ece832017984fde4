"""Find a browser, and the switches that isolate it."""

import sys

import pytest

from envs.webarena.chromium import find_browser, main, switches
from tests.completed import completed


def program(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return path


def test_a_given_program_comes_first_then_the_systems_then_playwrights_those_without_a_window_first(
    tmp_path, monkeypatch
):
    downloads = (
        "cache/chromium_headless_shell-1255/chrome-headless-shell-linux64/chrome-headless-shell",
        "cache/chromium-1255/chrome-linux/chrome",
    )
    order = [
        program(tmp_path / path)
        for path in ("bin/chromium-headless-shell", downloads[0], "bin/chromium", downloads[1])
    ]
    monkeypatch.setenv("PLAYWRIGHT_BROWSERS_PATH", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert find_browser("chromium") == str(tmp_path / "bin/chromium")
    with monkeypatch.context() as machine:
        machine.setenv("AGENTGYM_BROWSER", str(program(tmp_path / "given")))
        assert find_browser("chromium") == str(tmp_path / "given")
    for expected in order:
        assert find_browser() == str(expected)
        expected.unlink()


def test_a_machine_without_a_browser_is_told_how_to_get_one(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PLAYWRIGHT_BROWSERS_PATH", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match="apt-get install chromium"):
        find_browser()
    with pytest.raises(ValueError, match="option browser: 'chromium' is no program"):
        find_browser("chromium")
    with pytest.raises(ValueError, match="option browser: expected one of"):
        find_browser(str(program(tmp_path / "given")))
    monkeypatch.setenv("AGENTGYM_BROWSER", "nothing")
    with pytest.raises(ValueError, match="AGENTGYM_BROWSER: 'nothing' is no program"):
        find_browser()
    monkeypatch.delenv("AGENTGYM_BROWSER")
    assert main() == 1
    assert "python -m playwright install" in capsys.readouterr().err


def test_the_command_prints_the_program():
    done = completed(sys.executable, "-m", "envs.webarena.chromium", timeout=30, check=True)
    assert done.stdout.strip() == find_browser()


def test_names_resolve_to_the_given_addresses_and_nothing_else():
    rules = next(
        switch for switch in switches([("shop.test:80", "127.0.0.1:81")]) if "resolver" in switch
    )
    assert rules == "--host-resolver-rules=MAP shop.test:80 127.0.0.1:81, MAP * ~NOTFOUND"
    assert "MAP [::1]:80 [::1]:80" in switches([("[::1]:80", "[::1]:80")])[0]


@pytest.mark.parametrize(
    "address", ["shop.test", "a b:80", "a,MAP x y:80", "*:80", ":80", "host:port"]
)
def test_an_address_that_could_be_a_rule_is_refused(address):
    with pytest.raises(ValueError, match="is no host:port"):
        switches([(address, "127.0.0.1:80")])
