"""Run commands to completion in a process."""

import os
import subprocess
import sys


def completed(*command, timeout=300, **more):
    """Run a command and return it completed, with its output. more: arguments of subprocess.run."""
    words = [str(word) for word in command]
    return subprocess.run(words, capture_output=True, text=True, timeout=timeout, **more)


def printed_under(hash_seed, script, *words):
    """Return what a Python script prints in a new process with this PYTHONHASHSEED."""
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    command = (sys.executable, "-c", script, *words)
    return completed(*command, env=environment, timeout=60, check=True).stdout
