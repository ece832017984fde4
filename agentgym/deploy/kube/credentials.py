"""Identity for the API server: a context of a kubeconfig, or the account of the pod this runs in.

Credentials in files are read again, at the latest when the API server no longer accepts them:
tokens rotate within the hour.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from agentgym.config import ConfigError

if TYPE_CHECKING:
    from kubernetes.client import ApiClient

logger = logging.getLogger(__name__)

INSTALL = "pip install -e '.[cluster]'"
RENEW_S = 60.0  # how old credentials read from files may be
NO_MAPPING = (ValueError, TypeError, AttributeError)  # errors of a kubeconfig with other content
CONNECTIONS = 32  # kept open to one API server


@dataclass(frozen=True, slots=True)
class Source:
    """Origin of the credentials."""

    kubeconfig: str = ""  # paths as KUBECONFIG has them; empty: the account of this pod
    context: str = ""  # of the kubeconfig; empty: its current one

    @classmethod
    def find(
        cls,
        kubeconfig: Path | None = None,
        context: str = "",
        environment: Mapping[str, str] = os.environ,
    ) -> Source:
        """Find credentials as kubectl does: the file given, KUBECONFIG, ~/.kube/config, the pod's
        account.
        Errors: ConfigError if there are none.
        """
        home = Path(environment.get("HOME", "~")).expanduser() / ".kube" / "config"
        named = str(kubeconfig or environment.get("KUBECONFIG", ""))
        if named:
            if not any(Path(path).is_file() for path in named.split(os.pathsep) if path):
                raise ConfigError(
                    f"kubeconfig {named}: no such file; correct the variable KUBECONFIG"
                )
            return cls(named, context)
        if home.is_file():
            return cls(str(home), context)
        if environment.get("KUBERNETES_SERVICE_HOST") and not context:
            return cls()
        raise ConfigError(
            "no cluster is known here: neither KUBECONFIG nor ~/.kube/config is there, nor is this"
            " a pod with an account; name its kubeconfig in KUBECONFIG"
        )

    def __str__(self) -> str:
        if not self.kubeconfig:
            return "the cluster of this pod"
        return f"{self.kubeconfig}{f', context {self.context}' if self.context else ''}"


class Session:
    """A client of the package `kubernetes` with current credentials; threads may share it."""

    def __init__(self, source: Source, clock: Callable[[], float] = time.monotonic) -> None:
        """Load the credentials. Errors: ConfigError without the package, or if they
        cannot be read.
        """
        self.source = source
        self._clock = clock
        self._lock = threading.Lock()
        self._api = self._load()
        self._loaded_at = clock()

    def api(self) -> ApiClient:
        """Return the client with current credentials. Errors: ConfigError if a file can no longer
        be read.
        """
        with self._lock:
            if self._clock() - self._loaded_at >= RENEW_S:
                self._reload()
            return self._api

    def renew(self, refused: ApiClient) -> bool:
        """Reload the credentials after a refusal. Return True if the token is a new one."""
        with self._lock:
            before = dict(refused.configuration.api_key)
            if self._api is refused:
                self._reload()
            return dict(self._api.configuration.api_key) != before

    def close(self) -> None:
        self._api.close()

    def _reload(self) -> None:
        """Reload the credentials. Connections stay open if only the token is new."""
        fresh = self._load()
        old, new = self._api.configuration, fresh.configuration
        same = ("host", "ssl_ca_cert", "cert_file", "key_file", "verify_ssl")
        if all(getattr(old, name) == getattr(new, name) for name in same):
            fresh.rest_client = self._api.rest_client
        self._api = fresh
        self._loaded_at = self._clock()

    def _load(self) -> ApiClient:
        try:
            from kubernetes import client, config
        except ImportError as error:
            raise ConfigError(
                f"Kubernetes needs its client ({error}); install it from the checkout: {INSTALL}"
            ) from None
        settings = client.Configuration()
        try:
            if self.source.kubeconfig:
                config.load_kube_config(
                    self.source.kubeconfig,
                    context=self.source.context or None,
                    client_configuration=settings,
                    persist_config=False,
                )
            else:
                config.load_incluster_config(settings)
        except (config.ConfigException, OSError, yaml.YAMLError, *NO_MAPPING) as error:
            raise ConfigError(f"{self.source}: {_one_line(error)}") from None
        if not settings.verify_ssl:
            _tell_once(str(self.source))
        settings.retries = False  # we repeat calls by our own rules
        settings.connection_pool_maxsize = CONNECTIONS
        settings.keep_alive = True
        return client.ApiClient(settings)


@functools.cache
def _tell_once(source: str) -> None:
    """Warn once that certificates are not verified; turn off urllib3's warning at every request."""
    import urllib3

    urllib3.disable_warnings(urllib3.exceptions.InsecureRequestWarning)
    logger.warning("%s: the cluster's certificate is not verified, as it asks for", source)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def authorized(api: Any, method: str, path: str, query: list[tuple[str, str]]) -> tuple[Any, ...]:
    """Return (method, URL, headers) of a request, with the credentials added."""
    method, url, headers, _, _ = api.param_serialize(
        method, path, query_params=list(query), auth_settings=["BearerToken"]
    )
    return method, url, headers
