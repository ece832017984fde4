"""Hand-computed costs of tokens, and when they are marked as inexact."""

import pytest

from agentgym.config import ConfigError
from agentgym.rollouts.policies.prices import Cost, load_tariff
from agentgym.types import Usage


@pytest.fixture
def tariff(tmp_path):
    def load(text, model="m"):
        (tmp_path / "prices.yaml").write_text(text)
        return load_tariff(tmp_path / "prices.yaml", model)

    return load


def test_cached_tokens_have_their_price_and_others_theirs(tariff):
    prices = tariff("currency: EUR\nmodels: {m: {input: 2.0, cached: 0.5, output: 8.0}}")
    usage = Usage(3, 0, input_tokens=1000, cached_tokens=400, output_tokens=100)
    # 600 x 2 + 400 x 0.5 + 100 x 8 = 2200 millionths
    assert prices.cost(usage) == Cost(0.0022, "EUR", True)
    assert tariff("models: {m: {input: 2.0, output: 8.0}}").cost(usage) == Cost(0.0028, "USD", True)


def test_a_cost_that_is_not_known_says_so(tariff):
    cached = tariff("models: {m: {input: 2.0, cached: 0.5}}")
    plain = tariff("models: {m: {input: 2.0}}")
    assert not cached.cost(Usage(1, num_untold=1)).exact
    assert not cached.cost(Usage(1, input_tokens=5, num_cache_untold=1)).exact
    assert plain.cost(Usage(1, input_tokens=5, num_cache_untold=1)).exact


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("models: {other: {input: 1}}", "no price of the model 'm'; it has: other"),
        ("models: {m: {inptu: 1}}", "unknown key"),
        ("models: {m: {input: -1}}", "greater than or equal to 0"),
        ("[1]", "mapping"),
    ],
)
def test_a_wrong_price_file_is_refused_in_one_line(tariff, text, said):
    with pytest.raises(ConfigError, match=said):
        tariff(text)
