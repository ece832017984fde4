"""BM25 over documents in memory."""

from concurrent.futures import ThreadPoolExecutor
from math import log

from envs.searchqa import questions, retrievers
from envs.searchqa.retrievers import Bm25, Document

SMALL = Bm25(
    [
        Document("Oak", "a tree"),
        Document("Elm", "a tree"),
        Document("Pike", "a fish"),
        Document("Ash", "a tree"),
    ]
)


def test_the_best_match_comes_first_and_ties_keep_the_order_of_the_corpus():
    assert [d.title for d in SMALL.search("ash tree", 4)] == ["Ash", "Oak", "Elm"]
    assert [d.title for d in SMALL.search("tree", 2)] == ["Oak", "Elm"]


def test_what_shares_no_word_with_the_query_is_not_returned():
    assert [d.title for d in SMALL.search("PIKE?", 3)] == ["Pike"]
    for query in ("whale", "", "the", "<>&\x00", "𝔘nicode"):
        assert SMALL.search(query, 3) == []


def test_topk_is_really_used():
    index = retrievers.embedded()
    assert [len(index.search("town river", topk)) for topk in (1, 3, 7, 5000)][:3] == [1, 3, 7]
    assert index.search("town river", 7)[:3] == index.search("town river", 3)


def test_scores_are_those_of_the_formula():
    """idf = ln(1 + (N - df + .5) / (df + .5)), tf / (tf + k1 (1 - b + b len / mean));
    a title counts twice.
    """
    norm = 1.2 * (1 - 0.75 + 0.75 * 3 / 3)  # every document has three words
    rare, common = log(1 + 3.5 / 1.5), log(1 + 1.5 / 3.5)  # in one document, and in three of four
    scores = SMALL._index.get_scores_from_ids([SMALL._vocabulary["oak"], SMALL._vocabulary["tree"]])
    assert abs(scores[0] - (rare * 2 / (2 + norm) + common / (1 + norm))) < 1e-5
    assert abs(scores[1] - common / (1 + norm)) < 1e-5


def test_threads_share_an_index():
    index = retrievers.embedded()
    queries = [question.text for question in questions.embedded().eval[:100]]
    alone = [index.search(query, 3) for query in queries]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda query: index.search(query, 3), queries * 4)) == alone * 4


def test_the_way_to_an_answer_can_be_searched_and_the_second_half_not_from_the_question():
    index = retrievers.embedded()
    for question in questions.embedded().eval:
        for hop in question.hops:
            assert hop.title in [document.title for document in index.search(hop.query, 3)]
    two_hop = [question for question in questions.embedded().eval if len(question.hops) == 2]
    straight = sum(
        question.hops[1].title in [d.title for d in index.search(question.text, 3)]
        for question in two_hop
    )
    assert straight < 0.02 * len(two_hop)
