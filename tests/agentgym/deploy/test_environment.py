"""Environment servers that outlive a run: kept once, shared by equal runs, ended by name."""

import os
import signal
import time
import urllib.error
import urllib.request
from dataclasses import replace

import pytest

from agentgym.config import ConfigError, load_config
from agentgym.deploy import environment
from agentgym.deploy.environment import end_all, environment_servers, keep, kept_for

pytestmark = pytest.mark.integration


@pytest.fixture
def cfg(tmp_path):
    yield load_config(overrides=[f"store.path={tmp_path}/store"])
    end_all(tmp_path)


def is_ready(url):
    try:
        with urllib.request.urlopen(f"{url}/readyz", timeout=5):
            return True
    except OSError:
        return False


def wait_until(done):
    deadline = time.monotonic() + 60
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_kept_server_is_started_once_used_by_runs_and_ended_on_request(cfg, capfd):
    (env,) = cfg.envs
    assert kept_for(cfg, env) is None
    server = keep(cfg, env)
    assert is_ready(server.url)
    assert keep(cfg, env) == server
    with environment_servers(cfg, False) as endpoints:
        assert endpoints == {"babyai": [server.url]}
        assert endpoints["babyai"][0].token == server.token
    assert is_ready(server.url)  # it outlives the run
    with environment_servers(cfg, True) as endpoints:  # servers with an expert are not shared
        assert endpoints["babyai"] != [server.url]
    other = env.model_copy(update={"options": {**env.options, "actions": "high"}})
    assert kept_for(cfg, other) is None
    file = next((cfg.state_dir / "environments").iterdir())
    assert file.stat().st_mode & 0o077 == 0
    assert server.token not in "".join([repr(server), *capfd.readouterr()])
    assert end_all(cfg.state_dir) == [server]
    wait_until(lambda: not is_ready(server.url))
    assert kept_for(cfg, env) is None
    assert end_all(cfg.state_dir) == []


@pytest.mark.slow
def test_a_server_dies_with_its_keeper_and_the_next_one_is_new(cfg):
    (env,) = cfg.envs
    server = keep(cfg, env)
    os.kill(server.pid, signal.SIGKILL)
    wait_until(lambda: not is_ready(server.url))
    os.waitpid(server.pid, 0)
    assert kept_for(cfg, env) is None  # although its file lists it
    assert keep(cfg, env).pid != server.pid


def test_a_server_ends_by_itself_when_its_time_is_over(cfg):
    server = keep(cfg, cfg.envs[0].model_copy(update={"keep_s": 1.0}))
    wait_until(lambda: not is_ready(server.url))
    os.waitpid(server.pid, 0)
    assert list((cfg.state_dir / "environments").iterdir()) == []


def test_a_server_of_other_code_or_too_small_is_refused(cfg, monkeypatch):
    (env,) = cfg.envs
    server = keep(cfg, env)
    larger = env.model_copy(update={"max_sessions": 2 * env.max_sessions})
    with pytest.raises(ConfigError, match=r"has room for 256 sessions, env\.max_sessions is 512"):
        keep(cfg, larger)
    monkeypatch.setattr(environment, "_source", lambda env: replace(server, source="other").source)
    with (
        pytest.raises(ConfigError, match=r"started from other code than this; run the flows envs"),
        environment_servers(cfg, False),
    ):
        pass


def test_options_that_the_environment_refuses_start_nothing(cfg):
    env = cfg.envs[0].model_copy(update={"options": {"levels": ["GoToNowhere"]}})
    with pytest.raises(ConfigError, match="GoToNowhere"):
        keep(cfg, env)
    assert not (cfg.state_dir / "environments").exists()
