"""No change is lost or told twice, wherever a connection breaks."""

import pytest

from agentgym.deploy.kube.watching import Change, Known, events


def pod(uid, version):
    return {"metadata": {"uid": uid, "resourceVersion": version}}


def test_a_list_tells_what_has_changed_since_the_last_one():
    known = Known()
    assert known.listed([pod("a", "1"), pod("b", "2")]) == [
        Change("added", pod("a", "1")),
        Change("added", pod("b", "2")),
    ]
    assert known.listed([pod("b", "3"), pod("c", "4")]) == [
        Change("deleted", pod("a", "1")),
        Change("modified", pod("b", "3")),
        Change("added", pod("c", "4")),
    ]


def test_what_a_list_has_told_is_not_told_again_by_the_stream():
    known = Known()
    known.listed([pod("a", "1")])
    assert known.told({"type": "ADDED", "object": pod("a", "1")}) is None
    assert known.told({"type": "MODIFIED", "object": pod("a", "2")}) == (
        "modified",
        pod("a", "2"),
    )
    assert known.told({"type": "ADDED", "object": pod("b", "3")}) == ("added", pod("b", "3"))
    assert known.told({"type": "DELETED", "object": pod("a", "4")}) == ("deleted", pod("a", "4"))
    assert known.told({"type": "DELETED", "object": pod("a", "4")}) is None


def test_events_are_lines_wherever_the_bytes_are_cut():
    stream = b'{"type":"ADDED","object":{"n":1}}\n\n{"type":"BOOKMARK","object":{"n":2}}\n{"ty'
    pieces = [stream[i : i + 7] for i in range(0, len(stream), 7)]
    assert [event["object"]["n"] for event in events(pieces)] == [1, 2]  # the third was cut off


@pytest.mark.parametrize("line", [b"[1]\n", b'{"type":"ADDED"}\n', b"<html>\n"])
def test_what_is_no_event_is_refused(line):
    with pytest.raises(ValueError):
        list(events([line]))
