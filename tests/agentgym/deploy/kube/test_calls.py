"""Late, busy, broken or unauthorized responses: bounded retries, and errors that name a fix."""

import json

import pytest
from kubernetes.client import ApiClient, Configuration
from kubernetes.client.rest import RESTResponse
from kubernetes.dynamic import DynamicClient, Resource

from agentgym.deploy.kube import calls
from agentgym.deploy.kube.calls import (
    ApiUnreachable,
    Forbidden,
    KubeError,
    RateLimiter,
    Retries,
    Transport,
    error_of,
)
from agentgym.deploy.kube.client import POD, Kube

ASK = {"verb": "request", "doing": "question", "method": "get", "path": "/x"}


class Answer:
    """urllib3's response, as far as the client reads it."""

    def __init__(self, status=200, *pieces, headers=None):
        self.status, self.headers, self.reason = status, headers or {}, ""
        self._pieces = list(pieces)

    def read1(self, _):
        piece = self._pieces.pop(0) if self._pieces else b""
        if isinstance(piece, BaseException):
            raise piece
        return piece

    def stream(self, **_):
        return iter(lambda: self.read1(None), b"")

    @property
    def data(self):
        return b"".join(self.stream())

    def close(self):
        pass

    release_conn = close


class Script:
    """Session, clock and connections to an API server that gives these answers in order."""

    def __init__(self, *answers):
        self.answers, self.asked, self.slept, self.now = list(answers), [], [], 0.0
        self.source, self.renewed = "a kubeconfig", False
        api = ApiClient(Configuration(host="http://api.test"))
        api.rest_client = self
        self.client = DynamicClient(api, discoverer=lambda *_: None)

    def renew(self, refused):
        self.renewed, before = True, self.renewed
        return not before

    def request(self, method, url, headers, body, post_params, _request_timeout):
        self.asked.append((method, url, body))
        answer = self.answers.pop(0)
        if isinstance(answer, BaseException):
            raise answer
        return RESTResponse(answer)

    def sleep(self, seconds):
        if seconds:
            self.slept.append(seconds)
        self.now += seconds

    def transport(self, **retries):
        return Transport(self, Retries(**retries), clock=lambda: self.now, sleep=self.sleep)

    def kube(self, **retries):
        free = RateLimiter(1000.0, 1000, clock=lambda: self.now)
        kube = Kube(self.transport(**retries), "n", "m", creates=free, deletes=free)
        kube._resources["v1"] = {"Pod": Resource("api", None, "v1", "Pod", True, name="pods")}
        return kube


def test_a_storm_of_429_is_waited_out_as_long_as_the_server_asks():
    script = Script(*[Answer(429, b"{}", headers={"Retry-After": "3"})] * 4, Answer(200, b"{}"))
    sender = script.transport()
    assert sender.ask(**ASK) == {}
    assert sender.calls == {"request": 5}
    assert all(3.0 <= each <= 3.75 for each in script.slept)


def test_a_lost_connection_and_half_an_answer_are_asked_for_again():
    script = Script(OSError("refused"), Answer(200, b'{"a":', OSError("reset")), Answer(200, b"{}"))
    assert script.transport().ask(**ASK) == {}


def test_the_deadline_ends_the_attempts_with_the_last_reason():
    script = Script(*[Answer(503, b"", headers={"Retry-After": "9"})] * 9)
    with pytest.raises(ApiUnreachable, match=r"answered 503: no reason \(tried 3 times") as caught:
        script.transport(deadline_s=25.0).ask(**ASK)
    assert caught.value.status == 503
    assert script.now <= 25.0
    script = Script(*[OSError("refused")] * 9)
    with pytest.raises(ApiUnreachable, match=r"no answer from http://api.test .*refused.*5 times"):
        script.transport(most=5).ask(**ASK)


def test_an_answer_that_trickles_is_cut_off():
    script = Script()
    slow = Answer(200)
    slow.read1 = lambda _: script.sleep(3.0) or b" "
    script.answers = [slow, Answer(200, b"{}")]
    assert script.transport(request_s=10.0).ask(**ASK) == {}
    assert script.slept[:4] == [3.0] * 4


def test_refused_credentials_are_read_again_once():
    script = Script(Answer(401, b"{}"), Answer(200, b"{}"))
    assert script.transport().ask(**ASK) == {}
    script = Script(*[Answer(401, b"{}")] * 3)
    with pytest.raises(Forbidden, match="does not accept these credentials"):
        script.transport().ask(**ASK)
    assert len(script.asked) == 2


def test_what_no_repetition_mends_is_not_repeated():
    script = Script(Answer(422, b"{}"))
    with pytest.raises(KubeError, match="refuses it as invalid"):
        script.transport().ask(**ASK)
    script = Script(Answer(200, b"<html>"))
    with pytest.raises(KubeError, match="no API server: b'<html>'"):
        script.transport().ask(**ASK)


def pod(uid, version):
    return f'{{"metadata":{{"uid":"{uid}","resourceVersion":"{version}"}}}}'


def event(what, each):
    return f'{{"type":"{what}","object":{each}}}\n'.encode()


def listing(version, *pods):
    return Answer(
        200, f'{{"metadata":{{"resourceVersion":"{version}"}},"items":[{",".join(pods)}]}}'.encode()
    )


def test_a_watch_survives_drops_bookmarks_and_forgotten_versions():
    script = Script(
        listing("5", pod("a", "1")),
        Answer(
            200, event("ADDED", pod("b", "6")), event("BOOKMARK", pod("", "9")), OSError("reset")
        ),
        OSError("refused"),
        Answer(200, event("ERROR", '{"code":410,"reason":"Expired","message":"too old"}')),
        listing("20", pod("b", "12")),
        Answer(200, event("DELETED", pod("b", "21")), TimeoutError()),
        Answer(410, b"{}"),
        listing("30"),
    )
    watch = script.kube().watch(POD, for_s=100.0)
    told = ["".join(each["metadata"]["uid"] for each in next(watch)) for _ in range(9)]
    assert told == [
        "a",  # the first list
        "ab",
        "ab",  # connection reset
        "ab",  # connection refused
        "ab",  # 410: expired version
        "b",  # the second list
        "",
        "",  # timeout
        "",  # 410 again
    ]
    assert next(watch) == ()  # the third list
    assert len(script.asked) == 8


def test_a_watch_that_hears_nothing_for_the_deadline_gives_up_and_one_that_is_over_ends():
    script = Script(listing("5"), *[OSError("refused")] * 99)
    with pytest.raises(ApiUnreachable, match="watch of Pod: no answer"):
        list(script.kube(deadline_s=60.0).watch(POD, for_s=1000.0))
    assert 60.0 < script.now < 80.0
    script = Script(listing("5"), *[OSError("refused")] * 99)
    assert all(each == () for each in script.kube().watch(POD, for_s=10.0))


@pytest.mark.parametrize("line", [b"[1]\n", b'{"type":"ADDED"}\n', b"<html>\n"])
def test_a_watch_that_gets_no_events_lists_again(line):
    script = Script(listing("5"), Answer(200, line), listing("6", pod("a", "6")))
    watch = script.kube().watch(POD, for_s=1000.0)
    told = [next(watch) for _ in range(3)]
    assert [len(each) for each in told] == [0, 0, 1]


def test_a_watch_whose_credentials_are_refused_goes_on_with_renewed_ones():
    script = Script(listing("5"), Answer(401, b"{}"), Answer(200, event("ADDED", pod("a", "6"))))
    watch = script.kube().watch(POD, for_s=1000.0)
    assert [len(next(watch)) for _ in range(2)] == [0, 1]
    assert script.renewed
    assert script.slept == []


def test_a_watch_that_is_forbidden_is_not_repeated():
    script = Script(listing("5"), Answer(403, b'{"message":"no"}'))
    with pytest.raises(Forbidden):
        list(script.kube().watch(POD, for_s=1000.0))


def test_a_create_whose_answer_was_lost_is_found_again_and_a_strangers_is_not():
    wanted = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a"}}
    script = Script(OSError("reset"), Answer(409, b'{"reason":"AlreadyExists"}'))

    def stored(*_, **__):
        return script.asked[0][2]

    kube = script.kube()
    kube.find = stored
    assert kube.create(wanted)["metadata"]["name"] == "a"
    script = Script(Answer(409, b'{"reason":"AlreadyExists"}'))
    kube = script.kube()
    kube.find = lambda *_, **__: wanted
    with pytest.raises(KubeError, match="one of that name is there already"):
        kube.create(wanted)


def test_a_list_is_read_page_by_page_and_begun_again_where_its_pages_expired():
    def page(name, more):
        text = (
            f'{{"metadata":{{"continue":"{more}"}},"items":[{{"metadata":{{"name":"{name}"}}}}]}}'
        )
        return Answer(200, text.encode())

    script = Script(page("a", "2"), Answer(410, b"{}"), page("a", "2"), page("b", ""))
    found = script.kube().list(POD).items
    assert [each["metadata"]["name"] for each in found] == ["a", "b"]
    assert {each["kind"] for each in found} == {"Pod"}


def test_waits_double_up_to_the_longest_and_are_spread():
    retries = Retries(first_s=0.2, longest_s=10.0)
    most = [retries.wait_s(attempt, 0.0, draw=1.0) for attempt in range(8)]
    assert most == pytest.approx([0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10.0, 10.0])
    assert retries.wait_s(3, 0.0, draw=0.0) == pytest.approx(0.8)


def test_what_a_server_asks_for_is_waited_for_and_believed_for_so_long_only():
    retries = Retries(longest_s=10.0)
    assert retries.wait_s(0, 4.0, draw=0.0) == 4.0
    assert retries.wait_s(0, 4.0, draw=1.0) == 5.0  # with a spread of up to a quarter
    assert retries.wait_s(0, 3600.0, draw=0.0) == 30.0


def test_only_what_may_pass_is_tried_again():
    again = [408, 429, 500, 502, 503, 504]
    never = [0, 400, 401, 403, 404, 409, 410, 422, 501]
    assert [each for each in again + never if Retries().may_retry(KubeError("", each))] == again
    assert Retries().may_retry(ApiUnreachable("no answer"))


def test_a_burst_goes_at_once_and_the_rest_at_its_rate():
    now = [100.0]
    limiter = RateLimiter(per_s=4.0, burst=3, clock=lambda: now[0])
    waits = [limiter.reserve_s() for _ in range(5)]
    assert waits == pytest.approx([0.0, 0.0, 0.0, 0.25, 0.5])
    now[0] += 0.5  # the last slot is due: unused time is not saved
    assert limiter.reserve_s() == pytest.approx(0.25)
    now[0] += 100.0
    assert [limiter.reserve_s() for _ in range(4)] == pytest.approx([0.0, 0.0, 0.0, 0.25])


def said(**fields):
    return json.dumps({"kind": "Status", **fields})


def test_a_conflict_names_each_field_and_its_manager():
    causes = [
        {
            "reason": "FieldManagerConflict",
            "message": f'conflict with "{manager}" using apps/v1 at 2026-01-01T00:00:00Z',
            "field": field,
        }
        for manager, field in [
            ("kubectl", ".spec.replicas"),
            ("helm", ".spec.paused"),
            ("kubectl", ".metadata.labels.a"),
        ]
    ]
    body = said(reason="Conflict", message="Apply failed", details={"causes": causes})
    error = error_of(409, body, "apply of Deployment x")
    assert isinstance(error, calls.FieldConflict)
    assert str(error) == (
        "apply of Deployment x: fields are held by another manager: spec.replicas,"
        " metadata.labels.a by kubectl; spec.paused by helm. Let it give them up (apply there"
        " without these fields), leave them out of the manifest, or take them over with force"
    )


@pytest.mark.parametrize(
    ("status", "body", "kind", "told"),
    [
        (404, said(message='pods "a" not found'), calls.NotFound, 'x: pods "a" not found'),
        (409, said(reason="AlreadyExists"), calls.AlreadyExists, "x: one of that name"),
        (409, said(reason="Conflict", message="object has been modified"), calls.Stale, "changed"),
        (410, said(message="too old resource version"), calls.Gone, "too old"),
        (401, said(message="Unauthorized"), calls.Forbidden, "renew them"),
        (403, said(message="cannot create"), calls.Forbidden, "give the account that right"),
        (403, said(message="exceeded quota: agentgym"), calls.Forbidden, "agentgym envs gc"),
        (403, said(message="is being terminated"), calls.Forbidden, "wait until the namespace"),
        (422, said(message="replicas: Invalid value"), calls.KubeError, "refuses it as invalid"),
        (502, "<html>Bad gateway</html>", calls.KubeError, "answered 502: <html>Bad gateway"),
        (503, "", calls.KubeError, "answered 503: no reason"),
    ],
)
def test_each_refusal_has_its_kind_and_a_way_out(status, body, kind, told):
    error = error_of(status, body, "x")
    assert type(error) is kind
    assert told in str(error)
    assert "\n" not in str(error)
