"""The bearer token of each fleet: made of a key in the flow's environment, so that every attempt at
a run finds it again and reads no Secret. Servers know their fleet's token alone, and the key is
sent nowhere.
"""

from __future__ import annotations

import hmac
import os

from agentgym.config import ConfigError
from agentgym.deploy.fleets.lease import OWNED, Group
from agentgym.deploy.kube import AlreadyExists, Kube
from agentgym.deploy.kube.kinds import SECRET
from agentgym.deploy.manifests import RUN_LABEL
from envs.wire import TOKEN_VARIABLE

KEY_VARIABLE = "AGENTGYM_FLEET_KEY"


def no_key() -> list[str]:
    """A line where this environment lacks what tokens are made of."""
    if os.environ.get(KEY_VARIABLE, "").strip():
        return []
    return [
        f"{KEY_VARIABLE} is not set; the token of each fleet is made of it:"
        f" export {KEY_VARIABLE}=$(openssl rand -hex 32), and keep it (k8s/README.md)"
    ]


def token_of_fleet(name: str) -> str:
    """name: of the fleet's Service. Errors: ConfigError where there is nothing to make it of."""
    if missing := no_key():
        raise ConfigError(missing[0])
    key = os.environ[KEY_VARIABLE].strip().encode()
    return hmac.new(key, f"fleet {name}".encode(), "sha256").hexdigest()


def give_token(kube: Kube, group: Group, name: str) -> None:
    """Make the Secret that the fleet's pods name; it goes with the group.

    One that an earlier owner left is replaced unread: the flow's account may make and delete
    Secrets, and do nothing else with them. That of a kept fleet is shared, and the same.
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
