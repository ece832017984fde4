"""A run that is killed and restarted ends like one without kills, and leaves no processes."""

import contextlib
import random
import re
import signal
import socket
import sqlite3
import time

import psutil
import pytest

from agentgym.audit import audit
from agentgym.config import load_config
from agentgym.data.items import ItemStream, load_splits
from agentgym.models.architecture import WEIGHTS
from agentgym.models.checkpoint import OPTIMIZER
from agentgym.pipeline.run import run_step
from agentgym.pipeline.table import finished, key_of, open_store, steps_of
from agentgym.records import TRAJECTORIES, decode_trajectories
from agentgym.steps.step import stages
from agentgym.store.lease import LeaseHeld
from agentgym.store.runstore import store_at
from tests.agentgym.driver import MOMENTS, drive
from tests.forked import FORKS
from tests.waiting import wait_until

pytestmark = pytest.mark.integration

GONE_WITHIN_S = 30.0
OWNER = "AGENTGYM_TEST_OWNER"  # set for every process that a driver starts


class Driver:
    """Runs every step of a params file in another process."""

    def __init__(self, params):
        self.params = params
        self.scratch = params.parent / "scratch"
        self.scratch.mkdir()

    @contextlib.contextmanager
    def start(self, moment="never"):
        """Yield (process, connection that receives its output)."""
        environment = {OWNER: str(self.params), "TMPDIR": str(self.scratch)}
        output, end = FORKS.Pipe(duplex=False)
        process = FORKS.Process(target=drive, args=(self.params, moment, environment, end))
        with output:
            process.start()
            end.close()
            try:
                yield process, output
            finally:
                process.kill()
                process.join()

    def run(self, moment="never"):
        """Return (return code, output)."""
        lines = []
        with self.start(moment) as (process, output):
            with contextlib.suppress(EOFError):
                while True:
                    lines.append(output.recv() + "\n")
            process.join()
            return process.exitcode, "".join(lines)

    def assert_nothing_is_left(self):
        """Check that no process of a driver runs and that no port of its environments is open."""
        wait_until(
            lambda: not (self.processes() or self.ports()),
            GONE_WITHIN_S,
            why=lambda: (self.processes(), self.ports()),
        )

    def processes(self):
        found = []
        for process in psutil.process_iter():
            try:
                if (
                    process.environ().get(OWNER) == str(self.params)
                    and process.status() != psutil.STATUS_ZOMBIE
                ):
                    found.append(process.cmdline())
            except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
                continue
        return found

    def ports(self):
        logs = "".join(path.read_text() for path in (self.params.parent / "logs").glob("*.log"))
        found = []
        for port in {
            int(port) for port in re.findall(r"listens on http://127\.0\.0\.1:(\d+)", logs)
        }:
            with socket.socket() as client:
                client.settimeout(1)
                if client.connect_ex(("127.0.0.1", port)) == 0:
                    found.append(port)
        return found


def histories(cfg):
    store = open_store(cfg)
    return {
        name: store.history(name, manifest.key) for name, manifest in finished(cfg, store).items()
    }


def consumed(cfg):
    by_step = histories(cfg)
    return [
        item
        for stage in stages(cfg.horizon)
        for commit in by_step[stage.name]
        for item in commit.state["consumed"]
    ]


def expected_items(cfg):
    splits = load_splits(
        cfg.data.path, cfg.env.name, validation_fraction=cfg.data.validation_fraction, seed=cfg.seed
    )
    num_items = sum(cfg.horizon.stage_steps) * cfg.rollout.items_per_step
    return [item.item_id for item in ItemStream(splits.train, seed=cfg.seed).next(num_items)]


def repeated_points(cfg):
    with sqlite3.connect(cfg.state_dir / "mlflow.db") as database:
        return database.execute(
            "select key, step, count(*) from metrics group by run_uuid, key, step having"
            " count(*) > 1"
        ).fetchall()


def assert_audited(cfg, steps=None):
    report = audit(cfg)
    assert report.ok, [check.failures[:5] for check in report.checks if not check.ok]
    assert list(report.steps) == list(steps_of(cfg))[:steps]


@pytest.fixture
def untouched(whole_run):
    return load_config(whole_run / "params.yaml")


@pytest.fixture(scope="module")
def killed(tmp_path_factory, tiny_params):
    """A run that is killed at every moment and restarted: (configuration, outputs by moment)."""
    driver = Driver(tiny_params(tmp_path_factory.mktemp("killed"), deterministic=True))
    cfg = load_config(driver.params)
    said = {}
    for moment in MOMENTS:
        code, said[moment] = driver.run(moment)
        assert code == -signal.SIGKILL, (
            moment,
            said[moment],
            (driver.params.parent / "driver.log").read_text(),
        )
        driver.assert_nothing_is_left()
        if moment == "manifest":
            assert_audited(cfg, steps=7)
    code, said["end"] = driver.run()
    assert code == 0, (driver.params.parent / "driver.log").read_text()
    driver.assert_nothing_is_left()
    return cfg, said


def test_a_killed_run_ends_bit_identical_to_one_that_nobody_touched(untouched, killed):
    cfg, _ = killed
    ours, theirs = histories(untouched), histories(cfg)
    assert list(ours) == list(theirs) == list(steps_of(cfg))
    for name, commits in ours.items():
        for mine, other in zip(commits, theirs[name], strict=True):
            for part in ("blobs", "state", "results", "parents", "config"):
                assert getattr(mine, part) == getattr(other, part), (name, mine.seq, part)
            assert mine.digest == other.digest
            if TRAJECTORIES in mine.records:
                logs = [
                    decode_trajectories(open_store(c).read(m, TRAJECTORIES))
                    for c, m in ((untouched, mine), (cfg, other))
                ]
                assert logs[0] == logs[1]
    last = ours["stage-2"][-1]
    # optimizer states are kept while the run needs them: between commits and between stages
    assert [
        [OPTIMIZER in each.blobs for each in ours[name]] for name in ("stage-1", "stage-2")
    ] == [[True, True], [True, False]]
    assert OPTIMIZER not in ours["warm-start"][-1].blobs
    assert last.blobs[WEIGHTS] != ours["warm-start"][-1].blobs[WEIGHTS], (
        "nothing was learned, so nothing was shown"
    )
    assert (
        ours["stage-1"][0].blobs[WEIGHTS]
        != ours["stage-1"][1].blobs[WEIGHTS]
        != last.blobs[WEIGHTS]
    )


def test_each_restart_goes_on_from_the_last_commit(killed):
    _, said = killed
    assert "stage-1 is" not in said["rollout"]
    assert "commit stage-1 0" in said["rollout"]
    assert "commit stage-1" not in said["manifest"]
    assert "stage-1 is resumed at commit 1" in said["evaluation"]
    assert "commit evaluate-stage-1 1" in said["evaluation"]
    assert "evaluate-stage-1 is resumed at commit 2" in said["ledger"]
    assert "commit evaluate-stage-1 1" not in said["ledger"]
    assert "commit stage-2 0" not in said["ledger"] + said["end"]  # committed, but not announced
    assert "stage-2 is resumed at commit 1" in said["end"]
    assert said["end"].count(" is done") == list(said["end"].splitlines()).index("commit stage-2 1")


def test_the_ledger_has_each_point_once_and_both_runs_pass_their_audit(untouched, killed):
    cfg, _ = killed
    for each in (untouched, cfg):
        assert repeated_points(each) == []
        assert_audited(each)


def test_no_item_is_lost_or_trained_twice(killed):
    cfg, _ = killed
    assert consumed(cfg) == expected_items(cfg)
    assert len(set(consumed(cfg))) == len(consumed(cfg))


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_free_running_run_killed_at_random_times_loses_and_repeats_nothing(
    tmp_path, tiny_params, seed
):
    driver = Driver(tiny_params(tmp_path, seed=seed))
    cfg = load_config(driver.params)
    chance = random.Random(seed)
    for _ in range(2):
        with driver.start() as (_, output):
            for _ in range(chance.randrange(1, 14)):  # commits to wait for
                while not output.recv().startswith("commit"):
                    pass
            time.sleep(chance.uniform(0, 1))
        driver.assert_nothing_is_left()
    code, said = driver.run()
    assert code == 0, (driver.params.parent / "driver.log").read_text()
    driver.assert_nothing_is_left()
    assert "report is" in said
    assert consumed(cfg) == expected_items(cfg)
    assert repeated_points(cfg) == []
    assert_audited(cfg)


def hold(path, key, output):
    with store_at(path, lease_ttl_s=30).open("prepare", key):
        output.send("held")
        time.sleep(60)


def test_a_step_held_by_a_live_process_is_refused_with_who_holds_it(tmp_path, tiny_params):
    cfg = load_config(tiny_params(tmp_path))
    step = steps_of(cfg)["prepare"]
    output, end = FORKS.Pipe(duplex=False)
    asked = (cfg.store.path, key_of(step, cfg, {}), end)
    holder = FORKS.Process(target=hold, args=asked)
    holder.start()
    try:
        output.recv()
        with pytest.raises(
            LeaseHeld,
            match=(
                rf"step prepare .* is held by process {holder.pid} on .*; wait for it or stop"
                r" that process"
            ),
        ):
            run_step("prepare", cfg)
    finally:
        holder.kill()
        holder.join()
    assert str(run_step("prepare", cfg)) == "ran"  # nothing had been committed
