"""The rollout worker: an actor with an engine of its own."""

from __future__ import annotations

import itertools
import os
import socket
from dataclasses import dataclass
from urllib.parse import urlsplit

from torch import Tensor

from agentgym.compute.transfer import node_address, node_id
from agentgym.config import RunConfig
from agentgym.models.adapter import Adapter
from agentgym.models.checkpoint import ARCHITECTURE, TOKENIZER, stored_checkpoint
from agentgym.models.model import set_threads
from agentgym.models.tensorfiles import StoredTensors
from agentgym.models.transport import use_interface_of
from agentgym.rollouts.collect import Attempts
from agentgym.rollouts.engine import openings
from agentgym.rollouts.episode import EpisodeSettings, token_players
from agentgym.rollouts.policies.engines import open_here
from agentgym.rollouts.pools import EnvPools
from agentgym.types import Delivery, Endpoints, EngineUsage, Item, Trajectory


@dataclass(frozen=True)
class WorkerPlan:
    """Configuration and first weights of a run's rollout workers."""

    cfg: RunConfig
    files: dict[str, bytes]  # architecture and tokenizer
    weights: StoredTensors  # the first ones
    version: int  # of these weights
    endpoints: Endpoints
    num_slots: int  # episodes at a time
    drivers_node: str  # Ray's id of the node the step runs on
    adapter: Adapter | None = None  # as in `Checkpoint`


class RolloutWorker:
    """Actor with its own engine and its own connections to the environments.
    Its methods run in one event loop.
    """

    async def start(self, plan: WorkerPlan) -> tuple[str, dict[str, str]]:
        """Open the engine with the plan's weights and connect to the environments. Also set torch's
        threads and the network interface of gloo and NCCL.
        Result: (process and host of this worker, opening instructions by environment).
        Errors: ValueError if an environment server listens on another node's loopback alone; those
        of `open_here` and `EnvPools.check`.
        """
        set_threads()
        use_interface_of(node_address())  # send weights through the interface that Ray uses
        self._cfg = cfg = plan.cfg
        if node_id() != plan.drivers_node:
            for endpoint in itertools.chain.from_iterable(plan.endpoints.values()):
                if urlsplit(endpoint).hostname in ("127.0.0.1", "localhost", "::1"):
                    raise ValueError(
                        f"environment server {endpoint} can be reached on the machine of the step"
                        f" alone, and this rollout worker is on {socket.gethostname()}; start"
                        " servers that every node can reach and name them in env.endpoints"
                    )
        checkpoint = stored_checkpoint(
            plan.files[ARCHITECTURE].decode(), plan.files[TOKENIZER], plan.weights, plan.adapter
        )
        self._renderer = checkpoint.renderer
        self._policy = open_here(cfg, checkpoint, num_slots=plan.num_slots, version=plan.version)
        self._pool = EnvPools.of(cfg.envs, plan.endpoints)
        await self._pool.__aenter__()
        guides = await self._pool.check(cfg.envs, allow_expert=False)
        return f"process {os.getpid()} on {socket.gethostname()}", (openings(cfg, guides))

    async def play(
        self, item: Item, sample: int, settings: EpisodeSettings
    ) -> tuple[Trajectory, list[Trajectory]]:
        """Play one episode of the item, sample number `sample`; if the environment fails, try again
        in a new session. Result: (the attempt that counts, else the last one; those before it).
        """
        rollout = self._cfg.rollout
        failed: list[Trajectory] = []
        players, limit_s = token_players(self._policy, self._renderer), rollout.episode_timeout_s
        attempts = Attempts(self._pool, players, settings, limit_s, rollout.max_attempts)
        last = await attempts.play(item, sample, failed=failed.append)
        return last, failed

    async def publish(self, delivery: Delivery) -> None:
        """Change to the delivered weights, see `Policy.publish`."""
        await self._policy.publish(delivery)

    async def score(self, sequences: list[list[int]]) -> list[Tensor]:
        return await self._policy.score(sequences)

    async def usage(self) -> EngineUsage:
        return await self._policy.usage()

    async def sleep(self) -> None:
        await self._policy.sleep()

    async def wake(self) -> None:
        await self._policy.wake()

    async def close(self) -> None:
        await self._policy.close()
