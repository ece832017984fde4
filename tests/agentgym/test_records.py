"""Episodes are read back unchanged, one at a time, including those of earlier versions."""

import gzip
import io
import json
import math
import subprocess
import sys
import tracemalloc
from dataclasses import asdict, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentgym import records
from agentgym.records import (
    RecordError,
    decode_trajectories,
    encode_trajectories,
    read_trajectories,
)
from agentgym.types import Item, Learned, Status, Trajectory, Turn


def episode(number, turns=12, *, info=True, times=True):
    """Return an episode with `turns` turns of six tokens and observations of 30 characters."""
    own, ids = [], [number % 97] * 20
    for turn in range(turns):
        start = len(ids)
        ids += [(number * 31 + turn * 7 + place) % 256 for place in range(6)]
        own.append(
            Turn(
                f"go to red ball {turn}",
                f"you see a blue key {turn} steps ahead",
                0.5 if turn % 5 == 4 else 0.0,
                start,
                len(ids),
                number // 128,
                reply=f"I look for it. Action: go to red ball {turn}" if turn % 3 == 0 else "",
                info={"score": turn, "done": False} if info else {},
                generate_s=0.0123 + turn / 1000 if times else 0.0,
                env_s=0.0011 if times else 0.0,
            )
        )
        ids += [3] * 8
    mask = [False] * len(ids)
    for turn in own:
        mask[turn.start : turn.end] = [True] * 6
    status = list(Status)[number % len(Status)]
    return Trajectory(
        Item("babyai", number, "train"),
        number % 8,
        number // 128,
        12,
        status,
        sum(turn.reward for turn in own) if status.is_valid else None,
        status is Status.TERMINATED,
        "task: go to the red ball",
        tuple(own),
        tuple(ids),
        tuple(mask),
        tuple(-0.1234567 * (number % 5 + 1) if acted else 0.0 for acted in mask),
        error=None if status.is_valid else "server lost",
        id=f"{number:016x}",
        learned=Learned((-0.5,) * 3, (1.0,) * 3, (1.01,) * 3, "", (0.3,) * 3)
        if number % 50 == 0
        else None,
        timing={"generate_s": 0.2, "env_s": 0.013, "wall_s": 0.3} if times else {},
    )


def times_of(each):
    return (dict(each.timing), [(turn.generate_s, turn.env_s) for turn in each.turns])


def schema_1(each):
    """Return a line as versions before schema numbers wrote it."""
    row = asdict(each)
    for name in ("id", "learned"):
        del row[name]
    for turn in row["turns"]:
        for name in ("reply", "info", "generate_s", "env_s"):
            del turn[name]
    return json.dumps({**row, "status": str(each.status)})


def test_ten_thousand_episodes_are_read_back_equal_by_both_readers():
    episodes = [episode(number, turns=3) for number in range(10_000)]
    data = encode_trajectories(episodes)
    assert decode_trajectories(data) == episodes
    count = 0
    for read, written in zip(read_trajectories(io.BytesIO(data)), episodes, strict=True):
        assert read == written
        assert times_of(read) == times_of(written)
        count += 1
    assert count == 10_000


def test_records_of_schema_1_stay_readable():
    episodes = [episode(number) for number in range(200)]
    lines = "".join(f"{schema_1(each)}\n" for each in episodes)
    read = decode_trajectories(gzip.compress(lines.encode()))
    bare = [
        replace(
            each,
            id="",
            learned=None,
            turns=tuple(replace(turn, reply="", info={}) for turn in each.turns),
        )
        for each in episodes
    ]
    assert read == bare


@settings(max_examples=60, deadline=None)
@given(
    st.text(),
    st.text(),
    st.floats(allow_nan=False),
    st.dictionaries(st.text(), st.integers() | st.text()),
)
def test_whatever_was_said_survives(action, reply, reward, info):
    turn = Turn(action, reply, reward, 1, 2, reply=reply, info=info)
    each = replace(episode(3, 1), turns=(turn,), first_observation=reply)
    assert decode_trajectories(encode_trajectories([each])) == [each]


def test_half_a_character_and_no_number_survive():
    said = replace(episode(1), error="cut \ud83d", logprobs=(float("-inf"), 1e-5, 0.1))
    assert decode_trajectories(encode_trajectories([said])) == [said]
    (read,) = decode_trajectories(encode_trajectories([replace(said, logprobs=(float("nan"),))]))
    assert math.isnan(read.logprobs[0])
    (read,) = decode_trajectories(encode_trajectories([replace(episode(1), reward=math.nan)]))
    assert math.isnan(read.reward)


def test_equal_episodes_give_equal_bytes_and_times_do_not_make_them_unequal():
    assert encode_trajectories([episode(1)]) == encode_trajectories([episode(1)])
    assert episode(1) == episode(1, times=False)
    assert episode(1) != episode(1, info=False)


def test_weight_versions_of_an_episode():
    one = episode(300)
    mixed = replace(one, turns=(*one.turns, replace(one.turns[0], version=9)))
    assert (one.versions, mixed.versions) == ((2,), (2, 9))


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "line 2 of the episodes is no trajectory: JSONDecodeError"),
        ("[]", "line 2 of the episodes is no trajectory"),
        ('{"item": 3}', "line 2 of the episodes is no trajectory: KeyError"),
        ('{"schema": 3}', "an episode of record schema 3; this version reads up to 2: update it"),
    ],
)
def test_what_is_no_record_is_refused_with_its_line(line, said):
    good = gzip.decompress(encode_trajectories([episode(1)])).decode()
    with pytest.raises(RecordError, match=said):
        decode_trajectories(gzip.compress((good + line + "\n").encode()))


def test_a_small_file_that_unfolds_to_much_is_refused_before_it_fills_memory(monkeypatch):
    monkeypatch.setattr(records, "MAX_UNFOLDED", 2**20)
    good = gzip.decompress(encode_trajectories([episode(1)]))
    for bomb in (
        gzip.compress(b" " * 2**26),  # one line
        gzip.compress(good * (2**24 // len(good)), 9),  # as many whole lines
    ):
        tracemalloc.start()
        with pytest.raises(RecordError, match="it was made to fill memory"):
            for _ in read_trajectories(io.BytesIO(bomb)):
                pass
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert most < 2**24


def test_what_is_nested_too_deep_or_no_stream_of_gzip_is_damage():
    deep = b"[" * 100_000 + b"]" * 100_000
    broken = bytearray(encode_trajectories([episode(number) for number in range(50)]))
    broken[200:300] = b"\xff" * 100
    for data in (gzip.compress(deep), gzip.compress(b"\xff\xfe"), bytes(broken)):
        with pytest.raises(RecordError, match="line 1"):
            decode_trajectories(data)


def test_a_record_that_was_cut_off_is_refused():
    data = encode_trajectories([episode(number) for number in range(50)])
    with pytest.raises(RecordError, match="EOFError"):
        decode_trajectories(data[: len(data) // 2])
    with pytest.raises(RecordError, match="line 1"):
        decode_trajectories(b"no gzip")


@pytest.mark.integration
def test_reading_one_episode_holds_one():
    """Read many episodes without keeping them, and without loading tracking or server modules."""
    data = encode_trajectories([episode(number) for number in range(2_000)])
    program = """
import sys, tracemalloc
from agentgym.records import read_trajectories
tracemalloc.start()
count = sum(1 for _ in read_trajectories(sys.stdin.buffer))
print(count, tracemalloc.get_traced_memory()[1])
print(sorted(m for m in sys.modules if m.startswith(("agentgym.", "torch", "aiohttp", "mlflow"))))
"""
    run = subprocess.run(
        [sys.executable, "-c", program], input=data, capture_output=True, check=True
    )
    told, modules = run.stdout.decode().splitlines()
    count, peak = map(int, told.split())
    assert count == 2_000
    assert peak < 2**20
    assert modules == "['agentgym.records', 'agentgym.types']"
