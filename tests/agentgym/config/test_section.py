"""Configuration sections: unknown keys are named, and settings without effect are in no key."""

import pytest
from pydantic import ValidationError

from agentgym.config.section import Section, is_operational, operational, setting, unknown_key


class Inner(Section):
    rate: float = setting(0.5, "changes results")
    workers: int = operational(2, "changes speed alone")


class Outer(Section):
    name: str = setting("a", "changes results")
    inner: Inner = setting(Inner(), "a section")
    several: tuple[Inner, ...] = setting((Inner(), Inner(rate=1.0)), "sections")
    sizes: tuple[int, ...] = setting((1, 2), "numbers")
    place: str = operational("here", "where alone")


def test_a_key_is_made_of_what_changes_a_result_as_plain_json():
    assert Outer().semantic() == {
        "name": "a",
        "inner": {"rate": 0.5},
        "several": [{"rate": 0.5}, {"rate": 1.0}],
        "sizes": [1, 2],
    }
    assert Outer(place="there", inner=Inner(workers=9)).semantic() == Outer().semantic()
    assert [name for name, info in Outer.model_fields.items() if is_operational(info)] == ["place"]


def test_a_misspelt_key_names_the_nearest_and_a_strange_one_all():
    known = ("rate", "workers")
    assert unknown_key(["inner"], "rat", known) == (
        "unknown key inner.rat; did you mean inner.rate?"
    )
    assert unknown_key([], "zzz", known) == "unknown key zzz; known: rate, workers"
    assert unknown_key([], "speed", known, sought="rate").endswith("did you mean rate?")


@pytest.mark.parametrize("wrong", [{"rat": 1.0}, {"rate": float("nan")}, {"rate": float("inf")}])
def test_a_section_takes_no_unknown_key_and_no_number_that_is_none(wrong):
    with pytest.raises(ValidationError):
        Inner(**wrong)


def test_a_section_does_not_change():
    with pytest.raises(ValidationError, match="frozen"):
        Inner().rate = 1.0
