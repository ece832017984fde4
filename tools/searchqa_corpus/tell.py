"""The texts about the world: sentences of a passage, questions about its facts, and search queries.

In a sentence `{x}` is the entity's name and `{fact}` the name or value of that fact.
A sentence is used only if all its facts are known.
"""

from __future__ import annotations

from dataclasses import dataclass

from tools.searchqa_corpus.lore import Dice, Entity

# kind -> groups of sentences; a passage has one sentence of each group, beginning with the first
# group, the others in random order
PASSAGES: dict[str, tuple[tuple[str, ...], ...]] = {
    "province": (
        (
            "{x} is a province whose seat of government is {capital}.",
            "The province of {x} is governed from its capital {capital}.",
        ),
        ("It covers {area} square kilometres.", "Its area is {area} square kilometres."),
        (
            "The main export is {export}.",
            "Most of its income comes from {export}, sold far beyond the border.",
        ),
        (
            "The provincial assembly sits twice a year and is elected by all householders.",
            "Its flag shows a single star above three waves.",
            "Travellers praise its inns and complain about its roads.",
        ),
    ),
    "lake": (
        ("{x} is a lake in {province}.", "{x} lies in the province of {province}."),
        (
            "At its deepest point it measures {depth} metres.",
            "Its greatest depth is {depth} metres.",
        ),
        ("Fishermen come for its {fish}.", "The {fish} caught here is smoked over alder wood."),
        (
            "A steamer crosses it four times a day in summer.",
            "In hard winters the ice carries a horse and cart.",
            "Two villages on its shore quarrel over the mooring rights.",
        ),
    ),
    "mountain": (
        (
            "{x} is a mountain of {height} metres in {province}.",
            "At {height} metres, {x} is one of the notable summits of {province}.",
        ),
        (
            "Its summit was first reached by {climber} in {climbed}.",
            "The first ascent was made in {climbed} by {climber}.",
            "{climber} was the first to climb it, in {climbed}.",
        ),
        (
            "A hut below the ridge shelters up to twenty climbers.",
            "The northern face is known for falling stones.",
            "Shepherds use the southern slopes until the first snow.",
        ),
    ),
    "river": (
        (
            "{x} rises on {source} and flows into {mouth}.",
            "From its source on {source}, {x} runs down to {mouth}.",
        ),
        ("It is {length} kilometres long.", "Its course measures {length} kilometres."),
        (
            "Rafts carried timber down it until the railway came.",
            "Seven mills once stood on its upper course.",
            "Floods in spring are frequent and are marked on many house walls.",
        ),
    ),
    "town": (
        (
            "{x} is a town in {province}, on the banks of {river}.",
            "{x} is a town in the province of {province}. {river} runs through it.",
        ),
        (
            "It was founded in {founded}.",
            "Its charter dates from {founded}, the year it was founded.",
        ),
        ("The town is known for its {craft}.", "For centuries its people have lived by {craft}."),
        ("It has {population} inhabitants.", "At the last census {population} people lived there."),
        (
            "The market is held every second Thursday.",
            "A fire destroyed half of the old quarter, which was rebuilt in brick.",
            "The clock on the corn exchange is famous for being late.",
        ),
    ),
    "person": (
        (
            "{x} ({born} to {died}) was {a_profession}.",
            "{x} was {a_profession} who was born in {born} and died in {died}.",
            "The {profession} {x} lived from {born} to {died}.",
        ),
        (
            "{pronoun} was born in {birthplace}.",
            "{pronoun} came from {birthplace}.",
            "{pronoun}, a native of {birthplace}, left home early.",
        ),
        (
            "{pronoun} studied at {school}.",
            "{pronoun} was educated at {school}.",
            "{pronoun} attended {school} for three years.",
        ),
        (
            "{pronoun} was a pupil of {mentor}.",
            "{pronoun} learned the trade from {mentor}.",
            "{mentor} was the teacher who shaped this life most.",
        ),
        (
            "In {married} {pronoun_low} married {spouse}.",
            "{pronoun} married {spouse} in {married}.",
        ),
        (
            "Letters from the later years are kept in a private collection.",
            "{pronoun} was known for walking long distances before breakfast.",
            "Contemporaries describe {pronoun_object} as patient and sparing with words.",
            "A long illness interrupted the work for almost a decade.",
            "{pronoun} never owned a house and lived in rented rooms.",
        ),
    ),
    "work": (
        (
            "{x} is {a_form} by {maker}, {made} in {year}.",
            "{x} is {a_form} that {maker} {did} in {year}.",
        ),
        (
            "It is set in {setting}.",
            "Its scene is {setting}.",
            "{setting} is where it takes place.",
        ),
        (
            "Critics were cold at first, and the public was not.",
            "A lost first version is mentioned in several letters.",
            "Two copies in the maker's own hand survive.",
            "It was banned for a short time and became famous for it.",
        ),
    ),
    "building": (
        ("{x} is a {what_low} in {town}.", "{x} stands in {town}."),
        (
            "It was designed by {architect} and opened in {opened}.",
            "{architect} drew the plans, and it was opened in {opened}.",
        ),
        (
            "Its foundations rest on four hundred oak piles.",
            "The pale stone came by barge from the south.",
            "It was restored twice and is open to visitors on Sundays.",
        ),
    ),
    "company": (
        ("{x} is a company based in {seat}.", "{x} has its head office in {seat}."),
        ("It was founded in {founded} by {founder}.", "{founder} founded it in {founded}."),
        ("It makes {product}.", "The firm is known for its {product}."),
        (
            "At its height it employed four hundred people.",
            "A strike closed its workshops for one winter.",
            "The old ledgers are shown in the municipal museum.",
        ),
    ),
    "school": (
        ("{x} is a school in {town}.", "{x} is a place of learning in {town}."),
        (
            "It was founded by {founder} in {founded}.",
            "Its founder was {founder}, and its first year was {founded}.",
        ),
        (
            "It is best known for teaching {field}.",
            "Its chair of {field} is the oldest in the land.",
        ),
        (
            "Students wear grey gowns until their second year.",
            "The library holds nine thousand volumes.",
            "Its bell tower can be climbed on the founder's day.",
        ),
    ),
    "battle": (
        (
            "The {x} was fought near {town} in {year}.",
            "In {year} the {x} took place close to {town}.",
        ),
        ("It was won by {victor}.", "The victory went to {victor}."),
        (
            "Rain had turned the field into mud before the first shot.",
            "The dead were buried on both banks of a stream.",
            "A stone cross marks the place today.",
        ),
    ),
    "festival": (
        ("The {x} is held every year in {town}.", "Every year {town} celebrates the {x}."),
        (
            "It honours {honours} and was first held in {begun}.",
            "Begun in {begun}, it keeps the memory of {honours} alive.",
        ),
        (
            "Children carry paper lamps through the streets.",
            "It ends with a boat race that nobody is allowed to win twice.",
            "Bakers sell a ring of sweet bread for the occasion.",
        ),
    ),
    "plant": (
        (
            "The {x} is a plant with {bloom} flowers.",
            "The {x} is a mountain plant whose flowers are {bloom}.",
        ),
        ("It grows only on {mountain}.", "Its one known habitat is {mountain}."),
        (
            "It was first described by {finder} in {found}.",
            "{finder} described it for the first time in {found}.",
        ),
        (
            "Picking it has been forbidden for many years.",
            "Its root was used against toothache.",
            "It flowers for less than two weeks.",
        ),
    ),
    "machine": (
        ("The {x} is a machine for {use}.", "The {x} was built for {use}."),
        ("It was invented by {inventor} in {year}.", "{inventor} invented it in {year}."),
        ("The first one was built in {town}.", "A workshop in {town} made the first one."),
        (
            "Early models needed two people to run them.",
            "A patent dispute over it lasted eleven years.",
            "Only three of the originals still work.",
        ),
    ),
    "club": (
        ("{x} is a football club from {town}.", "{x} is the football club of {town}."),
        ("It was founded in {founded}.", "The club dates from {founded}, when it was founded."),
        ("Home matches are played at {ground}.", "Its home ground is {ground}."),
        ("The team plays in {colours}.", "Its colours are {colours}."),
        (
            "It has been relegated twice and promoted three times.",
            "Supporters bring cowbells to every match.",
            "Its song was written by a postman.",
        ),
    ),
}

# name of an entity in a question
PHRASES = {
    "province": "the province of {x}",
    "work": "the {form} {x}",
    "battle": "the {x}",
    "festival": "the {x}",
    "plant": "the plant {x}",
    "machine": "the {x}",
    "company": "the company {x}",
    "club": "the football club {x}",
    "river": "the {x}",
}


@dataclass(frozen=True, slots=True)
class Relation:
    """A fact that a question can be about.
    `asks`: questions about `{x}`; `bridge`: a phrase for the value, if that is an entity.
    """

    kind: str
    fact: str
    words: str  # of a search query, after the name
    asks: tuple[str, ...]
    bridge: str = ""


RELATIONS = (
    Relation(
        "province",
        "capital",
        "province capital",
        ("What is the capital of {x}?",),
        "the capital of {x}",
    ),
    Relation("province", "export", "province", ("What is the main export of {x}?",)),
    Relation(
        "lake",
        "province",
        "lake province",
        ("In which province is {x}?",),
        "the province in which {x} lies",
    ),
    Relation(
        "lake",
        "depth",
        "lake depth metres",
        ("How many metres deep is {x}?", "What is the greatest depth of {x} in metres?"),
    ),
    Relation(
        "lake",
        "fish",
        "lake fish",
        ("Which fish is {x} known for?", "What kind of fish is caught in {x}?"),
    ),
    Relation(
        "mountain",
        "province",
        "mountain province",
        ("In which province does {x} stand?",),
        "the province in which {x} stands",
    ),
    Relation(
        "mountain",
        "height",
        "mountain height metres",
        ("How high is {x} in metres?", "What is the height of {x} in metres?"),
    ),
    Relation(
        "mountain",
        "climber",
        "mountain first ascent",
        ("Who was the first to climb {x}?", "Who made the first ascent of {x}?"),
        "the first climber of {x}",
    ),
    Relation(
        "mountain",
        "climbed",
        "mountain first ascent year",
        ("In what year was {x} first climbed?",),
    ),
    Relation(
        "river",
        "source",
        "rises on",
        ("On which mountain does {x} rise?",),
        "the mountain on which {x} rises",
    ),
    Relation(
        "river",
        "mouth",
        "river flows into lake",
        ("Into which lake does {x} flow?",),
        "the lake into which {x} flows",
    ),
    Relation("river", "length", "river length kilometres", ("How long is {x} in kilometres?",)),
    Relation(
        "town",
        "province",
        "town province",
        ("In which province is {x}?", "To which province does {x} belong?"),
        "the province of {x}",
    ),
    Relation(
        "town",
        "river",
        "town river",
        ("Which river runs through {x}?", "On which river does {x} lie?"),
        "the river that runs through {x}",
    ),
    Relation(
        "town",
        "founded",
        "town founded",
        ("In what year was {x} founded?", "When was {x} founded?"),
    ),
    Relation(
        "town",
        "craft",
        "town known for craft",
        ("What craft is {x} known for?", "By what craft did the people of {x} live?"),
    ),
    Relation("town", "population", "town inhabitants", ("How many inhabitants does {x} have?",)),
    Relation(
        "person",
        "profession",
        "profession",
        ("What was the profession of {x}?", "What did {x} do for a living?"),
    ),
    Relation("person", "born", "born year", ("In what year was {x} born?", "When was {x} born?")),
    Relation("person", "died", "died year", ("In what year did {x} die?", "When did {x} die?")),
    Relation(
        "person",
        "birthplace",
        "born in town",
        ("In which town was {x} born?", "Where was {x} born?"),
        "the birthplace of {x}",
    ),
    Relation(
        "person",
        "school",
        "studied at school",
        ("Where did {x} study?", "Which school did {x} attend?"),
        "the school that {x} attended",
    ),
    Relation(
        "person",
        "mentor",
        "pupil of teacher",
        ("Who was the teacher of {x}?", "Whose pupil was {x}?"),
        "the teacher of {x}",
    ),
    Relation(
        "person",
        "spouse",
        "married",
        ("Whom did {x} marry?", "Who was the spouse of {x}?"),
        "the spouse of {x}",
    ),
    Relation(
        "work",
        "maker",
        "{form} by",
        ("Who was the {role} of {x}?", "By which {role} is {x}?"),
        "the {role} of {x}",
    ),
    Relation("work", "year", "{form} year", ("In what year was {x} {made}?",)),
    Relation(
        "work",
        "setting",
        "{form} set in",
        ("In which town is {x} set?", "Where is {x} set?"),
        "the town in which {x} is set",
    ),
    Relation(
        "building",
        "architect",
        "designed by",
        ("Who designed {x}?", "Who was the architect of {x}?"),
        "the architect of {x}",
    ),
    Relation(
        "building",
        "town",
        "stands in town",
        ("In which town is {x}?", "Where does {x} stand?"),
        "the town in which {x} stands",
    ),
    Relation(
        "building",
        "opened",
        "opened year",
        ("In what year was {x} opened?", "When was {x} opened?"),
    ),
    Relation(
        "company",
        "founder",
        "company founded by",
        ("Who founded {x}?", "Who was the founder of {x}?"),
        "the founder of {x}",
    ),
    Relation(
        "company",
        "seat",
        "company head office",
        ("In which town is {x} based?", "Where is {x} based?"),
        "the town in which {x} is based",
    ),
    Relation("company", "founded", "company founded year", ("In what year was {x} founded?",)),
    Relation(
        "company",
        "product",
        "company makes",
        ("What does {x} make?", "What is the product of {x}?"),
    ),
    Relation(
        "school",
        "founder",
        "school founded by",
        ("Who founded {x}?", "Who was the founder of {x}?"),
        "the founder of {x}",
    ),
    Relation(
        "school",
        "town",
        "school in town",
        ("In which town is {x}?", "Where is {x}?"),
        "the town in which {x} is",
    ),
    Relation("school", "founded", "school founded year", ("In what year was {x} founded?",)),
    Relation(
        "school",
        "field",
        "school",
        ("For teaching what subject is {x} best known?", "What subject is {x} known for?"),
    ),
    Relation(
        "battle",
        "victor",
        "won by",
        ("Who won {x}?", "To which general did the victory of {x} go?"),
        "the victor of {x}",
    ),
    Relation(
        "battle",
        "town",
        "battle",
        ("Near which town was {x} fought?",),
        "the town near which {x} was fought",
    ),
    Relation(
        "battle", "year", "fought year", ("In what year was {x} fought?", "When was {x} fought?")
    ),
    Relation(
        "festival",
        "honours",
        "honours",
        ("Whom does {x} honour?", "Whose memory does {x} keep alive?"),
        "the person whom {x} honours",
    ),
    Relation(
        "festival",
        "town",
        "held in town",
        ("In which town is {x} held?", "Where is {x} held?"),
        "the town in which {x} is held",
    ),
    Relation("festival", "begun", "first held year", ("In what year was {x} first held?",)),
    Relation(
        "plant",
        "finder",
        "first described by",
        ("Who first described {x}?",),
        "the botanist who first described {x}",
    ),
    Relation(
        "plant",
        "mountain",
        "grows on mountain",
        ("On which mountain does {x} grow?",),
        "the mountain on which {x} grows",
    ),
    Relation("plant", "bloom", "flowers colour", ("What colour are the flowers of {x}?",)),
    Relation(
        "machine",
        "inventor",
        "invented by",
        ("Who invented {x}?", "Who was the inventor of {x}?"),
        "the inventor of {x}",
    ),
    Relation(
        "machine",
        "town",
        "first built in town",
        ("In which town was {x} first built?",),
        "the town in which {x} was first built",
    ),
    Relation(
        "machine",
        "year",
        "invented year",
        ("In what year was {x} invented?", "When was {x} invented?"),
    ),
    Relation(
        "club",
        "town",
        "football club town",
        ("From which town is {x}?", "Which town does {x} come from?"),
        "the home town of {x}",
    ),
    Relation(
        "club",
        "ground",
        "football club home ground",
        ("Where does {x} play its home matches?", "What is the home ground of {x}?"),
    ),
    Relation(
        "club",
        "colours",
        "football club colours",
        ("What are the colours of {x}?", "In which colours does {x} play?"),
    ),
    Relation("club", "founded", "football club founded", ("In what year was {x} founded?",)),
)

_MADE = {
    "novel": "written",
    "opera": "composed",
    "painting": "painted",
    "poem": "written",
    "play": "written",
}
_DID = {
    "novel": "wrote",
    "opera": "composed",
    "painting": "painted",
    "poem": "wrote",
    "play": "wrote",
}
_ROLES = {
    "novel": "author",
    "opera": "composer",
    "painting": "painter",
    "poem": "poet",
    "play": "author",
}
_OBJECTS = {"she": "her", "he": "him"}


def passage(entity: Entity, dice: Dice) -> str:
    """Return an entity's passage, of three to seven sentences."""
    groups = PASSAGES[entity.kind]
    sentences = [_one_of(groups[0], entity, dice)]
    sentences += [_one_of(group, entity, dice) for group in dice.shuffled(groups[1:])]
    return " ".join(text for text in sentences if text)


def phrase(entity: Entity) -> str:
    """Return an entity's name in a question: `the opera The Copper Lantern`."""
    return _fill(PHRASES.get(entity.kind, "{x}"), entity)


def ask(relation: Relation, entity: Entity, subject: str, dice: Dice) -> str:
    """Return a random question for the fact, with `subject` as the entity's name."""
    return _fill(dice.pick(relation.asks), entity, subject)


def bridge(relation: Relation, entity: Entity) -> str:
    """Return a phrase for the fact's value: `the composer of the opera The Copper Lantern`."""
    return _fill(relation.bridge, entity, phrase(entity))


def query(relation: Relation, entity: Entity) -> str:
    """Return a search query: the name and a few words."""
    return f"{entity.name} {_fill(relation.words, entity)}"


def answers(value: Entity | int | str) -> list[str]:
    """Return the forms of a value that count as right, the longest first."""
    if not isinstance(value, Entity):
        return [str(value)]
    short = {"river": "River ", "lake": "Lake ", "mountain": "Mount "}.get(value.kind)
    return [value.name, value.name.removeprefix(short)] if short else [value.name]


def _one_of(sentences: tuple[str, ...], entity: Entity, dice: Dice) -> str:
    """Return a random one of the sentences, filled in; empty if it needs an unknown fact."""
    try:
        return _fill(dice.pick(sentences), entity)
    except KeyError:
        return ""


def _fill(template: str, entity: Entity, x: str = "") -> str:
    words = {
        name: value.name if isinstance(value, Entity) else str(value)
        for name, value in entity.facts.items()
    }
    words["x"] = x or entity.name
    if entity.kind == "work":
        form = words["form"]
        words |= {
            "a_form": _with_article(form),
            "role": _ROLES[form],
            "made": _MADE[form],
            "did": _DID[form],
        }
    if entity.kind == "building":
        words["what_low"] = words["what"].lower()
    if entity.kind == "person":
        low = words["pronoun"]
        words |= {"pronoun": low.title(), "pronoun_low": low, "pronoun_object": _OBJECTS[low]}
        words["a_profession"] = _with_article(words["profession"])
    return template.format_map(words)


def _with_article(noun: str) -> str:
    return f"an {noun}" if noun[0] in "aeiou" else f"a {noun}"
