"""A forked command is the command: its program, words, place, environment, output and end."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import forks as forks_module

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[1]
TELL = """
import json, os, sys
ours = {"agentgym", "envs", "flows", "services", "tasks", "prefect"} & sys.modules.keys()
print(json.dumps([sys.argv, os.getcwd(), dict(os.environ), sorted(ours), "torch" in sys.modules]))
print("to stderr", file=sys.stderr)
sys.exit(3)
"""
WAIT = """
import sys, time
print("begun", flush=True)
try:
    time.sleep(60)
except KeyboardInterrupt:
    sys.exit(7)
"""


def test_it_has_its_words_its_place_and_its_environment_and_nothing_of_ours_is_imported(
    forks, tmp_path
):
    environment = {"PATH": os.environ["PATH"], "OWN": "1"}
    ended = forks.run(["python", "-c", TELL, "a b"], cwd=tmp_path, env=environment)
    assert (ended.returncode, ended.stderr) == (3, "to stderr\n")
    words, place, found, ours, imported = json.loads(ended.stdout)
    assert (words, place, found) == (["-c", "a b"], str(tmp_path), environment)
    assert (ours, imported) == ([], True)


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["python", "-m", "theirs", "x"], "theirs ['x'] __main__"),
        (["python", "theirs.py", "x"], "theirs ['x'] __main__"),
        (["theirs-command", "x"], "theirs ['x'] __main__"),
    ],
    ids=["module", "file", "command"],
)
def test_modules_files_and_installed_commands_run_as_the_program(forks, tmp_path, command, said):
    text = "import sys\nprint('theirs', sys.argv[1:], __name__)\n"
    (tmp_path / "theirs.py").write_text(text)
    installed = tmp_path / "bin/theirs-command"
    installed.parent.mkdir()
    installed.write_text(f"#!/usr/bin/env python\n{text}")
    installed.chmod(0o755)
    environment = {**os.environ, "PATH": f"{installed.parent}:{os.environ['PATH']}"}
    ended = forks.run(command, cwd=tmp_path, env=environment)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, f"{said}\n", "")


def test_it_finds_what_its_own_path_holds_before_what_is_installed(forks, tmp_path):
    (tmp_path / "agentgym.py").write_text("print('another')\n")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    ended = forks.run(["python", "-c", "import agentgym"], cwd=ROOT, env=environment)
    # the directory it runs in is first, as for any `python -c`
    assert (ended.returncode, ended.stdout) == (0, "")
    ended = forks.run(["python", "-c", "import agentgym"], cwd=tmp_path.parent, env=environment)
    assert (ended.returncode, ended.stdout) == (0, "another\n")


ENDING = """
import atexit, sys, threading, time
atexit.register(print, "at exit")
threading.Thread(target=lambda: (time.sleep(0.2), print("a thread"))).start()
sys.stdout.write("said ")
"""


@pytest.mark.parametrize(
    ("last", "code", "told"),
    [
        ("", 0, ""),
        ("sys.exit()", 0, ""),
        ("sys.exit(300)", 300 & 0xFF, ""),
        ("sys.exit('a reason')", 1, "a reason\n"),
        ("1 / 0", 1, "ZeroDivisionError: division by zero\n"),
        ("raise KeyboardInterrupt", -signal.SIGINT, "KeyboardInterrupt\n"),
    ],
)
def test_it_ends_as_any_program_does(forks, last, code, told):
    command = [sys.executable, "-c", ENDING + last]
    plain = subprocess.run(command, capture_output=True, text=True, check=False)
    for ended in (plain, forks.run(command)):
        assert (ended.returncode, ended.stdout) == (code, "said a thread\nat exit\n")
        assert ended.stderr.endswith(told)
        assert bool(ended.stderr) is bool(told)


def test_it_is_a_process_that_can_be_watched_interrupted_and_killed(forks):
    for number, code in ((signal.SIGKILL, -signal.SIGKILL), (signal.SIGINT, 7)):
        with forks.start(["python", "-c", WAIT]) as running:
            assert running.stdout.readline() == "begun\n"
            assert running.poll() is None
            with pytest.raises(subprocess.TimeoutExpired):
                running.wait(0.05)
            running.send_signal(number)
            assert running.wait(30) == code
    with pytest.raises(subprocess.TimeoutExpired):
        forks.run(["python", "-c", WAIT], timeout=0.5)


COPIED = """
import os, sys, torch
from agentgym.types import Item
print(sys.stdin.readline().strip(), os.getsid(0) == os.getpid(), os.environ["OWN"], flush=True)
sys.exit(int(sys.stdin.readline() or 9))
"""


def test_a_program_that_begins_as_a_copy_is_what_popen_gives_otherwise(forks, tmp_path):
    began = []
    begin = forks_module.popen_of(forks, lambda: began.append(1) or True)
    command, own = [sys.executable, "-c", COPIED], {**os.environ, "OWN": "1"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    for more, session in (({}, "False"), ({"start_new_session": True}, "True")):
        with begin(command, env=own, cwd=tmp_path, **pipes, **more) as running:
            shown = Path(f"/proc/{running.pid}/cmdline").read_bytes().split(b"\0")
            assert shown[0] == sys.executable.encode()
            assert running.poll() is None
            with pytest.raises(subprocess.TimeoutExpired):
                running.wait(0.05)
            said, _ = running.communicate("here\n4\n", timeout=60)
        assert (said, running.returncode) == (f"here {session} 1\n", 4)
    with begin(command, env=own, **pipes) as running:  # its input ends with its owner
        running.stdin.close()
        assert running.wait(60) == 9
    with begin(command, env=own, **pipes) as running:
        running.kill()
        assert running.wait(60) == -signal.SIGKILL
        running.kill()  # it is gone: nobody else gets it
    assert len(began) == 4
    with begin([sys.executable, "-c", "import sys; sys.exit(3)"]) as other:
        assert other.wait(60) == 3
    assert len(began) == 4


GIVEN = """
import os, subprocess, sys
from agentgym.store import posix
print(os.getppid(), flush=True)
os.write(int(sys.argv[1]), b"through its own number")
if sys.argv[2:]:
    subprocess.run([sys.executable, "-c", *sys.argv[2:], sys.argv[1]], pass_fds=[int(sys.argv[1])])
"""


def test_it_has_the_files_that_are_passed_on(forks):
    read, write = os.pipe()
    command = [sys.executable, "-c", GIVEN, str(write), GIVEN]
    begin = forks_module.popen_of(forks, lambda: True)
    with (
        open(read, "rb") as reader,
        open(write, "wb") as writer,
        begin(command, cwd=ROOT, stdout=subprocess.PIPE, pass_fds=[write]) as running,
    ):
        parents = running.communicate(timeout=60)[0].split()
        writer.close()
        assert reader.read() == b"through its own number" * 2
    assert int(parents[1]) == running.pid  # what it starts is its child


def test_what_a_program_starts_that_nobody_watches_begins_as_a_copy_too(forks):
    ended = forks.run([sys.executable, "-c", GIVEN, "1", GIVEN], cwd=ROOT)
    first, second = re.findall(r"\d+", ended.stdout)
    assert first == second  # both are copies of one process


@pytest.mark.parametrize(
    ("words", "begins"),
    [
        (forks_module.TESTS, True),
        *((["-m", name, "serve"], True) for name in forks_module.BEGUN),
        (["-P", str(ROOT / "tests/s3_server.py"), "port"], True),
        (["-P", "another.py"], False),
        (["-c", "from agentgym.store import posix"], True),
        (["-c", "from agentgym.store import posix; print('torch' in sys.modules)"], False),
        (["-m", "agentgym", "plan"], False),
        (["-c", "print(1)"], False),
        ([], False),
    ],
)
def test_what_begins_as_a_copy(words, begins):
    assert forks_module.is_begun([sys.executable, *words]) is begins
    assert not forks_module.is_begun(["another", *words])


def test_the_process_that_forks_ends_with_the_last_of_those_who_held_it(forks, tmp_path):
    first, second = (type(forks)(tmp_path / "own", ()) for _ in range(2))
    place = "import os; print(os.getppid())"
    assert first.run(["python", "-c", place]).returncode == 0
    assert second.run(["python", "-c", place]).returncode == 0
    first.close()
    time.sleep(0.2)
    assert second.run(["python", "-c", place]).returncode == 0
    second.close()
    deadline = time.monotonic() + 30
    while (tmp_path / "own").exists():
        assert time.monotonic() < deadline, "nobody holds it, and it is still there"
        time.sleep(0.05)
