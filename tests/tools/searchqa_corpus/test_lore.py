"""The invented world is consistent, and its two halves are disjoint."""

from tools.searchqa_corpus.lore import World


def test_no_fact_links_the_worlds_of_the_two_splits():
    for entity in World().entities():
        for value in entity.facts.values():
            assert isinstance(value, int | str) or value.split == entity.split


def test_the_world_is_consistent():
    world = World()
    for person in world.by_kind["person"]:
        assert 52 <= person.number("died") - person.number("born") <= 93
        if "mentor" in person.facts:
            mentor = person.entity("mentor")
            assert mentor.number("born") + 15 <= person.number("born") <= mentor.number("died") - 18
            assert mentor.facts["profession"] == person.facts["profession"]
        if "school" in person.facts:
            assert person.entity("school").number("founded") <= person.number("born") + 16
        if "spouse" in person.facts:
            spouse = person.entity("spouse")
            assert (
                spouse.facts["married"]
                == person.facts["married"]
                < min(person.number("died"), spouse.number("died"))
            )
    makers = {
        "work": ("maker", "year"),
        "building": ("architect", "opened"),
        "company": ("founder", "founded"),
        "school": ("founder", "founded"),
    }
    for kind, (maker, year) in {
        **makers,
        "plant": ("finder", "found"),
        "machine": ("inventor", "year"),
        "battle": ("victor", "year"),
    }.items():
        for entity in world.by_kind[kind]:
            assert (
                entity.entity(maker).number("born") + 20
                < entity.number(year)
                < entity.entity(maker).number("died")
            )
