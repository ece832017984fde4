"""Steps as jobs of an existing Ray cluster, through its Jobs API.

Each job runs the submitter's source and configuration: both are sent with it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from agentgym.config import ConfigError, RunConfig
from agentgym.deploy.attempts import (
    POLL_S,
    VARIABLES,
    Job,
    Look,
    Phase,
    RayJobFailed,
    RayUnreachable,
    arguments,
    numbered,
    params_text,
    sent_config,
)
from agentgym.store.keys import package_folders

if TYPE_CHECKING:
    from ray.job_submission import JobDetails, JobSubmissionClient

REQUEST_TIMEOUT_S = (5.0, 20.0)  # to connect, to answer


class RayJobs:
    """Transport of jobs through the Jobs API of one existing Ray cluster."""

    gone_means = "it must have been started again"

    def __init__(self, client: JobSubmissionClient, cfg: RunConfig) -> None:
        self.place = f"the Ray cluster at {cfg.ray.address}"
        self._client = client
        self._told: dict[str, int] = {}  # characters of a job's log that were passed on

    @classmethod
    def connect(cls, cfg: RunConfig) -> Self:
        """Connect to the cluster's dashboard. Errors: ConfigError without Ray, RayUnreachable."""
        return cls(_connect(cfg.ray.address), cfg)

    def attempts(self, job: Job) -> Mapping[int, Look]:
        jobs = {details.submission_id: details for details in self._client.list_jobs()}
        return numbered({name: _look(details) for name, details in jobs.items() if name}, job)

    def submit(self, job: Job, name: str) -> None:
        """Submit the job, unless one of that name exists: another process may have been faster.
        Retry while the cluster starts, for `ray.placement_timeout_s`. Errors: RayJobFailed.
        """
        with tempfile.TemporaryDirectory(prefix="agentgym-job-") as folder:
            request = _request(job, name, Path(folder))
            deadline = time.monotonic() + job.cfg.ray.placement_timeout_s
            while True:
                try:
                    self._client.submit_job(**request)
                    return
                except RuntimeError as error:
                    if "already exists" in str(error):
                        return
                    # 5xx: a young cluster has no agents yet
                    if "status code 5" not in str(error) or time.monotonic() > deadline:
                        raise RayJobFailed(
                            f"{self.place} does not take job {name}: {error}"
                        ) from None
                time.sleep(POLL_S)

    def look(self, name: str) -> Look | None:
        try:
            return _look(self._client.get_job_info(name))
        except RuntimeError as error:  # for any status but 200
            if "status code 404" in str(error):
                return None
            raise

    async def tail(self, name: str, hear: Callable[[str], None]) -> None:
        """Pass the log's whole lines to `hear`, each once, also over several calls, to its end."""
        num_read, rest = 0, ""
        async for text in self._client.tail_job_logs(name):
            num_read += len(text)
            num_new = num_read - self._told.get(name, 0)
            if num_new <= 0:
                continue
            *whole, rest = (rest + text[-num_new:]).split("\n")
            self._told[name] = num_read - len(rest)
            for line in whole:
                hear(line)

    def stop(self, name: str) -> None:
        self._client.stop_job(name)

    def settle(self, job: Job) -> None:
        """Do nothing: ended jobs are the cluster's history and use no resources."""


def _look(job: JobDetails) -> Look:
    status = str(job.status)
    return Look(
        {"PENDING": Phase.WAITING, "RUNNING": Phase.RUNNING}.get(status, Phase.ENDED),
        status,
        message=job.message or "",
        exit_code=job.driver_exit_code,
        is_stopped=status == "STOPPED",
    )


def _request(job: Job, name: str, folder: Path) -> dict[str, Any]:
    """Write source and configuration to folder; return the arguments of Ray's `submit_job`."""
    inner = sent_config(job.cfg)
    alone = inner.compute == "inline"
    for package, source in package_folders().items():
        shutil.copytree(source, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "params.yaml").write_text(params_text(inner), encoding="utf-8")
    return {
        "entrypoint": f"python -m agentgym step {arguments(job)} --params params.yaml",
        "submission_id": name,
        "runtime_env": {"working_dir": str(folder), "env_vars": dict(VARIABLES)},
        "metadata": {
            "step": job.step,
            "submitted_by": f"{os.uname().nodename} process {os.getpid()}",
        },
        "entrypoint_num_cpus": job.cfg.ray.rank_cpus if alone else 0,
        "entrypoint_num_gpus": job.cfg.ray.rank_gpus if alone else 0,
    }


def auth_headers(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the Authorization header with the token from RAY_AUTH_TOKEN or Ray's token file; empty
    without a token, or if RAY_AUTH_MODE turns it off.

    Ray's own client sends a token only with RAY_AUTH_MODE=token, while the clusters it starts
    demand one by default.
    """
    if environment.get("RAY_AUTH_MODE", "token").lower() != "token":
        return {}
    token = environment.get("RAY_AUTH_TOKEN", "")
    if not token:
        path = Path(environment.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
        with contextlib.suppress(OSError):
            token = path.read_text(encoding="utf-8")
    return {"Authorization": f"Bearer {token.strip()}"} if token.strip() else {}


def forget_token() -> None:
    """Clear Ray's cached token: Ray keeps the first one that it reads, and this process may have
    used another cluster before.
    """
    from ray._raylet import AuthenticationTokenLoader  # type: ignore[attr-defined]  # compiled

    AuthenticationTokenLoader.instance().reset_cache()


def _connect(address: str) -> JobSubmissionClient:
    """Return a client of the Jobs API at this address, whose requests have timeouts. Clear Ray's
    cached token, and silence the client's log below warnings.
    Errors: ConfigError without Ray; RayUnreachable, also if the token is refused.
    """
    try:
        import requests
        from ray.exceptions import AuthenticationError
        from ray.job_submission import JobSubmissionClient
    except ImportError as error:
        raise ConfigError(
            f"compute ray-job needs Ray ({error}); install it from the"
            " checkout: pip install -e '.[cluster]'"
        ) from None
    forget_token()
    for name in ("dashboard_sdk", "job.sdk"):
        logging.getLogger(f"ray.dashboard.modules.{name}").setLevel(logging.WARNING)

    class Client(JobSubmissionClient):  # type: ignore[misc]
        def _do_request(self, method: str, endpoint: str, **options: Any) -> Any:
            return super()._do_request(method, endpoint, timeout=REQUEST_TIMEOUT_S, **options)

    advice = "start the cluster, or correct ray.address (the dashboard's, http://host:8265)"
    try:
        # these variables would override the address
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
    removed = {name: os.environ.pop(name) for name in names if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(removed)
