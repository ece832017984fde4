"""Commands end with one plain line, the page on the error and an exit code."""

import re
import signal
import subprocess
import sys
from importlib.metadata import Distribution
from pathlib import Path

import pytest

from agentgym.config import ConfigError, load_config
from agentgym.console import ending
from agentgym.console.ending import PAGES, guarded, page_of
from agentgym.deploy.kube.calls import AlreadyExists
from agentgym.pipeline.child import Stopped, run_command

# window title, cleared screen, hyperlink, bell, C1 sequence introducer, right-to-left override,
# line separator, carriage return
HOSTILE = "ok\x1b]0;owned\x07\x1b[2J\x1b]8;;http://evil\x1b\\x\x9b31m\u202ekcab\u2028\rfailed"
STEERING = set("\x1b\x07\x9b\u202e\u2028\r")


@pytest.mark.parametrize(
    ("error", "code"),
    [(ConfigError(HOSTILE), 2), (RuntimeError(HOSTILE), 1), (OSError(5, HOSTILE), 1)],
)
@pytest.mark.parametrize("show_traceback", [False, True])
def test_a_commands_error_is_plain(capsys, error, code, show_traceback):
    def command():
        raise error

    assert guarded(command, show_traceback=show_traceback) == code
    assert not STEERING & set(capsys.readouterr().err)


MANY = """
import sys
from agentgym.console.ending import guarded, say

def command():
    for number in range(100_000):
        say(number)
    return 0

sys.exit(guarded(command))
"""


def test_a_command_whose_reader_is_gone_ends_without_a_word():
    """Run `agentgym plan | head -1`."""
    command = subprocess.Popen(
        [sys.executable, "-c", MANY], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    with command:
        assert command.stdout.readline() == b"0\n"
        command.stdout.close()
        assert command.stderr.read() == b""
    assert command.returncode == 128 + signal.SIGPIPE


def test_another_pipe_that_breaks_is_a_failure(capsys):
    def command():
        raise BrokenPipeError(32, "Broken pipe")

    assert guarded(command) == 1
    assert capsys.readouterr().err == "failed: BrokenPipeError: [Errno 32] Broken pipe\n"


ROOT = Path(__file__).parents[3]
REFERENCE = "docs/reference"


def documented():
    """Return {class of errors: the pages, as paths, that have a section on it}."""
    found = {}
    for path in sorted((ROOT / REFERENCE).glob("errors-*.md")):
        for name in re.findall(r"^## (\w+)$", path.read_text(), re.MULTILINE):
            found.setdefault(name, []).append(f"{REFERENCE}/{path.name}#{name.lower()}")
    return {name: pages for name, pages in found.items() if name[0].isupper()} | {
        "RuntimeError": [f"{REFERENCE}/errors.md#classes"]
    }


@pytest.mark.parametrize("name", sorted({*PAGES, *documented()} - {"Services"}))
def test_an_errors_last_line_is_the_section_on_it_and_fits_80_columns(name, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)

    def command():
        raise type(name, (Exception,), {})("text")

    assert guarded(command) == 1
    said, page = capsys.readouterr().err.splitlines()
    assert said == f"failed: {name}: text"
    assert page.removeprefix("see ") in documented()[name]
    assert len(page) <= 80


def test_an_error_without_a_section_names_that_of_its_nearest_documented_base(monkeypatch):
    monkeypatch.chdir(ROOT)
    assert page_of(AlreadyExists) == f"{REFERENCE}/errors-environments.md#kubeerror"
    assert page_of(Stopped) == f"{REFERENCE}/errors.md#classes"
    assert page_of(BrokenPipeError) == ""


def test_the_page_is_named_by_its_path_by_its_address_or_by_the_repository(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    section = f"{REFERENCE}/errors-configuration.md#configerror"
    assert page_of(ConfigError) == str(ROOT / section)
    monkeypatch.setattr(ending, "CHECKOUT", tmp_path)
    assert page_of(ConfigError) == f"{section} in the repository of agentgym-flow"

    class Installed(Distribution):
        def read_text(self, filename):
            address = "Documentation, https://docs.example/flow/"
            return f"Metadata-Version: 2.4\nProject-URL: Home, x\nProject-URL: {address}\n"

        def locate_file(self, path):
            raise NotImplementedError

    monkeypatch.setattr(ending, "metadata", lambda name: Installed().metadata)
    address = f"https://docs.example/flow/{REFERENCE}/errors-configuration/#configerror"
    assert page_of(ConfigError) == address


@pytest.mark.integration
def test_the_page_of_an_error_in_another_process_is_the_last_line_here_too(
    tmp_path, capsys, monkeypatch, tiny_params
):
    monkeypatch.chdir(ROOT)
    cfg = load_config(tiny_params(tmp_path / "run"))

    def command():
        run_command(
            ("step", "prepare", "--set", "data.path=nowhere"), cfg, title="part", place="parts/one"
        )
        return 0

    assert guarded(command) == 2
    said, page = capsys.readouterr().err.splitlines()
    assert said.startswith("error: part: ")
    assert "; its log is " in said
    assert page == f"see {REFERENCE}/errors-configuration.md#dataerror"
