"""A manifest's digest covers the results, not who computed them or when."""

import json
import math

import pytest

from agentgym.store.manifest import (
    Blob,
    Manifest,
    ManifestDamaged,
    ManifestError,
    canonical_json,
    decode_commit,
    encode_commit,
)

KEY = "ab" * 32


def manifest(**changes: object) -> Manifest:
    fields = {
        "step": "stage-1",
        "key": KEY,
        "seq": 3,
        "done": False,
        "parents": {"warm-start": "cd" * 32},
        "config": {"lr": 1e-3},
        "state": {"global_step": 4, "consumed": ["babyai_1", "babyai_2"]},
        "blobs": {"model.safetensors": Blob.of(b"weights")},
        "results": {"success": 0.25},
        "records": {"metrics.jsonl": Blob.of(b"at 12:00")},
        "timings": {"rollout_s": 1.5},
        "epoch": 1,
        "created_at": 1000.0,
    }
    return Manifest.model_validate(fields | changes)


def test_the_digest_is_the_sha256_of_sorted_identity_fields() -> None:
    import hashlib

    text = (
        '{"blobs":{"model.safetensors":{"digest":"'
        + hashlib.sha256(b"weights").hexdigest()
        + '","size":7}},"config":{"lr":0.001},"done":false,"key":"'
        + KEY
        + '","parents":{"warm-start":"'
        + "cd" * 32
        + '"},'
        '"results":{"success":0.25},"schema_version":1,'
        '"state":{"consumed":["babyai_1","babyai_2"],"global_step":4},"step":"stage-1"}'
    )
    assert manifest().digest == hashlib.sha256(text.encode()).hexdigest()


UNHASHED = pytest.mark.parametrize(
    "change",
    [
        {"records": {}},
        {"timings": {"rollout_s": 9.0}},
        {"epoch": 7},
        {"created_at": 2000.0},
        {"seq": 9},
    ],
)


@UNHASHED
def test_times_and_writers_do_not_change_the_digest(change: dict[str, object]) -> None:
    assert manifest(**change).digest == manifest().digest


@pytest.mark.parametrize(
    "change",
    [
        {"state": {"global_step": 5}},
        {"blobs": {}},
        {"results": {"success": 0.5}},
        {"done": True},
        {"parents": {}},
    ],
)
def test_what_was_reached_changes_the_digest(change: dict[str, object]) -> None:
    assert manifest(**change).digest != manifest().digest


def test_bytes_give_the_same_manifest_back() -> None:
    written = manifest(state={"by_id": {2: "b", 10: "a"}, "pair": (1, 2)})
    again = decode_commit(encode_commit([written]))[-1]
    assert again == written
    assert again.digest == written.digest
    assert again.state == {"by_id": {"10": "a", "2": "b"}, "pair": [1, 2]}


def test_a_newer_schema_is_refused_and_named() -> None:
    tree = json.loads(encode_commit([manifest()])) | {"schema_version": 3, "colour": "blue"}
    with pytest.raises(
        ManifestError,
        match=r"000003\.json has schema_version 3, this agentgym reads up to 2; upgrade",
    ):
        decode_commit(json.dumps(tree).encode(), where="000003.json")


def test_a_manifest_changed_by_hand_is_refused() -> None:
    tree = json.loads(encode_commit([manifest()]))
    tree["results"]["success"] = 0.99
    with pytest.raises(ManifestError, match="was changed"):
        decode_commit(json.dumps(tree).encode())


DEEP = (b"[" * 100_000 + b"]" * 100_000, b"[" * 900 + b"]" * 900)


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"{}", b"5", b"null", *DEEP])
def test_what_is_no_manifest_is_refused(data: bytes) -> None:
    with pytest.raises(ManifestError):
        decode_commit(data)


def test_a_setting_that_is_nested_too_deep_is_damage_and_ends_no_reader() -> None:
    whole = encode_commit([manifest()]).replace(b'"config": {', b'"config": {"x": %s, ' % DEEP[1])
    with pytest.raises(ManifestDamaged, match="more than 100 levels deep"):
        decode_commit(whole)


def test_a_number_json_cannot_hold_is_named_with_its_place() -> None:
    with pytest.raises(
        ValueError, match=r"value\.eval\[1\]\.score of type float is not plain JSON"
    ):
        manifest(results={"eval": [{"score": 1.0}, {"score": math.nan}]})
    with pytest.raises(TypeError, match=r"value\.ids of type set"):
        canonical_json({"ids": {1, 2}})


@UNHASHED
def test_the_second_digest_is_of_records_times_and_what_went_before(
    change: dict[str, object],
) -> None:
    first = manifest(follows="")
    assert manifest(follows="", **change).records_digest != first.records_digest
    assert manifest(follows=first.records_digest).records_digest != first.records_digest
    assert manifest(follows=first.records_digest).digest == first.digest


def test_records_changed_by_hand_are_refused() -> None:
    tree = json.loads(encode_commit([manifest(follows="")]))
    tree["timings"]["rollout_s"] = 0.1
    with pytest.raises(ManifestError, match="its records or times were changed"):
        decode_commit(json.dumps(tree).encode())
    del tree["records_digest"]
    with pytest.raises(ManifestError, match="states records digest None"):
        decode_commit(json.dumps(tree).encode())


def test_a_manifest_from_before_the_second_digest_is_read_and_written_as_it_was() -> None:
    old = encode_commit([manifest()])
    assert b"records_digest" not in old
    assert b"follows" not in old
    assert encode_commit(decode_commit(old)) == old


def test_a_hostile_name_reaches_the_terminal_escaped() -> None:
    tree = json.loads(encode_commit([manifest()])) | {"\x1b[2J": 1}
    with pytest.raises(ManifestError) as caught:
        decode_commit(json.dumps(tree).encode())
    assert "\x1b" not in str(caught.value)
