"""A local environment server runs exactly as long as its `with` block."""

import json
import pickle
import subprocess
import sys
import time
import urllib.error
import urllib.request

import psutil
import pytest

from agentgym.config import ConfigError, EnvConfig, RunConfig
from agentgym.deploy import local, owned
from agentgym.deploy.environment import environment_servers
from agentgym.deploy.local import local_env
from agentgym.private import token_of

pytestmark = pytest.mark.integration


def children():
    return [
        child for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE
    ]


def test_a_server_is_ready_when_the_block_begins_and_gone_when_it_ends(tmp_path):
    env = EnvConfig(options={"actions": "high"}, max_sessions=3, session_ttl_s=12.5)
    before = children()
    with local_env(env, expert=True, log_path=tmp_path / "logs" / "env.log") as endpoints:
        info = ask(endpoints[0])
        assert (
            info["env"],
            info["options"]["actions"],
            info["max_sessions"],
            info["session_ttl_s"],
        ) == ("babyai", "high", 3, 12.5)
        assert info["offers_expert"]
        with open(f"/proc/{info['pid']}/environ") as environment:
            assert "OMP_NUM_THREADS=1" in environment.read().split("\0")
    assert children() == before
    assert "babyai listens on http://127.0.0.1:" in (tmp_path / "logs" / "env.log").read_text()


def ask(endpoint, token=None):
    headers = {"Authorization": f"Bearer {endpoint.token if token is None else token}"}
    with urllib.request.urlopen(
        urllib.request.Request(f"{endpoint}/info", headers=headers), timeout=5
    ) as reply:
        return json.loads(reply.read())


def test_each_server_has_a_token_of_its_own_that_nobody_else_can_read(
    tmp_path, monkeypatch, caplog
):
    monkeypatch.setenv("AGENTGYM_ENV_TOKEN", "of-configured-servers")
    caplog.set_level(0)
    logs = tmp_path / "first", tmp_path / "second"
    with (
        local_env(EnvConfig(), expert=False, log_path=logs[0]) as (first,),
        local_env(EnvConfig(), expert=False, log_path=logs[1]) as (second,),
    ):
        pid = ask(first)["pid"]
        assert ask(second)["env"] == "babyai"
        for token in ("", "of-configured-servers", second.token):
            with pytest.raises(urllib.error.HTTPError, match="401"):
                ask(first, token)
        with open(f"/proc/{pid}/cmdline") as command:
            assert first.token not in command.read()
    shown = [
        str(first),
        repr(first),
        f"{first}",
        json.dumps([first]),
        caplog.text,
        *(log.read_text() for log in logs),
    ]
    assert not [text for text in shown if first.token in text]
    assert len(first.token) >= 43  # 256 random bits
    # a rollout worker gets it with the endpoint
    assert pickle.loads(pickle.dumps(first)).token == first.token


def test_configured_servers_get_the_token_of_the_environment_wherever_they_are_asked_from(
    monkeypatch,
):
    monkeypatch.setenv("AGENTGYM_ENV_TOKEN", "of-configured-servers")
    cfg = RunConfig.model_validate({"env": {"endpoints": ["http://10.0.0.5:8000"]}})
    with environment_servers(cfg, False) as endpoints:
        # also on a machine with other environment variables
        (endpoint,) = pickle.loads(pickle.dumps(endpoints))["babyai"]
    monkeypatch.delenv("AGENTGYM_ENV_TOKEN")
    assert (endpoint, token_of(endpoint)) == ("http://10.0.0.5:8000", "of-configured-servers")


def test_servers_of_one_environment_may_have_a_token_that_others_do_not_get(monkeypatch):
    monkeypatch.setenv("AGENTGYM_ENV_TOKEN", "of-all")
    monkeypatch.setenv("AGENTGYM_ENV_TOKEN_BABYAI", "of-babyai")
    mix = [{"name": "textcraft", "endpoints": ["http://10.0.0.6:8000"]}]
    cfg = RunConfig.model_validate({"env": {"endpoints": ["http://10.0.0.5:8000"]}, "mix": mix})
    with environment_servers(cfg, False) as endpoints:
        tokens = {env: token_of(urls[0]) for env, urls in endpoints.items()}
    assert tokens == {"babyai": "of-babyai", "textcraft": "of-all"}


def test_no_process_is_left_after_an_exception(tmp_path):
    before = children()

    def interrupted():
        with local_env(EnvConfig(), expert=False, log_path=tmp_path / "log"):
            assert len(children()) == len(before) + 1
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert children() == before


def test_a_server_that_refuses_its_options_is_bad_input_at_once(tmp_path):
    started = time.monotonic()
    env = EnvConfig(options={"vew": "compact"})
    with (
        pytest.raises(
            ConfigError, match=r"^env: babyai has no option 'vew'; did you mean 'view'\?$"
        ),
        local_env(env, expert=False, log_path=tmp_path / "log"),
    ):
        pass
    assert time.monotonic() - started < 20


def test_options_that_are_not_checked_in_time_are_bad_input():
    with pytest.raises(ConfigError, match=r"babyai did not check its options within 0\.01 s"):
        local.check_local_env(EnvConfig(start_timeout_s=0.01))


def test_a_server_that_exits_is_reported_with_its_last_words(tmp_path, monkeypatch):
    monkeypatch.setattr(local, "BAD_INPUT", None)
    with (
        pytest.raises(RuntimeError, match=r"exited with code 2(?s:.*)did you mean 'view'"),
        local_env(EnvConfig(options={"vew": "compact"}), expert=False, log_path=tmp_path / "log"),
    ):
        pass


def test_a_server_that_never_listens_is_given_up_and_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(owned, "STOP_TIMEOUT_S", 0.3)
    stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
    real = subprocess.Popen
    monkeypatch.setattr(
        subprocess,
        "Popen",
        lambda command, **options: real([sys.executable, "-c", stubborn], **options),
    )
    before = children()
    with (
        pytest.raises(RuntimeError, match="not ready within 1 s"),
        local_env(EnvConfig(start_timeout_s=1), expert=False, log_path=tmp_path / "log"),
    ):
        pass
    assert children() == before


def test_a_child_that_could_not_even_write_why_it_ended_says_whether_the_disk_is_full(
    tmp_path, monkeypatch
):
    (tmp_path / "log").touch()
    assert owned.tail(tmp_path / "log") == f"{tmp_path}/log is empty"
    monkeypatch.setattr(owned, "LEAST_SPACE", 1 << 60)  # more than any disk has
    assert owned.tail(tmp_path / "log").startswith(
        f"{tmp_path}/log is empty; no space left on its disk"
    )
