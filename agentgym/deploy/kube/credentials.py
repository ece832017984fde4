"""Identity for the API server: a context of a kubeconfig, or the account of the pod this runs in.

Credentials are read again when the API server no longer accepts them: tokens rotate within the
hour.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from agentgym.config import ConfigError

if TYPE_CHECKING:
    from kubernetes.dynamic import DynamicClient

logger = logging.getLogger(__name__)

INSTALL = "pip install -e '.[cluster]'"
NO_MAPPING = (ValueError, TypeError, AttributeError)  # errors for a kubeconfig that is no mapping
CONNECTIONS = 32  # kept open to one API server
OF_CONNECTIONS = ("host", "ssl_ca_cert", "cert_file", "key_file", "verify_ssl")


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
        """Return the first of: `kubeconfig`, the files in KUBECONFIG, ~/.kube/config, and, without
        a context, the account of this pod.
        Errors: ConfigError if there are none, or no file at `kubeconfig` or the named KUBECONFIG.
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
    """Owner of a dynamic client of the package `kubernetes`, which it replaces when credentials
    are renewed. Threads may share it.

    The package itself renews a pod's token every minute, and a plugin's once it has expired.
    """

    def __init__(self, source: Source) -> None:
        """Load the credentials.
        Errors: ConfigError without the package `kubernetes`, or if they cannot be read.
        """
        self.source = source
        self._lock = threading.Lock()
        self.client = self._load()

    def renew(self, refused: DynamicClient) -> bool:
        """Load the credentials again after the client `refused` was refused, unless another thread
        has done so. Return True if they are new ones.
        Connections stay open if only the token is new. Errors: ConfigError.
        """
        with self._lock:
            if self.client is refused:
                self.client = self._load()
            old, new = refused.configuration, self.client.configuration
            is_same = all(getattr(old, name) == getattr(new, name) for name in OF_CONNECTIONS)
            if is_same:
                self.client.client.rest_client = refused.client.rest_client
            return not is_same or old.api_key != new.api_key

    def close(self) -> None:
        self.client.client.close()

    def _load(self) -> DynamicClient:
        try:
            from kubernetes import client, config, dynamic
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
            reason = " ".join(str(error).split()) or type(error).__name__
            raise ConfigError(f"{self.source}: {reason}") from None
        if not settings.verify_ssl:
            _tell_once(str(self.source))
        settings.retries = False  # we repeat calls by our own rules
        settings.connection_pool_maxsize = CONNECTIONS
        settings.keep_alive = True
        # its discovery would ask now, and trust a file in the shared temporary folder
        return dynamic.DynamicClient(client.ApiClient(settings), discoverer=lambda *_: None)


@functools.cache
def _tell_once(source: str) -> None:
    """Warn once that certificates are not verified; turn off urllib3's warning at every request."""
    import urllib3

    urllib3.disable_warnings(urllib3.exceptions.InsecureRequestWarning)
    logger.warning("%s: the cluster's certificate is not verified, as it asks for", source)
