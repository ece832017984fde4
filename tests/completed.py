"""Run commands to completion in a process."""

import subprocess


def completed(*command, timeout=300, **more):
    """Run a command and return it completed, with its output. more: arguments of subprocess.run."""
    words = [str(word) for word in command]
    return subprocess.run(words, capture_output=True, text=True, timeout=timeout, **more)
