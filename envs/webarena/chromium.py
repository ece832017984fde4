"""Where Chromium is on this machine, and the switches that close it off from everything but the
sites of the tasks.

`python -m envs.webarena.chromium` prints the program found, or the command that installs one (exit
code 1).
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path

# of the machine, never of a parameter file: "off" goes without Chromium's sandbox
SANDBOX_VARIABLE = "WEBARENA_SANDBOX"
# all that browser and driver are told of this process's environment, which holds the trainer's
# secrets
_KEPT = (
    "PATH",
    "LANG",
    "LANGUAGE",
    "TZ",
    "LD_LIBRARY_PATH",
    "FONTCONFIG_FILE",
    "FONTCONFIG_PATH",
    "CHROME_DEVEL_SANDBOX",
)
BROWSER_VARIABLE = "AGENTGYM_BROWSER"  # path or name of the program
INSTALL = (
    "apt-get install chromium-headless-shell fonts-dejavu-core, or: python -m playwright install"
    " --with-deps chromium"
)
# the builds without a window first: the others draw one nobody sees, for a quarter more CPU time a
# step and twice the memory a session
_SHELLS = ("chromium-headless-shell", "chrome-headless-shell")
_PROGRAMS = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome")
_PLAYWRIGHTS_SHELL = "chromium_headless_shell-*/chrome-*/*headless*shell"
_PLAYWRIGHTS = "chromium-*/chrome-linux*/chrome"
_HOST = re.compile(r"[A-Za-z0-9.-]+|\[[0-9A-Fa-f:.]+\]")


def find_browser(given: str = "") -> str:
    """Path of the browser: the one this machine's owner names in the environment, else the given
    one, else one without a window, the system's before the newest that Playwright downloaded, else
    any.

    given: one of the known names; it comes from a parameter file, which may choose a browser but no
    other program.
    Errors: ValueError, where there is none saying how to get one.
    """
    machines = os.environ.get(BROWSER_VARIABLE, "")
    if given and given not in _SHELLS + _PROGRAMS:
        raise ValueError(
            f"webarena option browser: expected one of {', '.join(_SHELLS + _PROGRAMS)}, got"
            f" {given!r}; a path is taken from the variable {BROWSER_VARIABLE} alone"
        )
    if machines or given:
        source = BROWSER_VARIABLE if machines else "webarena option browser"
        found = shutil.which(machines or given)
        if found is None:
            raise ValueError(
                f"{source}: {machines or given!r} is no program that can be run; leave it out to"
                " look for one"
            )
        return found
    cache = Path(os.environ.get("PLAYWRIGHT_BROWSERS_PATH") or Path.home() / ".cache/ms-playwright")
    for programs, pattern in ((_SHELLS, _PLAYWRIGHTS_SHELL), (_PROGRAMS, _PLAYWRIGHTS)):
        for found in filter(None, map(shutil.which, programs)):
            # Debian's programs are shell scripts around these
            inner = Path("/usr/lib/chromium") / Path(found).name
            return (
                str(inner) if found.startswith("/usr/bin/") and os.access(inner, os.X_OK) else found
            )
        downloaded = [path for path in cache.glob(pattern) if os.access(path, os.X_OK)]
        if downloaded:
            return str(max(downloaded, key=lambda path: path.stat().st_mtime))
    raise ValueError(f"webarena needs Chromium and finds none; install it: {INSTALL}")


def switches(routes: Iterable[tuple[str, str]]) -> list[str]:
    """Command line switches. routes: (host:port as the pages name it, host:port to connect to); no
    other address is reachable.

    Errors: ValueError where an address is none.
    """
    rules = []
    for named, real in routes:
        for address in (named, real):
            host, _, port = address.rpartition(":")
            if not _HOST.fullmatch(host) or not port.isdigit():
                raise ValueError(f"webarena: {address!r} is no host:port")
        rules.append(f"MAP {named} {real}")
    return [
        f"--host-resolver-rules={', '.join([*rules, 'MAP * ~NOTFOUND'])}",
        "--no-proxy-server",  # a proxy would resolve names by itself
        "--disable-quic",
        "--force-webrtc-ip-handling-policy=disable_non_proxied_udp",
        "--disable-gpu",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        "--disable-crash-reporter",
    ]


def environment(folder: str) -> dict[str, str]:
    """Of the browser and its driver; they write to the folder and nowhere else."""
    kept = {
        name: value for name, value in os.environ.items() if name in _KEPT or name.startswith("LC_")
    }
    return {
        **kept,
        **dict.fromkeys(("TMPDIR", "HOME", "XDG_CONFIG_HOME", "XDG_CACHE_HOME"), folder),
    }


def use_sandbox() -> bool:
    """Whether Chromium runs in its own sandbox: always, but as root, whom it refuses, and where
    the machine says otherwise.

    Errors: ValueError.
    """
    said = os.environ.get(SANDBOX_VARIABLE, "on")
    if said not in ("on", "off"):
        raise ValueError(f"{SANDBOX_VARIABLE}: expected on or off, got {said!r}")
    return said == "on" and os.geteuid() != 0


def main() -> int:
    try:
        sys.stdout.write(f"{find_browser()}\n")
    except ValueError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
