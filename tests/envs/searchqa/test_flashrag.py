"""The benchmarks' parquet files under AgentGym's ids."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from envs.env import ExpertFailed
from envs.searchqa import spec
from envs.searchqa.flashrag import RANGES, FlashRag, find_range


def row(source, index, split="test", **changes):
    answers = changes.pop("answers", [f"{source} answer {index}"])
    return {
        "id": f"{split}_{index}",
        "question": f"{source} {split} {index}?",
        "golden_answers": answers,
        "data_source": source,
        "prompt": [{"role": "user", "content": "not read"}],
        "ability": "fact-reasoning",
        "reward_model": {"style": "rule", "ground_truth": {"target": answers}},
        "extra_info": {"split": split, "index": index},
        **changes,
    }


def write(folder, split, rows):
    pq.write_table(pa.Table.from_pylist(rows), folder / f"{split}.parquet")
    return folder


def borders():
    """Return (task id, row) of the first and the last item of every published range."""
    return [
        (task_id, row(r.data_source, task_id - r.first, r.split))
        for r in RANGES
        for task_id in (r.first, r.last)
    ]


def test_the_published_ranges_follow_one_another():
    assert [(r.data_source, r.first, r.last) for r in RANGES] == [
        ("nq", 0, 3609),
        ("triviaqa", 3610, 14922),
        ("popqa", 14923, 29189),
        ("hotpotqa", 29190, 36594),
        ("2wikimultihopqa", 36595, 49170),
        ("musique", 49171, 51587),
        ("bamboogle", 51588, 51712),
        ("nq", 51713, 130880),
        ("hotpotqa", 130881, 221327),
    ]
    assert [r.split for r in RANGES] == ["test"] * 7 + ["train"] * 2


def test_ids_at_the_borders_of_the_ranges_find_their_rows(tmp_path):
    for split in ("test", "train"):
        write(tmp_path, split, [r for _, r in borders() if r["extra_info"]["split"] == split])
    found = FlashRag(tmp_path)
    assert len(found) == 18
    for task_id, expected in borders():
        question = found[task_id]
        assert question.text == expected["question"]
        assert question.answers == tuple(expected["golden_answers"])
        assert question.data_source == expected["data_source"] == find_range(task_id).data_source


@pytest.mark.parametrize("task_id", [-1, 221_328])
def test_ids_outside_the_ranges_are_refused(tmp_path, task_id):
    with pytest.raises(ValueError, match=r"outside the published ranges 0\.\.221327"):
        FlashRag(write(tmp_path, "test", [row("nq", 0)]))[task_id]


def test_a_missing_row_or_file_is_named(tmp_path):
    found = FlashRag(write(tmp_path, "test", [row("nq", 0)]))
    with pytest.raises(
        ValueError,
        match=r"task id 3610 is row 0 of triviaqa \(test\), but .*test\.parquet has no such row",
    ):
        found[3610]
    with pytest.raises(
        ValueError,
        match=r"task id 130881 is row 0 of hotpotqa \(train\), but .*train\.parquet is not there",
    ):
        found[130_881]


def test_rows_without_extra_info_are_counted_within_their_data_set(tmp_path):
    rows = [row("nq", 7), row("triviaqa", 7), row("nq", 7, answers=["second"])]
    for one in rows:
        del one["extra_info"]
    found = FlashRag(write(tmp_path, "test", rows))
    assert found[1].answers == ("second",)
    assert found[3610].data_source == "triviaqa"


def test_questions_end_in_a_question_mark_and_answers_come_from_either_column(tmp_path):
    rows = [
        row("nq", 0, question=" who wrote it \n"),
        row(
            "nq",
            1,
            question="who?",
            reward_model={"style": "rule", "ground_truth": {"target": ["x", "y"]}},
        ),
    ]
    found = FlashRag(write(tmp_path, "test", rows))
    assert found[0].text == "who wrote it?"
    assert (found[1].text, found[1].answers) == ("who?", ("x", "y"))
    for one in rows:
        del one["reward_model"]
    assert FlashRag(write(tmp_path, "test", rows))[1].answers == ("nq answer 1",)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (
            [row("squad", 0)],
            r"test\.parquet, row 0: unknown data_source 'squad'; known: nq, triviaqa",
        ),
        (
            [row("nq", 0), row("nq", 3610)],
            r"row 1: index 3610 of nq, which has 3610 questions \(test\)",
        ),
        ([row("nq", 5), row("nq", 5)], "row 1: index 5 of nq comes twice"),
        ([{"question": "q", "golden_answers": ["a"]}], "no column data_source"),
        ([{"question": "q", "data_source": "nq"}], "no answers"),
    ],
)
def test_files_that_contradict_the_layout_are_refused(tmp_path, rows, message):
    with pytest.raises(ValueError, match=message):
        FlashRag(write(tmp_path, "test", rows))


def test_a_row_without_an_answer_is_an_error_and_not_an_unsolvable_task(tmp_path):
    found = FlashRag(
        write(
            tmp_path,
            "test",
            [row("nq", 0), row("nq", 1, answers=pa.array([], pa.string()).to_pylist())],
        )
    )
    with pytest.raises(ValueError, match="task id 1: the row has no golden answer"):
        found[1]


def test_folders_and_files_that_are_no_such_thing_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"neither train\.parquet nor test\.parquet"):
        FlashRag(tmp_path)
    (tmp_path / "test.parquet").write_text("no parquet")
    with pytest.raises(ValueError, match=r"test\.parquet cannot be read as parquet"):
        FlashRag(tmp_path)
    with pytest.raises(ValueError, match="there is no folder"):
        spec({"questions": str(tmp_path / "nowhere")})


def test_the_embedded_corpus_is_no_match_for_the_benchmarks(tmp_path):
    write(tmp_path, "test", [row("nq", 0)])
    with pytest.raises(ValueError, match="give retriever the URL of an index"):
        spec({"questions": str(tmp_path)})


def test_a_folder_without_task_0_could_not_become_ready_and_is_refused(tmp_path):
    write(tmp_path, "train", [row("nq", 0, "train")])
    with pytest.raises(ValueError, match=r"task id 0 is row 0 of nq \(test\)"):
        spec({"questions": str(tmp_path), "retriever": "http://127.0.0.1:9/retrieve"})


def test_episodes_on_the_benchmarks_search_a_real_index(tmp_path, retrieving):
    rows = [
        row("nq", 0, question="what is the capital of japan", answers=["Tokyo"]),
        row("nq", 1, question="what is the capital of peru", answers=["Lima"]),
    ]
    write(tmp_path, "test", rows)
    with retrieving() as (url, log):
        make = spec({"questions": str(tmp_path), "retriever": url, "topk": 2}).make
        episode = make()
        assert episode.reset(0) == "Question: what is the capital of japan?"
        expert = episode.expert()
        first = episode.step(expert.next_action())
        assert first.observation.startswith(
            '<information>Doc 1(Title: "Japan") Japan is a country.'
        )
        assert log[-1][1]["topk"] == 2
        assert expert.next_action() == "<answer>Tokyo</answer>"
        result = episode.step(expert.next_action())
        assert result.success
        assert result.info["family"] == "nq"
        episode = make()
        episode.reset(1)
        expert = episode.expert()
        episode.step(expert.next_action())
        # the expert gives no answer that is in no shown document
        with pytest.raises(ExpertFailed, match="no document contains"):
            expert.next_action()
        with pytest.raises(ValueError, match="has no such row"):
            make().reset(2)
