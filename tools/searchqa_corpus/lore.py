"""The invented world behind the embedded corpus: its entities and the facts that link them.

Every entity belongs to a province and every province to one split.
Facts link only entities of the same split, so no entity in a train question, its hops or its answer
can occur in an eval question.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

T = TypeVar("T")

SEED = 20_250_910
NUM_PROVINCES = 24
EVAL_EVERY = 4  # provinces 3, 7, 11, ... belong to split eval

_ONSETS = (
    "b",
    "br",
    "d",
    "dr",
    "f",
    "g",
    "gl",
    "h",
    "k",
    "kr",
    "l",
    "m",
    "n",
    "p",
    "r",
    "s",
    "sk",
    "st",
    "t",
    "th",
    "tr",
    "v",
    "w",
    "z",
)
_VOWELS = ("a", "e", "i", "o", "u", "ae", "ei")
_CODAS = ("l", "n", "r", "s", "m", "nd", "rk", "lt", "sk", "v", "th", "rn")
# stems that are rude or common English words
_AVOIDED = (
    "bum",
    "dum",
    "kum",
    "kun",
    "pen",
    "pis",
    "vul",
    "has",
    "her",
    "him",
    "his",
    "this",
    "was",
    "work",
)
_TOWN_ENDS = ("holt", "wick", "stead", "mere", "ford", "gate", "haven", "field", "brook", "moor")
_NAME_ENDS = (
    "eld",
    "elt",
    "mark",
    "rosk",
    "vane",
    "vant",
    "thorn",
    "sen",
    "dall",
    "dell",
    "wyn",
    "stry",
    "quist",
    "lund",
)
_PROVINCE_ENDS = ("mar", "oria", "and", "ovia", "esse", "anth")
_HER_ENDS = ("a", "ea", "ys", "wen", "ine", "ith")
_HIS_ENDS = ("or", "an", "ek", "in", "ard", "ov")

_ADJECTIVES = """
    Amber Ashen Borrowed Broken Burning Copper Crooked Distant Drowned Empty Faithful Folded \
Forgotten Frozen Gilded Hidden Hollow Idle
    Iron Ivory Last Leaden Lonely Marble Midnight Nameless Northern Painted Patient Quiet Restless \
Salted Scarlet Seventh Silent Silver
    Sleeping Thirteenth Twilight Unlit Wandering Waxen Whispering Wooden
    """.split()  # noqa: SIM905  (a list of single words reads worse)
_NOUNS = """
    Almanac Anchor Apiary Archer Balcony Baker Banner Bellringer Bridge Candle Cartographer Chapel \
Clock Compass Crown Ferry Fiddler
    Garden Granary Harbour Harvest Heron Horizon Inkwell Judge Kiln Ladder Lantern Ledger Library \
Locksmith Loom Meadow Messenger
    Millstone Mirror Notary Orchard Organist Pilgrim Procession Quarry Raven Regent Sailmaker \
Shepherd Staircase Tailor Tide Tollhouse
    Umbrella Veil Vineyard Watchman Weathercock Window
    """.split()  # noqa: SIM905
_PROFESSIONS = (
    ("novelist", 5),
    ("composer", 4),
    ("painter", 4),
    ("poet", 3),
    ("playwright", 3),
    ("architect", 4),
    ("inventor", 3),
    ("botanist", 2),
    ("mountaineer", 2),
    ("general", 1),
    ("merchant", 2),
    ("scholar", 3),
)
# who makes what
FORMS = {
    "novel": "novelist",
    "opera": "composer",
    "painting": "painter",
    "poem": "poet",
    "play": "playwright",
}
_CRAFTS = (
    *(
        "bell founding",
        "glass blowing",
        "lace making",
        "clock making",
        "rope making",
        "paper milling",
        "saddlery",
        "candle making",
    ),
    *(
        "cheese making",
        "barrel making",
        "dyeing",
        "boat building",
        "basket weaving",
        "tile making",
        "salt boiling",
        "honey trading",
    ),
    *("felt making", "organ building"),
)
_PRODUCTS = {
    "Instruments": "barometers|telescopes|sextants|surveying chains",
    "Foundry": "church bells|cast iron stoves|ship propellers|printing presses",
    "Mills": "linen sheets|sail cloth|wallpaper|blotting paper",
    "Provisions": "pickled plums|rye biscuits|smoked eel|pear cider",
    "Works": "fountain pens|bicycles|oil lamps|piano strings",
}
_BUILDINGS = ("Bridge", "Lighthouse", "Theatre", "Library", "Observatory", "Town Hall")
_PLANTS = (
    "bellwort",
    "saxifrage",
    "gentian",
    "thistle",
    "orchid",
    "sorrel",
    "lupin",
    "campion",
    "primrose",
    "heather",
)
_BLOOM = (
    "pale blue",
    "deep violet",
    "cream white",
    "orange",
    "dark red",
    "lemon yellow",
    "rose pink",
    "greenish white",
)
_MACHINES = {
    "pump": "draining mines",
    "loom": "weaving ribbons",
    "plough": "breaking heavy clay",
    "press": "printing maps",
    "crane": "unloading barges",
    "dynamo": "lighting streets",
    "lathe": "turning brass screws",
}
_CLUBS = ("Rovers", "Athletic", "Wanderers", "United", "Harriers")
_COLOURS = (
    "green and white",
    "black and gold",
    "sky blue",
    "red and grey",
    "purple",
    "maroon and cream",
    "orange and black",
)
_FISH = ("char", "perch", "pike", "whitefish", "trout", "bream", "burbot")
_EXPORTS = ("barley", "slate", "wool", "amber", "timber", "copper ore", "cider", "hemp")
_FIELDS = ("medicine", "navigation", "law", "music", "astronomy", "mining", "drawing", "rhetoric")


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
            stem.title() + end for stem in stems for end in dice.shuffled(_NAME_ENDS)[:4]
        ]
        self._first = {
            "she": [
                stem.title() + end for stem in stems[:40] for end in dice.shuffled(_HER_ENDS)[:2]
            ],
            "he": [
                stem.title() + end for stem in stems[30:] for end in dice.shuffled(_HIS_ENDS)[:2]
            ],
        }

    def stem(self) -> str:
        while (
            stem := self._dice.pick(_ONSETS) + self._dice.pick(_VOWELS) + self._dice.pick(_CODAS)
        ) in _AVOIDED:
            pass
        return stem

    def unused(self, *candidates: str) -> str | None:
        """Return the first unused candidate and mark it as used; None if all are used."""
        for name in candidates:
            if name.lower() not in self._taken:
                self._taken.add(name.lower())
                return name
        return None

    def coined(self, before: str = "", ends: Sequence[str] = ("",), after: str = "") -> str:
        while True:
            name = self.unused(f"{before}{(self.stem() + self._dice.pick(ends)).title()}{after}")
            if name is not None:
                return name

    def place(self, twin_of: str) -> str:
        """Return an unused town's name; one in eight is made of `twin_of`, another town's name."""
        if twin_of and self._dice.chance(0.125):
            name = self.unused(
                *(
                    f"{word} {twin_of}"
                    for word in self._dice.shuffled(("New", "Upper", "Lower", "Old"))
                )
            )
            if name is not None:
                return name
        return self.coined(ends=_TOWN_ENDS)

    def person(self, pronoun: str) -> str:
        while True:
            name = self.unused(
                f"{self._dice.pick(self._first[pronoun])} {self._dice.pick(self._surnames)}"
            )
            if name is not None:
                return name

    def title(self) -> str:
        while True:
            adjective, noun, other = (
                self._dice.pick(_ADJECTIVES),
                self._dice.pick(_NOUNS),
                self._dice.pick(_NOUNS),
            )
            shapes = (
                f"The {adjective} {noun}",
                f"The {noun} and the {other}",
                f"My {adjective} {noun}",
                f"{noun} of the {adjective} {other}",
            )
            if noun != other and (name := self.unused(self._dice.pick(shapes))) is not None:
                return name

    def phrase(self, after: str) -> str:
        while True:
            name = self.unused(f"{self._dice.pick(_ADJECTIVES)} {self._dice.pick(_NOUNS)} {after}")
            if name is not None:
                return name


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
            self._add("province", self.names.coined(ends=_PROVINCE_ENDS), split) for split in splits
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
            province.facts["capital"] = self.dice.pick(
                [
                    town
                    for town in self.of("town", province.split)
                    if town.facts["province"] is province
                ]
            )

    def entities(self) -> list[Entity]:
        return [entity for entities in self.by_kind.values() for entity in entities]

    def of(self, kind: str, split: str, **facts: str) -> list[Entity]:
        """Return the entities of a kind and split whose facts have these values."""
        return [
            entity
            for entity in self.by_kind[kind]
            if entity.split == split
            and all(entity.facts.get(name) == value for name, value in facts.items())
        ]

    def _add(self, kind: str, name: str, split: str, **facts: Entity | int | str) -> Entity:
        entity = Entity(kind, name, split, facts)
        self.by_kind.setdefault(kind, []).append(entity)
        return entity

    def _land(self, province: Entity) -> None:
        dice, split = self.dice, province.split
        province.facts.update(export=dice.pick(_EXPORTS), area=dice.between(31, 240) * 100)
        lake = self._add(
            "lake",
            self.names.coined("Lake "),
            split,
            province=province,
            depth=dice.between(18, 290),
            fish=dice.pick(_FISH),
        )
        mountains = [
            self._add(
                "mountain",
                self.names.coined("Mount "),
                split,
                province=province,
                height=dice.between(1_210, 4_380),
            )
            for _ in range(3)
        ]
        rivers = [
            self._add(
                "river",
                self.names.coined("River "),
                split,
                source=mountain,
                mouth=lake,
                length=dice.between(41, 612),
            )
            for mountain in mountains
        ]
        for _ in range(10):
            towns = self.by_kind.get("town", [])
            plain = [town.name for town in towns if " " not in town.name]
            self._add(
                "town",
                self.names.place(dice.pick(plain) if plain else ""),
                split,
                province=province,
                river=dice.pick(rivers),
                founded=dice.between(1_080, 1_540),
                craft=dice.pick(_CRAFTS),
                population=dice.between(21, 940) * 100,
            )

    def _people(self, province: Entity) -> None:
        dice, split = self.dice, province.split
        towns = [town for town in self.of("town", split) if town.facts["province"] is province]
        for profession, count in _PROFESSIONS:
            for _ in range(count):
                pronoun = dice.pick(("she", "he"))
                born = (
                    dice.between(1_560, 1_630)
                    if profession == "scholar"
                    else dice.between(1_640, 1_890)
                )
                facts: dict[str, Entity | int | str] = {
                    "profession": profession,
                    "pronoun": pronoun,
                    "born": born,
                    "died": born + dice.between(52, 93),
                    "birthplace": dice.pick(towns),
                }
                self._add("person", self.names.person(pronoun), split, **facts)

    def _acquaintances(self, person: Entity) -> None:
        """Choose a mentor and a spouse for a person.
        A mentor is older and still alive. A person who is named as a spouse names none.
        """
        dice, born = self.dice, person.number("born")
        colleagues = self.of("person", person.split, profession=str(person.facts["profession"]))
        teachers = [
            p
            for p in colleagues
            if born - 50 <= p.number("born") <= born - 15 and p.number("died") >= born + 18
        ]
        if teachers and dice.chance(0.7):
            person.facts["mentor"] = dice.pick(teachers)
        others = {"she": "he", "he": "she"}
        partners = [
            p
            for p in self.of("person", person.split, pronoun=others[str(person.facts["pronoun"])])
            if abs(p.number("born") - born) <= 9
            and "spouse" not in p.facts
            and "married" not in p.facts
        ]
        if partners and "married" not in person.facts and dice.chance(0.6):
            partner = dice.pick(partners)
            person.facts["spouse"] = partner
            person.facts["married"] = partner.facts["married"] = max(
                born, partner.number("born")
            ) + dice.between(20, 29)

    def _grown(self, person: Entity) -> int:
        """Return a year of the person's working life."""
        born = person.number("born")
        return self.dice.between(born + 24, min(person.number("died") - 1, born + 66))

    def _deeds(self, province: Entity) -> None:
        dice, names, split = self.dice, self.names, province.split

        def someone(profession: str) -> Entity:
            return dice.pick(self.of("person", split, profession=profession))

        def somewhere() -> Entity:
            return dice.pick(self.of("town", split))

        for mountain in [m for m in self.of("mountain", split) if m.facts["province"] is province]:
            climber = someone("mountaineer")
            mountain.facts.update(climber=climber, climbed=self._grown(climber))
        for number in range(20):
            form = tuple(FORMS)[number % len(FORMS)]
            maker = someone(FORMS[form])
            self._add(
                "work",
                names.title(),
                split,
                form=form,
                maker=maker,
                year=self._grown(maker),
                setting=somewhere(),
            )
        for number in range(6):
            architect = someone("architect")
            what = _BUILDINGS[number % len(_BUILDINGS)]
            name = names.coined(after=f" {what}")
            self._add(
                "building",
                name,
                split,
                what=what,
                architect=architect,
                town=somewhere(),
                opened=self._grown(architect),
            )
        for branch in _PRODUCTS:
            founder = someone("merchant")
            product = dice.pick(_PRODUCTS[branch].split("|"))
            name = names.coined(ends=("a", "ex", "ano", "ix"), after=f" {branch}")
            self._add(
                "company",
                name,
                split,
                founder=founder,
                seat=somewhere(),
                founded=self._grown(founder),
                product=product,
            )
        for what in ("Academy", "College", "Institute"):
            scholar = someone("scholar")
            founded = min(self._grown(scholar), scholar.number("born") + 50)
            name = names.coined(after=f" {what}")
            self._add(
                "school",
                name,
                split,
                founder=scholar,
                town=somewhere(),
                founded=founded,
                field=dice.pick(_FIELDS),
            )
        for terrain in ("Ford", "Hill"):
            victor = someone("general")
            name = names.coined("Battle of ", after=f" {terrain}")
            self._add(
                "battle", name, split, victor=victor, town=somewhere(), year=self._grown(victor)
            )
        for _ in range(3):
            honoured = dice.pick(self.of("person", split))
            begun = honoured.number("died") + dice.between(1, 40)
            self._add(
                "festival",
                names.phrase("Festival"),
                split,
                honours=honoured,
                town=somewhere(),
                begun=begun,
            )
        for _ in range(4):
            finder = someone("botanist")
            name = names.coined(after=f" {dice.pick(_PLANTS)}")
            mountain = dice.pick(self.of("mountain", split))
            self._add(
                "plant",
                name,
                split,
                finder=finder,
                mountain=mountain,
                found=self._grown(finder),
                bloom=dice.pick(_BLOOM),
            )
        for _ in range(3):
            inventor = someone("inventor")
            what = dice.pick(tuple(_MACHINES))
            name = names.coined(ends=("on", "ic", "o"), after=f" {what}")
            self._add(
                "machine",
                name,
                split,
                what=what,
                inventor=inventor,
                town=somewhere(),
                year=self._grown(inventor),
                use=_MACHINES[what],
            )
        for _ in range(4):
            name = names.coined(ends=_TOWN_ENDS, after=f" {dice.pick(_CLUBS)}")
            ground = names.coined(after=f" {dice.pick(('Park', 'Road', 'Green'))}")
            self._add(
                "club",
                name,
                split,
                town=somewhere(),
                ground=ground,
                founded=dice.between(1_862, 1_921),
                colours=dice.pick(_COLOURS),
            )

    def _education(self, person: Entity) -> None:
        schools = [
            school
            for school in self.of("school", person.split)
            if school.number("founded") <= person.number("born") + 16
        ]
        if schools and self.dice.chance(0.8):
            person.facts["school"] = self.dice.pick(schools)
