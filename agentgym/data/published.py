"""The dataset under DVC: imported at one revision of its git repository, and compared with the pin
in its `.dvc` file.

DVC runs as a child process; none of its modules is imported.
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import yaml

from agentgym.config import ConfigError
from agentgym.data.items import LFS_POINTER, DataError
from agentgym.deploy.owned import finished_process, owned_process
from agentgym.store.posix import discard, write_whole

HUB_URL = "https://huggingface.co/datasets/AgentGym/AgentGym-RL-Data-ID"
IMPORT_TIMEOUT_S = 1800.0
GIT_TIMEOUT_S = 120.0
# by the repository's name, so that a mirror counts
LICENCES = {"AgentGym/AgentGym-RL-Data-ID": "CC-BY-NC-4.0"}
T = TypeVar("T")
_SHA = re.compile(r"[0-9a-f]{40}")
# DVC's process: it ends when this process does
_DVC = (
    "import sys; from agentgym.deploy.owned import end_with_owner; end_with_owner(); from dvc.cli"
    " import main; sys.exit(main())"
)


class DvcError(RuntimeError):
    """A DVC command failed or ran out of time, or an import has Git LFS pointers."""


@dataclass(frozen=True, slots=True)
class Imported:
    """A dataset that DVC imported."""

    path: Path
    pointer: Path  # the .dvc file, to keep in git
    url: str
    sha: str  # full commit id
    licence: str | None  # SPDX id; None if this project does not know it
    is_new: bool  # False: it was imported before


def run_dvc(*arguments: str, timeout_s: float) -> str:
    """Run `dvc`, wait, and return stdout and stderr. Errors: DvcError, also after `timeout_s`."""
    shown = " ".join(("dvc", *arguments))
    environment = {"DVC_NO_ANALYTICS": "1", "GIT_TERMINAL_PROMPT": "0"}
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "log")
        with owned_process(
            [sys.executable, "-c", _DVC, *arguments], log_path=log, env=environment
        ) as process:
            try:
                code = process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                raise DvcError(
                    f"`{shown}` did not end within {timeout_s:g} s; run it by hand to see why it"
                    " hangs"
                ) from None
        output = log.read_text(errors="replace", encoding="utf-8").strip()
    if code:
        errors = re.findall(r"^ERROR: (.*)", output, re.MULTILINE)
        raise DvcError(f"`{shown}` failed ({code}): {' | '.join(errors) or output[-500:]}")
    return output


def import_dataset(url: str, rev: str, out: Path) -> Imported:
    """Import the whole git repository at `url` (an address or a folder) into the folder `out`, at
    one commit, with `dvc import`.

    rev: a full commit id, or a branch or tag, which is resolved now: the `.dvc` file pins the
    commit.
    An earlier import at that commit is kept; if its folder is missing, it is pulled.
    A call after a killed one starts over. A known license is noted in the `.dvc` file.
    Errors: ConfigError for mistakes you can correct, DataError if the folder differs from the pin,
    DvcError.
    """
    _check_project(out)
    if Path(url).is_dir():
        url = Path(url).resolve().as_uri()
    pointer, marker = out.with_name(f"{out.name}.dvc"), out.with_name(f".{out.name}.importing")
    pinned = _pinned_source(pointer)
    sha = rev if pinned == (url, rev) else _resolve(url, rev)
    if pinned is None:
        if out.exists() and not marker.is_file():
            raise ConfigError(
                f"{out} exists and was not imported; move it away, or name another folder with"
                " --out"
            )
        out.parent.mkdir(parents=True, exist_ok=True)
        marker.touch()
        try:
            options = ("--rev", sha, "--force", "--out", str(out))
            run_dvc("import", *options, "--", url, ".", timeout_s=IMPORT_TIMEOUT_S)
            _refuse_lfs_pointers(out, pointer, url)
        except DvcError as error:
            if not out.exists():
                discard(marker)
            if "revision" in str(error).lower() and sha in str(error):
                raise ConfigError(
                    f"{url} has no commit {sha}; give one that a branch or tag of it contains"
                ) from None
            raise
    elif pinned != (url, sha):
        raise ConfigError(
            f"{pointer} pins {pinned[0]} at {pinned[1]}, not {url} at {sha}; name another folder"
            f" with --out, or run `dvc remove {pointer}` first"
        )
    elif not out.is_dir():
        run_dvc("pull", str(pointer), timeout_s=IMPORT_TIMEOUT_S)
    check_pin(out)
    bare_url = url.removesuffix(".git")
    licence = next((spdx for name, spdx in LICENCES.items() if bare_url.endswith(f"/{name}")), None)
    if licence is not None:
        _note_licence(pointer, licence)
    discard(marker)
    return Imported(out, pointer, url, sha, licence, pinned is None)


def track_folder(out: Path, write: Callable[[Path], T], *, pattern: str) -> tuple[Path, T]:
    """Call `write` with an empty folder, move this folder to `out`, and pin it with `dvc add`.
    Result: the `.dvc` file, and what `write` returned.

    A folder that DVC tracks already is replaced if all its files match `pattern`; DVC's cache keeps
    the earlier content.
    A call after a killed one starts over.
    pattern: glob for the file names.
    Errors: ConfigError if `out` is in no DVC project, exists untracked, is tracked but missing, or
    has other files; DvcError.
    """
    _check_project(out)
    pointer, marker = out.with_name(f"{out.name}.dvc"), out.with_name(f".{out.name}.importing")
    others = sorted(path.name for path in out.rglob("*") if not path.match(pattern))
    if others:
        raise ConfigError(
            f"{out} holds {others[0]}, which is none of {pattern}; name another folder with --out"
        )
    if not marker.is_file() and out.exists() != pointer.is_file():
        if out.exists():
            raise ConfigError(
                f"{out} exists and is not tracked by DVC; move it away, or name another folder with"
                " --out"
            )
        raise ConfigError(
            f"{pointer} tracks a folder that is not here; run `dvc pull {pointer}` first, or name"
            " another with --out"
        )
    out.parent.mkdir(parents=True, exist_ok=True)
    marker.touch()
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=".") as folder:
        new_folder = Path(folder, out.name)
        new_folder.mkdir()
        result = write(new_folder)
        if out.exists():
            out.rename(Path(folder, "before"))
        new_folder.rename(out)
    run_dvc("add", "--", str(out), timeout_s=IMPORT_TIMEOUT_S)
    discard(marker)
    return pointer, result


def check_pin(path: Path) -> None:
    """Compare a folder with its `.dvc` file, byte for byte; do nothing if there is no such file.

    DVC itself trusts its cache and, unless a remote has `verify`, every remote.
    Errors: DataError if they differ; ConfigError if the `.dvc` file is not valid YAML.
    """
    pointer = path.with_name(f"{path.name}.dvc")
    if not pointer.is_file():
        return
    outs = _read_pointer(pointer).get("outs") or [{}]
    expected, md5 = str(outs[0].get("md5")), _folder_md5(path)
    if md5 != expected:
        raise DataError(
            f"digest mismatch: {path} is not what {pointer} pins: expected md5 {expected}, got"
            f" {md5}; if the files were changed here, `dvc checkout --force {pointer}` brings the"
            f" pinned ones back and `dvc add {path}` pins the new ones; if `dvc pull` brought them,"
            " its remote is damaged: delete them and .dvc/cache, mend the remote and set its"
            " `verify`"
        )


def _folder_md5(path: Path) -> str:
    """Return DVC's digest of a folder: md5 of the JSON list of its files with their digests."""
    files = sorted(file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file())
    rows = [{"md5": _md5((path / name).read_bytes()), "relpath": name} for name in files]
    return _md5(json.dumps(rows, sort_keys=True).encode()) + ".dir"


def _md5(data: bytes) -> str:
    return hashlib.md5(data, usedforsecurity=False).hexdigest()


def _check_project(out: Path) -> None:
    here = Path.cwd()
    root = next((folder for folder in (here, *here.parents) if (folder / ".dvc").is_dir()), None)
    if root is None:
        raise ConfigError(
            f"{here} is not inside a DVC project; run this in a clone of this project, or after"
            " `git init && dvc init`"
        )
    if not out.resolve().is_relative_to(root):
        raise ConfigError(
            f"--out {out} is outside of the DVC project {root}; name a folder inside it"
        )


def _refuse_lfs_pointers(out: Path, pointer: Path, url: str) -> None:
    """Refuse an import with Git LFS pointers, which DVC imports in place of files it cannot fetch.
    Errors: DvcError, after the `.dvc` file `pointer` was deleted, so that nothing is pinned.
    """
    for file in sorted(out.rglob("*")):
        is_small = file.is_file() and file.stat().st_size < 1024
        if is_small and file.read_bytes().startswith(LFS_POINTER):
            discard(pointer)
            raise DvcError(
                f"{file.relative_to(out)} of {url} is in Git LFS, and its content could not be"
                " fetched (LFS works over http and ssh, not from a folder or file://); nothing was"
                " pinned, try again"
            )


def _read_pointer(pointer: Path) -> dict[str, Any]:
    try:
        tree = yaml.safe_load(pointer.read_text(encoding="utf-8"))
    except (ValueError, yaml.YAMLError) as error:
        raise ConfigError(
            f"{pointer} is not YAML ({' '.join(str(error).split())}); restore it from git"
        ) from None
    if not isinstance(tree, dict):
        raise ConfigError(f"{pointer} must hold a mapping, as DVC writes it; restore it from git")
    return tree


def _pinned_source(pointer: Path) -> tuple[str, str] | None:
    """Return (url, commit) of a DVC import from its `.dvc` file; None if that is missing.
    Errors: ConfigError if the file is unreadable or no import.
    """
    if not pointer.is_file():
        return None
    try:
        repository = _read_pointer(pointer)["deps"][0]["repo"]
        return str(repository["url"]), str(repository["rev_lock"])
    except (KeyError, IndexError, TypeError):
        raise ConfigError(
            f"{pointer} tracks a folder that was not imported; name another folder with --out"
        ) from None


def _resolve(url: str, rev: str) -> str:
    """Return the full commit id that a tag, or else a branch, has now; a full id is not looked up.
    Errors: ConfigError if git is missing, the repository cannot be read (also for a full id), or
    the name is malformed or unknown.
    """
    if not re.fullmatch(r"[\w.][\w./+-]*", rev):
        raise ConfigError(
            f"revision {rev!r} is no name of a commit; give a full commit id, a tag or a branch"
        )
    try:
        command, asks_nothing = ["git", "ls-remote", "--", url], {"GIT_TERMINAL_PROMPT": "0"}
        result = finished_process(command, timeout_s=GIT_TIMEOUT_S, env=asks_nothing)
    except FileNotFoundError:
        raise ConfigError("`git` is not installed; importing a dataset needs it") from None
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"{url} did not answer within {GIT_TIMEOUT_S:g} s; check the network and --url"
        ) from None
    if result.returncode:
        message = " ".join(result.stderr.split())[-300:]
        raise ConfigError(
            f"{url} cannot be read as a git repository ({message}); check the network and --url"
        )
    if _SHA.fullmatch(rev):
        return rev
    refs = {name: sha for sha, name in (line.split("\t") for line in result.stdout.splitlines())}
    # ^{} names the commit of an annotated tag
    for name in (f"refs/tags/{rev}^{{}}", f"refs/tags/{rev}", f"refs/heads/{rev}"):
        if name in refs:
            return refs[name]
    kinds = ("refs/heads/", "refs/tags/")
    named = [name.split("/", 2)[2].removesuffix("^{}") for name in refs if name.startswith(kinds)]
    known = sorted(set(named))
    raise ConfigError(
        f"{url} has no branch or tag {rev!r}; it has {', '.join(known[:8]) or 'none'}; a commit id"
        " must have all of its 40 digits"
    )


def _note_licence(pointer: Path, licence: str) -> None:
    """Append the license to the `.dvc` file as `meta`, which DVC preserves, unless it has one."""
    if "meta" in _read_pointer(pointer):
        return
    write_whole(pointer, pointer.read_bytes() + f"meta:\n  license: {licence}\n".encode())
