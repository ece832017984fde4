"""The documents of the embedded corpus answer its questions, and no question answers itself."""

import gzip
import json

import pytest

from envs.searchqa import questions, retrievers
from envs.searchqa.questions import FIRST_TRAIN_ID
from tools.searchqa_corpus.generate import contains


def lines(path):
    with gzip.open(path, "rt", encoding="utf-8") as rows:
        return [json.loads(row) for row in rows]


@pytest.fixture(scope="module")
def told():
    return {row["title"]: row["text"] for row in lines(retrievers.PASSAGES)}


@pytest.fixture(scope="module")
def asked():
    return questions.embedded()


def test_both_splits_hold_as_many_one_hop_as_two_hop_questions(asked):
    for split, count in ((asked.train, 4000), (asked.eval, 1200)):
        assert len(split) == count
        for source, hops in (("embedded_one_hop", 1), ("embedded_two_hop", 2)):
            of_source = [question for question in split if question.data_source == source]
            assert len(of_source) == count // 2
            assert all(len(question.hops) == hops for question in of_source)


def test_every_document_named_by_a_question_tells_what_it_is_named_for(asked, told):
    for question in asked.train + asked.eval:
        for hop in question.hops:
            assert contains(told[hop.title], hop.finds)
        assert question.hops[-1].finds == question.answers[0]


def test_a_two_hop_question_needs_both_documents(asked, told):
    for question in asked.train + asked.eval:
        if len(question.hops) == 2:
            first, second = question.hops
            assert second.title == first.finds
            assert not contains(question.text, first.finds)
            assert not contains(told[second.title], first.title)
            assert not any(contains(told[first.title], answer) for answer in question.answers)


def test_no_question_gives_its_answer_away(asked):
    for question in asked.train + asked.eval:
        assert not any(contains(question.text, answer) for answer in question.answers)


def test_the_splits_share_no_question_and_no_entity(asked, told):
    def entities(split):
        names = {hop.title for question in split for hop in question.hops}
        return names | {question.answers[0] for question in split if question.answers[0] in told}

    assert not {question.text for question in asked.train} & {
        question.text for question in asked.eval
    }
    assert len(entities(asked.train)) > 1000
    assert len(entities(asked.eval)) > 400
    assert not entities(asked.train) & entities(asked.eval)


def test_ids_of_the_published_ranges_mean_the_right_split(asked):
    assert asked[0] is asked.eval[0]
    assert asked[1200] is asked.eval[0]
    assert asked[FIRST_TRAIN_ID - 1] is asked.eval[(FIRST_TRAIN_ID - 1) % 1200]
    assert asked[FIRST_TRAIN_ID] is asked.train[0]
    assert asked[221_327] is asked.train[(221_327 - FIRST_TRAIN_ID) % 4000]
    assert asked[2**53 - 1] in asked.train
    with pytest.raises(ValueError, match="negative"):
        asked[-1]
