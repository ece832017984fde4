"""The keeper ends the browser's session and no other that reuses its number."""

import subprocess
import sys

import psutil
import pytest

from envs.webarena import keeper

pytestmark = pytest.mark.usefixtures("chromium")


SLEEPER = """import subprocess, sys, time
open("/proc/self/comm", "wb").write("браузер".encode()[:15])  # a name cut within a letter
subprocess.Popen([sys.executable, "-c", "import time; print(flush=True); time.sleep(60)"], env={})
time.sleep(60)"""


def test_the_keeper_ends_a_session_of_the_browsers_own_and_no_other_that_got_its_number(tmp_path):
    folder = str(tmp_path)
    command = [sys.executable, "-c", SLEEPER, folder]
    leader = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
    follower = subprocess.Popen(command, stdout=subprocess.PIPE)
    try:
        for process in (leader, follower):
            process.stdout.readline()  # wait until its child runs
        (child,) = psutil.Process(leader.pid).children()
        browser = keeper.checked(leader.pid, folder)
        assert browser is not None
        assert keeper.checked(follower.pid, folder) is None  # it runs in our session
        assert keeper.checked(leader.pid, "/another") is None
        assert sorted(keeper.left(folder, browser)) == sorted([leader.pid, follower.pid, child.pid])
        assert keeper.left("/another", (browser[0], browser[1] + 1)) == []
    finally:
        for process in (leader, follower):
            for each in [*psutil.Process(process.pid).children(), process]:
                each.kill()
            process.wait()
            process.stdout.close()
