"""Bearer token of each fleet: derived from a key in the flow's environment, so that every attempt
at a run derives it again and reads no Secret.
Servers know only their own fleet's token, and the key is sent nowhere.
"""

from __future__ import annotations

import hmac
import os

from agentgym.config import ConfigError
from agentgym.deploy.fleets.lease import OWNED, Group
from agentgym.deploy.kube.client import SECRET, Kube
from agentgym.deploy.kube.transport import AlreadyExists
from agentgym.deploy.manifests import RUN_LABEL
from envs.wire import TOKEN_VARIABLE

KEY_VARIABLE = "AGENTGYM_FLEET_KEY"


def no_key() -> list[str]:
    """Return one line if this environment lacks the key that tokens are derived from, else none."""
    if os.environ.get(KEY_VARIABLE, "").strip():
        return []
    return [
        f"{KEY_VARIABLE} is not set; the token of each fleet is made of it:"
        f" export {KEY_VARIABLE}=$(openssl rand -hex 32), and keep it (k8s/README.md)"
    ]


def token_of_fleet(name: str) -> str:
    """Return a fleet's token. name: of the fleet's Service. Errors: ConfigError without a key."""
    if missing := no_key():
        raise ConfigError(missing[0])
    key = os.environ[KEY_VARIABLE].strip().encode()
    return hmac.new(key, f"fleet {name}".encode(), "sha256").hexdigest()


def give_token(kube: Kube, group: Group, name: str) -> None:
    """Create the Secret with the fleet's token, which its pods read; the group owns it.

    A Secret that an earlier owner left is replaced unread: the flow's account may create and delete
    Secrets, and do nothing else with them.
    The Secret of a kept fleet is shared, and stays the same.
    Errors: ConfigError, KubeError.
    """
    secret = {
        "apiVersion": SECRET.api_version,
        "kind": SECRET.kind,
        "metadata": {
            "name": name,
            "labels": {**OWNED, RUN_LABEL: group.run},
            "ownerReferences": [group.owner()],
        },
        "stringData": {TOKEN_VARIABLE: token_of_fleet(name)},
    }
    try:
        kube.create(secret)
    except AlreadyExists:
        if not group.is_kept:
            kube.delete(SECRET, name)
            kube.create(secret)
