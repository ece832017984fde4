"""Talking to the API server of a cluster. `connect` gives a `Kube`; nothing else here needs the
package `kubernetes`, which the extra `cluster` brings.

credentials  who asks: a kubeconfig, or the account of this pod; read again when they are refused
client       apply, create, get, list, patch, delete, watch: each with a deadline
watching     what changes, through dropped connections and forgotten versions
pace         how often a call is repeated, how many are made in a second
errors       what the API server says, in one sentence
"""

from agentgym.deploy.kube.client import Kube, connect
from agentgym.deploy.kube.errors import (
    AlreadyExists,
    ApiUnreachable,
    FieldConflict,
    Forbidden,
    KubeError,
    NotFound,
    NotServed,
)
from agentgym.deploy.kube.kinds import Kind, Object
from agentgym.deploy.kube.watching import Change

__all__ = [
    "AlreadyExists",
    "ApiUnreachable",
    "Change",
    "FieldConflict",
    "Forbidden",
    "Kind",
    "Kube",
    "KubeError",
    "NotFound",
    "NotServed",
    "Object",
    "connect",
]
