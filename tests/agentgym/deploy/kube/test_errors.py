"""An API server's answers become one sentence that says what to do."""

import json

import pytest

from agentgym.deploy.kube import errors
from agentgym.deploy.kube.errors import error_of


def said(**fields):
    return json.dumps({"kind": "Status", **fields}).encode()


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
    assert isinstance(error, errors.FieldConflict)
    assert str(error) == (
        "apply of Deployment x: fields are held by another manager: spec.replicas,"
        " metadata.labels.a by kubectl; spec.paused by helm. Let it give them up (apply there"
        " without these fields), leave them out of the manifest, or take them over with force"
    )


@pytest.mark.parametrize(
    ("status", "body", "kind", "told"),
    [
        (404, said(message='pods "a" not found'), errors.NotFound, 'x: pods "a" not found'),
        (409, said(reason="AlreadyExists"), errors.AlreadyExists, "x: one of that name"),
        (409, said(reason="Conflict", message="object has been modified"), errors.Stale, "changed"),
        (410, said(message="too old resource version"), errors.Gone, "too old"),
        (500, said(message="expired", code=410), errors.Gone, "expired"),  # an event of a watch
        (401, said(message="Unauthorized"), errors.Forbidden, "renew them"),
        (403, said(message="cannot create"), errors.Forbidden, "give the account that right"),
        (403, said(message="exceeded quota: agentgym"), errors.Forbidden, "agentgym envs gc"),
        (403, said(message="is being terminated"), errors.Forbidden, "wait until the namespace"),
        (422, said(message="replicas: Invalid value"), errors.KubeError, "refuses it as invalid"),
        (502, b"<html>Bad gateway</html>", errors.KubeError, "answered 502: <html>Bad gateway"),
        (503, b"", errors.KubeError, "answered 503: no reason"),
    ],
)
def test_each_refusal_has_its_kind_and_a_way_out(status, body, kind, told):
    error = error_of(status, body, "x")
    assert type(error) is kind
    assert told in str(error)
    assert "\n" not in str(error)
