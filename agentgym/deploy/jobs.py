"""One step of a run as a job on a Ray cluster: submitted under the attempt's name, followed, found
again, stopped.

There are two transports: Ray's Jobs API (rayjobs.py), and a RayJob of Kubernetes that brings a
cluster of its own (kuberay.py).
The job must compute the same key as its submitter, else it is refused.
The final manifest in the store is the result; the job's status is not.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable

from agentgym.config import ConfigError, RunConfig
from agentgym.deploy.attempts import (
    POLL_S,
    STOP_TIMEOUT_S,
    Job,
    Look,
    Phase,
    RayJobFailed,
    RayUnreachable,
    Transport,
)
from agentgym.store.manifest import Manifest
from agentgym.store.runstore import RunStore

logger = logging.getLogger(__name__)

SILENCE_S = 60.0  # a cluster that was reached once may be silent for this long
LOG_END_S = 5.0  # for the last lines of a finished job
LOG_LINES = 15  # of a failed job, in the error
BAD_INPUT = 2  # exit code of a step whose input is bad: no retry helps


def run_as_job(step: str, cfg: RunConfig, store: RunStore, *, run_key: str, key: str) -> Manifest:
    """Run the step as a job and return its final manifest.
    run_key: digest of the run. key: the step's, which the job must compute, too.

    With `compute` ray-job it runs on the cluster at `ray.address`, with kuberay on its own cluster.
    If a job of this run and step has not ended, because the process that followed it died, follow
    that one: there are never two.
    If the job fails, wait `store.lease_ttl_s` and start the next attempt, at most
    `ray.job_attempts` in this call.
    An interrupt, a deadline or another failure on this side stops the job; RayUnreachable does not.
    Errors: RayUnreachable; ConfigError if the job reports bad input; TimeoutError; RayJobFailed
    with the end of its log.
    """
    transport = _transport(cfg)
    job = Job(step, run_key, key, cfg)
    number, reason = 0, ""
    for chance in range(cfg.ray.job_attempts):
        if chance:
            # a driver that died silently on another machine keeps the step's lease this long
            time.sleep(cfg.store.lease_ttl_s)
        attempts = transport.attempts(job)
        live = [known for known, look in attempts.items() if look.phase is not Phase.ENDED]
        is_new = not live
        number = max(live) if live else max([number, *attempts]) + 1
        name = job.name(number)
        if is_new:
            transport.submit(job, name)
        how = "was submitted" if is_new else "is there already, following it"
        logger.info("step %s: job %s on %s %s", step, name, transport.place, how)
        look, log = _follow_or_stop(transport, name, cfg)
        manifest = store.final(step, key)
        if manifest is not None:
            transport.settle(job)
            return manifest
        reason = _reason(transport, name, look, log)
        _raise_where_no_attempt_helps(look, reason, cfg)
        logger.warning("%s", reason)
    raise RayJobFailed(
        f"step {step} failed in {cfg.ray.job_attempts} jobs (ray.job_attempts), the last: {reason}"
    )


def _transport(cfg: RunConfig) -> Transport:
    """Return a transport that is connected to Kubernetes (`compute` kuberay), else to the Ray
    cluster at `ray.address`. Errors: ConfigError, RayUnreachable.
    """
    if cfg.compute == "kuberay":
        from agentgym.deploy.kuberay import KubeRay

        return KubeRay.connect(cfg)
    from agentgym.deploy.rayjobs import RayJobs

    return RayJobs.connect(cfg)


def _follow_or_stop(
    transport: Transport, name: str, cfg: RunConfig
) -> tuple[Look | None, list[str]]:
    """Follow the job. Result: (its last state, or None if the cluster has forgotten it; the end of
    its log).

    The job is stopped on every exception but RayUnreachable (all are raised again), and if its
    cluster is lost.
    """
    try:
        look, lines = asyncio.run(_follow(transport, name, cfg))
    except BaseException as error:
        if not isinstance(error, RayUnreachable):
            _stop(transport, name)
        raise
    if look is not None and look.is_lost:
        _stop(transport, name)
    return look, lines


async def _follow(transport: Transport, name: str, cfg: RunConfig) -> tuple[Look | None, list[str]]:
    """Log the job's output until the job ends. Result: (its last state, or None if the cluster has
    forgotten it; the end of its log).
    Errors: RayUnreachable after SILENCE_S without an answer; TimeoutError past a phase's deadline.
    """
    lines: list[str] = []

    def hear(line: str) -> None:
        logger.info("%s | %s", name, line)
        lines.append(line)
        del lines[:-LOG_LINES]

    tail = asyncio.create_task(_keep_tailing(transport, name, hear))
    since = heard_at = time.monotonic()
    phase = None
    try:
        while True:
            try:
                look = await asyncio.to_thread(transport.look, name)
            except (OSError, RuntimeError) as error:
                if time.monotonic() - heard_at > SILENCE_S:
                    raise RayUnreachable(
                        f"{transport.place} did not answer for {SILENCE_S:g} s"
                        f" ({type(error).__name__}); job {name} may still be running there. Run the"
                        " step again to follow it, or to go on from its last commit if the cluster"
                        " is lost"
                    ) from None
            else:
                heard_at = time.monotonic()
                if look is None or look.phase is Phase.ENDED:
                    await asyncio.wait([tail], timeout=LOG_END_S if look is not None else 0)
                    return look, lines
                if look.phase is not phase:
                    phase, since = look.phase, heard_at
                _check_deadline(name, look, heard_at - since, cfg)
            await asyncio.sleep(POLL_S)
    finally:
        tail.cancel()
        await asyncio.gather(tail, return_exceptions=True)


def _check_deadline(name: str, look: Look, waited_s: float, cfg: RunConfig) -> None:
    """Raise TimeoutError if waited_s, the job's time in its phase, exceeds the phase's limit."""
    setting, limit_s = {
        Phase.QUEUED: ("kuberay.queue_timeout_s", cfg.kuberay.queue_timeout_s),
        Phase.WAITING: ("ray.placement_timeout_s", cfg.ray.placement_timeout_s),
        Phase.RUNNING: ("ray.job_timeout_s", cfg.ray.job_timeout_s),
    }[look.phase]
    if waited_s > limit_s:
        what = "end" if look.phase is Phase.RUNNING else "start"
        raise TimeoutError(
            f"job {name} did not {what} within {setting} {limit_s:g} ({look.status}:"
            f" {look.message or 'no message'}); it was stopped"
        )


async def _keep_tailing(transport: Transport, name: str, hear: Callable[[str], None]) -> None:
    while True:
        with contextlib.suppress(Exception):  # the log is a courtesy; the status decides
            await transport.tail(name, hear)
        await asyncio.sleep(POLL_S)


def _stop(transport: Transport, name: str) -> None:
    """Stop the job and wait until it has ended. A failure to do so is only logged: the caller has
    an error to report already.
    """
    try:
        transport.stop(name)
        deadline = time.monotonic() + STOP_TIMEOUT_S
        while (look := transport.look(name)) is not None and look.phase is not Phase.ENDED:
            if time.monotonic() > deadline:
                raise TimeoutError(f"it has not ended after {STOP_TIMEOUT_S:g} s")
            time.sleep(POLL_S)
        logger.warning("job %s was stopped", name)
    except Exception as error:
        logger.error("job %s could not be stopped: %s: %s", name, type(error).__name__, error)


def _reason(transport: Transport, name: str, look: Look | None, log: list[str]) -> str:
    if look is None:
        return f"job {name} is no longer known to {transport.place}: {transport.gone_means}"
    code = "" if look.exit_code is None else f" with exit code {look.exit_code}"
    return "\n".join(
        [f"job {name} ended as {look.status}{code}: {look.message}", *(f"  {line}" for line in log)]
    )


def _raise_where_no_attempt_helps(look: Look | None, reason: str, cfg: RunConfig) -> None:
    """Raise the job's error if another attempt would not help: ConfigError for bad input,
    TimeoutError past the job's deadline, RayJobFailed if it was stopped from outside.
    """
    if look is None:
        return
    if look.exit_code == BAD_INPUT:
        shared = "\nstore.path and data.path must name the same files on the cluster as here"
        raise ConfigError(reason if cfg.store.uri else reason + shared)
    if look.is_late:
        raise TimeoutError(f"{reason}\nits cluster ended it at ray.job_timeout_s")
    if look.is_stopped:
        raise RayJobFailed(
            f"{reason}\nstopped from outside; run the step again to go on from its last commit"
        )
