"""Python commands that begin as copies of one process, which has imported what they need.

To import torch, transformers and MLflow takes a command five seconds of CPU, more than most tests
ask of it; here one process does so for all test processes, which begin so themselves, and forks. A
copy runs the program it is given, in its directory, environment and files. The modules of this
repository, and Prefect, which reads its settings when it is imported, each copy imports itself.
"""

import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib
import json
import os
import re
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

START_TIMEOUT_S = 240.0
IMPORTED = (
    "accelerate",
    "aiohttp",
    "alembic.config",
    "docket",
    "dvc.cli",
    "dvc.repo",
    "fastapi",
    "gymnasium",
    "httpx",
    "httptools",
    "jinja2.sandbox",
    "minigrid",
    "mlflow",
    "mlflow.store.tracking.sqlalchemy_store",
    "moto.moto_server.werkzeug_app",
    "moto.s3.responses",
    "pandas",
    "pydantic_settings",
    "rich.progress",
    "safetensors.torch",
    "sqlalchemy.ext.asyncio",
    "torch",
    "torch.distributed.fsdp",
    "transformers.models.auto.modeling_auto",
    "transformers.models.qwen2.modeling_qwen2",
    "transformers.utils.chat_template_utils",
    "uvicorn",
    "uvicorn.protocols.http.httptools_impl",
    "uvicorn.protocols.websockets.websockets_sansio_impl",
    "uvloop",
)
OURS = {"agentgym", "envs", "flows", "services", "sites", "tasks", "prefect"}
BEGUN = ("agentgym.models.template", "envs", "mlflow", "services.prefect_server")
TESTS = ["-u", "-c", "import sys;exec(eval(sys.stdin.readline()))"]  # a process of pytest-xdist's
S3_SERVER = str(Path(__file__).with_name("s3_server.py"))
HOLD, RUN = b"H", b"R"
MAX_FILES = 16
MAX_NUMBER = 512  # of a descriptor that a program is given


def popen_of(forks, are_begun):
    """A subprocess.Popen by which what `is_begun` names begins as a copy while are_begun() says so,
    all else as ever.
    """

    class Popen(subprocess.Popen):
        _fork = None

        def _execute_child(
            self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *more
        ):
            words = [os.fsdecode(each) for each in args] if isinstance(args, list) else []
            if not (is_begun(words) and are_begun()) or preexec_fn:
                super()._execute_child(
                    args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *more
                )
                return
            _, _, _, p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite, *rest = more
            starts_session = rest[-2]
            files = [p2cread, c2pwrite, errwrite]
            with open(os.devnull) as nothing:
                theirs = [
                    each if each != -1 else own
                    for each, own in zip(files, (nothing.fileno(), 1, 2), strict=True)
                ]
                self._fork = forks.begin(words, theirs, cwd, env, starts_session, pass_fds)
            self.pid, self._child_created = self._fork.pid, True
            self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)

        def _internal_poll(self, *arguments, **settings):
            if self._fork is None:
                return super()._internal_poll(*arguments, **settings)
            if self.returncode is None and self._waitpid_lock.acquire(False):
                try:
                    self.returncode = self._fork.poll()
                finally:
                    self._waitpid_lock.release()
            return self.returncode

        def _wait(self, timeout):
            if self._fork is None:
                return super()._wait(timeout)
            deadline = None if timeout is None else time.monotonic() + timeout
            while self.returncode is None:
                with self._waitpid_lock, contextlib.suppress(subprocess.TimeoutExpired):
                    self.returncode = self._fork.wait(0.02)
                if self.returncode is None and deadline and time.monotonic() > deadline:
                    raise subprocess.TimeoutExpired(self.args, timeout)
            return self.returncode

    return Popen


def is_begun(words):
    """What starts by the hundred: servers, templates, DVC, scripts that use our modules, and who
    runs the tests; not what asks what is imported.
    """
    if words[:1] != [sys.executable]:
        return False
    if words[1:] == TESTS:
        return True
    if words[1:2] == ["-m"]:
        return words[2] in BEGUN
    if words[1:2] == ["-P"]:
        return words[2] == S3_SERVER
    is_ours = words[1:2] == ["-c"] and re.search("from (dvc[.]cli|agentgym[.].*) import", words[2])
    return bool(is_ours) and "sys.modules" not in words[2]


class Fork:
    """A command that runs: what tests use of subprocess.Popen."""

    stdout = None

    def __init__(self, command, connection):
        self.args, self.returncode = command, None
        self._connection, self._told = connection, connection.makefile("r")
        self.pid = int(self._told.readline())

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.stdout is not None:
            self.stdout.close()
        self.wait()

    def poll(self):
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout=None):
        if self.returncode is None:
            if not select.select([self._connection], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout)
            self.returncode = int(self._told.readline())
            self._told.close()
            self._connection.close()
        return self.returncode

    def communicate(self, timeout=None):
        """What it says until it ends; a watch ends it after the timeout."""
        watch = threading.Timer(timeout, self.kill) if timeout else None
        if watch:
            watch.start()
        try:
            said = self.stdout.read()
            self.wait(timeout)
        finally:
            if watch:
                watch.cancel()
        return said, None

    def send_signal(self, number):
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self):
        self.send_signal(signal.SIGKILL)


class Forks:
    """Where commands begin; `place` is a short path that all test processes name."""

    def __init__(self, place, imported=IMPORTED):
        self._place, self._imported, self._held = Path(place), imported, None

    def close(self):
        if self._held is not None:
            self._held.close()

    def run(self, command, *, cwd=None, env=None, timeout=600):
        """As subprocess.run with captured text; what it starts of `is_begun` are copies, too."""
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
            running = self.start(command, cwd=cwd, env=env, stdout=out, stderr=err, copies=True)
            try:
                code = running.wait(timeout)
            finally:
                running.kill()
            texts = [(file.seek(0), file.read())[1] for file in (out, err)]
        return subprocess.CompletedProcess(command, code, *texts)

    def start(
        self, command, *, cwd=None, env=None, stdout=subprocess.PIPE, stderr=None, copies=False
    ):
        """As subprocess.Popen with text; stderr: a file, or None for that of stdout. copies: as of
        `run`; they are no children of it, and their environment is not seen in /proc.
        """
        with contextlib.ExitStack() as stack:
            reader = None
            if stdout == subprocess.PIPE:
                read, write = os.pipe()
                reader = os.fdopen(read)
                stdout = stack.enter_context(os.fdopen(write, "w"))
            nothing = stack.enter_context(open(os.devnull))
            files = [each.fileno() for each in (nothing, stdout, stderr or stdout)]
            fork = self.begin(command, files, cwd, env, copies=copies)
        fork.stdout = reader
        return fork

    def begin(
        self, command, files, cwd=None, env=None, starts_session=False, passed=(), copies=False
    ):
        """files: descriptors of its input, output and errors; passed: of what it has under the
        same numbers.
        """
        self._hold()
        command = [str(word) for word in command]
        asked = {
            "command": command,
            "cwd": os.fsdecode(cwd or Path.cwd()),
            "env": {**(os.environ if env is None else env)},
            "starts_session": starts_session,
            "passed": passed,
            "place": str(self._place) if copies else None,
        }
        told = json.dumps(asked).encode()
        connection = self._connect()
        socket.send_fds(connection, [RUN], [*files, *passed])
        connection.sendall(len(told).to_bytes(4, "big") + told)
        return Fork(command, connection)

    def _connect(self):
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(str(self._place))
        except OSError:
            connection.close()
            raise
        return connection

    def _hold(self):
        """The process that forks lives as long as one of those who asked for it."""
        if self._held is not None:
            return
        with self._place.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            try:
                self._held = self._connect()
            except OSError:
                self._begin()
                self._held = self._connect()
            self._held.sendall(HOLD)

    def _begin(self):
        self._place.unlink(missing_ok=True)
        state = self._place.with_suffix(".state")
        state.mkdir(exist_ok=True)
        names = ("HF_HOME", "MPLCONFIGDIR", "TORCHINDUCTOR_CACHE_DIR")
        more = {"MLFLOW_DISABLE_TELEMETRY": "true", "OMP_NUM_THREADS": "1", "DO_NOT_TRACK": "1"}
        env = {**os.environ, **dict.fromkeys(names, str(state)), **more}
        env.pop("PYTHONPATH", None)  # a command has its own
        with (state / "log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, __file__, str(self._place), *self._imported],
                cwd=state,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self._place.exists():
            assert process.poll() is None, (state / "log").read_text()
            assert time.monotonic() < deadline, (state / "log").read_text()
            time.sleep(0.05)


def serve(place, *imported):
    """Fork for whoever asks, until nobody holds it. Result, in a fork: what it is to run."""
    sys.path.pop(0)  # modules beside this one
    for name in imported:
        importlib.import_module(name)
    assert not OURS & sys.modules.keys(), OURS & sys.modules.keys()
    assert threading.active_count() == 1
    gc.collect()
    gc.freeze()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"{place}.part")
    listener.listen(64)
    os.rename(f"{place}.part", place)
    holders, running, first = [], {}, True  # running: by a descriptor that tells of the end
    while first or holders or running:
        waiting = [listener, *holders, *running]
        ready = select.select(waiting, [], [], START_TIMEOUT_S if first else None)[0]
        for each in ready:
            if each in running:
                pid, connection = running.pop(each)
                os.close(each)
                tell(connection, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
                connection.close()
            elif each in holders:
                holders.remove(each)
                each.close()
            elif asked := accept(listener, holders, running):
                return asked
        first = first and not holders and bool(ready)
    os.unlink(place)
    return None


def accept(listener, holders, running):
    """One who connects, and holds or has a copy made. Result, in the copy: what it is to run."""
    connection, _ = listener.accept()
    word, files, _, _ = socket.recv_fds(connection, 1, MAX_FILES)
    if word == HOLD:
        holders.append(connection)
        return None
    asked = asked_of(connection) if word == RUN else None
    if asked is None:
        connection.close()
    elif pid := os.fork():
        running[os.pidfd_open(pid)] = pid, connection
        tell(connection, pid)
    else:
        ours = (listener, connection, *holders, *(each for _, each in running.values()))
        for one in (*(each.detach() for each in ours), *running):
            os.close(one)
        take(files, [0, 1, 2, *asked.pop("passed")])
        return asked
    for file in files:
        os.close(file)
    return None


def asked_of(connection):
    """What one who connected wants run, or None where he is gone."""
    with contextlib.suppress(OSError, ValueError), connection.makefile("rb") as told:
        return json.loads(told.read(int.from_bytes(told.read(4), "big")))
    return None


def take(files, numbers):
    """Each file under its number."""
    apart = [fcntl.fcntl(file, fcntl.F_DUPFD, MAX_NUMBER) for file in files]
    for file in files:
        os.close(file)
    for file, number in zip(apart, numbers, strict=True):
        os.dup2(file, number)
        os.close(file)


def tell(connection, number):
    with contextlib.suppress(OSError):
        connection.sendall(f"{number}\n".encode())


def run(command, cwd, env, starts_session, place):
    """What Python does with such a command line. place: where what it starts begins as a copy."""
    if place:
        subprocess.Popen = popen_of(Forks(place), lambda: True)
    if starts_session:
        os.setsid()
    show(command)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.path[:0] = [each for each in env.get("PYTHONPATH", "").split(os.pathsep) if each]
    program, *words = command
    if not Path(program).name.startswith("python"):
        words = [shutil.which(program, path=env["PATH"]), *words]
    end(lambda: execute(words, cwd))


def execute(words, cwd):
    is_safe = words[0] == "-P"  # from modules beside it
    words = words[words[0] in ("-P", "-u") :]
    if words[0] == "-m":
        sys.argv = words[1:]
        sys.path.insert(0, cwd)
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    elif words[0] == "-c":
        sys.argv = ["-c", *words[2:]]
        sys.path.insert(0, "")
        exec(compile(words[1], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv = words
        if not is_safe:
            sys.path.insert(0, str(Path(words[0]).parent))
        runpy.run_path(words[0], run_name="__main__")


def end(program):
    """What Python does at the end of a program, but for taking apart what was imported: of a copy
    all that memory would become its own, half a second of work.
    """
    code, was_interrupted = 0, False
    try:
        program()
    except SystemExit as asked:
        code = asked.code or 0
        if not isinstance(code, int):
            print(code, file=sys.stderr)
            code = 1
    except BaseException as error:  # whatever the program did not catch
        sys.excepthook(*sys.exc_info())
        code, was_interrupted = 1, isinstance(error, KeyboardInterrupt)
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    if was_interrupted:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(code & 0xFF)


def show(command):
    """The command where `ps` looks for it, as far as there is room."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    begin, end = int(fields[45]), int(fields[46])
    text = b"\0".join(word.encode() for word in command)[: end - begin - 1]
    ctypes.memset(begin, 0, end - begin)
    ctypes.memmove(begin, text, len(text))


if __name__ == "__main__" and (asked := serve(*sys.argv[1:])):
    run(**asked)
