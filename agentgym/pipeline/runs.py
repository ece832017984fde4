"""A run knows its configuration: it is kept in the store under the run's key, and every command
that takes a run's name reads it there.

The key is the digest of what is kept, so a changed record is found out. Addresses, secrets and
paths (operational settings) are not in it: they come from the owner's own parameter file.
"""

from __future__ import annotations

import contextlib
import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from agentgym.config import (
    ConfigError,
    EnvConfig,
    RunConfig,
    Section,
    config_digest,
    load_config,
    owned_env,
)
from agentgym.config.section import is_operational
from agentgym.pipeline.plan import changed, plan
from agentgym.pipeline.table import open_store, run_identity, run_key
from agentgym.private import without_login
from agentgym.store.lease import LeaseHeld
from agentgym.store.manifest import Manifest
from agentgym.store.runstore import RunStore
from agentgym.tracking.deliver import delivered_steps
from agentgym.trust import outward

STEP = "runs"  # the name these records have among the steps of a store
PARAMS = "params.yaml"
# sections that only a training reads: whoever looks at the run later does without
WHILE_TRAINING = ("alarms", "pipeline")


def keep_run(cfg: RunConfig, store: RunStore) -> None:
    """Write the run's configuration into its store, once. Errors: StoreFull."""
    key = run_key(cfg)
    if store.head(STEP, key) is not None:
        return
    with contextlib.suppress(LeaseHeld), store.open(STEP, key) as writer:  # another keeps the same
        if writer.head is None:
            writer.commit(
                done=True,
                state={},
                parents={},
                config=run_identity(cfg),
                blobs={},
                records={},
                results={},
                timings={},
            )


def find_run(store: RunStore, name: str) -> Manifest | None:
    """Return the record of a run; None where the store has none. name: r and the first digits.
    Errors: ConfigError where several runs begin so, or the record is not what was kept.
    """
    found = store.heads(STEP, name.removeprefix("r"))
    if len(found) > 1:
        there = ", ".join(label(head.key) for head in found)
        raise ConfigError(f"run {name} is several of this store: {there}; give more digits")
    for head in found:
        if config_digest(head.config) != head.key:
            raise ConfigError(
                f"what {store.root} keeps of run {label(head.key)} was changed: it has another"
                " digest than the run's name; restore it from a copy, or name the run's"
                " parameters with --params and --set"
            )
        return head
    return None


def config_of_run(
    name: str, cfg: RunConfig, params: str, overrides: Sequence[str] = ()
) -> RunConfig:
    """Return the configuration of a run of this store, with the owner's operational settings.

    cfg: of `params` and `overrides`, which lie over the run's own. Result: `cfg` where the store
    keeps nothing of the run, which was then made by an earlier version.
    Errors: ConfigError.
    """
    head = find_run(open_store(cfg), name)
    if head is None:
        return cfg
    try:
        found = load_config(params, overrides, layers=[_layer(head.config["config"], cfg)])
        for env in found.envs:
            owned_env(env, cfg.envs)
        return found
    except ConfigError as error:
        raise ConfigError(f"run {label(head.key)} cannot be had as it was: {error}") from None


def _layer(semantic: Mapping[str, Any], cfg: RunConfig) -> dict[str, Any]:
    """Return the run's settings as a layer; addresses of its environments are the owner's, and so
    is every other operational setting, whatever the record says.
    """
    semantic = _without_own(semantic, RunConfig)
    own = {env.name: env for env in cfg.envs}

    def placed(env: Mapping[str, Any]) -> dict[str, Any]:
        there = own.get(env["name"], EnvConfig())
        tree = there.model_dump(mode="json")
        own_settings = {name: tree[name] for name in tree if _is_own(EnvConfig, name)}
        return {**_without_own(env, EnvConfig), **own_settings}

    return {
        **semantic,
        "env": placed(semantic["env"]),
        "mix": [placed(each) for each in semantic["mix"]],
    }


def _without_own(tree: Mapping[str, Any], model: type[Section]) -> dict[str, Any]:
    """Return settings on record without those that are the owner's to say."""
    kept = {}
    for name, value in tree.items():
        info = model.model_fields.get(name)
        if info is not None and is_operational(info):
            continue
        inner = info.annotation if info is not None else None
        if isinstance(inner, type) and issubclass(inner, Section) and isinstance(value, Mapping):
            value = _without_own(value, inner)
        kept[name] = value
    return kept


def require_run(cfg: RunConfig, name: str) -> None:
    """Raise ConfigError where configuration, data or source are not those of the run; it says
    which differ.
    """
    key = run_key(cfg)
    if key.startswith(name.removeprefix("r")):
        return
    head = find_run(open_store(cfg), name)
    if head is None:
        raise ConfigError(
            f"run {name} is not the run of this configuration and source, {label(key)};"
            f" {existing(cfg, name)}"
        )
    told = ", ".join(_differences(run_identity(cfg), head.config))
    raise ConfigError(
        f"run {label(head.key)} is not the run of this configuration and source, {label(key)}:"
        f" {told}; use the version and the data that made it, and no --set of something else"
    )


def _differences(now: Mapping[str, Any], kept: Mapping[str, Any]) -> Iterator[str]:
    yield from changed(now["config"], kept["config"])
    if now["data"] != kept["data"]:
        yield "its data is other data"
    sources, before = now["sources"], kept["sources"]
    names = sorted(name for name in {*sources, *before} if sources.get(name) != before.get(name))
    if names:
        more = f" and {len(names) - 1} more steps" if len(names) > 1 else ""
        yield f"the source of {names[0]}{more} is another"


def existing(cfg: RunConfig, name: str = "") -> str:
    """Return the text that lists the known runs. name: of a run made before stores kept
    configurations, for which it adds the missing overrides.
    """
    delivered, store = delivered_steps(cfg), open_store(cfg)
    keys = dict.fromkeys([*delivered, *(head.key[:16] for head in store.heads(STEP))])
    told = f"known under {cfg.state_dir}: {', '.join(label(key) for key in keys) or 'no run'}"
    wanted = name.removeprefix("r")
    steps = next((delivered[key] for key in delivered if wanted and key.startswith(wanted)), None)
    if steps:
        made = [head for head in store.heads() if (head.step, head.key[:16]) in steps]
        if missing := missing_overrides(cfg, made):
            return f"{told}; it was made with settings that are missing here: add {missing}"
    other = next((f"{each.name}: {each.why}" for each in plan(cfg) if "is gone" in each.why), "")
    if other:
        return f"{told}; what is there is of another version ({other}), which can audit it"
    return told


def missing_overrides(cfg: RunConfig, made: Sequence[Manifest]) -> str:
    """Return `--set key=value` for each setting in which a run's steps differ from `cfg`."""
    here, there = _flat(cfg.semantic()), {}
    for head in made:
        there.update(_flat(head.config))
    words = []
    for key, value in there.items():
        if key in here and here[key] != value:
            text = value if isinstance(value, str) else json.dumps(value)
            words += ["--set", f"{key}={text}"]
    return shlex.join(words)


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping) and value and not key.endswith("options"):
            flat.update(_flat(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def how_to_find(params: str, overrides: Sequence[str], cfg: RunConfig) -> str:
    """Return the options, after a space, with which a command finds a run made with these: the
    parameter file, overrides of settings that no run keeps, and those of environments whose options
    are taken from the owner alone.

    cfg: what both come to.
    """
    reaches_out = any(outward(env.name, env.options) for env in cfg.envs)
    words = [] if params == PARAMS else ["--params", params]
    for override in overrides:
        path = override.partition("=")[0].split(".")
        if _says_where(path) or (reaches_out and path[0] in ("env", "mix")):
            words += ["--set", without_login(override)]
    return "".join(f" {word}" for word in map(shlex.quote, words))


def _says_where(path: Sequence[str]) -> bool:
    """Return True for an operational setting, and for a section that has such settings."""
    if path[0] in WHILE_TRAINING:
        return False
    model: type[Section] = RunConfig
    for name in path:
        if name not in model.model_fields:
            return False  # of a recipe, whose settings all change results
        if _is_own(model, name) or name == "mix":
            return True
        inner = model.model_fields[name].annotation
        if not (isinstance(inner, type) and issubclass(inner, Section)):
            return False
        model = inner
    return True


def _is_own(model: type[Section], name: str) -> bool:
    return is_operational(model.model_fields[name])


def label(key: str) -> str:
    """A run's name, as people see it."""
    return f"r{key[:12]}"
