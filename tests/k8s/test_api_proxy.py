"""The tests' proxy makes the API server fail on command, and otherwise forwards."""

import json

import pytest

pytestmark = [pytest.mark.kubernetes, pytest.mark.filterwarnings("ignore:Unverified HTTPS request")]


@pytest.fixture
def api(api_proxy):
    """Core API through the proxy, by a client without retries."""
    from kubernetes import client, config

    settings = client.Configuration()
    config.load_kube_config(str(api_proxy.kubeconfig), client_configuration=settings)
    settings.retries = False
    with client.ApiClient(settings) as connection:
        yield client.CoreV1Api(connection)


def status_of(call):
    from kubernetes import client

    with pytest.raises(client.ApiException) as failure:
        call()
    return failure.value


def test_what_is_asked_is_passed_on(api, api_proxy, kubectl):
    names = {each.metadata.name for each in api.list_namespace().items}
    assert "kube-system" in names
    assert api_proxy.asked["GET", 200] == 1
    given = status_of(lambda: api.read_namespace("nowhere"))
    assert (given.status, json.loads(given.body)["reason"]) == (404, "NotFound")


def test_a_storm_of_429_says_when_to_come_back_and_passes(api, api_proxy):
    api_proxy.fail(429, 2, retry_after_s=3)
    for _ in range(2):
        told = status_of(api.list_namespace)
        assert (told.status, told.headers["Retry-After"]) == (429, "3")
    assert api.list_namespace().items
    assert api_proxy.asked["GET", 429] == 2
    assert api_proxy.failures_left == 0


def test_errors_hit_the_requests_that_match(api, api_proxy):
    api_proxy.fail(503, 1, lambda method, path: path.startswith("/api/v1/nodes"))
    assert api.list_namespace().items
    assert status_of(api.list_node).status == 503
    assert api.list_node().items


def test_a_watch_is_dropped_in_the_middle(api, api_proxy):
    from urllib3.exceptions import HTTPError

    stream = api.list_namespace(watch=True, _preload_content=False)
    assert b'"ADDED"' in stream.readline()
    assert api_proxy.drop_watches() == 1
    with pytest.raises((HTTPError, OSError)):
        stream.read()


def test_a_watch_is_told_in_its_stream_that_its_version_is_too_old(api, api_proxy):
    api_proxy.expire_watches(1)
    event = json.loads(api.list_namespace(watch=True, _preload_content=False).read())
    assert (event["type"], event["object"]["code"]) == ("ERROR", 410)


def test_a_watch_is_told_at_once_that_its_version_is_too_old(api, api_proxy):
    api_proxy.expire_watches(1, as_event=False)
    assert api.list_namespace().items
    assert status_of(lambda: api.list_namespace(watch=True)).status == 410


def test_the_server_is_away_and_comes_back(api, api_proxy):
    from urllib3.exceptions import HTTPError

    assert api.list_namespace().items
    with api_proxy.away(), pytest.raises((HTTPError, OSError)):
        api.list_namespace()
    assert api.list_namespace().items
