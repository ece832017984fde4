"""Environment servers as fleets of pods that come up for a run and go with it.

All servers of a run are one group: they bear its name in the label `agentgym.io/run` and are owned
by its lease (fleets/lease.py), so that one delete takes them away, and a run that died is known.
While the run goes on, a thread renews the lease, tells the balancer where the servers are, and
trips when there are more of them than there should be (fleets/upkeep.py).
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from agentgym.config import ConfigError, EnvConfig, KubernetesConfig, RunConfig
from agentgym.deploy.capacity import replicas_for
from agentgym.deploy.fleets.addresses import Listing, kind_of_addresses
from agentgym.deploy.fleets.lease import (
    KEPT,
    RENEWALS,
    Group,
    acquire,
    acquire_free,
    dead_groups,
    groups,
    lease_name,
)
from agentgym.deploy.fleets.preflight import lacks
from agentgym.deploy.fleets.sending import (
    kinds_of,
    most_pods,
    send,
    take_down,
    wait_ready,
)
from agentgym.deploy.fleets.tokens import no_key, token_of_fleet
from agentgym.deploy.fleets.upkeep import Upkeep, first_addresses, reach
from agentgym.deploy.kube import Kube, KubeError, connect
from agentgym.deploy.kube.kinds import DEPLOYMENT, LEASE, Object
from agentgym.deploy.kube.pace import Retries
from agentgym.deploy.manifests import MANIFESTS, RUN_LABEL, Fleet, rendered_fleet
from agentgym.store.manifest import canonical_json, sha256
from agentgym.types import Endpoint

logger = logging.getLogger(__name__)

PORT = 8000  # of every server, as k8s/server says
OBSERVE_S = 10.0  # more than two renewals of the shortest lease

ByEnv = dict[str, Sequence[str]]  # environment -> endpoints


@dataclass(frozen=True, slots=True)
class Plan:
    """What is sent for a group."""

    run: str
    fleets: tuple[Fleet, ...]
    objects: tuple[Object, ...]

    @classmethod
    def of(cls, cfg: RunConfig, envs: Sequence[EnvConfig], run: str, *, expert: bool) -> Plan:
        """Errors: ConfigError as `rendered_fleet`, and where nobody knows how many servers are
        enough.
        """
        fleets = tuple(fleet_of(cfg, env, run, expert=expert) for env in envs)
        return cls(run, fleets, tuple(o for each in fleets for o in rendered(each, cfg.kubernetes)))

    def services(self) -> dict[str, str]:
        """Environment -> name of its Service."""
        return {each.env: f"env-{each.env}-{self.run}" for each in self.fleets}


def fleet_of(cfg: RunConfig, env: EnvConfig, run: str, *, expert: bool) -> Fleet:
    """The servers of one environment that this run needs.
    Errors: ConfigError where `env.replicas auto` knows no capacity.
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
    """Errors: ConfigError."""
    return rendered_fleet(
        where.overlay,
        fleet,
        components=where.components,
        namespace=where.namespace,
        manifests=manifests,
    )


def connected(where: KubernetesConfig, retries: Retries = Retries()) -> Kube:  # noqa: B008 (frozen)
    """Errors: ConfigError without credentials, or without the package `kubernetes`."""
    return connect(
        context=where.context,
        namespace=where.namespace,
        retries=retries,
        creates_per_s=where.creates_per_s,
        deletes_per_s=where.deletes_per_s,
    )


def of_fleets(cfg: RunConfig) -> list[EnvConfig]:
    """The environments of this run whose servers are on Kubernetes."""
    return [env for env in cfg.envs if env.deploy == "kubernetes"]


def check_fleets(cfg: RunConfig) -> None:
    """Before a run begins: is there anything in its way on the cluster.
    Errors: ConfigError, a line for each thing that is missing; KubeError where the cluster does not
    answer.
    """
    envs = of_fleets(cfg)
    if not envs:
        return
    with contextlib.closing(connected(cfg.kubernetes)) as kube:
        lines = missing(kube, cfg)
        if lines:
            raise ConfigError(
                "\n".join([f"{len(lines)} things are in the way:", *lines])
                if len(lines) > 1
                else lines[0]
            )
        dead = [each for each in groups(kube) if not each.is_alive_now() and not each.is_kept]
        if dead:
            logger.warning(
                "%d runs seem to have died and left servers (%s); agentgym envs gc takes them away",
                len(dead),
                ", ".join(each.run for each in dead[:3]),
            )


def missing(kube: Kube, cfg: RunConfig) -> list[str]:
    """What is in the way of this run's fleets. Errors: ConfigError, KubeError."""
    plan = Plan.of(cfg, of_fleets(cfg), "preflight", expert=False)
    return no_key() + lacks(kube, plan.objects, kind_of_addresses(kube))


@contextlib.contextmanager
def fleets(cfg: RunConfig, envs: Sequence[EnvConfig], *, expert: bool, run: str) -> Iterator[ByEnv]:
    """Endpoints of servers of these environments on the cluster, ready for sessions.

    Those that are kept (`env.keep`, `envs-up`) are used and stay; of the others a group comes up
    under the run's name and is taken down afterwards, whatever happened.
    Errors: ConfigError, KubeError, FleetNotReady, LeaseHeld.
    """
    with contextlib.ExitStack() as stack:
        kube = stack.enter_context(contextlib.closing(connected(cfg.kubernetes)))
        endpoints: ByEnv = {}
        own: list[EnvConfig] = []
        for env in envs:
            plan = None if expert else kept_plan(cfg, env)
            if plan and (env.keep or is_kept(kube, plan.run)):
                group, plan = keep_fleet(kube, env, plan)
                endpoints |= stack.enter_context(_served(kube, cfg, group, plan))
            else:
                own.append(env)
        if own:
            endpoints |= stack.enter_context(_own(kube, cfg, own, expert=expert, run=run))
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
        _take_down(kube, group, where.down_timeout_s)
        if not expert:
            _take_down_dead(kube, run, where.down_timeout_s)


def _take_down_dead(kube: Kube, run: str, timeout_s: float) -> None:
    """What killed attempts of this run have left, whose machine cannot be seen from here: a new
    attempt had servers of its own. What fails here is logged.
    """
    try:
        for name in _end_dead(kube, run, timeout_s):
            logger.info("servers of %s, of an attempt that was killed, are gone", name)
    except (KubeError, ConfigError, RuntimeError) as error:
        logger.error("%s; agentgym envs gc takes away what is left", error)


def _take_down(kube: Kube, group: Group, timeout_s: float) -> None:
    """What fails here is logged: something else may already be raised, or all work is done."""
    try:
        take_down(kube, group.run, timeout_s=timeout_s)
    except (KubeError, ConfigError, RuntimeError) as error:
        logger.error("%s; agentgym envs gc takes away what is left", error)


@contextlib.contextmanager
def _served(kube: Kube, cfg: RunConfig, group: Group, plan: Plan) -> Iterator[ByEnv]:
    """Once ready: endpoints, kept up while they are used."""
    where, services = cfg.kubernetes, plan.services()
    most = most_pods(plan.objects)
    folder = cfg.state_dir.resolve() / "fleets"
    listings = {service: Listing(folder / f"{service}.json") for service in services.values()}
    with Upkeep(kube, group, listings, most=most).running():
        wait_ready(kube, group.run, timeout_s=where.ready_timeout_s, most=most)
        for service in services.values():
            addresses = first_addresses(kube, service, num=1, timeout_s=60.0)
            listings[service].say(addresses)
            reach(addresses)
        yield {
            env: [
                Endpoint(
                    f"http://{service}.{where.namespace}.svc:{PORT}",
                    token_of_fleet(service),
                    str(listings[service].path),
                )
            ]
            for env, service in services.items()
        }


def kept_plan(cfg: RunConfig, env: EnvConfig, manifests: Path = MANIFESTS) -> Plan:
    """The fleet of this environment that outlives runs: named for all that its servers are, so
    that other options, or another image, are another fleet.
    """
    fleet = fleet_of(cfg, env, "keep", expert=False)
    same = Fleet(env.name, "keep", 1, fleet.arguments)
    name = f"keep-{sha256(canonical_json(rendered(same, cfg.kubernetes, manifests)))[:12]}"
    fleet = Fleet(env.name, name, fleet.replicas, fleet.arguments)
    return Plan(name, (fleet,), tuple(rendered(fleet, cfg.kubernetes, manifests)))


def is_kept(kube: Kube, run: str) -> bool:
    """Whether such a fleet is there and its time is not over."""
    found = kube.find(LEASE, lease_name(run))
    return found is not None and Group.of(found).is_alive_now()


def keep_fleet(kube: Kube, env: EnvConfig, plan: Plan) -> tuple[Group, Plan]:
    """Bring it up, or leave it as it is, with more servers where more are planned now.
    Result: its group, and what is there. Errors: KubeError.
    """
    group = acquire(kube, plan.run, ttl_s=env.keep_s, kept=True)
    objects = []
    for each in plan.objects:
        if each["kind"] == "Deployment" and "replicas" in each["spec"]:
            found = kube.find(DEPLOYMENT, each["metadata"]["name"])
            more = max(each["spec"]["replicas"], found["spec"].get("replicas", 1) if found else 1)
            each = each | {"spec": each["spec"] | {"replicas": more}}
        objects.append(each)
    send(kube, group, objects)
    return group, replace(plan, objects=tuple(objects))


def keep_up(cfg: RunConfig, env: EnvConfig) -> str:
    """A kept fleet of this environment, ready. Result: its name.
    Errors: ConfigError, KubeError, FleetNotReady; what did not get ready is taken down.
    """
    plan = kept_plan(cfg, env)
    with contextlib.closing(connected(cfg.kubernetes)) as kube:
        was_there = is_kept(kube, plan.run)
        group, plan = keep_fleet(kube, env, plan)
        try:
            timeout_s, most = cfg.kubernetes.ready_timeout_s, most_pods(plan.objects)
            wait_ready(kube, plan.run, timeout_s=timeout_s, most=most)
        except BaseException:
            if not was_there:
                _take_down(kube, group, cfg.kubernetes.down_timeout_s)
            raise
    return plan.run


def end_kept(cfg: RunConfig) -> list[str]:
    """Take down the kept fleets of this run's environments, and wait. Result: their names.
    Errors: ConfigError, KubeError, FleetNotReady.
    """
    names = [kept_plan(cfg, env).run for env in of_fleets(cfg)]
    if not names:
        return []
    with contextlib.closing(connected(cfg.kubernetes)) as kube:
        there = [each for each in names if kube.find(LEASE, lease_name(each)) is not None]
        for each in there:
            take_down(kube, each, timeout_s=cfg.kubernetes.down_timeout_s)
        return there


def end_run(cfg: RunConfig, run: str) -> list[str]:
    """Take down what a run of this name has left, of processes that are gone. Result: the groups.
    Errors: ConfigError, KubeError, FleetNotReady.
    """
    with contextlib.closing(connected(cfg.kubernetes)) as kube:
        return _end_dead(kube, run, cfg.kubernetes.down_timeout_s)


def _end_dead(kube: Kube, run: str, timeout_s: float) -> list[str]:
    """Result: the groups. Errors: KubeError, FleetNotReady."""
    dead = [
        each.run
        for each in groups(kube)
        if (each.run == run or each.run.startswith(f"{run}-")) and not each.is_alive_now()
    ]
    for each in dead:
        take_down(kube, each, timeout_s=timeout_s)
    return dead


@dataclass(frozen=True, slots=True)
class Orphan:
    """Servers that nobody holds any more."""

    run: str
    why: str


def orphans(kube: Kube, *, observe_s: float) -> list[Orphan]:
    """Groups whose run is dead or whose time is over, and objects of runs that have no lease.
    Errors: KubeError.
    """
    dead = [
        Orphan(each.run, f"last heard of at {each.renewed}, {each.holder or 'kept'}")
        for each in dead_groups(kube, observe_s=observe_s)
    ]
    labelled = {
        each["metadata"]["labels"][RUN_LABEL]
        for kind in kinds_of(kube)
        for each in kube.list(kind, labels={RUN_LABEL: None}).items
    }
    known = {each.run for each in groups(kube)}  # looked at last: a lease comes before its objects
    return dead + [Orphan(run, "it has no lease") for run in sorted(labelled - known)]


def observation_s(cfg: RunConfig) -> float:
    """How long a silent group is watched before it counts as dead: two renewals."""
    return max(OBSERVE_S, 2 * cfg.kubernetes.lease_s / RENEWALS)


__all__ = ["KEPT", "Plan", "check_fleets", "end_kept", "end_run", "fleets", "keep_up", "orphans"]
