"""Whole episodes on the embedded corpus."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envs.env import ExpertFailed
from envs.searchqa import questions, spec
from envs.searchqa.questions import FIRST_TRAIN_ID
from envs.searchqa.world import MAX_QUERY_CHARS, OVER, PROTOCOLS
from tests.completed import printed_under

TASKS = [*range(150), *range(FIRST_TRAIN_ID, FIRST_TRAIN_ID + 150)]
MAX_TURNS = 3  # two searches and an answer


def episode_of(task_id=0, **options):
    episode = spec(options).make()
    episode.reset(task_id)
    return episode


def play(episode, policy, max_turns=10):
    results = []
    for turn in range(max_turns):
        results.append(episode.step(policy(turn)))
        if results[-1].terminated:
            break
    return results


def right_answer(episode):
    return f"<answer>{episode.question.answers[0]}</answer>"


@pytest.mark.parametrize("mode", ["strict", "agentgym"])
def test_the_expert_succeeds_on_every_id_within_three_turns(mode):
    make = spec({"mode": mode}).make
    for task_id in TASKS:
        episode = make()
        episode.reset(task_id)
        expert = episode.expert()
        results = play(episode, lambda turn, expert=expert: expert.next_action(), MAX_TURNS)
        assert [result.reward for result in results] == [0.0] * len(episode.question.hops) + [1.0]
        assert results[-1].success
        assert results[-1].info == {
            "family": episode.question.data_source,
            "num_searches": len(results) - 1,
            "parts": {"em": 1.0, "f1": 1.0},
        }


@pytest.mark.slow
def test_the_expert_succeeds_on_every_question_there_is():
    make = spec({}).make
    for task_id in [*range(1200), *range(FIRST_TRAIN_ID, FIRST_TRAIN_ID + 4000)]:
        episode = make()
        episode.reset(task_id)
        expert = episode.expert()
        assert play(episode, lambda turn, expert=expert: expert.next_action(), MAX_TURNS)[
            -1
        ].success, task_id


@pytest.mark.parametrize("mode", ["strict", "agentgym"])
@pytest.mark.parametrize(
    "reply",
    [
        "",
        "I do not know",
        "<answer></answer>",
        "<answer>the</answer>",
        "<answer>junk</answer>",
        "<search>junk</search>",
        "<search></search>",
    ],
)
def test_junk_and_silence_earn_nothing(mode, reply):
    make = spec({"mode": mode}).make
    for task_id in TASKS:
        episode = make()
        episode.reset(task_id)
        results = play(episode, lambda turn: reply, 4)
        assert sum(result.reward for result in results) == 0.0
        assert not any(result.success for result in results)


def test_answering_with_the_question_or_the_first_title_earns_nothing():
    for task_id in TASKS:
        episode = episode_of(task_id)
        assert episode.step(f"<answer>{episode.question.text}</answer>").reward == 0.0
        episode.reset(task_id)
        episode.step(f"<search>{episode.question.text}</search>")
        assert (
            episode.step(f"<answer>{episode.searched[0].documents[0].title}</answer>").reward == 0.0
        )


def test_an_episode_in_words():
    episode = spec({"topk": 1}).make()
    assert episode.reset(FIRST_TRAIN_ID + 5) == "Question: Who founded the company Tevex Mills?"
    result = episode.step("<think>Look it up.</think>\n<search>Tevex Mills</search>")
    assert (
        result.observation
        == '<information>Doc 1(Title: "Tevex Mills") Tevex Mills is a company based in Hirford. A'
        " strike closed its workshops for one winter. Krarith Glildall founded it in 1760. The"
        " firm is known for its blotting paper.</information>"
    )
    assert (result.reward, result.terminated, result.success) == (0.0, False, False)
    result = episode.step("<answer>krarith glildall.</answer>")
    assert (result.observation, result.reward, result.terminated, result.success) == (
        "Your answer is right.",
        1.0,
        True,
        True,
    )
    media_type, text = episode.render()
    assert media_type == "text/plain"
    assert text.decode().splitlines() == [
        "Question (embedded_one_hop): Who founded the company Tevex Mills?",
        "",
        "Search 1: Tevex Mills",
        (
            "  Tevex Mills: Tevex Mills is a company based in Hirford. A strike closed its"
            " workshops for one winter. Krarith Glildall founded it in 1760. The firm is known for"
            " its blotting paper."
        ),
        "",
        "Answer: krarith glildall. (right)",
    ]


def test_strict_takes_one_answer_and_tells_how_near_it_was():
    episode = episode_of(FIRST_TRAIN_ID + 5)
    result = episode.step("<answer>Krarith</answer><answer>Krarith Glildall</answer>")
    assert (result.reward, result.terminated, result.success) == (0.0, True, False)
    assert result.info["parts"] == {"em": 0.0, "f1": 0.6667}


def test_every_turn_tells_the_data_set_and_which_replies_are_no_action():
    episode = episode_of(FIRST_TRAIN_ID + 5)
    told = [episode.step(text).info for text in ("hm", "<search> </search>", "<search>x</search>")]
    assert {each["family"] for each in told} == {episode.question.data_source}
    assert [each.get("invalid", False) for each in told] == [True, True, False]


def test_agentgym_mode_goes_on_until_the_answer_is_right():
    episode = episode_of(FIRST_TRAIN_ID + 5, mode="agentgym")
    for _ in range(3):
        result = episode.step("<answer>somebody</answer>")
        assert (
            result.observation,
            result.reward,
            result.terminated,
            result.info["parts"]["em"],
        ) == (PROTOCOLS["own"].try_again, 0.0, False, 0.0)
    # on AgentGym's routes the last answer of a reply counts
    result = episode.step("<answer>nobody</answer>, no: <answer>Krarith Glildall</answer>")
    assert (result.reward, result.terminated, result.success) == (1.0, True, True)


def test_agentgyms_protocol_asks_in_its_order_and_has_its_four_cases():
    served = spec({"protocol": "agentgym", "mode": "agentgym"})
    places = [
        served.instructions.index(part)
        for part in (
            "<think>",
            "<search>",
            "<information>",
            "<answer>...</answer>",
            "confident",
            "For example",
        )
    ]
    assert served.instructions.endswith("\n")  # a blank line before the question
    assert places[0] < places[1] < places[2] < places[3]
    assert places[4] < places[5]
    episode, says = (
        episode_of(FIRST_TRAIN_ID + 5, protocol="agentgym", mode="agentgym"),
        PROTOCOLS["agentgym"],
    )
    found = episode.step(
        "<think>I could <search>Tevex Mills</search> or</think> <answer>junk</answer>"
    ).observation  # the raw reply is parsed
    assert found.startswith("<information>Doc 1(Title: ")
    assert episode.step("<answer>somebody</answer>").observation == says.try_again
    assert episode.step("hm").observation == says.neither
    assert all(
        f"<{tag}>" in says.neither and f"</{tag}>" in says.neither for tag in ("search", "answer")
    )
    assert (
        episode.step("<search> </search>").observation
        == "<information>No document matches.</information>"
    )
    won = episode.step("<think><answer>nobody</answer></think><answer>Krarith Glildall</answer>")
    assert (won.observation, won.reward, won.terminated) == (says.right, 1.0, True)
    assert not {says.right, says.wrong, says.try_again, says.neither} & {*vars_of(PROTOCOLS["own"])}


def vars_of(protocol):
    return [getattr(protocol, name) for name in ("right", "wrong", "try_again", "neither")]


@pytest.mark.parametrize("mode", ["strict", "agentgym"])
def test_nothing_is_paid_after_the_end(mode):
    episode = episode_of(3, mode=mode)
    assert episode.step(right_answer(episode)).reward == 1.0
    for reply in (right_answer(episode), "<search>town</search>", ""):
        result = episode.step(reply)
        assert (result.observation, result.reward, result.terminated, result.success) == (
            OVER,
            0.0,
            True,
            False,
        )
    assert episode.searched == []


def test_a_reply_without_a_tag_is_told_the_two_tags():
    episode = episode_of()
    for reply in ("town", "<think><answer>a</answer></think>"):
        result = episode.step(reply)
        assert "<search>your query</search>" in result.observation
        assert "<answer>your answer</answer>" in result.observation
        assert not result.terminated
    assert "empty" in episode.step("<search> \n</search>").observation
    assert episode.searched == []


@pytest.mark.parametrize("topk", [1, 3, 8])
def test_as_many_documents_are_shown_as_were_asked_for(topk):
    observation = episode_of(0, topk=topk).step("<search>town river</search>").observation
    assert observation.count("(Title: ") == topk
    assert f"Doc {topk}(Title: " in observation


def test_texts_can_be_limited_and_the_expert_says_what_it_could_not_see():
    episode = episode_of(FIRST_TRAIN_ID + 5, max_doc_chars=40)
    observation = episode.step("<search>Tevex Mills</search>").observation
    assert observation.startswith(
        '<information>Doc 1(Title: "Tevex Mills") Tevex Mills is a company based in ...\nDoc 2'
    )
    expert = episode.expert()
    episode.step(expert.next_action())
    with pytest.raises(
        ExpertFailed,
        match=(
            r"no document contains what 'Who founded the company Tevex Mills\?' needs;"
            r" searched for: Tevex Mills;"
        ),
    ):
        expert.next_action()


def test_the_expert_goes_on_from_what_others_did():
    episode = episode_of(
        next(i for i, q in enumerate(questions.embedded().eval) if len(q.hops) == 2)
    )
    first, second = episode.question.hops
    expert = episode.expert()
    assert expert.next_action() == expert.next_action() == f"<search>{first.query}</search>"
    episode.step(f"<search>{second.title}</search>")  # the second document is shown already
    episode.step("blub")
    while not (result := episode.step(expert.next_action())).terminated:
        pass
    assert result.success
    assert second.query not in [search.query for search in episode.searched]


def test_a_query_is_read_up_to_a_limit():
    episode = episode_of()
    episode.step(f"<search>{'x' * 5000}</search>")
    assert len(episode.searched[0].query) == MAX_QUERY_CHARS


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.text(max_size=60),
            st.builds("<search>{}</search>".format, st.text(max_size=60)),
            st.builds(
                "<think>{}</think><answer>{}</answer>".format,
                st.text(max_size=20),
                st.text(max_size=20),
            ),
            st.lists(
                st.sampled_from(
                    ["<search>", "</search>", "<answer>", "</answer>", "<think>", "town"]
                ),
                max_size=8,
            ).map("".join),
        ),
        max_size=6,
    ),
    st.sampled_from(["strict", "agentgym"]),
    st.sampled_from(["own", "agentgym"]),
)
def test_no_text_raises_or_pays(replies, mode, protocol):
    episode = episode_of(1, mode=mode, protocol=protocol)
    for reply in replies:
        result = episode.step(reply)
        assert isinstance(result.observation, str)
        json.dumps(result.info)
        assert result.reward == 0.0
    assert episode.render()[1].decode().startswith("Question (embedded_")


TRANSCRIPT = """
import hashlib, sys
from envs.searchqa import spec
digest = hashlib.sha256()
make = spec({}).make
ids = [*range(40), *range(51713, 51753)]
episodes = [make() for _ in ids]
told = [[episode.reset(task_id)] for episode, task_id in zip(episodes, ids)]
def turn(number):
    episode = episodes[number]
    if not episode.ended:
        action = episode.expert().next_action()
        told[number] += [action, repr(episode.step("<search>river town founded</search>")), \
repr(episode.step(action))]
if sys.argv[1] == "interleaved":
    for _ in range(3):
        for number in reversed(range(len(ids))):
            turn(number)
else:
    for number in range(len(ids)):
        for _ in range(3):
            turn(number)
for lines in told:
    digest.update(chr(10).join(lines).encode())
print(digest.hexdigest())
"""


@pytest.mark.integration
def test_equal_task_ids_give_equal_transcripts_in_two_processes_and_between_other_sessions():
    first = printed_under("0", TRANSCRIPT, "interleaved")
    assert first == printed_under("4711", TRANSCRIPT, "one by one")
