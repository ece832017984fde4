"""Environment servers as fleets of pods that come up for a run and end with it.

All servers of a run are one group: they have its name in the label `agentgym.io/run` and are owned
by its lease (fleets/fleet_lease.py), so that one delete removes them and a dead run is recognized.
During the run a thread renews the lease, writes the servers' addresses to a file for clients, and
stops the run if there are more servers than there should be (fleets/upkeep.py).
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from agentgym.config import ConfigError, EnvConfig, KubernetesConfig, RunConfig
from agentgym.deploy.fleets.addresses import Listing
from agentgym.deploy.fleets.fleet_lease import (
    RENEWALS,
    Group,
    acquire,
    acquire_free,
    dead_groups,
    groups,
    lease_name,
)
from agentgym.deploy.fleets.preflight import lacks
from agentgym.deploy.fleets.startup import (
    kinds_of,
    most_pods,
    no_key,
    send,
    take_down,
    token_of_fleet,
    wait_ready,
)
from agentgym.deploy.fleets.upkeep import Upkeep, first_addresses, reach
from agentgym.deploy.kube.calls import KubeError, Retries
from agentgym.deploy.kube.client import DEPLOYMENT, LEASE, Kube, Object, connect
from agentgym.deploy.manifests import MANIFESTS, RUN_LABEL, Fleet, rendered_fleet, replicas_for
from agentgym.store.manifest import canonical_json, sha256
from agentgym.types import Endpoint

logger = logging.getLogger(__name__)

PORT = 8000  # of every server, as k8s/server sets it
OBSERVE_S = 10.0  # more than two renewals of the shortest lease

ByEnv = dict[str, Sequence[str]]  # environment -> endpoints


@dataclass(frozen=True, slots=True)
class Plan:
    """Fleets of a group, and their objects to send to the cluster."""

    run: str
    fleets: tuple[Fleet, ...]
    objects: tuple[Object, ...]

    @classmethod
    def of(cls, cfg: RunConfig, envs: Sequence[EnvConfig], run: str, *, expert: bool) -> Plan:
        """Plan the fleets of these environments as the group `run`; `expert` as in `fleet_of`.
        Errors: ConfigError as `rendered_fleet`, and if a server's capacity is unknown.
        """
        fleets = tuple(fleet_of(cfg, env, run, expert=expert) for env in envs)
        objects = tuple(obj for fleet in fleets for obj in rendered(fleet, cfg.kubernetes))
        return cls(run, fleets, objects)


def fleet_of(cfg: RunConfig, env: EnvConfig, run: str, *, expert: bool) -> Fleet:
    """Return the fleet that this run needs of one environment. expert: its servers have experts.
    Errors: ConfigError with `env.replicas` auto if the capacity of a server was not measured.
    """
    replicas = (
        replicas_for(env.name, cfg.rollout.concurrency) if env.replicas == "auto" else env.replicas
    )
    arguments = [f"--session-ttl={env.session_ttl_s:g}"]
    if env.options:
        arguments.append(f"--options={json.dumps(env.options, sort_keys=True)}")
    if expert:
        arguments.append("--expert")
    return Fleet(env=env.name, run=run, replicas=replicas, arguments=tuple(arguments))


def rendered(fleet: Fleet, where: KubernetesConfig, manifests: Path = MANIFESTS) -> list[Object]:
    """Render a fleet's objects with the configured overlay, components and namespace.
    manifests: the folder `k8s`. Errors: ConfigError.
    """
    return rendered_fleet(
        where.overlay,
        fleet,
        components=where.components,
        namespace=where.namespace,
        manifests=manifests,
    )


def connected(where: KubernetesConfig, retries: Retries = Retries()) -> Kube:  # noqa: B008 (frozen)
    """Return a client of the configured cluster; no request is sent yet.
    Errors: ConfigError without credentials, or without the package `kubernetes`.
    """
    return connect(
        context=where.context,
        namespace=where.namespace,
        retries=retries,
        creates_per_s=where.creates_per_s,
        deletes_per_s=where.deletes_per_s,
    )


def of_fleets(cfg: RunConfig) -> list[EnvConfig]:
    """Return the environments of this run whose servers are on Kubernetes."""
    return [env for env in cfg.envs if env.deploy == "kubernetes"]


def check_fleets(cfg: RunConfig) -> None:
    """Check, before a run begins, that its fleets can come up. Log the servers of dead runs.
    Errors: ConfigError with a line for each obstacle; KubeError if the cluster does not answer.
    """
    envs = of_fleets(cfg)
    if not envs:
        return
    with contextlib.closing(connected(cfg.kubernetes)) as kube:
        lines = missing(kube, cfg)
        if lines:
            heading = [f"{len(lines)} things are in the way:"] if len(lines) > 1 else []
            raise ConfigError("\n".join([*heading, *lines]))
        dead = [group for group in groups(kube) if not group.is_alive() and not group.is_kept]
        if dead:
            logger.warning(
                "%d runs seem to have died and left servers (%s); agentgym envs gc takes them away",
                len(dead),
                ", ".join(group.run for group in dead[:3]),
            )


def missing(kube: Kube, cfg: RunConfig) -> list[str]:
    """Return a line for each obstacle to this run's fleets. Errors: ConfigError, KubeError."""
    return no_key() + lacks(kube, Plan.of(cfg, of_fleets(cfg), "preflight", expert=False).objects)


@contextlib.contextmanager
def fleets(cfg: RunConfig, envs: Sequence[EnvConfig], *, expert: bool, run: str) -> Iterator[ByEnv]:
    """Yield endpoints, by environment, of servers on the cluster that are ready for sessions.

    A fleet that outlives runs is renewed, used and left; `env.keep` starts a missing one. For other
    environments, and for all with `expert`, a group comes up under the run's name. It is taken down
    on exit and, without `expert`, so are groups of this run's dead attempts; errors of that are
    only logged.
    Errors: ConfigError, KubeError, FleetNotReady, FleetTripped, LeaseHeld, RuntimeError.
    """
    with contextlib.ExitStack() as stack:
        kube = stack.enter_context(contextlib.closing(connected(cfg.kubernetes)))
        endpoints: ByEnv = {}
        temporary: list[EnvConfig] = []
        for env in envs:
            plan = None if expert else kept_plan(cfg, env)
            if plan and (env.keep or is_kept(kube, plan.run)):
                group, plan = keep_fleet(kube, env, plan)
                endpoints |= stack.enter_context(_served(kube, cfg, group, plan))
            else:
                temporary.append(env)
        if temporary:
            endpoints |= stack.enter_context(_own(kube, cfg, temporary, expert=expert, run=run))
        yield endpoints


@contextlib.contextmanager
def _own(
    kube: Kube, cfg: RunConfig, envs: Sequence[EnvConfig], *, expert: bool, run: str
) -> Iterator[ByEnv]:
    where = cfg.kubernetes
    group = acquire_free(kube, f"{run}-expert" if expert else run, ttl_s=where.lease_s)
    try:
        plan = Plan.of(cfg, envs, group.run, expert=expert)
        send(kube, group, plan.objects)
        with _served(kube, cfg, group, plan) as endpoints:
            yield endpoints
    finally:
        with _left_to_gc():
            take_down(kube, group.run, timeout_s=where.down_timeout_s)
        if not expert:
            # attempts killed on other machines still seemed alive when this one began
            with _left_to_gc():
                for name in _end_dead(kube, run, where.down_timeout_s):
                    logger.info("servers of %s, of an attempt that was killed, are gone", name)


@contextlib.contextmanager
def _left_to_gc() -> Iterator[None]:
    """Log a KubeError, ConfigError or RuntimeError of the block instead of raising it.

    The block takes servers down. Its error must not replace one that is already being raised, nor
    fail work that is done; `agentgym envs gc` removes what is left.
    """
    try:
        yield
    except (KubeError, ConfigError, RuntimeError) as error:
        logger.error("%s; agentgym envs gc takes away what is left", error)


@contextlib.contextmanager
def _served(kube: Kube, cfg: RunConfig, group: Group, plan: Plan) -> Iterator[ByEnv]:
    """Yield endpoints by environment once the servers are ready. An `Upkeep` runs until exit.
    Errors: those of `wait_ready`, `first_addresses` and `reach`.
    """
    where = cfg.kubernetes
    services = {fleet.env: f"env-{fleet.env}-{plan.run}" for fleet in plan.fleets}
    max_pods = most_pods(plan.objects)
    folder = cfg.state_dir.resolve() / "fleets"
    listings = {service: Listing(folder / f"{service}.json") for service in services.values()}
    with Upkeep(kube, group, listings, most=max_pods).running():
        wait_ready(kube, group.run, timeout_s=where.ready_timeout_s, most=max_pods)
        for service in services.values():
            addresses = first_addresses(kube, service, num=1, timeout_s=60.0)
            listings[service].say(addresses)
            reach(addresses)
        urls = {service: f"http://{service}.{where.namespace}.svc:{PORT}" for service in listings}
        yield {
            env: [Endpoint(urls[service], token_of_fleet(service), str(listings[service].path))]
            for env, service in services.items()
        }


def kept_plan(cfg: RunConfig, env: EnvConfig, manifests: Path = MANIFESTS) -> Plan:
    """Plan the fleet of this environment that outlives runs. Its name contains a digest of its
    objects without the number of servers: other options, or another image, make another fleet.
    """
    fleet = fleet_of(cfg, env, "keep", expert=False)
    same = Fleet(env.name, "keep", 1, fleet.arguments)
    name = f"keep-{sha256(canonical_json(rendered(same, cfg.kubernetes, manifests)))[:12]}"
    fleet = Fleet(env.name, name, fleet.replicas, fleet.arguments)
    return Plan(name, (fleet,), tuple(rendered(fleet, cfg.kubernetes, manifests)))


def is_kept(kube: Kube, run: str) -> bool:
    """Return True if the fleet `run`, which outlives runs, exists and has not expired."""
    lease = kube.find(LEASE, lease_name(run))
    return lease is not None and Group.of(lease).is_alive()


def keep_fleet(kube: Kube, env: EnvConfig, plan: Plan) -> tuple[Group, Plan]:
    """Create or renew the lease of a fleet that outlives runs and send its objects; do not wait.
    The number of servers never falls. Result: its group, and the plan as it was sent.
    Errors: ConfigError, KubeError; LeaseHeld while the fleet is being taken down.
    """
    group = acquire(kube, plan.run, ttl_s=env.keep_s, kept=True)
    objects = []
    for obj in plan.objects:
        if obj["kind"] == "Deployment" and "replicas" in obj["spec"]:
            deployment = kube.find(DEPLOYMENT, obj["metadata"]["name"])
            present = deployment["spec"].get("replicas", 1) if deployment else 1
            obj = obj | {"spec": obj["spec"] | {"replicas": max(obj["spec"]["replicas"], present)}}
        objects.append(obj)
    send(kube, group, objects)
    return group, replace(plan, objects=tuple(objects))


def keep_up(cfg: RunConfig, env: EnvConfig) -> str:
    """Bring up the environment's fleet that outlives runs; wait until ready. Result: its name.
    A new fleet is taken down again if that fails.
    Errors: ConfigError, KubeError, LeaseHeld, FleetNotReady, FleetTripped.
    """
    plan = kept_plan(cfg, env)
    with contextlib.closing(connected(cfg.kubernetes)) as kube:
        was_there = is_kept(kube, plan.run)
        group, plan = keep_fleet(kube, env, plan)
        try:
            timeout_s, max_pods = cfg.kubernetes.ready_timeout_s, most_pods(plan.objects)
            wait_ready(kube, plan.run, timeout_s=timeout_s, most=max_pods)
        except BaseException:
            if not was_there:
                with _left_to_gc():
                    take_down(kube, group.run, timeout_s=cfg.kubernetes.down_timeout_s)
            raise
    return plan.run


def end_kept(cfg: RunConfig) -> list[str]:
    """Take down the fleets of this run's environments that outlive runs; wait until they are gone.
    Result: the names of those that existed.
    Errors: ConfigError, KubeError, FleetNotReady.
    """
    names = [kept_plan(cfg, env).run for env in of_fleets(cfg)]
    if not names:
        return []
    with contextlib.closing(connected(cfg.kubernetes)) as kube:
        existing = [name for name in names if kube.find(LEASE, lease_name(name)) is not None]
        for name in existing:
            take_down(kube, name, timeout_s=cfg.kubernetes.down_timeout_s)
        return existing


def end_run(cfg: RunConfig, run: str) -> list[str]:
    """Take down the servers on Kubernetes that dead processes of the run `run` left.
    Result: the names of their groups. Errors: ConfigError, KubeError, FleetNotReady.
    """
    with contextlib.closing(connected(cfg.kubernetes)) as kube:
        return _end_dead(kube, run, cfg.kubernetes.down_timeout_s)


def _end_dead(kube: Kube, run: str, timeout_s: float) -> list[str]:
    """Take down the dead groups `run` and `run-*`. Result: their names.
    Errors: KubeError, FleetNotReady.
    """
    dead = [
        group.run
        for group in groups(kube)
        if (group.run == run or group.run.startswith(f"{run}-")) and not group.is_alive()
    ]
    for name in dead:
        take_down(kube, name, timeout_s=timeout_s)
    return dead


@dataclass(frozen=True, slots=True)
class Orphan:
    """Servers that no live run uses."""

    run: str
    why: str


def orphans(kube: Kube, *, observe_s: float) -> list[Orphan]:
    """Return the dead groups, see `dead_groups`, and runs whose objects have no lease.
    observe_s: seconds to watch a group before it counts as dead. Errors: KubeError.
    """
    dead = [
        Orphan(group.run, f"last heard of at {group.renewed}, {group.holder or 'kept'}")
        for group in dead_groups(kube, observe_s=observe_s)
    ]
    labelled = {
        obj["metadata"]["labels"][RUN_LABEL]
        for kind in kinds_of(kube)
        for obj in kube.list(kind, labels={RUN_LABEL: None}).items
    }
    # read last, because a lease is created before its objects
    known = {group.run for group in groups(kube)}
    return dead + [Orphan(run, "it has no lease") for run in sorted(labelled - known)]


def observation_s(cfg: RunConfig) -> float:
    """Seconds to watch a silent group before it counts as dead: 2 renewals, at least OBSERVE_S."""
    return max(OBSERVE_S, 2 * cfg.kubernetes.lease_s / RENEWALS)
