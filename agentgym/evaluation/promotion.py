"""The alias moves by a decision: judged by the gate, recorded in the history, then told to MLflow.

`agentgym.evaluation.history` is the truth; MLflow shows it. An alias that MLflow has elsewhere was
moved by hand: it is found and named, and nothing moves until somebody says what is to count.
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from agentgym.config import ConfigError, GateConfig
from agentgym.evaluation.gate import Evidence, Judgement, judge
from agentgym.evaluation.history import (
    Entry,
    History,
    Home,
    Kind,
    OpenHistory,
    Version,
    champion_of,
    me,
)
from agentgym.evaluation.question import (
    Question,
    other_question,
    question_of_version,
    unlike_parts,
)
from agentgym.store.manifest import canonical_json, sha256
from agentgym.store.runstore import RunStore
from agentgym.tracking.mlflow import Tracker
from agentgym.tracking.registry import (
    FILES,
    alias_version,
    created_ms,
    describe_version,
    find_version,
    model_tags,
    version_run,
    version_tags,
)

logger = logging.getLogger(__name__)

FOLDER = "decisions"  # of a run's artifacts in MLflow, with a folder for each history
MADE_IN = "made_in"  # of a decision: the store that has its evidence
HOME = "mlflow.agentgym.history."  # tag of a registered model, with an alias: its history's Home
ROUNDS = 5  # champions that may change while a candidate is judged
VERDICT, WHY, DECISION = "gate.verdict", "gate.why", "gate.decision"  # tags of a version
BY_HAND = ("forced", "rolled back")  # kinds of entries that set the alias whoever holds it
EvidenceFor = Callable[[Version | None], Evidence]


@dataclass(frozen=True)
class Standing:
    """Who holds the alias, by the history and by MLflow."""

    champion: Version | None  # by the history
    held: str | None  # number of the version that holds it in MLflow
    drift: str = ""  # that somebody moved it by hand


class Promotions:
    """An alias of a registered model, its history and the registry it is shown in."""

    def __init__(self, store: RunStore, tracker: Tracker, model: str, alias: str) -> None:
        self.own = History(store, model, alias)
        self.tracker, self.model, self.alias = tracker, model, alias

    @property
    def history(self) -> History:
        """The one that decides: this store's own, unless the registry names another store's.
        Errors: HistoryElsewhere.
        """
        tags = model_tags(self.tracker, self.model) or {}
        told = tags.get(HOME + self.alias)
        return Home.from_json(told).deciding(self.own, self._base) if told else self.own

    @property
    def _base(self) -> Path | None:
        """Folder of the registry's database; None: a server has it."""
        uri = self.tracker.uri
        return Path(uri.removeprefix("sqlite:///")).parent if uri.startswith("sqlite:") else None

    @contextlib.contextmanager
    def open(self) -> Iterator[OpenHistory]:
        """The right to add to the history, with what it owes MLflow brought there first.
        Errors: HistoryElsewhere.
        """
        with self.history.open() as opened:
            if opened.history.is_owed:
                self._tell(opened)
            elif opened.history.began:  # of a version that did not say where it is
                self._claim(opened.history)
            yield opened

    def _claim(self, history: History) -> None:
        """The registry says where its history is."""
        tags, wanted = model_tags(self.tracker, self.model), Home.of(history, self._base).to_json()
        if tags is not None and tags.get(HOME + self.alias) != wanted:
            self.tracker.client.set_registered_model_tag(self.model, HOME + self.alias, wanted)

    def standing(self, entries: list[Entry]) -> Standing:
        champion, held = champion_of(entries), alias_version(self.tracker, self.model, self.alias)
        if champion is None:
            return Standing(None, held)
        number = self.number_of(champion)
        if number is not None and held is None and self._is_newer(entries[-1]):
            return Standing(champion, held)  # the registry was made anew
        if number in (held, None) and (number or held is None):
            return Standing(champion, held)
        told = f"version {held}" if held else "no version"
        return Standing(
            champion,
            held,
            f"the alias {self.alias} was moved by hand: MLflow has it at {told}, the history at"
            f" version {champion.number} since entry {entries[-1].number}; `agentgym rollback --to"
            f" {champion.number}` puts it back, `agentgym promote VERSION --force --why ...` makes"
            " another one count",
        )

    def number_of(self, version: Version) -> str | None:
        """What the registry has it as; None where it is not there."""
        if version.checkpoint:
            return find_version(self.tracker, self.model, version.checkpoint)
        with contextlib.suppress(LookupError):
            version_tags(self.tracker, self.model, version.number)
            return version.number
        return None

    def version(self, number: str) -> Version:
        """Errors: ConfigError where there is none."""
        try:
            tags = version_tags(self.tracker, self.model, number)
        except LookupError:
            raise ConfigError(
                f"{self.model} has no version {number}; where MLflow lost it, the pipeline"
                " (or `agentgym step register`) registers its run's model again"
            ) from None
        return version_of(number, tags)

    def _is_newer(self, entry: Entry) -> bool:
        return created_ms(self.tracker, self.model) > entry.at * 1000

    @property
    def made_in(self) -> dict[str, str]:
        """Return the location of this store, as decisions name it for their evidence."""
        home = Home.of(self.own, self._base)
        return {"store": home.store, "host": home.host}

    def evidence_store(self, decision: Mapping[str, Any]) -> RunStore | None:
        """Return the store with the evidence of a decision; None if none is named, or it cannot be
        looked at from here.
        """
        place = decision.get(MADE_IN)
        return Home(**place, began="").opened(self.own.store, self._base) if place else None

    # --- what moves it ------------------------------------------------------------------------

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
        """Judge the candidate against whoever holds the alias, and move it where that is the
        verdict. Asked again, what was decided stands, whatever was killed in between.

        evidence_for: may play for minutes, so nobody waits for it; where the champion changed
        meanwhile, it is asked for the new one. It is not asked where the two were judged on
        different things.
        question: what evidence_for asks, where the gate has no protocol of its own.
        Errors: HistoryElsewhere.
        """
        for _ in range(ROUNDS):
            with self.open() as opened:
                self._adopt(opened)
                found = next((each for each in opened.entries if each.asked == asked), None)
                standing = self.standing(opened.entries)
                if found is not None:
                    return found
            if candidate.is_same(standing.champion):
                return _same(candidate, standing)
            unlike = self._unlike(candidate, standing.champion, rules, question)
            evidence = (
                Evidence({}, True, obstacle=unlike) if unlike else evidence_for(standing.champion)
            )
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
        """Why the candidate is no model of what the champion is; empty: it is one."""
        theirs = self.question(champion) if champion is not None else None
        if theirs is None:
            return ""
        envs_only = bool(rules.protocol)
        asked = (self.question(candidate), None if envs_only else question)
        reasons = (other_question(q, theirs, envs_only=envs_only) for q in asked if q is not None)
        return next(filter(None, reasons), "")

    def misplaced(self) -> str:
        """Why the alias is at a model of other things than the one that held it before, by a
        judgement that nobody passed over since; empty: it is not. Earlier releases judged so.
        Errors: HistoryElsewhere.
        """
        broken = ""
        for entry in self.history.entries():
            if entry.kind in BY_HAND:
                broken = ""
            elif entry.moved and entry.before is not None and not broken:
                ours, theirs = (self.question(each) for each in (entry.candidate, entry.before))
                if ours is None or theirs is None or not (unlike := unlike_parts(ours, theirs)):
                    continue
                before, after = entry.before.number, entry.candidate.number
                broken = (
                    f"{self.model}@{self.alias}: decision {entry.number} took it from version"
                    f" {before} and gave it to version {after}, though {'; '.join(unlike)}."
                    f" `agentgym rollback --to {before} --set"
                    f" 'registry.model_name={self.model}'` gives it back"
                )
        return broken

    def question(self, version: Version) -> Question | None:
        """Return what a version was judged on; None if unknown. Errors: HistoryElsewhere."""
        stores = {store.root: store for store in (self.own.store, self.history.store)}
        return question_of_version(stores.values(), self.tracker, self.model, version)

    def _judged(
        self,
        opened: OpenHistory,
        candidate: Version,
        rules: GateConfig,
        evidence: Evidence,
        asked: str,
        who: str,
    ) -> Entry:
        standing = self.standing(opened.entries)
        looks = sum(
            each.decision.get("item_set") == evidence.item_set
            for each in opened.entries
            if each.before is not None
        )
        known = replace(evidence, drift=standing.drift, num_looks=looks)
        found = judge(rules, known)
        champion = standing.champion
        entry = Entry(
            "judged",
            asked,
            candidate,
            champion,
            candidate if found.verdict == "PROMOTE" else champion,
            who,
            time.time(),
            found.why,
            {**decision_json(rules, known, found), MADE_IN: self.made_in},
        )
        return self._add(opened, entry)

    def force(self, version: Version, why: str, kind: Kind = "forced") -> Entry:
        """Move it because a person says so."""
        with self.open() as opened:
            self._adopt(opened)
            before = champion_of(opened.entries)
            asked = sha256(canonical_json([kind, version.number, why, len(opened.entries)]))
            entry = Entry(kind, asked, version, before, version, me(), time.time(), why)
            return self._add(opened, entry)

    def roll_back(self, to: str | None, why: str) -> Entry:
        """Move it to who held it before, or to a version that once did.
        Errors: ConfigError where there is none, or it is gone.
        """
        entries = self.history.entries()
        holders = [each.after for each in entries if each.after is not None]
        now = champion_of(entries)
        if to is None:
            earlier = [each for each in holders if not each.is_same(now)]
            if not earlier:
                raise ConfigError(f"{self.model}: nobody held {self.alias} before; nothing to do")
            target = earlier[-1]
        else:
            held = [each for each in holders if each.number == to]
            if not held:
                numbers = ", ".join(dict.fromkeys(each.number for each in holders)) or "none"
                raise ConfigError(
                    f"{self.model} version {to} never held {self.alias}; those that did: {numbers}"
                )
            target = held[-1]
        if self.number_of(target) is None:
            raise ConfigError(f"{self.model} version {target.number} is gone from the registry")
        return self.force(target, why, "rolled back")

    def restore(self) -> None:
        """Bring MLflow to what the history says, where the registry was made anew or the last
        entry did not get there. Errors: HistoryElsewhere.
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
        """Of a candidate that nobody here can decide on; in no history."""
        held = alias_version(self.tracker, self.model, self.alias)
        holder = self.version(held) if held is not None else None
        return Entry("found", "", candidate, holder, holder, me(), time.time(), why)

    def _adopt(self, opened: OpenHistory) -> None:
        """A registry that is older than its history: who holds the alias is its first entry."""
        held = None if opened.entries else alias_version(self.tracker, self.model, self.alias)
        if held is None:
            return
        version = self.version(held)
        why = "held the alias when the history began"
        asked = sha256(canonical_json(["found", held]))
        self._add(opened, Entry("found", asked, version, None, version, me(), time.time(), why))

    def _add(self, opened: OpenHistory, entry: Entry) -> Entry:
        added = opened.add(entry)
        self._tell(opened)
        return added

    def _tell(self, opened: OpenHistory, *, restore: bool = False) -> None:
        """MLflow gets the last entry: the decision first, the alias last. restore: the alias even
        where the entry did not move it.
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


def artifact(history: History, entry: Entry) -> str:
    """Return the path of a decision among the artifacts of its MLflow run."""
    return f"{FOLDER}/{history.began[:12]}/{entry.number:04d}.json"


def decision_tags(entry: Entry) -> dict[str, str]:
    """Tags of the version that was decided on."""
    verdict = entry.verdict or entry.kind.upper()
    return {VERDICT: verdict, WHY: entry.why[:5000], DECISION: sha256(entry.to_bytes())}


def note_of(entry: Entry, place: str) -> str:
    """Return the text of a version's page about its last decision. place: its artifact."""
    when = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(entry.at))
    over = f" over version {entry.before.number}" if entry.before else ""
    lines = [
        f"**{entry.verdict or entry.kind}**{over}: {entry.why}",
        "",
        f"Decision {entry.number}, {when}, by {entry.who}; `{place}` among its run's"
        " artifacts has the numbers and the items.",
    ]
    rules = entry.decision.get("rules", [])
    if rules:
        lines += ["", "| rule | verdict | why |", "|---|---|---|"]
        lines += [
            f"| {' '.join((rule['rule'], rule['env'])).strip()} | {rule['verdict']} |"
            f" {rule['why'].replace('|', ' ')} |"
            for rule in rules
        ]
    made = entry.candidate
    named = {
        "checkpoint": made.checkpoint[:12],
        "run": made.run_key and f"r{made.run_key[:12]}",
        "evaluation": made.evaluation.get("digest", "")[:12],
    }
    told = ", ".join(f"{what} `{which}`" for what, which in named.items() if which)
    lines += ["", f"Lineage: {told}; all it was made of: `agentgym lineage {made.number}`"]
    return "\n".join(lines)


def version_of(number: str, tags: Mapping[str, str]) -> Version:
    """As its tags describe it."""
    evaluation = {
        "digest": tags.get("evaluation", ""),
        "step": tags.get("evaluation.step", ""),
        "key": tags.get("evaluation.key", ""),
    }
    return Version(
        number,
        tags.get("step_key", ""),
        evaluation if all(evaluation.values()) else {},
        sha256(tags[FILES].encode()) if FILES in tags else "",
        tags.get("run_key", ""),
    )


def decision_json(rules: GateConfig, evidence: Evidence, found: Judgement) -> dict[str, Any]:
    """All that the verdict follows from: `judge` of it comes to the same."""
    return {
        **found.to_json(),
        "item_set": evidence.item_set,
        "settings": json.loads(json.dumps(rules.model_dump(mode="json"))),
        "evidence": evidence.to_json(),
    }


def judged_again(decision: Mapping[str, Any]) -> dict[str, Any]:
    """What its evidence and its rules come to now. Errors: ValueError, KeyError, TypeError."""
    rules = GateConfig.model_validate(decision["settings"])
    evidence = Evidence.from_json(decision["evidence"])
    place = {MADE_IN: decision[MADE_IN]} if MADE_IN in decision else {}
    return {**decision_json(rules, evidence, judge(rules, evidence)), **place}


def _same(candidate: Version, standing: Standing) -> Entry:
    why = "it is this model, evaluated anew"
    champion = standing.champion
    return Entry("found", "", candidate, champion, champion, me(), time.time(), why)


def summary(entry: Entry) -> dict[str, Any]:
    """What a step or a page tells of it; equal for a command and its repetition."""
    return {
        "verdict": entry.verdict,
        "moved": entry.moved,
        "why": entry.why,
        "over": entry.before.number if entry.before else None,
        "needed_items": entry.decision.get("needed_items"),
        "rules": [
            {name: rule[name] for name in ("rule", "env", "verdict", "why")}
            for rule in entry.decision.get("rules", [])
        ],
    }


def sentence(registered: Mapping[str, Any]) -> str:
    """What became of the alias, from the results of `register`: one line without its name."""
    found = registered["champion"]
    verdict = f"{found['verdict']}: " if found.get("verdict") in ("HOLD", "REJECT") else ""
    if found["moved"]:
        return f"moves to version {registered['version']}: {found['why']}"
    holder = f"stays with version {found['over']}" if found["over"] else "is given to nobody"
    return f"{holder}: {verdict}{found['why']}"
