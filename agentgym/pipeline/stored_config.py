"""Records under a run's key: its configuration, which every command that takes a run's name reads,
and the report of its last audit, for the promotion gate.

The key is the digest of the configuration, so a changed one is detected. Addresses, secrets and
paths (operational settings) are not in it: they come from the owner's own parameter file.
"""

from __future__ import annotations

import contextlib
import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

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
from agentgym.pipeline.child import run_command
from agentgym.pipeline.plan import changed, plan
from agentgym.pipeline.table import open_store, run_identity, run_key
from agentgym.private import without_login
from agentgym.store.lease import LeaseHeld
from agentgym.store.manifest import Manifest
from agentgym.store.runstore import RunStore
from agentgym.tracking.deliver import delivered_steps
from agentgym.trust import outward

if TYPE_CHECKING:
    from agentgym.evaluation.gate import Audited  # imports scipy, which is slow

STEP = "runs"  # step under which a store keeps configurations of runs
AUDITS, AUDIT = "audits", "audit.json"  # step under which it keeps audits, and their record
NO_AUDIT: Audited = {"audit": "none", "audit_note": ""}
PARAMS = "params.yaml"
# sections that only training reads; later commands on the run do not need them
WHILE_TRAINING = ("alarms", "pipeline")


def keep_run(cfg: RunConfig, store: RunStore) -> None:
    """Write the run's configuration into its store, unless it is there. Errors: StoreFull."""
    key = run_key(cfg)
    if store.head(STEP, key) is not None:
        return
    # LeaseHeld: another process writes the same
    with contextlib.suppress(LeaseHeld), store.open(STEP, key) as writer:
        if writer.head is None:
            writer.commit(done=True, config=run_identity(cfg))


def find_run(store: RunStore, name: str) -> Manifest | None:
    """Return the record of a run, None without one. name: r and the first digits of its key.

    Errors: ConfigError if several runs begin with these digits, or the record was changed.
    """
    heads = store.heads(STEP, name.removeprefix("r"))
    if len(heads) > 1:
        there = ", ".join(label(head.key) for head in heads)
        raise ConfigError(f"run {name} is several of this store: {there}; give more digits")
    for head in heads:
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
    """Return the configuration of the run `name` in the store of `cfg`.

    The run's values replace those of the file `params`, and `overrides` replace both. Operational
    settings, such as addresses, are those of `cfg`, the configuration from `params` and
    `overrides`.
    Result: `cfg` if the store has no record of the run, because an earlier version made it.
    Errors: ConfigError.
    """
    head = find_run(open_store(cfg), name)
    if head is None:
        return cfg
    try:
        config = load_config(params, overrides, layers=[_layer(head.config["config"], cfg)])
        for env in config.envs:
            owned_env(env, cfg.envs)
        return config
    except ConfigError as error:
        raise ConfigError(f"run {label(head.key)} cannot be had as it was: {error}") from None


def _layer(semantic: Mapping[str, Any], cfg: RunConfig) -> dict[str, Any]:
    """Return a run's recorded settings (`semantic`) as a layer for `load_config`.
    Each environment gets its operational settings (addresses, ...) from the environment of the
    same name in `cfg`, or the defaults. Other operational settings are left out.
    """
    semantic = _without_own(semantic, RunConfig)
    owned_envs = {env.name: env for env in cfg.envs}

    def placed(env: Mapping[str, Any]) -> dict[str, Any]:
        tree = owned_envs.get(env["name"], EnvConfig()).model_dump(mode="json")
        own_settings = {name: tree[name] for name in tree if _is_own(EnvConfig, name)}
        return {**_without_own(env, EnvConfig), **own_settings}

    return {
        **semantic,
        "env": placed(semantic["env"]),
        "mix": [placed(env) for env in semantic["mix"]],
    }


def _without_own(tree: Mapping[str, Any], model: type[Section]) -> dict[str, Any]:
    """Return recorded settings without the operational ones, which the owner sets."""
    semantic = {}
    for name, value in tree.items():
        info = model.model_fields.get(name)
        if info is not None and is_operational(info):
            continue
        inner = info.annotation if info is not None else None
        if isinstance(inner, type) and issubclass(inner, Section) and isinstance(value, Mapping):
            value = _without_own(value, inner)
        semantic[name] = value
    return semantic


def require_run(cfg: RunConfig, name: str) -> None:
    """Raise ConfigError unless `cfg`, its data and this source are the run's; name differences."""
    key = run_key(cfg)
    if key.startswith(name.removeprefix("r")):
        return
    head = find_run(open_store(cfg), name)
    if head is None:
        raise ConfigError(
            f"run {name} is not the run of this configuration and source, {label(key)};"
            f" {'give settings after --set' if '=' in name else existing(cfg, name)}"
        )
    differences = ", ".join(_differences(run_identity(cfg), head.config))
    raise ConfigError(
        f"run {label(head.key)} is not the run of this configuration and source, {label(key)}:"
        f" {differences}; use the version and the data that made it, and no --set of something else"
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
    """Return a text that lists the known runs. name: a run whose configuration the store lacks,
    because an earlier version made it; overrides that give its settings are added to the text.
    Without them a step that an incompatible version made is named, if there is one.
    """
    delivered, store = delivered_steps(cfg), open_store(cfg)
    keys = dict.fromkeys([*delivered, *(head.key[:16] for head in store.heads(STEP))])
    text = f"known under {cfg.state_dir}: {', '.join(label(key) for key in keys) or 'no run'}"
    wanted = name.removeprefix("r")
    steps = next((delivered[key] for key in delivered if wanted and key.startswith(wanted)), None)
    if steps:
        heads = [head for head in store.heads() if (head.step, head.key[:16]) in steps]
        if missing := missing_overrides(cfg, heads):
            return f"{text}; it was made with settings that are missing here: add {missing}"
    other = next((f"{step.name}: {step.why}" for step in plan(cfg) if "is gone" in step.why), "")
    if other:
        return f"{text}; what is there is of another version ({other}), which can audit it"
    return text


def missing_overrides(cfg: RunConfig, made: Sequence[Manifest]) -> str:
    """Return `--set key=value` options with a run's values for all settings of `cfg` that differ,
    quoted for a shell. made: commits of the run.
    """
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
    """Return the options with which a command finds the run again, each word after a space; empty
    if none is needed.

    They are `--params` if `params` is not params.yaml, and a `--set` for each override of a whole
    section or of an operational setting (address, path, ...), which no run stores; overrides in
    `alarms` and `pipeline` are left out. If an environment has an option that can read a file or
    call an address (see `outward`), all overrides of `env` and `mix` are added, because such
    options are not taken from a store. Logins are removed.
    cfg: the configuration that `params` and `overrides` give.
    """
    reaches_out = any(outward(env.name, env.options) for env in cfg.envs)
    words = [] if params == PARAMS else ["--params", params]
    for override in overrides:
        path = override.partition("=")[0].split(".")
        if _says_where(path) or (reaches_out and path[0] in ("env", "mix")):
            words += ["--set", without_login(override)]
    return "".join(f" {word}" for word in map(shlex.quote, words))


def _says_where(path: Sequence[str]) -> bool:
    """Return True if a dotted path, in parts, is an operational setting or a whole section, which
    may have some; False for the sections WHILE_TRAINING and all in them.
    """
    if path[0] in WHILE_TRAINING:
        return False
    model: type[Section] = RunConfig
    for name in path:
        if name not in model.model_fields:
            return False  # a setting of a recipe; all of these change results
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
    """Name of a run for people: r and the first 12 digits of its key."""
    return f"r{key[:12]}"


def keep_audit(store: RunStore, report: Mapping[str, Any]) -> None:
    """Store an audit's report, from `AuditReport.to_json`, for the gate. Errors: LeaseHeld."""
    key = str(report["run_key"])
    with store.open(AUDITS, key) as writer:
        writer.commit(
            done=False,
            state={"ok": report["ok"], "seed": report["seed"]},
            config={"run_key": key},
            records={AUDIT: json.dumps(report, separators=(",", ":")).encode()},
        )


def audit_for_gate(cfg: RunConfig, run_key: str) -> Audited:
    """Return `audit` (none, passed or failed) and `audit_note` (a reason) for the gate's evidence.

    If `gate.require_audit` is set, an audit runs now in a process of its own; else the failures of
    a stored audit count as long as the audited steps are in the store.
    """
    if not run_key:
        return NO_AUDIT
    if not cfg.gate.require_audit:
        return _veto(open_store(cfg), run_key)
    name = label(run_key)
    try:
        run_command(("audit", name), cfg, title=f"audit of {name}", place=f"audits/{name}")
    except (ConfigError, RuntimeError) as error:
        return {"audit": "failed", "audit_note": str(error)[:1000]}
    return {"audit": "passed", "audit_note": ""}


def _veto(store: RunStore, run_key: str) -> Audited:
    head = store.head(AUDITS, run_key)
    if head is None:
        return NO_AUDIT
    report = json.loads(store.read(head, AUDIT))
    if not set(report.get("finals", {}).values()) <= {step.digest for step in store.heads()}:
        return NO_AUDIT  # a step was run again since
    failed = [check for check in report["checks"] if not check["ok"]]
    if report["ok"] and not failed:
        return NO_AUDIT  # a pass proves nothing: a person who can write to the store can forge it
    note = "; ".join(
        f"{check['name']}: {next(iter(check['failures']), 'failed')}"[:300] for check in failed
    )
    return {"audit": "failed", "audit_note": note}
