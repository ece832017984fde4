"""Client of a cluster's API server. `connect` returns a `Kube`; nothing else here needs the package
`kubernetes`, which the extra `cluster` installs.

credentials  identity: a kubeconfig, or the account of this pod; read again after a refusal
client       apply, create, get, list, patch, delete, watch: each with a deadline
watching     changes, across dropped connections and forgotten versions
pace         how often a call is repeated, how many are made in a second
errors       errors of the API server, each as one sentence
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
