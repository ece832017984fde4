"""Checks of values that a parameter file must not decide alone, because they would expose this
machine's secrets or choose its programs: an environment variable must confirm them.

A parameter file is semi-trusted: like a model or a dataset, it may come from another person. It may
choose among what this machine offers. A store is trusted less: its options must not name an
address, a path or a variable, unless the owner's configuration has the same option.
"""

from __future__ import annotations

import ipaddress
import os
import re
import socket
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import urlsplit

RAY_VARIABLES = ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS")  # Ray's own; also of the Jobs API
MLFLOW_VARIABLE = "MLFLOW_TRACKING_URI"  # MLflow's own
ENGINE_VARIABLE = "AGENTGYM_ENGINE_PYTHON"
MLFLOW_CREDENTIALS = (
    "MLFLOW_TRACKING_TOKEN",
    "MLFLOW_TRACKING_USERNAME",
    "MLFLOW_TRACKING_PASSWORD",
    "MLFLOW_TRACKING_AUTH",
)


def untrusted_address(
    ray_address: str, tracking_uri: str, environment: Mapping[str, str]
) -> str | None:
    """Return the reason why one of a run's addresses is refused, or None.

    ray_address, tracking_uri: "" if the run uses none. environment: the environment variables.
    A Ray cluster runs code in the processes that join it, and gets Ray's token: if it is on another
    machine, RAY_ADDRESS or RAY_API_SERVER_ADDRESS must name it, too.
    MLflow's client sends its credentials to `tracking.uri`: if there are any, and it is an HTTP
    address on another machine, MLFLOW_TRACKING_URI must name it, too.
    """
    address = ray_address.rstrip("/")
    if not is_here(address) and address not in _values(environment, RAY_VARIABLES):
        return (
            f"ray.address {address} is on another machine: its cluster runs code here and gets"
            " Ray's token, which a parameter file may not decide alone; if you trust it, export"
            f" {RAY_VARIABLES[0]}={address}"
        )
    uri = tracking_uri.rstrip("/")
    has_credentials = any(environment.get(name) for name in MLFLOW_CREDENTIALS)
    if (
        uri.startswith("http")
        and has_credentials
        and not is_here(uri)
        and uri not in _values(environment, (MLFLOW_VARIABLE,))
    ):
        return (
            f"tracking.uri {uri} is on another machine and would get the credentials in this"
            " environment, which a parameter file may not decide alone; if they are for it, export"
            f" {MLFLOW_VARIABLE}={uri}"
        )
    return None


def untrusted_python(python: str, prefix: str, environment: Mapping[str, str]) -> str | None:
    """Return the reason why an interpreter is refused, or None.

    It must be in a virtual environment next to this process's, or be the value of ENGINE_VARIABLE.
    prefix: folder of this process's virtual environment. environment: the environment variables.
    """
    folder = os.path.dirname(os.path.dirname(os.path.abspath(python)))
    parent = os.path.dirname(os.path.abspath(prefix))
    if os.path.dirname(folder) == parent or python in _values(environment, (ENGINE_VARIABLE,)):
        return None
    return (
        f"rollout.engine_python {python} lies in no environment of {parent}, and a parameter file"
        " may not decide alone what is run here; if you trust it, export"
        f" {ENGINE_VARIABLE}={python}"
    )


def _values(environment: Mapping[str, str], names: tuple[str, ...]) -> list[str]:
    return [environment[name].rstrip("/") for name in names if environment.get(name)]


def is_here(address: str) -> bool:
    """Return True if the host of an address is this machine: `localhost`, or one of its IP
    addresses. Names are not looked up: another name with a scheme or a port is False.

    True also for text without a host, or with neither scheme nor port, such as `auto`: other code
    uses it on this machine or refuses it. False for text that cannot be parsed.
    """
    try:
        parts = urlsplit(address if "://" in address else f"//{address}")
        host, port = parts.hostname, parts.port
    except ValueError:
        return False
    if not host or (port is None and "://" not in address):
        return True
    if host == "localhost":
        return True
    try:
        family = socket.AF_INET6 if ipaddress.ip_address(host).version == 6 else socket.AF_INET
        with socket.socket(family) as probe:
            probe.bind((host, 0))  # only this machine's addresses can be bound
        return True
    except (OSError, ValueError):
        return False  # names are not looked up: DNS answers are not trusted


def without_login(text: str) -> str:
    """Return a message without the logins (`user:password@`) of the URLs in it."""
    return re.sub(r"://[^/@\s]+@", "://", text)


# environment of this package -> option that may name an address, a path or a variable -> pattern of
# its values that name none
_OUTWARD: Mapping[str, Mapping[str, str]] = {
    "babyai": {},
    "sciworld": {},
    "searchqa": {"questions": "embedded", "retriever": "bm25"},
    "textcraft": {"recipes": r"|invented:[0-9]+"},
    "webarena": {
        "tasks": "embedded",
        "sites": "embedded",
        "names": "",
        "storage_state": "|none",
        "judge": "",
    },
}


def outward(env: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that can make an environment read a file or variable, or call an address.
    env: the environment's name. For an environment of another package these are all its options.
    """
    if env not in _OUTWARD:
        return dict(options)
    known = _OUTWARD[env]
    return {
        name: value
        for name, value in options.items()
        if name in known
        and value not in (None, {}, [])
        and not (isinstance(value, str) and re.fullmatch(known[name], value))
    }


def unowned(
    env: str, options: Mapping[str, Any], owned: Iterable[Mapping[str, Any]]
) -> dict[str, Any]:
    """Return those of a record's options that `outward` selects; none if a configuration in
    `owned` has the same ones.

    A store may come from another person: its options may choose among what an environment offers,
    but must not name an address to call, a file to read or a variable to send.
    owned: the options that the owner's configurations of this environment have.
    """
    recorded = outward(env, options)
    for allowed in owned:
        if all(name in allowed and allowed[name] == value for name, value in recorded.items()):
            return {}
    return recorded
