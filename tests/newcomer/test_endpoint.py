"""Evaluate your model behind an OpenAI-compatible endpoint with the README's command. The vendors'
response formats are those of public bug reports.
"""

import json
import re
import shlex
from threading import Event
from types import SimpleNamespace

import pytest

from tests.answering import Handler, http_server

pytestmark = pytest.mark.timeout(600)  # may first have to make the finished project


def completion(content="turn left", finish="stop"):
    message = {"role": "assistant", "content": content}
    usage = {"prompt_tokens": 10, "completion_tokens": 3, "total_tokens": 13}
    return 200, {"choices": [{"message": message, "finish_reason": finish}], "usage": usage}


def new_name(request):
    if "max_tokens" not in request:
        return completion()
    return 400, {"error": {"message": "max_tokens is not known; max_completion_tokens is"}}


THOUGHT = {"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]}
WAYS = {
    "text": lambda _: completion(),
    "parts": lambda _: completion([THOUGHT, {"type": "text", "text": "turn left"}]),
    "cut": lambda _: completion(None, "length"),
    "filtered": lambda _: completion(None, "content_filter"),
    "new_name": new_name,
    "error_in_200": lambda _: (200, {"error": {"message": "not offered to you", "code": 404}}),
}


@pytest.fixture
def vendor():
    """Server that answers `turn left` in the format `way` once `may_answer` is set."""
    state = SimpleNamespace(requests=[], way="text", may_answer=Event())
    state.may_answer.set()

    class Vendor(Handler):
        protocol_version = "HTTP/1.1"

        def do_POST(self):
            state.requests.append(self.read_json())
            state.may_answer.wait(60)
            status, reply = WAYS[state.way](state.requests[-1])
            self.send(json.dumps(reply).encode(), status, Content_Type="application/json")

    with http_server(Vendor) as address:
        state.url = f"{address}/v1"
        yield state


ASKED = ("--env", "babyai", "--num-items", "2", "--max-turns", "3")


def command(vendor, way="text"):
    """Return the README's command. way: format of the response, also the model's name."""
    vendor.way = way
    return ("agentgym", "evaluate", vendor.url, "--model", way, *ASKED)


TOLD = re.compile(
    r"babyai: this model was not trained here\. It gets \d+ characters of instructions, at most 512"
    r" tokens a reply and 4096 an episode, action format plain; --instructions, --max-new-tokens,"
    r" --context-tokens and --action-format change that"
)


def test_the_first_request_waits_until_it_is_printed_how_the_model_is_asked(finished, vendor):
    assert finished.run("agentgym", "evaluate", "random", *ASKED).returncode == 0
    vendor.may_answer.clear()
    with finished.start(*command(vendor)) as running:
        first = next(line for line in running.stdout if "not trained here" in line)
        assert TOLD.fullmatch(first.strip())
        vendor.may_answer.set()
        rest = running.stdout.read()
    assert running.returncode == 0, rest
    assert vendor.requests[0]["max_tokens"] == 512
    *_, how, report, compare = rest.splitlines()
    folder = re.fullmatch(r"ran: evaluation \w{12} in (\S+)", how)[1]
    assert report == f"report   {folder}/report.html"
    assert (finished.folder / folder / "report.html").is_file()
    name, typed = compare.split(maxsplit=1)
    assert name == "compare"
    compared = finished.run(*shlex.split(typed))
    assert compared.returncode == 0, compared.stderr
    assert "is not shown to differ from chance" in compared.stdout


@pytest.mark.parametrize(
    ("way", "named", "action"),
    [
        ("parts", "Outcomes: 6 truncated.", "turn left"),
        ("new_name", "Outcomes: 6 truncated.", "turn left"),
        ("cut", "babyai: 18 of 18 replies were cut at the limit of their tokens", ""),
        ("filtered", "babyai: 18 of 18 replies were held back by a filter.", ""),
    ],
)
def test_replies_of_other_forms_are_played_and_counted(finished, vendor, way, named, action):
    ended = finished.run(*command(vendor, way))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "coverage 100.0%: 6 of 6 episodes count" in ended.stdout
    *_, note, usage, how, report, compare = ended.stdout.splitlines()
    assert note.startswith(named)
    calls, failed, tokens = re.fullmatch(r"calls (\d+) \((\d+) failed\), (.+)", usage).groups()
    assert int(calls) - int(failed) == 18
    assert (failed != "0") is (way == "new_name")
    assert tokens == "input tokens 180, cached tokens unknown, output tokens 54"
    assert [line.split()[0] for line in (how, report, compare)] == ["ran:", "report", "compare"]
    turns = vendor.requests[-1]["messages"]
    assert {turn["content"] for turn in turns if turn["role"] == "assistant"} == {action}


def test_an_error_in_a_reply_of_status_200_is_named_and_ends_the_command(finished, vendor):
    ended = finished.run(*command(vendor, "error_in_200"))
    assert ended.returncode == 1, ended.stdout + ended.stderr
    named = f"model error_in_200 at {vendor.url}: error 404 with status 200: not offered to you"
    assert "This result is invalid: coverage 0.0% is below 95.0%." in ended.stdout
    *_, stopped, how, report = ended.stdout.splitlines()
    assert stopped == f"stopped: {named}; the same command continues it"
    assert [line.split()[0] for line in (how, report)] == ["ran:", "report"]
