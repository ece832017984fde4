"""Token prices of models behind endpoints, from a file that you maintain."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pydantic import NonNegativeFloat, ValidationError

from agentgym.config import ConfigError, Section, first_line, read_tree
from agentgym.config.section import setting
from agentgym.types import Usage

MILLION = 1_000_000


class Price(Section):
    """Price of one million tokens of one model, in the file's currency."""

    input: NonNegativeFloat = setting(0.0, "tokens of prompts")
    cached: NonNegativeFloat | None = setting(None, "of these, cached ones; null: as the others")
    output: NonNegativeFloat = setting(0.0, "tokens of replies")


class PriceFile(Section):
    currency: str = setting("USD", "of all prices of the file")
    models: dict[str, Price] = setting({}, "price of each model, by the name its endpoint knows")


@dataclass(frozen=True, slots=True)
class Cost:
    """Cost of calls, as far as their token counts were reported."""

    amount: float
    currency: str
    # False if calls that may have cost something reported no tokens or no cached tokens
    exact: bool


@dataclass(frozen=True, slots=True)
class Tariff:
    """The price of one model, and its currency."""

    price: Price
    currency: str

    def cost(self, usage: Usage) -> Cost:
        """Cost of a usage. If the number of cached tokens is unknown, none count as cached."""
        price = self.price
        of_cached = price.input if price.cached is None else price.cached
        fresh = usage.input_tokens - usage.cached_tokens
        amount = fresh * price.input + usage.cached_tokens * of_cached
        amount += usage.output_tokens * price.output
        unsure = usage.num_cache_untold and of_cached != price.input
        return Cost(amount / MILLION, self.currency, not (usage.num_untold or unsure))


def load_tariff(path: Path, model: str) -> Tariff:
    """Read a model's price from a YAML file. Errors: ConfigError, also if the file has no price."""
    try:
        file = PriceFile.model_validate(read_tree(path))
    except ValidationError as error:
        raise ConfigError(f"{path}: {first_line(error, PriceFile)}") from None
    if model not in file.models:
        known = ", ".join(sorted(file.models)) or "none"
        raise ConfigError(f"{path} has no price of the model {model!r}; it has: {known}")
    return Tariff(file.models[model], file.currency)
