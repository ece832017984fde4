"""The options of the environment, and its manual."""

import pytest

from envs.searchqa import spec


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top_k": 3}, "did you mean 'topk'"),
        ({"mode": "strickt"}, "did you mean 'strict'"),
        ({"protocol": "agentgm"}, "protocol: unknown value 'agentgm'; did you mean 'agentgym'"),
        ({"topk": 0}, "topk: expected a whole number from 1 to 100, got 0"),
        ({"topk": True}, "topk"),
        ({"topk": "3"}, "topk"),
        ({"max_doc_chars": -1}, "max_doc_chars"),
        ({"retriever": "bm52"}, "did you mean 'bm25'"),
        ({"retriever": "ftp://there/retrieve"}, "no URL such as"),
        ({"retriever": 5}, "expected"),
        ({"retriever_timeout_s": 0}, "seconds up to 50"),
        ({"retriever_timeout_s": "1"}, "seconds up to 50"),
        ({"questions": "embeded"}, "did you mean 'embedded'"),
        ({"questions": ""}, "expected"),
    ],
)
def test_wrong_options_name_the_nearest_known(options, message):
    with pytest.raises(ValueError, match=message):
        spec(options)


def test_the_manual_agrees_with_the_options():
    strict, agentgym = spec({"topk": 5}), spec({"mode": "agentgym"})
    assert "the 5 best documents" in strict.instructions
    assert "once" in strict.instructions
    assert "answer again" in agentgym.instructions
    for tag in ("<search>", "<answer>", "<think>", "<information>"):
        assert tag in strict.instructions
    assert not strict.blocking
    assert strict.options["mode"] == "strict"
