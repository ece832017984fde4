"""The invented world behind the embedded corpus: its entities and the facts that link them.

Every entity belongs to a province and every province to one split.
Facts link only entities of the same split, so no entity in a train question, its hops or its answer
can occur in an eval question.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import yaml

T = TypeVar("T")

SEED = 20_250_910
NUM_PROVINCES = 24
EVAL_EVERY = 4  # provinces 3, 7, 11, ... belong to split eval

WORDS: dict[str, Any] = yaml.safe_load(
    Path(__file__).with_name("words.yaml").read_text(encoding="utf-8")
)


@dataclass(slots=True, eq=False)
class Entity:
    """An invented person, place or thing, with a passage about it."""

    kind: str
    name: str  # unique in the world; also the title of its passage
    split: str  # train or eval
    facts: dict[str, Entity | int | str] = field(default_factory=dict)

    def number(self, fact: str) -> int:
        value = self.facts[fact]
        assert isinstance(value, int)
        return value

    def entity(self, fact: str) -> Entity:
        value = self.facts[fact]
        assert isinstance(value, Entity)
        return value


class Dice:
    """A source of randomness that uses only `random()`: the one method that Python promises never
    to change.
    """

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)  # noqa: S311  (no secret hangs on it)

    def below(self, n: int) -> int:
        return int(self._random.random() * n)

    def between(self, low: int, high: int) -> int:
        """Return a number from low to high, both included."""
        return low + self.below(high - low + 1)

    def pick(self, items: Sequence[T]) -> T:
        return items[self.below(len(items))]

    def word(self, table: str) -> str:
        """Return a random word of a table of words.yaml."""
        return self.pick(WORDS[table])

    def chance(self, share: float) -> bool:
        return self._random.random() < share

    def shuffled(self, items: Sequence[T]) -> list[T]:
        result = list(items)
        for last in range(len(result) - 1, 0, -1):
            other = self.below(last + 1)
            result[last], result[other] = result[other], result[last]
        return result


class Names:
    """A source of unused names; on purpose many are nearly alike."""

    def __init__(self, dice: Dice) -> None:
        self._dice = dice
        self._taken: set[str] = set()
        stems = [self.stem() for _ in range(70)]
        self._surnames = [
            stem.title() + end for stem in stems for end in dice.shuffled(WORDS["name_ends"])[:4]
        ]
        self._first = {
            pronoun: [
                stem.title() + end for stem in chosen for end in dice.shuffled(WORDS[ends])[:2]
            ]
            for pronoun, chosen, ends in (
                ("she", stems[:40], "her_ends"),
                ("he", stems[30:], "his_ends"),
            )
        }

    def stem(self) -> str:
        while (
            stem := self._dice.word("onsets") + self._dice.word("vowels") + self._dice.word("codas")
        ) in WORDS["avoided"]:
            pass
        return stem

    def unused(self, *candidates: str) -> str | None:
        """Return the first unused candidate and mark it as used; None if all are used."""
        for name in candidates:
            if name.lower() not in self._taken:
                self._taken.add(name.lower())
                return name
        return None

    def _unused_of(self, draw: Callable[[], str]) -> str:
        """Draw names until one is unused."""
        while (name := self.unused(draw())) is None:
            pass
        return name

    def coined(self, before: str = "", ends: Sequence[str] = ("",), after: str = "") -> str:
        return self._unused_of(
            lambda: f"{before}{(self.stem() + self._dice.pick(ends)).title()}{after}"
        )

    def place(self, twin_of: str) -> str:
        """Return an unused town's name; one in eight is made of `twin_of`, another town's name."""
        if twin_of and self._dice.chance(0.125):
            words = self._dice.shuffled(("New", "Upper", "Lower", "Old"))
            name = self.unused(*(f"{word} {twin_of}" for word in words))
            if name is not None:
                return name
        return self.coined(ends=WORDS["town_ends"])

    def person(self, pronoun: str) -> str:
        return self._unused_of(
            lambda: f"{self._dice.pick(self._first[pronoun])} {self._dice.pick(self._surnames)}"
        )

    def title(self) -> str:
        while True:
            adjective, noun = self._dice.word("adjectives"), self._dice.word("nouns")
            other = self._dice.word("nouns")
            shapes = (
                f"The {adjective} {noun}",
                f"The {noun} and the {other}",
                f"My {adjective} {noun}",
                f"{noun} of the {adjective} {other}",
            )
            if noun != other and (name := self.unused(self._dice.pick(shapes))) is not None:
                return name

    def phrase(self, after: str) -> str:
        return self._unused_of(
            lambda: f"{self._dice.word('adjectives')} {self._dice.word('nouns')} {after}"
        )


class World:
    """All entities by kind, in the order they were made."""

    def __init__(self, seed: int = SEED) -> None:
        self.dice = Dice(seed)
        self.names = Names(self.dice)
        self.by_kind: dict[str, list[Entity]] = {}
        splits = [
            "eval" if number % EVAL_EVERY == EVAL_EVERY - 1 else "train"
            for number in range(NUM_PROVINCES)
        ]
        provinces = [
            self._add("province", self.names.coined(ends=WORDS["province_ends"]), split)
            for split in splits
        ]
        for province in provinces:
            self._land(province)
        for province in provinces:
            self._people(province)
        for person in self.by_kind["person"]:
            self._acquaintances(person)
        for province in provinces:
            self._deeds(province)
        for person in self.by_kind["person"]:
            self._education(person)
        for province in provinces:
            province.facts["capital"] = self.dice.pick(self._inside("town", province))

    def entities(self) -> list[Entity]:
        return [entity for entities in self.by_kind.values() for entity in entities]

    def of(self, kind: str, split: str, **facts: str) -> list[Entity]:
        """Return the entities of a kind and split whose facts have these values."""
        entities = [entity for entity in self.by_kind[kind] if entity.split == split]
        wanted = facts.items()
        return [e for e in entities if all(e.facts.get(name) == value for name, value in wanted)]

    def _inside(self, kind: str, province: Entity) -> list[Entity]:
        places = self.of(kind, province.split)
        return [place for place in places if place.facts["province"] is province]

    def _add(self, kind: str, name: str, split: str, **facts: Entity | int | str) -> Entity:
        entity = Entity(kind, name, split, facts)
        self.by_kind.setdefault(kind, []).append(entity)
        return entity

    def _land(self, province: Entity) -> None:
        dice, split = self.dice, province.split
        province.facts.update(export=dice.word("exports"), area=dice.between(31, 240) * 100)
        name, depth = self.names.coined("Lake "), dice.between(18, 290)
        lake = self._add(
            "lake", name, split, province=province, depth=depth, fish=dice.word("fish")
        )
        mountains = []
        for _ in range(3):
            name, height = self.names.coined("Mount "), dice.between(1_210, 4_380)
            mountains.append(self._add("mountain", name, split, province=province, height=height))
        rivers = []
        for source in mountains:
            name, length = self.names.coined("River "), dice.between(41, 612)
            rivers.append(self._add("river", name, split, source=source, mouth=lake, length=length))
        for _ in range(10):
            towns = self.by_kind.get("town", [])
            plain = [town.name for town in towns if " " not in town.name]
            name = self.names.place(dice.pick(plain) if plain else "")
            town = self._add("town", name, split, province=province, river=dice.pick(rivers))
            town.facts.update(founded=dice.between(1_080, 1_540), craft=dice.word("crafts"))
            town.facts["population"] = dice.between(21, 940) * 100

    def _people(self, province: Entity) -> None:
        dice, split = self.dice, province.split
        towns = self._inside("town", province)
        for profession, count in WORDS["professions"].items():
            for _ in range(count):
                pronoun = dice.pick(("she", "he"))
                years = (1_560, 1_630) if profession == "scholar" else (1_640, 1_890)
                born = dice.between(*years)
                died, birthplace = born + dice.between(52, 93), dice.pick(towns)
                person = self._add("person", self.names.person(pronoun), split, born=born)
                person.facts.update(died=died, birthplace=birthplace, profession=profession)
                person.facts["pronoun"] = pronoun

    def _acquaintances(self, person: Entity) -> None:
        """Choose a mentor and a spouse for a person.
        A mentor is older and still alive. A person who is named as a spouse names none.
        """
        dice, born = self.dice, person.number("born")
        colleagues = self.of("person", person.split, profession=str(person.facts["profession"]))
        older = [p for p in colleagues if born - 50 <= p.number("born") <= born - 15]
        teachers = [p for p in older if p.number("died") >= born + 18]
        if teachers and dice.chance(0.7):
            person.facts["mentor"] = dice.pick(teachers)
        others = {"she": "he", "he": "she"}
        people = self.of("person", person.split, pronoun=others[str(person.facts["pronoun"])])
        single = [p for p in people if "married" not in p.facts]
        partners = [p for p in single if abs(p.number("born") - born) <= 9]
        if partners and "married" not in person.facts and dice.chance(0.6):
            partner = dice.pick(partners)
            year = max(born, partner.number("born")) + dice.between(20, 29)
            person.facts.update(spouse=partner, married=year)
            partner.facts["married"] = year

    def _grown(self, person: Entity) -> int:
        """Return a year of the person's working life."""
        born = person.number("born")
        return self.dice.between(born + 24, min(person.number("died") - 1, born + 66))

    def _someone(self, split: str, profession: str) -> Entity:
        return self.dice.pick(self.of("person", split, profession=profession))

    def _somewhere(self, split: str) -> Entity:
        return self.dice.pick(self.of("town", split))

    def _deeds(self, province: Entity) -> None:
        split = province.split
        for mountain in self._inside("mountain", province):
            climber = self._someone(split, "mountaineer")
            mountain.facts.update(climber=climber, climbed=self._grown(climber))
        for number in range(20):
            form = tuple(WORDS["forms"])[number % len(WORDS["forms"])]
            maker = self._someone(split, WORDS["forms"][form]["profession"])
            work = self._add("work", self.names.title(), split, form=form, maker=maker)
            work.facts.update(year=self._grown(maker), setting=self._somewhere(split))
        self._institutions(split)
        self._events(split)
        self._inventions(split)

    def _institutions(self, split: str) -> None:
        dice, names = self.dice, self.names
        for what in WORDS["buildings"]:
            architect = self._someone(split, "architect")
            name = names.coined(after=f" {what}")
            building = self._add("building", name, split, what=what, architect=architect)
            building.facts.update(town=self._somewhere(split), opened=self._grown(architect))
        for branch, products in WORDS["products"].items():
            founder = self._someone(split, "merchant")
            product = dice.pick(products)
            name = names.coined(ends=("a", "ex", "ano", "ix"), after=f" {branch}")
            company = self._add("company", name, split, founder=founder, product=product)
            company.facts.update(seat=self._somewhere(split), founded=self._grown(founder))
        for what in ("Academy", "College", "Institute"):
            scholar = self._someone(split, "scholar")
            founded = min(self._grown(scholar), scholar.number("born") + 50)
            name = names.coined(after=f" {what}")
            school = self._add("school", name, split, founder=scholar, founded=founded)
            school.facts.update(town=self._somewhere(split), field=dice.word("fields"))

    def _events(self, split: str) -> None:
        dice, names = self.dice, self.names
        for terrain in ("Ford", "Hill"):
            victor = self._someone(split, "general")
            name = names.coined("Battle of ", after=f" {terrain}")
            town, year = self._somewhere(split), self._grown(victor)
            self._add("battle", name, split, victor=victor, town=town, year=year)
        for _ in range(3):
            honoured = dice.pick(self.of("person", split))
            begun = honoured.number("died") + dice.between(1, 40)
            name, town = names.phrase("Festival"), self._somewhere(split)
            self._add("festival", name, split, honours=honoured, town=town, begun=begun)

    def _inventions(self, split: str) -> None:
        dice, names = self.dice, self.names
        for _ in range(4):
            finder = self._someone(split, "botanist")
            name = names.coined(after=f" {dice.word('plants')}")
            mountain = dice.pick(self.of("mountain", split))
            plant = self._add("plant", name, split, finder=finder, mountain=mountain)
            plant.facts.update(found=self._grown(finder), bloom=dice.word("bloom"))
        for _ in range(3):
            inventor = self._someone(split, "inventor")
            what = dice.pick(tuple(WORDS["machines"]))
            name = names.coined(ends=("on", "ic", "o"), after=f" {what}")
            machine = self._add("machine", name, split, what=what, inventor=inventor)
            machine.facts.update(town=self._somewhere(split), year=self._grown(inventor))
            machine.facts["use"] = WORDS["machines"][what]
        for _ in range(4):
            name = names.coined(ends=WORDS["town_ends"], after=f" {dice.word('clubs')}")
            ground = names.coined(after=f" {dice.pick(('Park', 'Road', 'Green'))}")
            club = self._add("club", name, split, town=self._somewhere(split), ground=ground)
            club.facts.update(founded=dice.between(1_862, 1_921), colours=dice.word("colours"))

    def _education(self, person: Entity) -> None:
        latest = person.number("born") + 16
        all_schools = self.of("school", person.split)
        schools = [school for school in all_schools if school.number("founded") <= latest]
        if schools and self.dice.chance(0.8):
            person.facts["school"] = self.dice.pick(schools)
