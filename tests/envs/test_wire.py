"""Messages of the API: misspelled, wrongly typed or too large fields are rejected."""

import json

import pytest
from pydantic import ValidationError

from envs.wire import (
    MAX_ACTION_CHARS,
    MAX_BATCH,
    BatchReply,
    BatchRequest,
    CloseReply,
    CreateRequest,
    ErrorKind,
    ErrorReply,
    SessionRequest,
    StepReply,
    StepRequest,
)

STEP = {"session_id": "s", "turn": 1, "action": "go"}
REPLY = {
    "turn": 1,
    "observation": "",
    "reward": 0.5,
    "terminated": False,
    "truncated": False,
    "success": False,
}


@pytest.mark.parametrize(
    ("message", "content"),
    [
        (StepRequest, {**STEP, "trun": 1}),
        (StepRequest, {**STEP, "turn": 0}),
        (StepRequest, {**STEP, "turn": "1"}),
        (StepRequest, {**STEP, "turn": True}),
        (StepRequest, {**STEP, "action": "x" * (MAX_ACTION_CHARS + 1)}),
        (StepRequest, {**STEP, "session_id": ""}),
        (CreateRequest, {"request_key": "k", "task_id": -1}),
        (CreateRequest, {"request_key": "k", "task_id": 2**53}),
        (CreateRequest, {"request_key": "", "task_id": 1}),
        (StepReply, {**REPLY, "reward": float("nan")}),
        (StepReply, {**REPLY, "reward": float("inf")}),
        (BatchRequest, {"requests": [STEP] * (MAX_BATCH + 1)}),
        (ErrorReply, {"kind": "strange", "message": ""}),
    ],
)
def test_what_is_no_message_is_refused(message, content):
    with pytest.raises(ValidationError):
        message.model_validate(content)


def test_a_batch_tells_its_requests_and_replies_apart():
    create = {"request_key": "k", "task_id": 3}
    asked = BatchRequest.model_validate({"requests": [STEP, create, {"session_id": "s"}]})
    assert [type(each) for each in asked.requests] == [StepRequest, CreateRequest, SessionRequest]
    error = {"kind": "full", "message": "later", "retry_after_s": 2.0}
    told = BatchReply.model_validate_json(
        json.dumps({"replies": [REPLY, {"closed": True}, error]})
    ).replies
    assert [type(each) for each in told] == [StepReply, CloseReply, ErrorReply]
    assert (told[2].kind, told[2].retry_after_s) == (ErrorKind.FULL, 2.0)


def test_a_message_does_not_change_and_survives_json():
    step = StepRequest.model_validate(STEP)
    assert StepRequest.model_validate_json(step.model_dump_json()) == step
    with pytest.raises(ValidationError, match="frozen"):
        step.turn = 2
