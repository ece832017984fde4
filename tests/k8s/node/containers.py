"""Containers without a container runtime: real commands in separate Linux namespaces.

A pod has a network namespace with an address on a bridge of this machine. Each of its containers
has separate processes, mounts, /tmp, /run, /dev/shm and host name. The file system is this
machine's, with the project at /app: every container has this image. `python` is the Python
that runs this module. User ids, capabilities and memory limits are not enforced.
Needs root, iproute2 and util-linux.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

PREFIX = "agents"  # prefix of bridges' names, followed by their owner's process id
POLL_S = 0.01
START_TIMEOUT_S = 30.0
# child processes die with this process, even if it is killed
OWNED = ("setpriv", "--pdeathsig", "KILL")
SPACES = ("--mount", "--pid", "--uts", "--ipc", "--fork", "--kill-child")
PATH = f"{Path(sys.executable).parent}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

IMAGE = {"PATH": PATH, "HOME": "/tmp", "PYTHONPATH": "/app"}  # import the project at /app


def missing() -> str:
    """Return the reason why namespaces are unavailable, or "" if they are available."""
    absent = [each for each in ("ip", "nsenter", "unshare", "setpriv") if not shutil.which(each)]
    if absent:
        return f"{', '.join(absent)} not found; install iproute2 and util-linux"
    return "" if os.geteuid() == 0 else "namespaces and addresses for pods need root"


@dataclass(frozen=True, slots=True)
class Bridge:
    """Network bridge between this machine and the pods of all nodes."""

    name: str
    block: int  # addresses are 10.block.NODE.POD; 10.block.0.1 is this machine

    @property
    def gateway(self) -> str:
        return f"10.{self.block}.0.1"


@contextlib.contextmanager
def bridge() -> Iterator[Bridge]:
    """Yield a new bridge; delete it at the end. First delete bridges of owners that have died."""
    links = subprocess.run(["ip", "-o", "link"], capture_output=True, text=True, check=True).stdout
    for name in {line.split(": ")[1] for line in links.splitlines()}:
        owner = name.removeprefix(PREFIX)
        if owner != name and not Path(f"/proc/{owner}").exists():
            subprocess.run(["ip", "link", "delete", name], check=False)
    taken = subprocess.run(
        ["ip", "-o", "-4", "address"], capture_output=True, text=True, check=True
    )
    free = (block for block in range(64, 256) if f" 10.{block}." not in taken.stdout)
    made = Bridge(f"{PREFIX}{os.getpid()}", next(free))
    try:
        _ip(
            f"link add {made.name} type bridge",
            f"address add {made.gateway}/16 dev {made.name}",
            f"link set {made.name} up",
        )
        yield made
    finally:
        subprocess.run(["ip", "link", "delete", made.name], check=False)


def _ip(*lines: str, inside: int | None = None) -> None:
    """Run `ip` commands. inside: a process in whose network namespace they run."""
    words = ["nsenter", f"--net=/proc/{inside}/ns/net"] if inside else []
    subprocess.run(
        [*words, "ip", "-batch", "-"], input="\n".join(lines), text=True, check=True, timeout=30
    )


async def open_network(name: str, address: str, bridge: Bridge) -> asyncio.subprocess.Process:
    """Start a process that holds a network namespace with this address until it ends."""
    holder = await asyncio.create_subprocess_exec(
        *OWNED, "unshare", "--net", "sleep", "infinity", start_new_session=True
    )
    ours, theirs = os.readlink("/proc/self/ns/net"), Path(f"/proc/{holder.pid}/ns/net")
    async with asyncio.timeout(START_TIMEOUT_S):
        while os.readlink(theirs) == ours:
            await asyncio.sleep(POLL_S)
    _ip(
        f"link add {name} type veth peer name eth0 netns {holder.pid}",
        f"link set {name} master {bridge.name} up",
    )
    _ip(
        f"address add {address}/16 dev eth0",
        "link set eth0 up",
        "link set lo up",
        f"route add default via {bridge.gateway}",
        inside=holder.pid,
    )
    return holder


@dataclass(frozen=True, slots=True)
class Mount:
    source: Path  # a folder or a file of this machine
    path: str  # path in the container
    read_only: bool = False


def entering(root: Path, hostname: str, mounts: Sequence[Mount]) -> str:
    """Return a shell script that makes a container's file system and then executes its command.

    root: an empty folder. The script's arguments: the working directory, then the command.
    """
    at = shlex.quote(str(root))
    lines = [
        f"set -e; echo {shlex.quote(hostname)} > /proc/sys/kernel/hostname",
        f"mount -t tmpfs root {at}; mkdir {at}/proc {at}/tmp {at}/run; chmod 1777 {at}/tmp",
        "for each in /*; do case $each in /proc|/tmp|/run) continue;; esac",
        f'if [ -L "$each" ]; then cp -P "$each" {at}/; elif [ -d "$each" ]; then',
        f'mkdir {at}"$each"; mount --rbind "$each" {at}"$each"; fi; done',
        f"mount -t proc proc {at}/proc; mount -t tmpfs shm {at}/dev/shm",
    ]
    for mount in mounts:
        source, target = shlex.quote(str(mount.source)), shlex.quote(f"{root}{mount.path}")
        make = f"mkdir -p {target}"
        if mount.source.is_file():
            make = f"mkdir -p $(dirname {target}); [ -e {target} ] || touch {target}"
        lines.append(f"{make}; mount --bind {source} {target}")
        if mount.read_only:
            lines.append(f"mount -o remount,bind,ro {target}")
    return "\n".join([*lines, f'exec chroot {at} sh -c \'cd "$0" && exec "$@"\' "$@"'])


class Container:
    """Command that runs in separate namespaces."""

    def __init__(self, process: asyncio.subprocess.Process, env: Mapping[str, str]) -> None:
        self.process = process
        self._env = env

    @classmethod
    async def start(
        cls,
        command: Sequence[str],
        env: Mapping[str, str],
        script: str,
        log: Path,
        network: int | None,
        workdir: str,
    ) -> Container:
        """Start it. network: the process that has the pod's namespace; None: this machine's."""
        inside = ("nsenter", f"--net=/proc/{network}/ns/net") if network else ()
        words = [*OWNED, *inside, "unshare", *SPACES, "sh", "-c", script, "sh", workdir, *command]
        with log.open("ab") as output:
            process = await asyncio.create_subprocess_exec(
                *words,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**IMAGE, **env},
                start_new_session=True,
            )
        return cls(process, env)

    def _first(self) -> int | None:
        """Return this machine's pid of the container's process 1."""
        pid = self.process.pid
        with contextlib.suppress(OSError):
            if children := Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
                return int(children[0])
        return None

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to process 1; SIGKILL also ends all its descendants."""
        with contextlib.suppress(ProcessLookupError):
            if (first := self._first()) is not None:
                os.kill(first, number)
            elif self.process.returncode is None:
                self.process.send_signal(number)

    async def execute(self, command: Sequence[str], timeout_s: float) -> bool:
        """Run a command inside. Return True if it exits with 0 in time."""
        if (first := self._first()) is None:
            return False
        spaces = ("--net", "--mount", "--pid", "--uts", "--ipc", "--root")
        beside = await asyncio.create_subprocess_exec(
            *OWNED,
            *("nsenter", "--target", str(first), *spaces, "--", *command),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            env={**IMAGE, **self._env},
            start_new_session=True,
        )
        try:
            async with asyncio.timeout(timeout_s):
                return await beside.wait() == 0
        except TimeoutError:
            return False
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(beside.pid, signal.SIGKILL)
            await beside.wait()
