"""Logs, reports and times lie outside the digest that two equal runs share: whether they are
still those of this run.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from agentgym.audit.lines import Line
from agentgym.audit.report import Tally


def check_records(run_key: str, lines: Sequence[Line], pointers: Path | None, tally: Tally) -> None:
    """Each commit names the one before it; what was noted elsewhere of the last one is compared.

    Whoever writes to the store can make all of this anew.
    What they cannot change is a pointer in git.
    """
    unpinned = [
        line.name for line in lines if any(commit.follows is None for commit in line.commits)
    ]
    for line in lines:
        before = ""
        for commit in line.commits:
            if commit.follows is not None:
                tally.expect(
                    line.at(commit), "records digest of the commit before", before, commit.follows
                )
            before = commit.records_digest
    if unpinned:
        tally.skipped += len(unpinned)
        which = f"{len(unpinned)} of {len(lines)} steps, {unpinned[0]} first"
        tally.notes.append(
            f"not pinned: {which}; they were written before manifests had a records digest"
        )
    found = (
        [_compare(run_key, line, pointers, tally) for line in lines]
        if pointers and pointers.is_dir()
        else []
    )
    num_others = found.count(False)
    tally.notes.append(
        f"{found.count(True)} pointers in {pointers} compared"
        if found
        else "no pointers of DVC to compare with"
    )
    if num_others:
        tally.notes.append(f"{num_others} are of another run")


def _compare(run_key: str, line: Line, pointers: Path, tally: Tally) -> bool | None:
    """True where there is a pointer of this step of this run; False where it is another's."""
    path = pointers / f"{line.name}.json"
    if not path.is_file():
        return None
    try:
        kept = json.loads(path.read_bytes())["manifest"][0]
        named = {
            name: kept.get(name) for name in ("step", "key", "digest", "records_digest", "run")
        }
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        tally.fail(
            f"{path}: it is no pointer ({type(error).__name__}); `agentgym step {line.name} --out"
            f" {path}` writes it again"
        )
        return None
    if named["key"] != line.key and named["run"] != run_key:
        return False
    wanted = {"step": line.name, "key": line.key}
    if line.final is not None:
        wanted |= {"digest": line.final.digest}
        if named["records_digest"] is not None:  # else it was written before there was one
            wanted |= {"records_digest": line.final.records_digest}
    for name, value in wanted.items():
        tally.expect(str(path), name, value, named[name])
    return True
