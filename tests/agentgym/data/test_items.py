from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentgym.config import ConfigError
from agentgym.data.items import (
    DataError,
    ItemStream,
    Splits,
    data_digest,
    interleave,
    load_splits,
    mix_splits,
    parse_item_id,
    splits_from_json,
)
from agentgym.types import Item


def write(root: Path, train: object, test: object, env: str = "toy") -> Path:
    for folder, name, rows in (
        ("train", f"{env}_train.json", train),
        ("eval", f"{env}_test.json", test),
    ):
        (root / folder).mkdir(parents=True, exist_ok=True)
        (root / folder / name).write_text(rows if isinstance(rows, str) else json.dumps(rows))
    return root


def entries(*item_ids: str) -> list[dict[str, str]]:
    return [{"item_id": item_id} for item_id in item_ids]


def numbered(*indices: int) -> list[dict[str, str]]:
    return entries(*(f"toy_{index}" for index in indices))


def load(root: Path, env: str = "toy", seed: int = 0, fraction: float = 0.3) -> Splits:
    return load_splits(root, env, validation_fraction=fraction, seed=seed)


def refusal(root: Path, env: str = "toy", fraction: float = 0.3) -> str:
    with pytest.raises(DataError) as caught:
        load(root, env, fraction=fraction)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_the_three_splits_hold_every_item_once_and_in_the_file_s_order(tmp_path: Path) -> None:
    splits = load(write(tmp_path, numbered(*range(50, 0, -1)), numbered(100, 99)))
    assert splits.test == (Item("toy", 100, "test"), Item("toy", 99, "test"))
    assert {item.split for item in splits.train} == {"train"}
    assert {item.split for item in splits.validation} == {"validation"}
    indices = [item.task_id for item in splits.train]
    assert indices == sorted(indices, reverse=True)
    assert sorted(indices + [item.task_id for item in splits.validation]) == list(range(1, 51))


def test_adding_items_never_moves_old_ones_between_splits(tmp_path: Path) -> None:
    before = load(write(tmp_path / "a", numbered(*range(100)), numbered(900)))
    after = load(write(tmp_path / "b", numbered(*range(300)), numbered(900, 901)))
    assert set(before.train) <= set(after.train)
    assert set(before.validation) <= set(after.validation)


def test_the_validation_share_is_near_the_fraction_and_depends_on_the_seed(tmp_path: Path) -> None:
    root = write(tmp_path, numbered(*range(2000)), numbered(9000))
    first, second = load(root, seed=0, fraction=0.1), load(root, seed=1, fraction=0.1)
    assert 140 <= len(first.validation) <= 260  # 200 expected, standard deviation 13.4
    assert first.validation != second.validation


def test_the_digest_is_of_the_lists_and_not_of_their_layout(tmp_path: Path) -> None:
    plain = load(write(tmp_path / "a", numbered(*range(30)), numbered(90, 91)))
    spaced = load(
        write(tmp_path / "b", json.dumps(numbered(*range(30)), indent=4), numbered(90, 91))
    )
    reordered = load(write(tmp_path / "c", numbered(*range(30)), numbered(91, 90)))
    assert plain.digest == spaced.digest
    assert plain.digest != reordered.digest  # an evaluation takes the first


def test_splits_survive_json(tmp_path: Path) -> None:
    splits = load(write(tmp_path, numbered(*range(30)), numbered(90)))
    assert splits_from_json(splits.to_json()) == splits


def test_an_item_id_is_read_by_agentgym_s_rule() -> None:
    assert parse_item_id("babyai_17") == ("babyai", 17)
    assert parse_item_id("alfworld_look_at_3") == ("alfworld", 3)
    for bad in (
        "babyai",
        "babyai_",
        "babyai_x",
        "babyai_-1",
        "babyai_1.5",
        "babyai_ 7",
        "babyai_٣",
        "",
    ):
        assert parse_item_id(bad)[1] == -1, bad


def test_a_dataset_that_was_not_pulled_says_so(tmp_path: Path) -> None:
    folder = tmp_path / "none"
    assert f"there is no {folder}.dvc to pull it by; set data.path" in refusal(folder)
    Path(f"{folder}.dvc").touch()
    message = refusal(folder)
    assert message.startswith("dataset not pulled: ")
    assert f"run `dvc pull {folder}.dvc`" in message


def test_an_environment_without_lists_is_told_which_there_are(tmp_path: Path) -> None:
    message = refusal(write(tmp_path, numbered(1), numbered(2)), env="maze")
    assert message.endswith("has lists for: toy")
    assert "maze_train.json does not exist" in message


def test_an_environment_without_a_list_in_a_pulled_set_is_not_called_unpulled(
    tmp_path: Path,
) -> None:
    (tmp_path / "train").mkdir()
    (tmp_path / "train/babyai_train.json").write_text("[]")
    with pytest.raises(
        DataError, match=r"chess_train\.json does not exist; .* has lists for: babyai"
    ):
        data_digest(tmp_path, "chess")
    with pytest.raises(DataError, match=r"there is no .*elsewhere\.dvc to pull it by"):
        data_digest(tmp_path / "elsewhere", "chess")


def test_broken_json_names_the_file(tmp_path: Path) -> None:
    message = refusal(write(tmp_path, "[{", numbered(2)))
    assert "toy_train.json is not valid JSON" in message
    assert "dvc pull" not in message  # DVC does not track a folder the user made
    Path(f"{tmp_path}.dvc").touch()
    assert f"restore it with `dvc pull --force {tmp_path}.dvc`" in refusal(tmp_path)


def test_a_list_with_a_byte_order_mark_is_the_same_list(tmp_path: Path) -> None:
    rows = numbered(*range(30))
    plain = load(write(tmp_path / "a", rows, numbered(90)))
    marked = load(write(tmp_path / "b", "\ufeff" + json.dumps(rows), numbered(90)))
    assert plain == marked


def test_a_list_that_git_lfs_did_not_bring_is_called_a_pointer(tmp_path: Path) -> None:
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12\n"
    message = refusal(write(tmp_path, pointer, numbered(2)))
    assert "toy_train.json is a Git LFS pointer" in message
    assert "git lfs pull" in message


def test_half_an_emoji_in_a_list_names_the_file(tmp_path: Path) -> None:
    message = refusal(write(tmp_path, [{"item_id": "toy_\ud83d"}], numbered(2)))
    assert "toy_train.json: the item_id of entry 0 holds half a surrogate pair" in message
    assert message.encode()


def test_a_file_that_cannot_be_read_names_the_reason(tmp_path: Path) -> None:
    root = write(tmp_path, numbered(1), numbered(2))
    (root / "train/toy_train.json").unlink()
    (root / "train/toy_train.json").mkdir()
    assert "toy_train.json cannot be read: Is a directory" in refusal(root)


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ({"item_id": "toy_1"}, "got dict"),
        (["toy_1"], 'entry 0 is "toy_1"'),
        ([{"item_id": "toy_1"}, {"id": "toy_2"}], 'entry 1 is {"id": "toy_2"}'),
        ([{"item_id": 7}], 'entry 0 is {"item_id": 7}'),
    ],
)
def test_another_structure_is_shown_beside_the_expected_one(
    tmp_path: Path, rows: object, expected: str
) -> None:
    message = refusal(write(tmp_path, rows, numbered(2)))
    assert "must hold a list of objects with the text field item_id" in message
    assert message.endswith(expected)


def test_an_item_of_another_environment_is_refused(tmp_path: Path) -> None:
    message = refusal(write(tmp_path, [*numbered(1), *entries("maze_2")], numbered(3)))
    assert message.endswith(
        "toy: maze_2 belong to another environment; an item of toy is `toy_<index>`"
    )


def test_an_index_that_is_not_a_whole_number_is_refused(tmp_path: Path) -> None:
    message = refusal(write(tmp_path, numbered(1), entries("toy_x", "toy_-4", "toy_2")))
    assert message.endswith("toy: toy_x, toy_-4 do not end in an index >= 0; write `toy_<index>`")


def test_duplicates_are_refused_also_when_written_differently(tmp_path: Path) -> None:
    message = refusal(write(tmp_path, entries("toy_1", "toy_2", "toy_01"), numbered(3)))
    assert message.endswith(
        "toy: toy_01 are listed more than once in one split; remove the repeated entries"
    )


def test_items_in_both_lists_are_a_leak_and_five_are_named(tmp_path: Path) -> None:
    message = refusal(write(tmp_path, numbered(*range(20)), numbered(*range(3, 11))))
    assert (
        "toy: toy_3, toy_4, toy_5, toy_6, toy_7 and 3 more are in the train and in the eval list; "
        in message
    )
    assert "the test is not held out" in message


def test_an_empty_list_is_refused(tmp_path: Path) -> None:
    assert "toy_test.json is an empty list" in refusal(write(tmp_path, numbered(1), []))


def test_a_fraction_that_leaves_no_validation_items_is_refused(tmp_path: Path) -> None:
    message = refusal(write(tmp_path, numbered(1, 2), numbered(3)), fraction=1e-9)
    assert message.startswith(
        "toy: no item is left for validation: 2 train items at data.validation_fraction 1e-09"
    )
    assert "no item is left for train" in refusal(tmp_path, fraction=1.0)


def test_another_count_than_published_is_a_warning(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        entries(*(f"webarena_{i}" for i in range(40))),
        entries("webarena_100"),
        env="webarena",
    )
    assert load(root, "webarena").warnings == (
        "webarena: 40 train items, published are 372; results do not compare",
        "webarena: 1 eval items, published are 50; results do not compare",
    )
    assert load(write(tmp_path, numbered(*range(20)), numbered(90))).warnings == ()


def test_a_data_error_is_a_configuration_error() -> None:
    assert issubclass(DataError, ConfigError)


def test_importing_the_room_does_not_import_pandas() -> None:
    code = (
        "import sys, agentgym.data.items;"
        "\nsys.exit('pandas' in sys.modules or 'pandera' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def stream(num_items: int, seed: int = 0, position: int = 0) -> ItemStream:
    return ItemStream(
        [Item("toy", index) for index in range(num_items)], seed=seed, position=position
    )


@settings(max_examples=150, deadline=None)
@given(
    num_items=st.integers(1, 12),
    seed=st.integers(0, 2**40),
    batches=st.lists(st.integers(0, 15), min_size=1, max_size=8),
    cut=st.integers(0, 8),
)
def test_a_stream_resumed_at_a_position_hands_out_what_the_old_one_would_have(
    num_items: int, seed: int, batches: list[int], cut: int
) -> None:
    whole = stream(num_items, seed)
    expected = [whole.next(n) for n in batches]
    first = stream(num_items, seed)
    got = [first.next(n) for n in batches[:cut]]
    resumed = stream(num_items, seed, position=first.position)
    got += [resumed.next(n) for n in batches[cut:]]
    assert got == expected
    assert resumed.position == whole.position == sum(batches)


@settings(max_examples=100, deadline=None)
@given(num_items=st.integers(1, 20), seed=st.integers(0, 2**40), num_epochs=st.integers(1, 5))
def test_every_epoch_holds_every_item_once(num_items: int, seed: int, num_epochs: int) -> None:
    items = stream(num_items, seed)
    for _ in range(num_epochs):
        assert sorted(item.task_id for item in items.next(num_items)) == list(range(num_items))


@settings(max_examples=100, deadline=None)
@given(num_items=st.integers(3, 30), seed=st.integers(0, 2**40), data=st.data())
def test_a_batch_across_epochs_holds_no_item_twice(
    num_items: int, seed: int, data: st.DataObject
) -> None:
    size = data.draw(st.integers(1, num_items // 3))
    items = stream(num_items, seed)
    for _ in range(4 * num_items // size):
        batch = items.next(size)
        assert len(set(batch)) == size


def test_a_batch_goes_on_into_the_next_epoch() -> None:
    whole = [item.task_id for item in stream(5).next(10)]
    items = stream(5)
    assert [item.task_id for item in items.next(3) + items.next(4) + items.next(3)] == whole
    assert whole[:5] != whole[5:]


def test_seeds_and_epochs_have_their_own_orders() -> None:
    assert stream(50, seed=0).next(50) != stream(50, seed=1).next(50)
    one = stream(50, seed=0)
    assert one.next(50) != one.next(50)


def test_a_stream_refuses_no_items_and_a_negative_position() -> None:
    with pytest.raises(ValueError, match="needs at least one item"):
        ItemStream([], seed=0)
    with pytest.raises(ValueError, match="position -1 must be >= 0"):
        stream(3, position=-1)


def test_environments_take_turns_by_weight_and_each_keeps_its_own_order() -> None:
    items = [Item("a", index) for index in range(40)] + [Item("b", index) for index in range(40)]
    mixed = ItemStream(items, seed=3, weights={"a": 3.0, "b": 1.0}).next(40)
    assert [item.env for item in mixed[:8]] == ["a", "a", "b", "a"] * 2
    for env, count in (("a", 30), ("b", 10)):
        own = [item.task_id for item in mixed if item.env == env]
        alone = ItemStream([item for item in items if item.env == env], seed=3).next(count)
        assert own == [item.task_id for item in alone]


@settings(max_examples=100, deadline=None)
@given(
    weights=st.dictionaries(st.sampled_from("abcd"), st.floats(0.1, 10), min_size=1),
    before=st.integers(0, 60),
    after=st.integers(0, 60),
)
def test_a_mixed_stream_resumes_where_it_was_and_no_environment_falls_behind(
    weights: dict[str, float], before: int, after: int
) -> None:
    items = [Item(env, index) for env in weights for index in range(7)]
    whole = ItemStream(items, seed=1, weights=weights).next(before + after)
    resumed = ItemStream(items, seed=1, weights=weights, position=before)
    assert resumed.next(after) == whole[before:]
    for env, weight in weights.items():
        share = (before + after) * weight / sum(weights.values())
        assert abs(sum(item.env == env for item in whole) - share) < len(weights)


def test_a_stream_names_the_environment_that_has_no_item() -> None:
    with pytest.raises(ValueError, match="got none of b"):
        ItemStream([Item("a", 1)], seed=0, weights={"a": 1.0, "b": 1.0})


def test_the_first_part_of_a_mixed_split_has_the_environments_shares(tmp_path: Path) -> None:
    parts = []
    for env, count in (("babyai", 6), ("textcraft", 2)):
        test = tuple(Item(env, index, "test") for index in range(count))
        parts.append(
            Splits(
                (Item(env, 90, "train"),),
                (Item(env, 91, "validation"),),
                test,
                f"digest of {env}",
                (f"{env}: few",),
            )
        )
    mixed = mix_splits({"babyai": 1.0, "textcraft": 1.0}, parts)
    assert [item.env for item in mixed.test] == ["babyai", "textcraft"] * 2 + ["babyai"] * 4
    assert mixed.warnings == ("babyai: few", "textcraft: few")
    assert splits_from_json(mixed.to_json()) == mixed
    assert mix_splits({"babyai": 1.0}, parts[:1]) == parts[0]
    assert interleave([], {"babyai": 1.0}) == []


@pytest.mark.parametrize(
    "weights",
    [{"a": 1.0}, {"a": 1.0, "b": 1.0}, {"a": 3.0, "b": 1.0}, {"a": 5.0, "b": 2.0, "c": 1.0}],
)
def test_the_most_a_stream_hands_out_without_an_item_twice_holds_wherever_it_stands(weights):
    items = [
        Item(env, task)
        for env, count in (("a", 40), ("b", 31), ("c", 23))
        if env in weights
        for task in range(count)
    ]
    most = ItemStream(items, seed=0, weights=weights).most_distinct()
    assert most >= 8
    for seed in range(5):
        stream = ItemStream(items, seed=seed, weights=weights)
        for size in [most, 1, most, 3] * 20:
            assert len(set(stream.next(size))) == size
    if len(weights) == 1:
        draws = [
            ItemStream(items, seed=seed, position=40 - 14).next(2 * most + 2) for seed in range(9)
        ]
        # negative control: batches twice as large repeat an item
        assert any(len(set(draw)) < len(draw) for draw in draws)
