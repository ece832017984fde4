"""An engine in a host process: sessions, updates of weights, and how it ends."""

import asyncio
import os
import signal
import sys
import tempfile
from contextlib import contextmanager, nullcontext
from importlib.metadata import EntryPoint

import psutil
import pytest
import torch

from agentgym.config import ConfigError
from agentgym.deploy.owned import owned_process
from agentgym.models import transport
from agentgym.models.checkpoint import new_checkpoint
from agentgym.rollouts.engine import LoopThread, open_policy
from agentgym.rollouts.policies import engines, host_protocol, hosts
from agentgym.rollouts.policies.engines import check_engine
from agentgym.rollouts.policies.host_protocol import HostBusy, HostLost
from agentgym.rollouts.policies.hosts import one_engine
from agentgym.rollouts.policies.torch import TorchPolicy
from agentgym.types import EngineMismatch
from tests.agentgym.rollouts.policies.hosting import (
    ENGINE,
    PROMPT,
    Session,
    config,
    expected,
    flip,
    halve,
    host,
    left_in,
    owner,
    same,
    sampling,
)
from tests.engines import checkpoint
from tests.waiting import wait_until

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module", autouse=True)
def room(tmp_path_factory):
    """Folder of all hosts of this module. The built-in engine replaces vLLM."""
    folder = tmp_path_factory.mktemp("hosts")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(engines.BUILT_IN, "vllm", ENGINE)
        patch.setenv("TEST_STARTS", str(folder / "starts"))
        patch.setattr(tempfile, "tempdir", str(folder))
        yield folder


@pytest.fixture(scope="module")
def cfg(room):
    return config(room)


@pytest.fixture(scope="module")
def shared(cfg):
    """One engine for several tests."""
    with one_engine(cfg):
        yield


@pytest.fixture
def num_starts(room):
    """Return a function that counts the engines started in this test."""

    def count():
        file = room / "starts"
        return len(file.read_text().split()) if file.exists() else 0

    before = count()
    return lambda: count() - before


@pytest.fixture(scope="module")
def session(make_model, tokenizer):
    """Return a function of (cfg, seed, version) that opens a policy with an event loop."""

    @contextmanager
    def opened(cfg, seed=0, version=0, num_slots=8, checkpoint=None):
        loop = LoopThread()
        checkpoint = checkpoint or new_checkpoint(make_model(seed), tokenizer)
        try:
            policy = open_policy(cfg, checkpoint, num_slots=num_slots, version=version)
            try:
                yield Session(policy, loop)
            finally:
                loop.run(policy.close())
        finally:
            loop.close()

    return opened


def test_sessions_share_one_engine_and_weights_it_holds_are_not_moved(
    cfg, session, num_starts, make_model, tokenizer, monkeypatch, room
):
    moved = []
    written = transport.write_weights
    monkeypatch.setattr(
        transport, "write_weights", lambda *arguments: moved.append(written(*arguments))
    )
    with one_engine(cfg):
        with session(cfg, 0, version=7) as first:
            assert same(first.generate(1, 2, 3), expected(make_model(0), tokenizer, 7, 1, 2, 3))
            first.publish(make_model(1), 8)
            assert same(first.generate(1), expected(make_model(1), tokenizer, 8, 1))
        assert len(moved) == 2
        with session(cfg, 1, version=3) as second:  # versions start again in another step
            assert len(moved) == 2
            assert same(second.generate(1), expected(make_model(1), tokenizer, 3, 1))
            with pytest.raises(ValueError, match="versions must grow: engine holds 3, got 3"):
                second.publish(make_model(1), 3)
        with session(cfg, 0) as third:
            assert same(third.generate(1, 2), expected(make_model(0), tokenizer, 0, 1, 2))
        assert num_starts() == 1
        processes = host()
        assert len(processes) == 2
    assert not psutil.wait_procs(processes, 10)[1]
    assert not left_in(room)
    assert hosts.ADDRESS not in os.environ


def test_a_host_that_is_killed_ends_its_session_and_the_next_one_has_another(
    cfg, session, num_starts
):
    with one_engine(cfg):
        with session(cfg) as first:
            first.generate(1)
            process, *below = host()
            process.kill()
            for _ in range(2):
                with pytest.raises(HostLost, match=r"host \(process \d+\) is lost, exit code -9"):
                    first.generate(1)
            for child in below:  # vLLM's processes end by themselves, see test_vllm_worker.py
                child.kill()
        with session(cfg) as second:
            second.generate(1)
        assert num_starts() == 2


def test_a_session_alone_ends_its_engine_and_a_host_that_is_silent_is_given_up(session, room):
    cfg = config(room, publish_timeout_s=1.0)
    with session(cfg) as opened:
        opened.generate(1)
        processes = host()
        processes[0].send_signal(signal.SIGSTOP)
        with pytest.raises(HostLost, match="no sign of life within 1 s"):
            opened.generate(1)
        processes[0].send_signal(signal.SIGCONT)
    assert not psutil.wait_procs(processes, 10)[1]
    assert not left_in(room)


def test_an_engine_that_does_not_start_says_why(cfg, session, monkeypatch, room):
    monkeypatch.setenv("TEST_ENGINE", "refuse")
    with pytest.raises(RuntimeError, match="no memory for an engine"), session(cfg):
        pass
    entry = EntryPoint("nothing", "tests.engines:Nothing", "agentgym.engines")
    monkeypatch.setattr(hosts, "engine_entry", lambda _: entry)
    with pytest.raises(HostLost, match=r"did not start\n[^$]*no attribute 'Nothing'"), session(cfg):
        pass
    assert not left_in(room)


@pytest.mark.slow
def test_nothing_is_left_of_an_engine_whose_owner_is_killed(tmp_path):
    process = owner(tmp_path, "wait")
    try:
        assert process.stdout.readline() == "playing\n"
        below = psutil.Process(process.pid).children(recursive=True)
        assert len(below) == 2
    finally:
        process.kill()
        process.wait(10)
        process.stdout.close()
    assert not psutil.wait_procs(below, 10)[1]
    assert not left_in(tmp_path)


def test_a_kept_engine_serves_runs_and_is_ended_when_nobody_uses_it(session, num_starts, tmp_path):
    """Start the engine in another process than its sessions, as `make up` does."""
    cfg, folder = config(tmp_path), hosts.new_folder()
    cfg.state_dir.mkdir()
    (cfg.state_dir / hosts.KEPT).symlink_to(folder)
    command, log = hosts.host_command(cfg, folder, keep_s=0.5), tmp_path / "log"
    with owned_process(command, log_path=log, env=hosts.host_environment(cfg)) as process:
        wait_until((folder / host_protocol.SOCKET).exists, process=process, why=log.read_text)
        below = psutil.Process(process.pid)
        for _ in range(2):
            with session(cfg) as opened:
                opened.generate(1)
        assert num_starts() == 1
        wait_until(lambda: not below.children())
        with session(cfg) as opened:
            opened.generate(1)
        assert num_starts() == 2
    assert not folder.exists()


def test_scores_usage_sleep_and_errors_cross_the_wire(shared, cfg, session, make_model, tokenizer):
    with session(cfg) as opened:
        policy = opened.policy
        here = TorchPolicy(make_model(0), stop_ids=[1], num_slots=1, context_tokens=64)
        sequences = [PROMPT, PROMPT[:3]]
        for ours, theirs in zip(
            asyncio.run(here.score(sequences)), opened.run(policy.score(sequences)), strict=True
        ):
            assert torch.equal(ours, theirs)
        opened.generate(1, 2)
        usage = opened.run(policy.usage())
        assert usage.prompt_tokens == 2 * len(PROMPT)
        assert set(map(type, usage.depth_s)) == {int}
        opened.run(policy.sleep())
        with pytest.raises(TimeoutError):
            opened.run(asyncio.wait_for(policy.generate(PROMPT, sampling(1)), 0.2))
        opened.run(policy.wake())  # the host has cancelled the request above
        assert len(opened.generate(1)) == 1
        with pytest.raises(ValueError, match="exceeds the context of 256"):
            opened.run(policy.generate(PROMPT * 9, sampling(1)))
        with pytest.raises(ValueError, match="an engine's host has no call 'close'"):
            opened.run(policy._call("close"))


def test_requests_of_one_tick_are_one_message(shared, cfg, session, monkeypatch):
    frames, made = [], host_protocol._framed
    monkeypatch.setattr(host_protocol, "_framed", lambda text: frames.append(text) or made(text))
    with session(cfg) as opened:
        opened.generate(1)
        frames.clear()
        opened.generate(*range(20))
    assert [text.count(b'"generate"') for text in frames] == [20]


@pytest.mark.parametrize("harm", [flip, halve, "swap"])
def test_harm_on_the_way_is_found_before_a_token_is_sampled(
    shared, cfg, session, make_model, monkeypatch, harm
):
    written = transport.write_weights

    def write(path, weights):
        if harm == "swap":
            names = ["model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.up_proj.weight"]
            weights = {**weights, names[0]: weights[names[1]], names[1]: weights[names[0]]}
        written(path, weights)
        if harm != "swap":
            harm(path)

    with session(cfg, 0, version=1) as opened:
        before = opened.generate(1)
        monkeypatch.setattr(transport, "write_weights", write)
        with pytest.raises(EngineMismatch, match=r"weights version 2 arrived at .* sent was"):
            opened.publish(make_model(1), 2)
        assert same(opened.generate(1), before)  # unchanged
        assert opened.policy.version == 1
        monkeypatch.undo()
        opened.publish(make_model(1), 2)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_twenty_honest_publishes_arrive_whole(room, session, make_model, tokenizer, dtype):
    """Each publish compares the digest of what the engine holds with that of what was sent."""
    models = [make_model(seed).to(getattr(torch, dtype)) for seed in range(21)]
    cfg = config(room, engine_dtype=dtype)
    with session(cfg, checkpoint=new_checkpoint(models[0], tokenizer)) as opened:
        for version, model in enumerate(models[1:], 1):
            opened.publish(model, version)
            (answer,) = opened.generate(1)
            assert answer.version == version
            if dtype == "float32":  # in half precision, rounding changes what is drawn
                assert same([answer], expected(model, tokenizer, version, 1))


def test_first_weights_that_were_harmed_begin_no_session(shared, cfg, session, monkeypatch):
    written = transport.write_weights

    def write(path, weights):
        written(path, weights)
        flip(path)

    monkeypatch.setattr(transport, "write_weights", write)
    with pytest.raises(EngineMismatch, match="weights version 0"), session(cfg, 2):
        pass


def test_an_engine_grows_with_what_is_asked_and_begins_as_large_as_the_run_needs(
    shared, cfg, session, num_starts
):
    with session(cfg, num_slots=2):
        begun = num_starts()  # started earlier or now
    for num_slots, more in ((8, 0), (9, 1), (1, 1)):
        with session(cfg, num_slots=num_slots) as opened:
            opened.generate(1)
        assert num_starts() == begun + more


def test_two_sessions_at_once_have_two_engines(shared, cfg, session, monkeypatch, caplog):
    monkeypatch.setattr(hosts, "QUEUE_S", 0.1)
    with session(cfg) as first, session(cfg) as second:
        assert same(first.generate(1), second.generate(1))
        assert f"the engine is used by process {os.getpid()}" in caplog.text
        folders = [opened.policy._connection.folder for opened in (first, second)]
        assert folders[0] != folders[1]
        connection = hosts.connect(folders[0], lambda: "", sys.executable)
        with pytest.raises(HostBusy):
            connection.ask("begin", {}, "", 0, 0.0, limit_s=5)


@pytest.mark.parametrize("odd", ["protocol", "source", "packages"])
def test_a_host_of_other_versions_is_refused_in_one_line(shared, cfg, session, monkeypatch, odd):
    with session(cfg) as opened:
        mine, folder = {**host_protocol.door(), odd: "f" * 64}, opened.policy._connection.folder
        monkeypatch.setattr(hosts, "door", lambda _: mine)
        with pytest.raises(ConfigError, match=rf"not fit this process: {odd} .+ and f+ here; let"):
            hosts.connect(folder, lambda: "", sys.executable)


def test_the_interpreter_is_asked_what_it_has(tmp_path, monkeypatch):
    beside = tmp_path / "other/bin/python"
    beside.parent.mkdir(parents=True)
    beside.symlink_to(sys.executable)
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "mine"))
    cfg = config(tmp_path, engine_python=str(beside))
    monkeypatch.setitem(engines.PACKAGES, "vllm", "json")
    check_engine(cfg)
    monkeypatch.setitem(engines.PACKAGES, "vllm", "no_such_package")
    with pytest.raises(ConfigError, match=f"no_such_package, which is not installed in {beside};"):
        check_engine(cfg)
    cfg = config(tmp_path, engine_python="/bin/false")
    with pytest.raises(ConfigError, match=r"engine_python /bin/false lies in no .* export AGENT"):
        check_engine(cfg)
    monkeypatch.setenv("AGENTGYM_ENGINE_PYTHON", "/bin/false")
    with pytest.raises(ConfigError, match="engine_python /bin/false is no Python"):
        check_engine(cfg)


@pytest.mark.slow
def test_a_process_below_uses_the_engine_while_it_is_free(
    shared, cfg, session, num_starts, tmp_path
):
    model = checkpoint()
    with session(cfg, checkpoint=model) as opened:
        opened.generate(1)
    begun = num_starts()
    for more, busy in ((0, False), (1, True)):
        with session(cfg, checkpoint=model) if busy else nullcontext():
            process = owner(tmp_path)
            assert process.communicate(timeout=140)[0] == "playing\n"
            assert process.returncode == 0
        assert num_starts() == begun + more


def test_folders_of_the_killed_are_swept(room):
    old, used, young = (room / f"{hosts.PREFIX}{name}" for name in ("old", "used", "young"))
    for folder in (old, used, young):
        folder.mkdir()
    for folder in (old, used):
        os.utime(folder, (0, 0))
    with host_protocol.address_in(used):
        new = hosts.new_folder()
        assert not old.exists()
        assert used.exists()
        assert young.exists()
    assert new.stat().st_mode & 0o777 == 0o700
