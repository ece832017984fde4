"""Check logs, reports and times, which are not in the digest that two equal runs share: they must
still be those of this run.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from agentgym.audit.findings import Checks
from agentgym.audit.stored_steps import StepRecord
from agentgym.config import first_of
from agentgym.pipeline.dvc import began_of

OWN = "own"
# Records have clock times, so no two runs have equal ones. Pointers of another person's run of the
# same parameters come with the repository and do not speak against this run.
OTHER_RUN = "are of another run"
OTHER_TIME = "are of another run of the same parameters, which has records of its own"
UNDATED = (
    "are of another run of the same parameters, or of this one before its records were changed:"
    " they were written before pointers had the time a step began"
)
OTHERS = (OTHER_RUN, OTHER_TIME, UNDATED)


def check_records(
    run_key: str, steps: Sequence[StepRecord], pointers: Path | None, checks: Checks
) -> None:
    """Check that each commit has the records digest of the previous one, and compare DVC's pointers
    with the last commits. Commits of earlier versions, which name no digest, are skipped.

    A person who can write to the store can forge all of its records, but not a pointer in git.
    pointers: folder of the pointers; None or a missing folder: nothing is compared.
    """
    what = "records digest of the commit before"
    num_unpinned = 0
    for record in steps:
        before = ""
        for commit in record.commits:
            if commit.follows is not None:
                checks.expect(record.at(commit), what, before, commit.follows)
            before = commit.records_digest
        num_unpinned += any(commit.follows is None for commit in record.commits)
    why = "they were written before manifests had a records digest"
    checks.skip("the order of a step's records", why, num_unpinned)
    pointer_kinds: dict[str, str | None] = {}
    if pointers and pointers.is_dir():
        pointer_kinds = {r.name: _compare(run_key, r, pointers, checks) for r in steps}
    num_own = list(pointer_kinds.values()).count(OWN)
    compared = f"{num_own} pointers in {pointers} compared"
    checks.notes.append(compared if pointer_kinds else "no pointers of DVC to compare with")
    for other in OTHERS:
        names = [name for name, kind in pointer_kinds.items() if kind == other]
        if names:
            checks.notes.append(f"{len(names)} {other}: {first_of(names, 3)}")


def _compare(run_key: str, record: StepRecord, pointers: Path, checks: Checks) -> str | None:
    """Compare the pointer of this step with its commits; differences are failures.
    Result: OWN for this run's; one of OTHERS for another run's, which is not compared; None if
    there is no pointer, or if it is unreadable, which is a failure.
    """
    path = pointers / f"{record.name}.json"
    if not path.is_file():
        return None
    try:
        pointer = json.loads(path.read_bytes())["manifest"][0]
        pointed = {
            name: pointer.get(name)
            for name in ("step", "key", "digest", "records_digest", "run", "began")
        }
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        checks.fail(
            f"{path}: it is no pointer ({type(error).__name__}); `agentgym step {record.name} --out"
            f" {path}` writes it again"
        )
        return None
    if pointed["key"] != record.key and pointed["run"] != run_key:
        return OTHER_RUN
    if pointed["began"] not in (None, began_of(record.commits)):
        return OTHER_TIME
    wanted = {"step": record.name, "key": record.key}
    if record.final is not None:
        wanted |= {"digest": record.final.digest}
        if pointed["records_digest"] is not None:  # older pointers have none
            wanted |= {"records_digest": record.final.records_digest}
    if pointed["began"] is None and any(pointed[name] != value for name, value in wanted.items()):
        return UNDATED
    for name, value in wanted.items():
        checks.expect(str(path), name, value, pointed[name])
    return OWN
