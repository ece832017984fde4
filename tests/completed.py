"""Commands that run to their end in a process of their own."""

import subprocess


def completed(*command, timeout=300, **more):
    """Return the end of a command with what it printed; more: of subprocess.run."""
    words = [str(word) for word in command]
    return subprocess.run(words, capture_output=True, text=True, timeout=timeout, **more)
