"""Promotions: the gate judges, the history records the decision, then MLflow gets the alias.

The history (`agentgym.evaluation.history`) decides; MLflow is a copy. If MLflow has the alias at
another version, it was moved by hand: this is reported, and the gate moves nothing until the user
decides which one counts.
"""

from __future__ import annotations

import contextlib
import logging
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from agentgym.config import ConfigError, GateConfig
from agentgym.evaluation.gate import Evidence, decision_json, judge
from agentgym.evaluation.history import (
    MADE_IN,
    Entry,
    History,
    HistoryElsewhere,
    Home,
    Kind,
    OpenHistory,
    Version,
    artifact,
    champion_of,
    decision_tags,
    me,
    note_of,
)
from agentgym.evaluation.question import Question, other_question, question_of_version, unlike_parts
from agentgym.store.manifest import canonical_json, sha256
from agentgym.store.runstore import RunStore
from agentgym.tracking.mlflow import Tracker
from agentgym.tracking.registry import (
    FILES,
    ModelChanged,
    alias_version,
    created_ms,
    describe_version,
    fetch_version,
    find_version,
    model_tags,
    registered_files,
    unregistered,
    version_run,
    version_tags,
)

logger = logging.getLogger(__name__)

HOME = "mlflow.agentgym.history."  # tag of a registered model, followed by the alias: a `Home`
ROUNDS = 5  # times that the champion may change while a candidate is judged
BY_HAND = ("forced", "rolled back")  # kinds of entries that set the alias without a judgement
EvidenceFor = Callable[[Version | None], Evidence]


@dataclass(frozen=True)
class Standing:
    """Version that has the alias, by the history and by MLflow."""

    champion: Version | None  # by the history
    held: str | None  # number of the version that holds it in MLflow
    drift: str = ""  # message that the alias was moved by hand; empty: it was not


class Promotions:
    """Judge of an alias: records decisions in its history, and moves the alias in MLflow."""

    def __init__(self, store: RunStore, tracker: Tracker, model: str, alias: str) -> None:
        self.own = History(store, model, alias)
        self.tracker, self.model, self.alias = tracker, model, alias

    @property
    def history(self) -> History:
        """The alias's history, perhaps in another store. Errors: HistoryElsewhere."""
        tags = model_tags(self.tracker, self.model) or {}
        home = tags.get(HOME + self.alias)
        return Home.from_json(home).deciding(self.own, self._base) if home else self.own

    @property
    def _base(self) -> Path | None:
        """Folder of the registry's SQLite file; None if the registry is a server."""
        uri = self.tracker.uri
        return Path(uri.removeprefix("sqlite:///")).parent if uri.startswith("sqlite:") else None

    @contextlib.contextmanager
    def open(self) -> Iterator[OpenHistory]:
        """Open the history to write, after sending MLflow its location and an entry that is missing
        there. Errors: HistoryElsewhere, LeaseHeld.
        """
        with self.history.open() as opened:
            if opened.history.is_owed:
                self._tell(opened)
            elif opened.history.began:  # an earlier release did not tag its location
                self._claim(opened.history)
            yield opened

    def _claim(self, history: History) -> None:
        """Tag the registered model, if there is one, with the location of its history."""
        tags, wanted = model_tags(self.tracker, self.model), Home.of(history, self._base).to_json()
        if tags is not None and tags.get(HOME + self.alias) != wanted:
            self.tracker.client.set_registered_model_tag(self.model, HOME + self.alias, wanted)

    def standing(self, entries: list[Entry]) -> Standing:
        champion = champion_of(entries)
        current = alias_version(self.tracker, self.model, self.alias)
        number = None if champion is None else self.number_of(champion)
        lost = number is not None and current is None
        recreated = lost and created_ms(self.tracker, self.model) > entries[-1].at * 1000
        if champion is None or number == current or recreated:
            return Standing(champion, current)
        current_text = f"version {current}" if current else "no version"
        return Standing(
            champion,
            current,
            f"the alias {self.alias} was moved by hand: MLflow has it at {current_text}, the"
            f" history at version {champion.number} since entry {entries[-1].number}; `agentgym"
            f" rollback --to {champion.number}` puts it back, `agentgym promote VERSION --force"
            " --why ...` makes another one count",
        )

    def number_of(self, version: Version) -> str | None:
        """Return a version's number in MLflow, by its checkpoint if it has one; None if missing."""
        if version.checkpoint:
            return find_version(self.tracker, self.model, version.checkpoint)
        with contextlib.suppress(LookupError):
            version_tags(self.tracker, self.model, version.number)
            return version.number
        return None

    def version(self, number: str) -> Version:
        """Return a version by its number. Errors: ConfigError if there is none."""
        try:
            tags = version_tags(self.tracker, self.model, number)
        except LookupError:
            raise ConfigError(
                f"{self.model} has no version {number}; if MLflow lost it, the pipeline"
                " (or `agentgym step register`) registers its run's model again"
            ) from None
        return version_of(number, tags)

    @property
    def made_in(self) -> dict[str, str]:
        """Location of this process's store (`store`, `host`), kept in decisions made here."""
        home = Home.of(self.own, self._base)
        return {"store": home.store, "host": home.host}

    def evidence_store(self, decision: Mapping[str, Any]) -> RunStore | None:
        """Open the store with a decision's evidence; None if unrecorded or not readable here."""
        location = decision.get(MADE_IN)
        return Home(**location, began="").opened(self.own.store, self._base) if location else None

    def consider(
        self,
        candidate: Version,
        rules: GateConfig,
        evidence_for: EvidenceFor,
        asked: str,
        *,
        question: Question | None = None,
        who: str = "",
    ) -> Entry:
        """Judge the candidate against the alias's holder, record the entry, return it, and move the
        alias on PROMOTE. An empty history first records the holder of the alias in MLflow, if any.
        Idempotent: a repeated call returns the recorded decision, also after a crash. If the
        candidate is the champion, the entry is not recorded.
        evidence_for: may play for minutes, so no lease is kept meanwhile; called again if the
        champion changed, and not at all if the two were judged on different questions.
        asked, who: as in `Entry` (who: empty for `me()`); question: the one that evidence_for
        evaluates without gate.protocol.
        Errors: HistoryElsewhere, LeaseHeld; RuntimeError if the champion changes ROUNDS times.
        """
        for _ in range(ROUNDS):
            with self.open() as opened:
                self._adopt(opened)
                recorded = next((entry for entry in opened.entries if entry.asked == asked), None)
                standing = self.standing(opened.entries)
                if recorded is not None:
                    return recorded
            if candidate.is_same(standing.champion):
                return _unrecorded(candidate, standing.champion, "it is this model, evaluated anew")
            unlike = self._unlike(candidate, standing.champion, rules, question)
            other = Evidence({}, True, obstacle=unlike)
            evidence = other if unlike else evidence_for(standing.champion)
            with self.open() as opened:
                if champion_of(opened.entries) == standing.champion:
                    return self._judged(opened, candidate, rules, evidence, asked, who or me())
            logger.info("the champion of %s changed meanwhile; judged anew", self.model)
        raise RuntimeError(
            f"{self.model}: the champion changed {ROUNDS} times while a candidate was judged; the"
            " same command tries again"
        )

    def _unlike(
        self,
        candidate: Version,
        champion: Version | None,
        rules: GateConfig,
        question: Question | None,
    ) -> str:
        """Return how the questions of candidate and champion differ; empty if they do not, or if
        one is unknown. question: another one of the candidate, compared too without rules.protocol.
        """
        theirs = self.question(champion) if champion is not None else None
        envs_only = bool(rules.protocol)
        if theirs is not None:
            for ours in (self.question(candidate), None if envs_only else question):
                if ours and (why := other_question(ours, theirs, envs_only=envs_only)):
                    return why
        return ""

    def misplaced(self) -> str:
        """Return a line about the first decision that moved the alias to a version with another
        question, as earlier releases could; else "". A later move by hand settles it.
        Errors: HistoryElsewhere.
        """
        broken = ""
        for entry in self.history.entries():
            if entry.kind in BY_HAND:
                broken = ""
            elif entry.moved and entry.before is not None and not broken:
                ours, theirs = self.question(entry.candidate), self.question(entry.before)
                unlike = unlike_parts(ours, theirs) if ours and theirs else []
                before, after = entry.before.number, entry.candidate.number
                if unlike:
                    broken = (
                        f"{self.model}@{self.alias}: decision {entry.number} took it from version"
                        f" {before} and gave it to version {after}, though {'; '.join(unlike)}."
                        f" `agentgym rollback --to {before} --set"
                        f" 'registry.model_name={self.model}'` gives it back"
                    )
        return broken

    def question(self, version: Version) -> Question | None:
        """Return a version's question; None if unknown. Errors: HistoryElsewhere."""
        stores = {store.root: store for store in (self.own.store, self.history.store)}
        return question_of_version(stores.values(), self.tracker, self.model, version)

    def _judged(
        self,
        opened: OpenHistory,
        candidate: Version,
        rules: GateConfig,
        evidence: Evidence,
        identity: str,
        who: str,
    ) -> Entry:
        standing = self.standing(opened.entries)
        earlier = [e.decision.get("item_set") for e in opened.entries if e.before is not None]
        looks = earlier.count(evidence.item_set)
        known = replace(evidence, drift=standing.drift, num_looks=looks)
        judgement = judge(rules, known)
        champion = standing.champion
        after = candidate if judgement.verdict == "PROMOTE" else champion
        decision = {**decision_json(rules, known, judgement), MADE_IN: self.made_in}
        models, why = (candidate, champion, after), judgement.why
        entry = Entry("judged", identity, *models, who, time.time(), why, decision)
        return self._add(opened, entry)

    def force(self, version: Version, why: str, kind: Kind = "forced") -> Entry:
        """Record a person's decision to move the alias to `version`, move it, and return the entry.
        An empty history first records the alias's holder in MLflow, as in `consider`.
        why, kind: as in `Entry`. Errors: HistoryElsewhere, LeaseHeld.
        """
        with self.open() as opened:
            self._adopt(opened)
            before = champion_of(opened.entries)
            identity = sha256(canonical_json([kind, version.number, why, len(opened.entries)]))
            entry = Entry(kind, identity, version, before, version, me(), time.time(), why)
            return self._add(opened, entry)

    def roll_back(self, to: str | None, why: str) -> Entry:
        """Move the alias back to the version numbered `to`, or to the one before (None), and record
        it with the reason `why`. Return the new entry. Errors: as `force`; ConfigError if that
        version never held the alias or is gone from the registry.
        """
        entries = self.history.entries()
        holders = [entry.after for entry in entries if entry.after is not None]
        now = champion_of(entries)
        if to is None:
            earlier = [holder for holder in holders if not holder.is_same(now)]
            if not earlier:
                raise ConfigError(
                    f"{self.model}: no version held {self.alias} before; promote one with --force"
                )
            target = earlier[-1]
        else:
            matching = [holder for holder in holders if holder.number == to]
            if not matching:
                numbers = ", ".join(dict.fromkeys(holder.number for holder in holders)) or "none"
                raise ConfigError(
                    f"{self.model} version {to} never held {self.alias}; those that did: {numbers}"
                )
            target = matching[-1]
        if self.number_of(target) is None:
            raise ConfigError(f"{self.model} version {target.number} is gone from the registry")
        return self.force(target, why, "rolled back")

    def restore(self) -> None:
        """Send MLflow the last entry and its alias if either is missing; an alias that was moved by
        hand stays, unless MLflow lacks that entry. Errors: HistoryElsewhere, LeaseHeld.
        """
        history = self.history
        entries = history.entries()
        standing = self.standing(entries)
        lacks = standing.champion is not None and standing.held is None and not standing.drift
        if not (history.is_owed or lacks):
            return
        with history.open() as opened:
            self._tell(opened, restore=True)

    def undecided(self, candidate: Version, why: str) -> Entry:
        """Return an entry for a candidate that cannot be decided on here; it is in no history."""
        number = alias_version(self.tracker, self.model, self.alias)
        holder = self.version(number) if number is not None else None
        return _unrecorded(candidate, holder, why)

    def _adopt(self, opened: OpenHistory) -> None:
        """If the history is empty, record the version that has the alias in MLflow, if any."""
        number = None if opened.entries else alias_version(self.tracker, self.model, self.alias)
        if number is None:
            return
        version = self.version(number)
        why = "held the alias when the history began"
        identity = sha256(canonical_json(["found", number]))
        self._add(opened, Entry("found", identity, version, None, version, me(), time.time(), why))

    def _add(self, opened: OpenHistory, entry: Entry) -> Entry:
        added = opened.add(entry)
        self._tell(opened)
        return added

    def _tell(self, opened: OpenHistory, *, restore: bool = False) -> None:
        """Send the last entry to MLflow, decision first, alias last, and mark it as settled.
        A version that MLflow lacks is skipped.
        restore: set the alias even if the entry did not move it.
        """
        entry = opened.entries[-1]
        self._claim(opened.history)
        number = self.number_of(entry.candidate)
        if number is not None:
            data = entry.to_bytes()
            if run_id := version_run(self.tracker, self.model, number):
                self.tracker.log_artifacts(run_id, {artifact(opened.history, entry): data})
            for key, value in decision_tags(entry).items():
                self.tracker.client.set_model_version_tag(self.model, number, key, value)
            note = note_of(entry, artifact(opened.history, entry))
            describe_version(self.tracker, self.model, number, note)
        holder = self.number_of(entry.after) if entry.after is not None else None
        if holder is not None and (restore or entry.moved or entry.kind in BY_HAND):
            self.tracker.client.set_registered_model_alias(self.model, self.alias, holder)
        if opened.history.is_owed:
            opened.settle()


def _unrecorded(candidate: Version, holder: Version | None, why: str) -> Entry:
    """Return an entry that changes nothing and is in no history."""
    return Entry("found", "", candidate, holder, holder, me(), time.time(), why)


def version_of(number: str, tags: Mapping[str, str]) -> Version:
    """Return the version with this number; tags: those it has in the registry."""
    names = {"digest": "evaluation", "step": "evaluation.step", "key": "evaluation.key"}
    evaluation = {part: tags[name] for part, name in names.items() if tags.get(name)}
    judged = evaluation if evaluation.keys() == names.keys() else {}
    files = sha256(tags[FILES].encode()) if FILES in tags else ""
    return Version(number, tags.get("step_key", ""), judged, files, tags.get("run_key", ""))


def fetch_registered(promotions: Promotions, number: str, folder: Path) -> tuple[Path, str]:
    """Download a version's files below `folder` and compare them with the stores' records.
    Return (their path, why they could not be compared); the second is empty if they were and agree.
    Errors: LookupError if there is no such version; ModelChanged if the files differ.
    """
    tracker, model = promotions.tracker, promotions.model
    stores = [promotions.own.store]
    entries = promotions.own.entries()
    with contextlib.suppress(HistoryElsewhere):
        stores.append(promotions.history.store)
        entries = promotions.history.entries()
    wanted = next(filter(None, (registered_files(store, model, number) for store in stores)), None)
    path = fetch_version(tracker, model, number, folder, committed=wanted)
    if wanted is not None:
        return path, ""
    for entry in reversed(entries):
        version = entry.candidate
        if version.number != number or not version.files:
            continue
        if entry.at * 1000 < created_ms(tracker, model):
            break  # the registry was recreated since and numbers its versions anew
        if sha256(version_tags(tracker, model, number).get(FILES, "").encode()) != version.files:
            raise ModelChanged(
                f"{model} version {number}: the digests of its files (tag {FILES}) are not those"
                f" of decision {entry.number} on it; do not use it, register the checkpoint again"
            )
        return path, ""
    return path, unregistered(model, number)


def told_of_files(promotions: Promotions, number: str) -> tuple[bool, str]:
    """Return (True if a version's files were changed or are gone, a line to print).
    Files that cannot be checked give False and a line that states this.
    """
    with tempfile.TemporaryDirectory(prefix="agentgym-model-") as folder:
        try:
            left_out = fetch_registered(promotions, number, Path(folder))[1]
        except (LookupError, ModelChanged) as error:
            return True, str(error)
    return False, f"not checked: {left_out}" if left_out else "files as they were registered"
