"""Answers that are late, busy, broken or no longer trusted: asked again within bounds."""

import itertools

import pytest

from agentgym.deploy.kube.client import Kube
from agentgym.deploy.kube.errors import ApiUnreachable, Forbidden, KubeError
from agentgym.deploy.kube.kinds import POD, Place
from agentgym.deploy.kube.pace import RateLimiter, Retries
from agentgym.deploy.kube.transport import Request, Transport
from agentgym.deploy.kube.watching import IDLE

ASK = Request("GET", "/x", "question")


class Answer:
    """urllib3's response, as far as it is read."""

    def __init__(self, status=200, *pieces, headers=None):
        self.status, self.headers, self._pieces = status, headers or {}, list(pieces)

    def read1(self, _):
        piece = self._pieces.pop(0) if self._pieces else b""
        if isinstance(piece, BaseException):
            raise piece
        return piece

    def read(self):
        return b"".join(self._pieces)

    def close(self):
        pass

    release_conn = close

    @property
    def response(self):
        return self


class Script:
    """A session, a clock and an API server that answers what it was told to, in order."""

    def __init__(self, *answers):
        self.answers, self.asked, self.slept, self.now = list(answers), [], [], 0.0
        self.tokens = itertools.count()
        self.host, self.source = "http://api.test", "a kubeconfig"
        self.configuration = self.rest_client = self

    def api(self):
        return self

    def renew(self, refused):
        return next(self.tokens) == 0

    def param_serialize(self, method, path, query_params, auth_settings):
        return method, path, {}, None, None

    def request(self, method, url, headers, body, _request_timeout):
        self.asked.append((method, url, body))
        answer = self.answers.pop(0)
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def sleep(self, seconds):
        self.slept.append(seconds)
        self.now += seconds

    def transport(self, **retries):
        return Transport(self, Retries(**retries), clock=lambda: self.now, sleep=self.sleep)

    def kube(self, **retries):
        free = RateLimiter(1000.0, 1000, clock=lambda: self.now)
        kube = Kube(
            self.transport(**retries), namespace="n", manager="m", creates=free, deletes=free
        )
        kube._places["v1"] = {"Pod": Place("pods", True)}
        return kube


def test_a_storm_of_429_is_waited_out_as_long_as_the_server_asks():
    script = Script(*[Answer(429, b"{}", headers={"Retry-After": "3"})] * 4, Answer(200, b"{}"))
    transport = script.transport()
    assert transport.ask(ASK) == {}
    assert transport.calls == {"get": 5}
    assert all(3.0 <= each <= 3.75 for each in script.slept)


def test_a_lost_connection_and_half_an_answer_are_asked_for_again():
    script = Script(OSError("refused"), Answer(200, b'{"a":', OSError("reset")), Answer(200, b"{}"))
    assert script.transport().ask(ASK) == {}


def test_the_deadline_ends_the_attempts_with_the_last_reason():
    script = Script(*[Answer(503, b"", headers={"Retry-After": "9"})] * 9)
    with pytest.raises(ApiUnreachable, match=r"answered 503: no reason \(tried 3 times") as caught:
        script.transport(deadline_s=25.0).ask(ASK)
    assert caught.value.status == 503
    assert script.now <= 25.0
    script = Script(*[OSError("refused")] * 9)
    with pytest.raises(ApiUnreachable, match=r"no answer from http://api.test .*refused.*5 times"):
        script.transport(most=5).ask(ASK)


def test_an_answer_that_trickles_is_cut_off():
    script = Script()
    slow = Answer(200)
    slow.read1 = lambda _: script.sleep(3.0) or b" "
    script.answers = [slow, Answer(200, b"{}")]
    assert script.transport(request_s=10.0).ask(ASK) == {}
    assert script.slept[:4] == [3.0] * 4


def test_refused_credentials_are_read_again_once():
    script = Script(Answer(401, b"{}"), Answer(200, b"{}"))
    assert script.transport().ask(ASK) == {}
    script = Script(*[Answer(401, b"{}")] * 3)
    with pytest.raises(Forbidden, match="does not accept these credentials"):
        script.transport().ask(ASK)
    assert len(script.asked) == 2


def test_what_no_repetition_mends_is_not_repeated():
    script = Script(Answer(422, b"{}"))
    with pytest.raises(KubeError, match="refuses it as invalid"):
        script.transport().ask(ASK)
    script = Script(Answer(200, b"<html>"))
    with pytest.raises(KubeError, match="no API server: b'<html>'"):
        script.transport().ask(ASK)


def pod(uid, version):
    return f'{{"metadata":{{"uid":"{uid}","resourceVersion":"{version}"}}}}'


def event(what, each):
    return f'{{"type":"{what}","object":{each}}}\n'.encode()


def listing(version, *pods):
    return Answer(
        200,
        f'{{"metadata":{{"resourceVersion":"{version}"}},"items":[{",".join(pods)}]}}'.encode(),
    )


def test_a_watch_survives_drops_bookmarks_and_forgotten_versions():
    script = Script(
        listing("5", pod("a", "1")),
        Answer(
            200, event("ADDED", pod("b", "6")), event("BOOKMARK", pod("", "9")), OSError("reset")
        ),
        OSError("refused"),
        Answer(200, event("ERROR", '{"code":410,"message":"too old"}')),
        listing("20", pod("b", "12")),
        Answer(200, event("DELETED", pod("b", "21")), TimeoutError()),
        Answer(410, b"{}"),
        listing("30"),
    )
    told = []
    for change in script.kube().watch(POD, for_s=100.0):
        told.append((change.what, change.object.get("metadata", {}).get("uid")))
        if len(told) == 11:
            break
    assert told == [
        ("added", "a"),
        ("idle", None),  # all of the first list
        ("added", "b"),
        ("idle", None),  # reset
        ("idle", None),  # refused
        ("deleted", "a"),  # forgotten, and a new list
        ("modified", "b"),
        ("idle", None),
        ("deleted", "b"),
        ("idle", None),  # nothing came
        ("idle", None),  # the third list
    ]
    assert len(script.asked) == 8


def test_a_watch_that_hears_nothing_for_the_deadline_gives_up_and_one_that_is_over_ends():
    script = Script(listing("5"), *[OSError("refused")] * 99)
    with pytest.raises(ApiUnreachable, match="watch of Pod: no answer"):
        list(script.kube(deadline_s=60.0).watch(POD, for_s=1000.0))
    assert 60.0 < script.now < 80.0
    script = Script(listing("5"), *[OSError("refused")] * 99)
    assert all(each == IDLE for each in script.kube().watch(POD, for_s=10.0))


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
