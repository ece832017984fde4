"""A forger with write access to a run's store and MLflow, who updates everything derived."""

import json
import sqlite3
from dataclasses import replace

from agentgym.audit import audit
from agentgym.evaluation.numbers import headline, metrics_of, numbers_of, paired
from agentgym.evaluation.publish import headline_tags, report_files
from agentgym.evaluation.result import RESULT, Result
from agentgym.evaluation.stored import plan_of, played_slots
from agentgym.pipeline.table import key_of, open_store, run_key, steps_of
from agentgym.records import TRAJECTORIES, decode_trajectories, encode_trajectories
from agentgym.steps.context import METRICS
from agentgym.store.manifest import Blob, decode_commit, encode_commit
from agentgym.tracking.points import decode_points, encode_points
from agentgym.tracking.saved_view import RESULT as RESULTS

LEFT = {"pages", "registry", "decisions"}


class Forger:
    """Changes a run, and then every digest that would show the change."""

    def __init__(self, cfg):
        self.cfg = cfg
        self.steps = cfg.store.path / "steps"

    def folder(self, step):
        return next(path for path in self.steps.iterdir() if path.name.rpartition("-")[0] == step)

    def commits(self, step):
        paths = sorted((self.folder(step) / "manifests").iterdir())
        return [decode_commit(path.read_bytes())[-1] for path in paths]

    def blob(self, step, seq, name):
        manifest = self.commits(step)[seq]
        return self.folder(step) / "blobs" / {**manifest.blobs, **manifest.records}[name].digest

    def episodes(self, step, seq):
        """Return the episodes of a commit; a plan and a result have none."""
        if TRAJECTORIES not in self.commits(step)[seq].records:
            return []
        return decode_trajectories(self.blob(step, seq, TRAJECTORIES).read_bytes())

    def rewrite(self, step, seq, name, data):
        """Replace content, its file name, and the digests of all manifests that depend on it."""
        manifest = self.commits(step)[seq]
        part = "records" if name in manifest.records else "blobs"
        changed = {**getattr(manifest, part), name: Blob.of(data)}
        (self.folder(step) / "blobs" / changed[name].digest).write_bytes(data)
        self.replace(manifest, **{part: changed})

    def replace(self, manifest, **changes):
        self.save(manifest.model_copy(update=changes))
        self.follow({manifest.digest: self.commits(manifest.step)[manifest.seq].digest})

    def save(self, manifest):
        """Write a manifest, relink the commits after it, and update the tag of the last one."""
        folder, old = self.folder(manifest.step) / "manifests", self.commits(manifest.step)
        before = old[manifest.seq - 1].records_digest if manifest.seq else ""
        for commit in [manifest, *old[manifest.seq + 1 :]]:
            written = commit.model_copy(update={"follows": before})
            (folder / f"{commit.seq:06d}.json").write_bytes(encode_commit([written]))
            before = written.records_digest
        self.sql("update tags set value = ? where value = ?", before, old[-1].records_digest)

    def follow(self, renamed):
        """Update keys, parents and folders of later steps, and the MLflow tags that name them."""
        finals = {}
        for name, step in steps_of(self.cfg).items():
            key = key_of(step, self.cfg, finals)
            history = self.commits(name)
            if key != history[0].key:
                for old in history:
                    new = old.model_copy(
                        update={
                            "key": key,
                            "parents": {parent: finals[parent].digest for parent in step.parents},
                        }
                    )
                    self.save(new)
                    renamed |= {old.key: key, old.digest: new.digest}
                self.folder(name).rename(self.steps / f"{name}-{key[:16]}")
            finals[name] = self.commits(name)[-1]
        for old, new in renamed.items():
            for table in ("tags", "model_version_tags"):
                self.sql(f"update {table} set value = ? where value = ?", new, old)

    def edit(self, step, seq, index, **changes):
        """Change one episode of one commit. Return its name in error texts."""
        episodes = self.episodes(step, seq)
        episodes[index] = replace(episodes[index], **changes)
        self.rewrite(step, seq, TRAJECTORIES, encode_trajectories(episodes))
        return f"{step} commit {seq} {episodes[index].item.item_id} sample {episodes[index].sample}"

    def metric(self, step, seq, ledger=True, **values):
        """Change a number in the spool and, if `ledger`, in MLflow."""
        points = decode_points(self.blob(step, seq, METRICS).read_bytes())
        for name, value in values.items():
            points[0].metrics[name] = value
            for table in ("metrics", "latest_metrics") if ledger else ():
                self.sql(
                    f"update {table} set value = ? where key = ? and timestamp = ?",
                    value,
                    name,
                    points[0].time_ms,
                )
        self.rewrite(step, seq, METRICS, encode_points(points))

    def undeliver(self, time_ms, name=None):
        """Delete points from MLflow, also from its table of latest values."""
        which = "timestamp = ?" + (" and key = ?" if name else "")
        self.sql(f"delete from metrics where {which}", time_ms, *([name] if name else []))
        columns = "key, value, timestamp, step, is_nan, run_uuid"
        self.sql("delete from latest_metrics")
        self.sql(
            f"insert into latest_metrics ({columns}) select key, value, timestamp, max(step),"
            " is_nan, run_uuid from metrics group by run_uuid, key"
        )

    def report(self):
        """Draw the page and its pictures again, in the store and in MLflow."""
        store, table = open_store(self.cfg), steps_of(self.cfg)
        finals = {name: self.commits(name)[-1] for name in table["report"].parents}
        for name, data in report_files(self.cfg, store, finals, run_key(self.cfg), table).items():
            self.rewrite("report", 0, name, data)
            for path in (self.cfg.state_dir / "mlflow-artifacts").rglob(name):
                path.write_bytes(data)

    def sql(self, statement, *values):
        with sqlite3.connect(self.cfg.state_dir / "mlflow.db") as database:
            return database.execute(statement, values).fetchall()

    def caught(self, *names, **options):
        """Audit with all episodes replayed. Return the failures of the checks in `names`.
        No other check may fail, except those in LEFT, and the ledger for results of evaluations:
        the forger leaves what they check unchanged.
        """
        self.report()
        report = audit(self.cfg, **{"num_episodes": None, **options})
        failed = {check.name for check in report.checks if not check.ok}
        (ledger,) = (check for check in report.checks if check.name == "ledger")
        left = LEFT | {"ledger"} if all(f": {RESULTS}" in f for f in ledger.failures) else LEFT
        assert failed - left == set(names) - left, [c for c in report.checks if not c.ok]
        assert failed >= set(names)
        assert not report.ok
        assert json.loads(json.dumps(report.to_json()))["ok"] is False
        return {check.name: " | ".join(check.failures) for check in report.checks if not check.ok}

    def result(self, step, final):
        """Return the result that follows from the episodes of an evaluation."""
        store, commits = open_store(self.cfg), self.commits(step)
        plan = plan_of(store, commits)
        slots = played_slots(store, plan, commits)
        numbers = numbers_of(slots, plan.protocol)
        return Result(plan.identity, slots, numbers, {**plan.about, "valid": True})

    def evaluation(self, step):
        """Return (commit, index, episode) of every episode of an evaluation."""
        return [
            (commit.seq, index, each)
            for commit in self.commits(step)
            for index, each in enumerate(self.episodes(step, commit.seq))
        ]

    def reevaluate(self, step, changed):
        """Replace episodes, {(commit, index): episode}, and all numbers derived from them."""
        for commit in self.commits(step):
            episodes = self.episodes(step, commit.seq)
            if not episodes:
                continue
            for (seq, index), episode in changed.items():
                if seq == commit.seq:
                    episodes[index] = episode
            self.rewrite(step, commit.seq, TRAJECTORIES, encode_trajectories(episodes))
        final, settings = self.commits(step)[-1], self.cfg.evaluation
        result = self.result(step, final)
        self.rewrite(step, final.seq, RESULT, result.to_bytes())
        results = {**final.results, **headline(result, settings.k, settings.confidence)}
        if "paired" in results:
            base = results["paired"]["baseline"]
            before = self.result(base, self.commits(base)[-1])
            gains = paired(before, result, settings.k, settings.confidence)
            results["paired"] = {"baseline": base, **gains}
        old = self.commits(step)[-1]
        self.replace(old, results=results)
        self.metric(step, final.seq, **metrics_of(results, result))
        final = self.commits(step)[-1]
        for name, value in headline_tags(final).items():
            self.sql("update model_version_tags set value = ? where key = ?", value, name)
        report = self.commits("report")[-1]
        self.replace(
            report,
            results={
                side: final.results if told == old.results else told
                for side, told in report.results.items()
            },
        )
