"""One step of a run as a job on a Ray cluster: submitted under the attempt's name, followed, found
again, stopped.

The job runs the source and the configuration of whoever submits it, so its keys are the same; store
and dataset must lie at the same place there.
The final manifest in the store says what came of it, not the job's status.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from agentgym.config import ConfigError, RunConfig
from agentgym.store.keys import object_name, package_folders
from agentgym.store.manifest import Manifest
from agentgym.store.runstore import RunStore

if TYPE_CHECKING:
    from ray.job_submission import JobSubmissionClient

logger = logging.getLogger(__name__)

POLL_S = 1.0
REQUEST_TIMEOUT_S = (5.0, 20.0)  # to connect, to answer
SILENCE_S = 60.0  # a cluster that was reached once may be away for so long
STOP_TIMEOUT_S = 60.0
STOP_GRACE_S = 20  # whole seconds a job has to end in order
LOG_END_S = 5.0  # for the last lines of a finished job
LOG_LINES = 15  # of a failed job, in the error
BAD_INPUT = 2  # exit code of a step that cannot succeed as it was asked for


class RayUnreachable(RuntimeError):
    """No Ray cluster answers at the configured address."""


class RayJobFailed(RuntimeError):
    """The job ended without the step's result."""


def run_as_job(step: str, cfg: RunConfig, store: RunStore, *, run_key: str, key: str) -> Manifest:
    """The step's final manifest, made by a job on the cluster at `ray.address`.

    A job of this run and step that is still there, because whoever followed it died, is followed
    again: there are never two.
    One that ends badly is followed by the next attempt, at most `ray.job_attempts` in this call.
    An interrupt, a deadline or any other failure on this side stops the job.
    Errors: RayUnreachable; ConfigError where the job says that its input is bad; RayJobFailed with
    the end of its log.
    """
    client = _connect(cfg.ray.address)
    reason = ""
    for chance in range(cfg.ray.job_attempts):
        if chance:
            # a driver that died without a word on another machine holds the lease so long
            time.sleep(cfg.store.lease_ttl_s)
        name, is_new = _find_or_name(client, run_key, step)
        if is_new:
            _submit(client, name, step, cfg)
        logger.info(
            "step %s: job %s on %s %s",
            step,
            name,
            cfg.ray.address,
            "was submitted" if is_new else "is there already, following it",
        )
        job, log = _follow_or_stop(client, name, cfg)
        manifest = store.final(step, key)
        if manifest is not None:
            return manifest
        reason = _reason(name, job, log)
        if job is not None and job.driver_exit_code == BAD_INPUT:
            raise ConfigError(
                f"{reason}\nstore.path and data.path must name the same files on the cluster as"
                " here"
            )
        if job is not None and str(job.status) == "STOPPED":
            raise RayJobFailed(
                f"{reason}\nsomebody stopped it; run the step again to go on from its last commit"
            )
        logger.warning("%s", reason)
    raise RayJobFailed(
        f"step {step} failed in {cfg.ray.job_attempts} jobs (ray.job_attempts), the last: {reason}"
    )


def job_config(cfg: RunConfig) -> RunConfig:
    """The same run as seen from inside a job: absolute paths, and actors of the job's own cluster
    or, where every bit must repeat, the job's own process.
    """
    return cfg.model_copy(
        update={
            "compute": "inline" if cfg.deterministic else "ray",
            "ray": cfg.ray.model_copy(update={"address": "auto"}),
            "data": cfg.data.model_copy(
                update={
                    name: getattr(cfg.data, name).resolve() for name in ("path", "trajectories")
                }
            ),
            "store": cfg.store.model_copy(update={"path": cfg.store.path.resolve()}),
        }
    )


def auth_headers(environment: Mapping[str, str]) -> dict[str, str]:
    """What an authenticated cluster asks for: the token from where Ray keeps it, or nothing where
    there is none.

    Ray's own client sends a token only after RAY_AUTH_MODE=token, while the clusters it starts
    demand one by default.
    """
    if environment.get("RAY_AUTH_MODE", "token").lower() != "token":
        return {}
    token = environment.get("RAY_AUTH_TOKEN", "")
    if not token:
        path = Path(environment.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
        with contextlib.suppress(OSError):
            token = path.read_text()
    return {"Authorization": f"Bearer {token.strip()}"} if token.strip() else {}


def forget_token() -> None:
    """Ray keeps the first token it saw, and this process may have been on another cluster."""
    from ray._raylet import AuthenticationTokenLoader  # type: ignore[attr-defined]  # compiled

    AuthenticationTokenLoader.instance().reset_cache()


def _connect(address: str) -> JobSubmissionClient:
    """A client of the Jobs API that gives up in time.
    Errors: ConfigError without Ray, RayUnreachable.
    """
    try:
        import requests
        from ray.exceptions import AuthenticationError
        from ray.job_submission import JobSubmissionClient
    except ImportError as error:
        raise ConfigError(
            f"compute ray-job needs Ray ({error}); install it with: pip install"
            " 'agentgym-flow[cluster]'"
        ) from None
    forget_token()
    for name in ("dashboard_sdk", "job.sdk"):
        logging.getLogger(f"ray.dashboard.modules.{name}").setLevel(logging.WARNING)

    class Client(JobSubmissionClient):  # type: ignore[misc]
        def _do_request(self, method: str, endpoint: str, **options: Any) -> Any:
            return super()._do_request(method, endpoint, timeout=REQUEST_TIMEOUT_S, **options)

    advice = "start the cluster, or correct ray.address (the dashboard's, http://host:8265)"
    try:
        # they would win over the address given
        with _without("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS"):
            return Client(address, headers=auth_headers(os.environ))
    except AuthenticationError as error:
        raise RayUnreachable(
            f"the Ray cluster at {address} refuses this client: {str(error).splitlines()[0]}; its"
            " token must be in ~/.ray/auth_token, RAY_AUTH_TOKEN or the file named by"
            " RAY_AUTH_TOKEN_PATH"
        ) from None
    except (ConnectionError, requests.ConnectionError, requests.Timeout) as error:
        raise RayUnreachable(
            f"no Ray cluster answers at {address} ({type(error).__name__}); {advice}"
        ) from None
    except (requests.RequestException, RuntimeError, ValueError, KeyError) as error:
        raise RayUnreachable(
            f"what answers at {address} is no Ray dashboard ({error}); {advice}"
        ) from None


@contextlib.contextmanager
def _without(*names: str) -> Iterator[None]:
    kept = {name: os.environ.pop(name) for name in names if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(kept)


def _find_or_name(client: JobSubmissionClient, run_key: str, step: str) -> tuple[str, bool]:
    """(name, False) of the job of this run and step that has not ended, else (the next free
    name, True).
    """
    base = object_name(run_key, step, 1)[:-1]
    attempts = {
        int(job.submission_id.removeprefix(base)): job
        for job in client.list_jobs()
        if job.submission_id and re.fullmatch(rf"{base}[0-9]+", job.submission_id)
    }
    for number, job in sorted(attempts.items(), reverse=True):
        if not job.status.is_terminal():
            return f"{base}{number}", False
    return f"{base}{max(attempts, default=0) + 1}", True


def _submit(client: JobSubmissionClient, name: str, step: str, cfg: RunConfig) -> None:
    """Start the job, unless somebody was faster: names are unique on a cluster."""
    inner = job_config(cfg)
    alone = inner.compute == "inline"
    with tempfile.TemporaryDirectory(prefix="agentgym-job-") as folder:
        for package, source in package_folders().items():
            shutil.copytree(
                source, Path(folder) / package, ignore=shutil.ignore_patterns("__pycache__")
            )
        (Path(folder) / "params.yaml").write_text(yaml.safe_dump(inner.model_dump(mode="json")))
        request = {
            "entrypoint": f"python -m agentgym step {step} --verbose --params params.yaml",
            "submission_id": name,
            "runtime_env": {
                "working_dir": folder,
                "env_vars": {
                    "RAY_JOB_STOP_WAIT_TIME_S": str(STOP_GRACE_S),
                    "RAY_USAGE_STATS_ENABLED": "0",
                    "OMP_NUM_THREADS": "1",
                },
            },
            "metadata": {
                "step": step,
                "submitted_by": f"{os.uname().nodename} process {os.getpid()}",
            },
            "entrypoint_num_cpus": cfg.ray.rank_cpus if alone else 0,
            "entrypoint_num_gpus": cfg.ray.rank_gpus if alone else 0,
        }
        deadline = time.monotonic() + cfg.ray.placement_timeout_s
        while True:
            try:
                client.submit_job(**request)
                return
            except RuntimeError as error:
                if "already exists" in str(error):
                    return
                # 5xx: a young cluster has no agents yet
                if "status code 5" not in str(error) or time.monotonic() > deadline:
                    raise RayJobFailed(
                        f"the Ray cluster at {cfg.ray.address} does not take job {name}: {error}"
                    ) from None
            time.sleep(POLL_S)


def _follow_or_stop(
    client: JobSubmissionClient, name: str, cfg: RunConfig
) -> tuple[Any, list[str]]:
    """(the ended job, or None where the cluster has forgotten it; the end of its log).

    Whatever ends the following, but for a lost cluster, also ends the job.
    """
    try:
        return asyncio.run(_follow(client, name, cfg))
    except RayUnreachable:
        raise
    except BaseException:
        _stop(client, name)
        raise


async def _follow(client: JobSubmissionClient, name: str, cfg: RunConfig) -> tuple[Any, list[str]]:
    """Errors: RayUnreachable after SILENCE_S; TimeoutError past `ray.job_timeout_s` or,
    waiting, past `ray.placement_timeout_s`.
    """
    lines: list[str] = []
    tail = asyncio.create_task(_tail(client, name, lines))
    began = heard_at = time.monotonic()
    try:
        while True:
            try:
                job = await asyncio.to_thread(client.get_job_info, name)
            except (
                OSError,
                RuntimeError,
            ) as error:  # requests' errors are of the first kind, replies but 200 of the second
                if "status code 404" in str(error):
                    return None, lines
                if time.monotonic() - heard_at > SILENCE_S:
                    raise RayUnreachable(
                        f"the Ray cluster at {cfg.ray.address} did not answer for {SILENCE_S:g} s"
                        f" ({type(error).__name__}); job {name} may still be running there. Run the"
                        " step again to follow it, or to go on from its last commit if the cluster"
                        " is lost"
                    ) from None
            else:
                heard_at = time.monotonic()
                if job.status.is_terminal():
                    await asyncio.wait([tail], timeout=LOG_END_S)
                    return job, lines
                waited = heard_at - began
                if str(job.status) == "PENDING" and waited > cfg.ray.placement_timeout_s:
                    raise TimeoutError(
                        f"job {name} was not started within ray.placement_timeout_s"
                        f" {cfg.ray.placement_timeout_s:g}: {job.message}"
                    )
                if waited > cfg.ray.job_timeout_s:
                    raise TimeoutError(
                        f"job {name} did not end within ray.job_timeout_s"
                        f" {cfg.ray.job_timeout_s:g}; it was stopped"
                    )
            await asyncio.sleep(POLL_S)
    finally:
        tail.cancel()
        await asyncio.gather(tail, return_exceptions=True)


async def _tail(client: JobSubmissionClient, name: str, lines: list[str]) -> None:
    """Pass every line of the job's log on once, however often the connection breaks; keep the
    last in `lines`.
    """
    num_seen, rest = 0, ""
    while True:
        num_told = 0
        with contextlib.suppress(Exception):  # the log is a courtesy; the status decides
            async for text in client.tail_job_logs(name):
                num_told += len(text)
                new = text[len(text) - max(0, num_told - num_seen) :] if num_told > num_seen else ""
                num_seen = max(num_seen, num_told)
                *whole, rest = (rest + new).split("\n")
                for line in whole:
                    logger.info("%s | %s", name, line)
                lines += whole
                del lines[:-LOG_LINES]
        await asyncio.sleep(POLL_S)


def _stop(client: JobSubmissionClient, name: str) -> None:
    """End the job and wait until it has ended; a failure is logged, because something else is
    already being raised.
    """
    try:
        client.stop_job(name)
        deadline = time.monotonic() + STOP_TIMEOUT_S
        while not client.get_job_info(name).status.is_terminal():
            if time.monotonic() > deadline:
                raise TimeoutError(f"it has not ended after {STOP_TIMEOUT_S:g} s")
            time.sleep(POLL_S)
        logger.warning("job %s was stopped", name)
    except Exception as error:
        logger.error("job %s could not be stopped: %s: %s", name, type(error).__name__, error)


def _reason(name: str, job: Any, log: list[str]) -> str:
    if job is None:
        return f"job {name} is no longer known to the cluster, which must have been started again"
    code = "" if job.driver_exit_code is None else f" with exit code {job.driver_exit_code}"
    return "\n".join(
        [f"job {name} ended as {job.status}{code}: {job.message}", *(f"  {line}" for line in log)]
    )
