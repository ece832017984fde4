"""Attack on a running project by another user of this machine: that user tries every port and file.

    sudo .venv/bin/python tools/second_user.py

Two situations: `make up` with a deployed run, and a pipeline in a terminal.
In each, a process of user `nobody` sends requests to every port on which a process of the project
listens, and opens every file below the project, its home and its temporary folder for reading and
for writing.
It prints what succeeded; anything that SECURITY.md does not allow ends with exit code 1.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import re
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from http.client import HTTPConnection, HTTPException
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))
from chaos_project import Project
from chaos_servers import services
from harness import parser_of

THEIR_ID = 65534  # nobody
LOOK_S = 0.5
SWEEP_AFTER_S = 5.0  # since the set of ports last changed
RUN_S = 400.0  # limit for a run to start its servers
CONNECT_S = 3.0
MAX_SHOWN = 40
OVERRIDES = ["horizon.stage_steps=[200,1]"]  # long enough for the sweep

# What SECURITY.md allows another user: to read the copy of the program, and to learn that a server
# is running.
ALLOWED = (
    # the owner chooses the modes of the clone itself
    r"read   file   project/(?!\.agentgym|prefect\.toml).*",
    r"list   folder (project(/(?!\.agentgym).*)?|home|tmp)",
    # Prefect's folders for flows from remote storage; empty here
    r"list   folder tmp/runner_storage(/[0-9a-f-]{36})?",
    r"use    port   .* GET (/health|/healthz|/readyz|/metrics|/api/health): 200",
)
# one request each; every answer but a refusal counts as a deed
PATHS = "/ /health /healthz /readyz /info /metrics /api/health /api/admin/settings /api/version"
PATHS += " /version /ajax-api/2.0/mlflow/experiments/search?max_results=1"
PATHS += " /api/2.0/mlflow-artifacts/artifacts /api/jobs/"
POSTED = {
    "/api/flows/": '{"name": "theirs"}',
    "/api/deployments/filter": "{}",
    "/create": '{"task_id": 0, "key": "theirs"}',
    "/api/2.0/mlflow/experiments/create": '{"name": "theirs"}',
}
REFUSALS = (None, 400, 401, 403, 404, 405, 415, 426)  # None: a closed connection
FORMS = ("application/json", "text/plain")


@dataclass(frozen=True, order=True)
class Deed:
    act: str  # read, write, list, use
    kind: str  # file, folder, port
    what: str

    def __str__(self) -> str:
        return f"{self.act:<6} {self.kind:<6} {self.what}"


def become_them() -> None:
    os.setgroups([])
    os.setgid(THEIR_ID)
    os.setuid(THEIR_ID)


def as_them(work: Callable[..., list[Deed]], *arguments: object) -> list[Deed]:
    """Run `work` in a child process as the other user; return its result."""
    # load the codec for sockets while the interpreter's files are still readable
    "localhost".encode("idna")
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(1, context, initializer=become_them) as child:
        return child.submit(work, *arguments).result()


def try_files(folders: dict[str, Path], paths: list[Path]) -> list[Deed]:
    """Try to read, list, write (without a change) and create files at each path."""
    deeds = []
    for path in paths:
        homes = ((title, base) for title, base in folders.items() if path.is_relative_to(base))
        title, base = next(homes)
        name = f"{title}/{path.relative_to(base)}".removesuffix("/.")
        kind = "folder" if os.path.isdir(path) and not os.path.islink(path) else "file"
        for act, attempt in ACTS[kind].items():
            with contextlib.suppress(OSError):
                attempt(path)
                deeds.append(Deed(act, kind, name))
    return deeds


def opened(flags: int, path: Path) -> None:
    os.close(os.open(path, flags | os.O_NONBLOCK | os.O_NOFOLLOW))


def make_in(path: Path) -> None:
    created = path / f"theirs-{os.getpid()}"
    opened(os.O_CREAT | os.O_EXCL | os.O_WRONLY, created)
    created.unlink()


ACTS: dict[str, dict[str, Callable[[Path], object]]] = {
    "folder": {"list": os.listdir, "write": make_in},
    "file": {"read": partial(opened, os.O_RDONLY), "write": partial(opened, os.O_WRONLY)},
}


def try_ports(ports: dict[tuple[str, int], str]) -> list[Deed]:
    return [deed for address, owner in sorted(ports.items()) for deed in try_port(address, owner)]


def try_port(address: tuple[str, int], owner: str) -> list[Deed]:
    """Send every request in every form, and random bytes."""
    requests = [("GET", path, "", FORMS[0]) for path in PATHS.split()]
    requests += [("POST", path, body, form) for path, body in POSTED.items() for form in FORMS]
    deeds, where = [], f"{owner} {address[0]}"
    for request in requests:
        if (status := ask(address, *request)) not in REFUSALS:
            deeds.append(Deed("use", "port", f"{where} {request[0]} {request[1]}: {status}"))
    if not deeds and (answer := greet(address)):
        what = f"{where} answers bytes that are no request with {answer[:40]!r}"
        deeds.append(Deed("use", "port", what))
    return deeds


def ask(address: tuple[str, int], method: str, path: str, body: str, form: str) -> int | None:
    """Return the status of the reply, or None if there is none."""
    headers = {"Content-Type": form, "Content-Length": str(len(body)), "Connection": "close"}
    with contextlib.closing(HTTPConnection(*address, timeout=CONNECT_S)) as connection:
        try:
            connection.request(method, path, body, headers)
            return connection.getresponse().status
        except (OSError, HTTPException):
            return None


def greet(address: tuple[str, int]) -> bytes:
    """Return the bytes that a server sends to an idle client, or in answer to meaningless bytes."""
    try:
        with socket.create_connection(address, CONNECT_S) as connection:
            connection.settimeout(CONNECT_S)
            with contextlib.suppress(TimeoutError):
                return connection.recv(64)
            connection.sendall(b"\0\0\0\1theirs\n")
            answer = connection.recv(64)
            return b"" if answer.startswith(b"HTTP/1.1 400") else answer
    except OSError:
        return b""


def listening(project: Project) -> dict[tuple[str, int], str]:
    """Return the listening sockets of the project's processes: (address, port) -> program."""
    programs = {}
    for process in project.processes():
        with contextlib.suppress(psutil.Error):
            words = [word for word in process.cmdline()[1:] if not word.startswith("-")]
            for connection in process.net_connections(kind="tcp"):
                if connection.status == psutil.CONN_LISTEN:
                    loopback_of = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104
                    host = loopback_of.get(connection.laddr.ip, connection.laddr.ip)
                    program = " ".join(words[:3])[:60] or process.name()
                    programs[(host, connection.laddr.port)] = program
    return programs


def sweep(project: Project) -> tuple[list[Deed], int, int]:
    """Try everything. Return (deeds, number of ports tried, number of files tried)."""
    ports = listening(project)
    folders = {"project": project.folder, "home": project.home, "tmp": project.scratch}
    found = {path for folder in folders.values() for path in (folder, *folder.rglob("*"))}
    paths = sorted(path for path in found if ".git" not in path.parts)
    deeds = as_them(try_ports, ports) + as_them(try_files, folders, paths)
    for process in project.processes():
        with contextlib.suppress(psutil.Error):
            secret = [Path(f"/proc/{process.pid}/{name}") for name in ("environ", "mem")]
            deeds += as_them(try_files, {"/proc": Path("/proc")}, secret)
    return deeds, len(ports), len(paths)


@contextlib.contextmanager
def deployed(project: Project) -> Iterator[None]:
    with services(project):
        parameters = json.dumps({"overrides": OVERRIDES})
        command = ("-m", "prefect", "--no-prompt", "deployment", "run", "pipeline/local")
        project.must(*command, "--param", f"run={parameters}")
        yield


@contextlib.contextmanager
def pipeline(project: Project) -> Iterator[None]:
    log = project.folder.parent / "pipeline.log"
    process = project.start(["-m", "flows.pipeline", *OVERRIDES], log)
    try:
        yield
    finally:
        process.terminate()
        process.wait(60)


def wait_for_stage(project: Project) -> None:
    """Wait until the first stage trains and the set of ports is stable: all servers run."""
    deadline, since = time.monotonic() + RUN_S, time.monotonic()
    known: dict[tuple[str, int], str] = {}
    while time.monotonic() < deadline:
        ports = listening(project)
        if ports != known or not project.phase().startswith("stage-1,"):
            known, since = ports, time.monotonic()
        elif time.monotonic() - since > SWEEP_AFTER_S:
            return
        time.sleep(LOOK_S)
    raise RuntimeError(f"no stage began within {RUN_S:g} s; {project.phase()}")


def main() -> int:
    """Return 0 if only allowed deeds succeeded, 1 if others did, 2 if this user is not root."""
    parser_of(__doc__).parse_args()
    if os.geteuid() != 0:
        print("error: only root can act as another user; run it with sudo", file=sys.stderr)
        return 2
    too_much = 0
    situations = {
        "make up, a deployed run under way": deployed,
        "a pipeline in a terminal": pipeline,
    }
    for title, situation in situations.items():
        with tempfile.TemporaryDirectory() as folder:
            # the worst case: a home that other users may enter
            Path(folder).chmod(0o755)
            project = Project(Path(folder))
            try:
                with situation(project):
                    wait_for_stage(project)
                    deeds, num_ports, num_files = sweep(project)
            finally:
                project.close()
        allowed = re.compile("|".join(ALLOWED))
        more = sorted({deed for deed in deeds if not allowed.fullmatch(str(deed))})
        too_much += len(more)
        print(
            f"{title}: {num_ports} ports and {num_files} files tried, {len(deeds) - len(more)}"
            f" deeds allowed, {len(more)} not"
        )
        print(*(f"  {deed}" for deed in more[:MAX_SHOWN]), sep="\n")
    return int(too_much > 0)


if __name__ == "__main__":
    sys.exit(main())
