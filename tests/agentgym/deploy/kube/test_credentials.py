"""Credentials are found as kubectl finds them, and read again when they have changed."""

import builtins

import pytest
import yaml

from agentgym.config import ConfigError
from agentgym.deploy.kube.credentials import Session, Source


def kubeconfig(path, **user):
    content = {
        "clusters": [{"name": n, "cluster": {"server": f"http://{n}.test:1"}} for n in "ab"],
        "users": [{"name": "u", "user": user}],
        "contexts": [{"name": n, "context": {"cluster": n, "user": "u"}} for n in "ab"],
        "current-context": "a",
    }
    path.write_text(yaml.safe_dump(content))
    return path


def test_the_file_given_wins_over_the_variable_and_that_over_the_home_and_the_pod(tmp_path):
    given, named = kubeconfig(tmp_path / "given"), kubeconfig(tmp_path / "named")
    (tmp_path / ".kube").mkdir()
    home = kubeconfig(tmp_path / ".kube" / "config")
    pod = {"HOME": str(tmp_path), "KUBERNETES_SERVICE_HOST": "10.0.0.1"}
    everything = pod | {"KUBECONFIG": str(named)}
    assert Source.find(given, "b", everything) == Source(str(given), "b")
    assert Source.find(None, "", everything) == Source(str(named))
    assert Source.find(None, "", pod) == Source(str(home))
    home.unlink()
    assert Source.find(None, "", pod) == Source("")


def test_without_any_the_error_says_where_was_looked(tmp_path):
    with pytest.raises(ConfigError, match=r"neither KUBECONFIG nor ~/\.kube/config"):
        Source.find(None, "", {"HOME": str(tmp_path)})
    with pytest.raises(ConfigError, match="nowhere: no such file"):
        Source.find(None, "", {"HOME": str(tmp_path), "KUBECONFIG": "nowhere"})


def test_a_context_chooses_the_cluster(tmp_path):
    file = kubeconfig(tmp_path / "config", token="t")
    assert Session(Source(str(file))).client.configuration.host == "http://a.test:1"
    assert Session(Source(str(file), "b")).client.configuration.host == "http://b.test:1"
    with pytest.raises(ConfigError, match=r"config, context c: .*c"):
        Session(Source(str(file), "c"))


@pytest.mark.parametrize("text", ["", "[1]", "a: b", "{"])
def test_a_file_that_is_no_kubeconfig_is_one_sentence(tmp_path, text):
    (tmp_path / "config").write_text(text)
    with pytest.raises(ConfigError, match="config: ") as caught:
        Session(Source(str(tmp_path / "config")))
    assert "\n" not in str(caught.value)


def test_a_rotated_token_is_read_when_the_old_one_is_refused(tmp_path):
    (tmp_path / "token").write_text("first")
    session = Session(
        Source(str(kubeconfig(tmp_path / "config", tokenFile=str(tmp_path / "token"))))
    )
    first = session.client
    assert first.configuration.api_key["BearerToken"] == "Bearer first"
    (tmp_path / "token").write_text("second")
    assert session.renew(first)
    assert session.client.configuration.api_key["BearerToken"] == "Bearer second"
    assert session.client.client.rest_client is first.client.rest_client  # connections stay open
    assert session.renew(first)  # a thread whose call was refused renews too
    assert not session.renew(session.client)  # refused, without newer credentials


def test_without_the_package_the_command_that_brings_it_is_named(tmp_path, monkeypatch):
    file = kubeconfig(tmp_path / "config", token="t")
    real = builtins.__import__

    def without(name, *arguments, **options):
        if name == "kubernetes":
            raise ImportError("No module named 'kubernetes'")
        return real(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ConfigError, match=r"pip install -e '\.\[cluster\]'"):
        Session(Source(str(file)))
