"""Recorded tokens, as pages color them."""

from dataclasses import replace

from agentgym.types import Learned
from agentgym.viewer.tokens import TokenView, available, numbers_of, spans, why_not_kept
from tests.agentgym.viewer.conftest import KEPT, episode


def test_numbers_of_the_update_are_those_of_sampled_tokens_in_order():
    numbers = numbers_of(episode(learned=KEPT))
    assert sorted(numbers) == [3, 4, 6, 7]
    assert (numbers[4].engine, numbers[4].learner) == (-0.5, -1.0)
    assert (numbers[6].ratio, numbers[6].advantage, numbers[6].version) == (0.8, 1.0, 4)
    assert numbers_of(episode())[3].learner is None


def test_overlays_are_offered_where_their_numbers_are_on_record():
    assert available(episode(learned=KEPT)) == [
        "mask", "engine", "learner", "entropy", "ratio", "advantage", "version"
    ]  # fmt: skip
    assert available(episode()) == ["mask", "engine", "version"]
    assert available(episode(input_ids=(), action_mask=(), logprobs=())) == []


def test_what_is_not_kept_says_why():
    assert why_not_kept(episode(learned=KEPT)) == ""
    assert "rollout.token_numbers_frac" in why_not_kept(episode())
    assert why_not_kept(episode(learned=Learned(excluded="truncated"))) == (
        "not in the loss: truncated"
    )
    assert "no tokens" in why_not_kept(episode(input_ids=(), action_mask=(), logprobs=()))


def test_spans_cover_every_token_once():
    assert spans(episode()) == [(0, 5), (5, 8), (8, 8)]
    assert spans(episode(input_ids=(), action_mask=(), logprobs=())) == [(0, 0)] * 3


def test_ids_are_shown_as_recorded_with_all_that_is_known():
    shown = TokenView(episode(learned=KEPT), "ratio", lambda token: f"<{token}>").span(2, 7)
    assert [token.text for token in shown] == ["<12>", "<13>", "<14>", "<15>", "<16>"]
    assert [token.sampled for token in shown] == [False, True, True, False, True]
    # log 1.2 = 0.182, in steps of 0.025: 7.3; log 0.8 = -0.223: 8.9, at most 8
    assert [token.shade for token in shown] == ["", "p8", "", "", "n8"]
    assert shown[1].told == (
        "token 3, id 13, engine -0.5000 nats (p 0.607), learner -0.5000, +0.0000 of it,"
        " entropy 0.6000, ratio 1.2000, advantage +1.0000, weights 4"
    )
    assert shown[0].told.endswith("read and not sampled: not in the loss")
    record = episode(learned=KEPT)
    first, *others = record.turns
    record = replace(record, turns=(replace(first, has_logprobs=False), *others))
    shown = TokenView(record, "engine", str).span(3, 7)
    assert [token.shade for token in shown] == ["", "", "", "s1"]
    assert shown[0].told.startswith("token 3, id 13, learner -0.5000, entropy 0.6000, ")


def test_shades_grow_with_surprise_and_fit_the_episode():
    def shades(overlay, **changes):
        shown = TokenView(episode(**changes), overlay, str).span(0, 8)
        return [token.shade for token in shown if token.sampled]

    logprobs = (0.0, 0.0, 0.0, -0.001, -0.6, 0.0, -9.0, 0.0)
    assert shades("engine", logprobs=logprobs) == ["s1", "s2", "s8", ""]
    half = Learned(logprobs=(-1.0,) * 4, advantages=(0.5, -0.25, 0.0, 0.5), ratios=(1.0,) * 4)
    assert shades("advantage", learned=half) == ["p8", "n4", "", "p8"]
    assert shades("learner", learned=half) == ["s2"] * 4
    assert shades("entropy", learned=KEPT) == ["s3", "", "s3", "s1"]
    assert shades("entropy", learned=half) == [""] * 4  # older records have none
    assert shades("version") == ["v0"] * 4
    assert shades("mask") == ["m"] * 4
