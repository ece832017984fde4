"""The path of Chromium on this machine, and the switches that limit it to the sites of the tasks.

`python -m envs.webarena.chromium` prints the path, or the command that installs Chromium (exit code
1).
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path

# "off" disables Chromium's sandbox; the machine's owner decides this, never a parameter file
SANDBOX_VARIABLE = "WEBARENA_SANDBOX"
# the only variables that browser and driver get: this process's environment has the trainer's
# secrets
_KEPT = (
    *("PATH", "LANG", "LANGUAGE", "TZ", "LD_LIBRARY_PATH"),
    *("FONTCONFIG_FILE", "FONTCONFIG_PATH", "CHROME_DEVEL_SANDBOX"),
)
BROWSER_VARIABLE = "AGENTGYM_BROWSER"  # path or name of the program
INSTALL = (
    "apt-get install chromium-headless-shell fonts-dejavu-core, or: python -m playwright install"
    " --with-deps chromium"
)
# builds without a window come first: the others draw an unseen window, which costs a quarter more
# CPU time per step and twice the memory per session
_SHELLS = ("chromium-headless-shell", "chrome-headless-shell")
_PROGRAMS = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome")
_PLAYWRIGHTS_SHELL = "chromium_headless_shell-*/chrome-*/*headless*shell"
_PLAYWRIGHTS = "chromium-*/chrome-linux*/chrome"
_HOST = re.compile(r"[A-Za-z0-9.-]+|\[[0-9A-Fa-f:.]+\]")


def find_browser(given: str = "") -> str:
    """Return the path of the browser: AGENTGYM_BROWSER, else `given`, else the first one present.

    Builds without a window come first, and the system's before the newest that Playwright
    downloaded.
    given: a known program name, or empty. It comes from a parameter file, which may choose a
    browser but no other program.
    Errors: ValueError for another name or a missing program; without any browser it states how to
    install one.
    """
    override = os.environ.get(BROWSER_VARIABLE, "")
    if given and given not in _SHELLS + _PROGRAMS:
        raise ValueError(
            f"webarena option browser: expected one of {', '.join(_SHELLS + _PROGRAMS)}, got"
            f" {given!r}; a path is taken from the variable {BROWSER_VARIABLE} alone"
        )
    if override or given:
        source = BROWSER_VARIABLE if override else "webarena option browser"
        program = shutil.which(override or given)
        if program is None:
            raise ValueError(
                f"{source}: {override or given!r} is no program that can be run; leave it out to"
                " look for one"
            )
        return program
    cache = Path(os.environ.get("PLAYWRIGHT_BROWSERS_PATH") or Path.home() / ".cache/ms-playwright")
    for programs, pattern in ((_SHELLS, _PLAYWRIGHTS_SHELL), (_PROGRAMS, _PLAYWRIGHTS)):
        for program in filter(None, map(shutil.which, programs)):
            # Debian's programs in /usr/bin are shell scripts that start these
            inner = Path("/usr/lib/chromium") / Path(program).name
            is_script = program.startswith("/usr/bin/") and os.access(inner, os.X_OK)
            return str(inner) if is_script else program
        downloaded = [path for path in cache.glob(pattern) if os.access(path, os.X_OK)]
        if downloaded:
            return str(max(downloaded, key=lambda path: path.stat().st_mtime))
    raise ValueError(f"webarena needs Chromium and finds none; install it: {INSTALL}")


def switches(routes: Iterable[tuple[str, str]]) -> list[str]:
    """Return command line switches under which the browser reaches only the routes.

    routes: (host:port as the pages name it, host:port to connect to).
    Errors: ValueError if an address is no host:port.
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
    """Return variables for browser and driver: a few of ours; HOME and TMPDIR are `folder`."""
    kept = (name for name in os.environ if name in _KEPT or name.startswith("LC_"))
    folders = dict.fromkeys(("TMPDIR", "HOME", "XDG_CONFIG_HOME", "XDG_CACHE_HOME"), folder)
    return {name: os.environ[name] for name in kept} | folders


def use_sandbox() -> bool:
    """Return True if Chromium runs in its sandbox.

    It does unless WEBARENA_SANDBOX is off or the user is root, for whom Chromium refuses it.
    Errors: ValueError if the variable is neither on nor off.
    """
    value = os.environ.get(SANDBOX_VARIABLE, "on")
    if value not in ("on", "off"):
        raise ValueError(f"{SANDBOX_VARIABLE}: expected on or off, got {value!r}")
    return value == "on" and os.geteuid() != 0


def main() -> int:
    try:
        sys.stdout.write(f"{find_browser()}\n")
    except ValueError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
