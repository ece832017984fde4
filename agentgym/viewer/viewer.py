"""State of the viewer: store, index, replays, and the thread that follows the store."""

from __future__ import annotations

import logging
import sqlite3
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, TypeVar

from agentgym.config import RunConfig
from agentgym.pipeline.table import open_store
from agentgym.store.lease import Tenure
from agentgym.store.runstore import RunStore
from agentgym.tracking.deliver import delivered_steps
from agentgym.viewer.bodies import Bodies
from agentgym.viewer.index import Index, IndexDamaged
from agentgym.viewer.names import Names, names_of
from agentgym.viewer.query import Lists
from agentgym.viewer.refresh import Refreshed, Refresher
from agentgym.viewer.replay import Replays, Servers

logger = logging.getLogger(__name__)

T = TypeVar("T")
MOST_MADE = 16  # results kept by `once`
FOLDER = "viewer"  # of the state folder
POLL_S, POLL_S3_S = 2.0, 20.0  # between two reads of the store


@dataclass
class Viewer:
    """All open resources of the viewer. `with` also starts the thread that follows the store."""

    cfg: RunConfig
    store: RunStore
    index: Index
    lists: Lists
    bodies: Bodies
    servers: Servers
    replays: Replays
    runs: tuple[str, ...] = ()  # prefixes of the runs on the first page; empty: all
    indexing: int | None = 0  # episodes read so far by the first refresh; None: it is over
    failure: str = ""  # of the last refresh
    # leases of the unfinished steps, by folder
    tenures: dict[str, Tenure] = field(default_factory=dict)
    _made: dict[str, tuple[str, Any]] = field(default_factory=dict)
    _stop: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    @classmethod
    def open(cls, cfg: RunConfig, runs: tuple[str, ...] = ()) -> Self:
        """Open the store and its index, created if missing. Errors: ConfigError for a bad store.
        runs: prefixes of the names of the runs that the first page lists; empty: all.
        """
        store = open_store(cfg)
        folder, root = cfg.state_dir / FOLDER, store.root
        root = root if root.startswith("s3://") else str(Path(root).absolute())
        index, servers = Index(Index.place(folder, root), root), Servers(cfg)
        bodies, replays = Bodies(store, index), Replays(folder / "replays.sqlite", servers)
        return cls(cfg, store, index, Lists(index), bodies, servers, replays, runs)

    def refresh(self) -> Refreshed:
        """Update index and leases, as the index's writer. Rebuild a damaged index once.
        Result: counts of the changes. Errors: those of `Refresher.refresh`.
        """
        refresher = Refresher(self.store, self.index, lambda: delivered_steps(self.cfg))

        def updated() -> Refreshed:
            refreshed = refresher.refresh(self._count)
            self.look_who_works()
            return refreshed

        try:
            return updated()
        except IndexDamaged as error:
            logger.warning("%s; it is built anew", error)
            self.index.remake()
        return updated()

    def look_who_works(self) -> None:
        """Read the leases of unfinished steps into `tenures`; they show which processes live."""
        rows = self.index.reader.execute("SELECT folder FROM steps WHERE done IS NOT 1")
        self.tenures = self.store.tenures(row["folder"] for row in rows)

    def why_stopped(self, run: str) -> str | None:
        """Return the reason why no process works on a run; None if one does, by `tenures`.
        run: its name in the index.
        """
        rows = self.index.reader.execute(
            "SELECT folder, name, digest FROM steps JOIN run_steps ON step_id = id"
            " WHERE run = ? ORDER BY created",
            (run,),
        ).fetchall()
        digests = {row["digest"] for row in rows}
        folders = {row["folder"]: row["name"] for row in rows}
        why = "the steps after its last one were not begun"
        for folder, tenure in sorted(self.tenures.items(), key=lambda pair: pair[1].holder.since):
            begins = folder not in folders  # a step without a commit belongs to no run yet
            parents = set(tenure.holder.parents)
            if begins and not (parents and parents <= digests):
                continue
            if tenure.alive:
                return None
            if not begins or tenure.reason != "":
                name = folders.get(folder, folder.rpartition("-")[0])
                why = f"{name}: {tenure}"
        return why

    @property
    def names(self) -> Names:
        """Names of what the index has now."""
        return self.once("names", lambda: names_of(self.index.reader))

    def once(self, name: str, make: Callable[[], T]) -> T:
        """Return `make()`, cached under this name until the index changes."""
        stamp = self.index.stamp
        cached = self._made.get(name)
        if cached is None or cached[0] != stamp:
            if len(self._made) >= MOST_MADE:
                self._made.clear()
            cached = self._made[name] = (stamp, make())
        return cached[1]

    def _count(self, episodes: int) -> None:
        if self.indexing is not None:
            self.indexing = episodes

    def damaged(self) -> None:
        """Empty the damaged index if this process writes it; the next refresh rebuilds it."""
        if self.index.writes:
            self.indexing = 0
            self.index.remake()

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._follow, name="follow", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join(60)
        self.close()

    def close(self) -> None:
        """Wait for the replay under way, then close replays, servers and index.
        The end of `with` calls it.
        """
        self.replays.close()
        self.servers.close()
        self.index.close()

    def _follow(self) -> None:
        """Refresh the index (if another process writes it, only the leases) and end idle servers,
        again and again until the viewer ends. Errors go to `failure` and the log.
        """
        pause_s = POLL_S3_S if self.store.root.startswith("s3://") else POLL_S
        while not self._stop.is_set():
            try:
                if self.index.writes:
                    self.refresh()
                else:
                    self.look_who_works()
                self.failure = ""
            except (OSError, ValueError, RuntimeError, sqlite3.Error) as error:
                logger.warning("the store cannot be read now: %s", error)
                self.failure = f"{type(error).__name__}: {error}"
            self.indexing = None
            self.servers.end_idle()
            self._stop.wait(pause_s)
