"""Running a step, be it done, half done or new: tasks, commands and tests call `run_step`."""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from agentgym.config import ConfigError, EnvConfig, RunConfig, is_elsewhere
from agentgym.data.copies import keep_data
from agentgym.defaults import keep_blocks, return_memory
from agentgym.deploy.environment import environment_servers
from agentgym.pipeline.stored_config import audit_for_gate, keep_run
from agentgym.pipeline.table import (
    finished,
    key_of,
    known_steps,
    open_store,
    run_key,
    run_label,
    semantic_of,
    steps_of,
    with_parents,
)
from agentgym.rollouts.policies.hosts import one_engine
from agentgym.steps.context import METRICS, Environment, NoProgress, Progress, StepContext
from agentgym.steps.step import Kind, Outcome, Step
from agentgym.store.lease import LeaseHeld, when_free
from agentgym.store.manifest import BlobMissing, DigestMismatch, Manifest, StepWriter, sha256
from agentgym.store.runstore import RunStore
from agentgym.tracking.deliver import Paced, close_dead, deliver_step, delivery_mark, tracker_of
from agentgym.tracking.points import AlarmStop
from agentgym.tracking.reaching import (
    LedgerUnavailable,
    has_file,
    import_client,
    ledger_identity,
    reaching,
    registry_identity,
)
from agentgym.tracking.registry import model_tags
from agentgym.types import Endpoints

logger = logging.getLogger(__name__)

# kinds of steps that run in this process with every setting of `compute`: they need no accelerator
STAYS_HERE = (Kind.PREPARE, Kind.DEMONSTRATE, Kind.INITIALIZE, Kind.REGISTER, Kind.REPORT)


def run_step(
    name: str,
    cfg: RunConfig,
    *,
    environment: Environment | None = None,
    progress: Progress | None = None,
) -> Outcome:
    """Bring one step to its end: confirm that it is done, resume it, or run it.

    environment: offer_expert -> endpoints of running servers; without it the step starts and ends
    its own servers. It also starts and ends its own engine, except inside `one_engine`.
    Commits are delivered to MLflow, also those of a step that was done.
    Errors: ConfigError if the name is unknown or a parent is not done; LeaseHeld if another process
    runs the step; DigestMismatch, BlobMissing for stored content; LedgerUnavailable; AlarmStop.
    """
    table, store = known_steps(cfg, name), open_store(cfg)
    step = table[name]
    done = finished(cfg, store)
    if missing := [parent for parent in step.parents if parent not in done]:
        raise ConfigError(
            f"step {name} needs {', '.join(missing)} first; run `agentgym step {missing[0]}`"
        )
    keep_run(cfg, store)
    if name in done:
        confirm(cfg, store, step, done[name])
        return Outcome(step, done[name], "done")
    parents = {parent: done[parent] for parent in step.parents}
    key = key_of(step, cfg, done)
    if cfg.compute in ("ray-job", "kuberay") and step.kind not in STAYS_HERE:
        return _run_elsewhere(step, cfg, store, key, environment)
    _prepare_process(cfg, store)
    opened = store.open(name, key, [parent.digest for parent in parents.values()])
    with _closed_where_it_fails(cfg, store), opened as writer:
        head = writer.head
        if head is not None and head.done:  # another process was faster
            confirm(cfg, store, step, head)
            return Outcome(step, head, "done")
        for manifest in parents.values():
            store.verify(manifest)
        head = _intact_head(store, writer)
        ctx = StepContext(
            cfg=cfg,
            step=step,
            config=semantic_of(step, cfg),
            store=store,
            writer=writer,
            parents=parents,
            environment=environment or _own_servers(cfg),
            progress=progress or NoProgress(),
            play_anew=functools.partial(_play_anew, cfg, progress),
            audited=functools.partial(audit_for_gate, cfg),
            on_commit=Paced(lambda manifest: deliver(cfg, store, step, manifest)),
            trained=[commit for stage, commit in done.items() if step.stage and table[stage].stage],
        )
        begins = f"resumes after commit {head.seq}" if head else "starts"
        logger.info("step %s (%s): %s", name, key[:12], begins)
        with one_engine(cfg), reaching(cfg.tracking_uri), ctx:  # some steps call MLflow
            manifest = _run_watched(ctx)
    return Outcome(step, manifest, "resumed" if head else "ran", head.seq + 1 if head else None)


_looked: set[tuple[str, str]] = set()  # (MLflow, store) pairs that this process has cleaned up


def _prepare_process(cfg: RunConfig, store: RunStore) -> None:
    """Tune memory for a hub model; once per process, close MLflow runs that dead processes left."""
    if cfg.model.source == "hub":
        gc.collect()  # the last step's models may be in reference cycles
        return_memory()
        keep_blocks()
    if (cfg.tracking_uri, store.root) not in _looked:
        _looked.add((cfg.tracking_uri, store.root))
        close_dead(cfg, store)


@contextlib.contextmanager
def _closed_where_it_fails(cfg: RunConfig, store: RunStore) -> Iterator[None]:
    """If the `with` block fails or is interrupted, call `close_dead`, which ends its MLflow run and
    others of this store that no process runs. Then raise the block's error again; a failure to
    end them is only logged. After LeaseHeld nothing is ended.
    """
    try:
        yield
    except LeaseHeld:
        raise
    except BaseException:
        try:
            close_dead(cfg, store)
        except Exception as error:  # the caller must get the step's own exception
            logger.warning("MLflow may show the step as RUNNING: %s", error)
        raise


def _run_elsewhere(
    step: Step, cfg: RunConfig, store: RunStore, key: str, environment: Environment | None
) -> Outcome:
    """Run the step as a job on a cluster, then `confirm` its result. Errors: see `run_as_job`."""
    from agentgym.deploy.jobs import run_as_job

    head = store.head(step.name, key)
    here = cfg
    if is_elsewhere(cfg):  # the job fetches the data files from the store
        data = cfg.data.model_copy(update={"digest": keep_data(cfg, store)})
        here = cfg.model_copy(update={"data": data})
    with _with_servers(here, environment) as sent:
        manifest = run_as_job(step.name, sent, store, run_key=run_key(cfg), key=key)
    confirm(cfg, store, step, manifest)
    return Outcome(step, manifest, "resumed" if head else "ran", head.seq + 1 if head else None)


@contextlib.contextmanager
def _with_servers(cfg: RunConfig, environment: Environment | None) -> Iterator[RunConfig]:
    """Start the servers of environments that deploy on Kubernetes, and yield the configuration of
    a job with their addresses; `cfg` itself if there are no such environments.
    """
    if not any(env.deploy == "kubernetes" for env in cfg.envs):
        yield cfg
        return
    with (environment or _own_servers(cfg))(False) as endpoints:

        def named(env: EnvConfig) -> EnvConfig:
            if env.deploy != "kubernetes":
                return env
            room = max(env.max_sessions, cfg.rollout.concurrency)  # one address for all servers
            there = {"deploy": "local", "replicas": "auto", "keep": False, "max_sessions": room}
            urls = tuple(str(endpoint) for endpoint in endpoints[env.name])
            return env.model_copy(update={**there, "endpoints": urls})

        yield cfg.model_copy(update={"env": named(cfg.env), "mix": tuple(map(named, cfg.mix))})


def _own_servers(cfg: RunConfig) -> Environment:
    return lambda expert: environment_servers(cfg, expert, run_label(cfg))


def require_key(name: str, cfg: RunConfig, expected: str) -> None:
    """Raise ConfigError unless source, data and settings give the step the key `expected` here,
    too. An unknown name passes: `run_step` reports it.
    """
    table, done = steps_of(cfg), finished(cfg, open_store(cfg))
    if name in table and all(parent in done for parent in table[name].parents):
        key = key_of(table[name], cfg, done)
    else:
        key = "" if name in table else expected  # run_step reports an unknown name
    if key != expected:
        came = f"has key {key[:12]}" if key else "lacks results that it builds on"
        raise ConfigError(
            f"step {name} was asked for with key {expected[:12]} and {came} here: the source, the"
            " data or the store of this machine is another one; use one image for flow and jobs"
        )


def _play_anew(cfg: RunConfig, progress: Progress | None, policy: str) -> Any:
    from agentgym.pipeline.versions import play_anew  # takes seconds

    return play_anew(cfg, progress)(policy)


def _run_watched(ctx: StepContext) -> Manifest:
    """Run the step and return its final commit. If an alarm stops it, deliver the last commit to
    MLflow, if it can be reached, and raise AlarmStop.
    """
    try:
        if stop := ctx.watch.stop:
            raise stop
        if ctx.step.stage:
            import_client(ctx.cfg.tracking_uri)
        return ctx.step.run(ctx)
    except AlarmStop:
        if ctx.head is not None:
            with contextlib.suppress(LedgerUnavailable):
                deliver(ctx.cfg, ctx.store, ctx.step, ctx.head)
        raise


def _intact_head(store: RunStore, writer: StepWriter) -> Manifest | None:
    """Drop the newest commits with damaged content, and return the one to resume from, if any.
    Errors: DigestMismatch, BlobMissing if the oldest kept commit is damaged, too.
    """
    while writer.head is not None:
        try:
            store.verify(writer.head)
            break
        except (DigestMismatch, BlobMissing) as error:
            before = writer.fall_back()
            if before is None:
                raise
            logger.warning("%s; resuming from commit %d, the one before", error, before.seq)
    return writer.head


def run_with_parents(
    name: str, cfg: RunConfig, *, wait_s: float = 0.0, progress: Progress | None = None
) -> list[Outcome]:
    """Run a step and all the steps that it needs, with one engine and with environment servers that
    start when they are first needed.

    wait_s and errors: see `run_when_free`.
    """
    with one_engine(cfg), contextlib.ExitStack() as stack:
        running: list[Endpoints] = []  # once there are servers

        def environment(expert: bool) -> AbstractContextManager[Endpoints]:
            if expert:
                return environment_servers(cfg, True, run_label(cfg))
            if not running:
                running.append(stack.enter_context(environment_servers(cfg, False, run_label(cfg))))
            return contextlib.nullcontext(running[0])

        return [
            run_when_free(step, cfg, wait_s=wait_s, environment=environment, progress=progress)
            for step in with_parents(cfg, name)
        ]


def export_report(cfg: RunConfig, manifest: Manifest) -> Path:
    """Write the report of a finished run to a folder of the state, and return its page.
    manifest: of the step `report`.
    """
    folder = cfg.state_dir / "reports" / run_label(cfg)
    folder.mkdir(parents=True, exist_ok=True)
    store = open_store(cfg)
    for name in (*manifest.blobs, *manifest.records):
        (folder / name).write_bytes(store.read(manifest, name))
    (folder / "config.json").write_text(cfg.model_dump_json(indent=1), encoding="utf-8")
    return folder / "report.html"


def run_when_free(
    name: str,
    cfg: RunConfig,
    *,
    wait_s: float,
    environment: Environment | None = None,
    progress: Progress | None = None,
) -> Outcome:
    """Run a step once no other process runs it, see `run_step`. Errors: LeaseHeld after `wait_s`
    seconds; those of `run_step`.
    """
    return when_free(
        lambda: run_step(name, cfg, environment=environment, progress=progress), wait_s
    )


def confirm(cfg: RunConfig, store: RunStore, step: Step, manifest: Manifest) -> None:
    """Verify a finished step's content, then `deliver`. Errors: DigestMismatch, BlobMissing."""
    store.verify(manifest)
    deliver(cfg, store, step, manifest)


def deliver(cfg: RunConfig, store: RunStore, step: Step, manifest: Manifest) -> None:
    """Bring MLflow up to the last commit.
    A mark file avoids the slow import of MLflow if nothing is new; no point is sent twice.
    A model that MLflow has lost is registered again.

    Errors: LedgerUnavailable, LedgerError.
    """
    if METRICS not in manifest.records and not manifest.done:
        return
    mark = delivery_mark(cfg, run_key(cfg), step.name, manifest.key)
    is_registration = step.kind is Kind.REGISTER
    recorded = mark.read_text(encoding="utf-8") if mark.is_file() else ""
    if recorded == _mark(cfg, step, manifest) and not (is_registration and _is_lost(cfg)):
        return
    deliver_step(
        cfg,
        store,
        manifest,
        run_key(cfg),
        title=step.title,
        headline=step.headline,
        is_report=step.kind is Kind.REPORT,
    )
    if is_registration:
        from agentgym.evaluation.publish import confirm_registration

        done = finished(cfg, store)
        checkpoint, evaluation = done[step.checkpoint], done[step.evaluation]
        with reaching(cfg.tracking_uri):
            confirm_registration(cfg, store, manifest, checkpoint, evaluation, run_key(cfg))
    mark.parent.mkdir(parents=True, exist_ok=True)
    mark.write_text(_mark(cfg, step, manifest), encoding="utf-8")


def _is_lost(cfg: RunConfig) -> bool:
    """Return True if an MLflow server has lost the registered model; False if it does not answer.

    A database file needs no such check: its identity is in the mark.
    Errors: LedgerError if the server has lost the experiment.
    """
    if has_file(cfg):
        return False
    try:
        with reaching(cfg.tracking_uri):
            tracker = tracker_of(cfg)
            _ = tracker.experiment_id
            return model_tags(tracker, cfg.registered_model) is None
    except LedgerUnavailable as error:
        logger.warning("the registered model was not looked for: %s", error)
        return False


def _mark(cfg: RunConfig, step: Step, manifest: Manifest) -> str:
    ledger = ledger_identity(cfg)
    if step.kind is Kind.REGISTER:
        ledger += f" {registry_identity(cfg)}"
    return sha256(f"{manifest.digest} {manifest.created_at!r} {ledger}".encode())
