"""The words the shop's content is made of."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Kind:
    """A sort of product: name, icon, price span in dollars, what to choose, details, and what it is said to be good for."""

    name: str
    icon: str
    low: int
    high: int
    option: str
    values: tuple[str, ...]
    details: tuple[tuple[str, tuple[str, ...]], ...]
    line: str


COLORS = ("Forest Green", "Slate Gray", "Oat White", "Brick Red", "Navy Blue", "Mustard")
SIZES = ("Small", "Medium", "Large")
SHOES = ("38", "39", "40", "41", "42", "43", "44")

# slug, name, blurb, brands, kinds
CATEGORIES: tuple[tuple[str, str, str, tuple[str, ...], tuple[Kind, ...]], ...] = (
    (
        "kitchen",
        "Kitchen & Dining",
        "Pans, knives and mugs that will outlast a few moves.",
        ("Fernwick", "Copper & Clay", "Halden", "Maison Orme"),
        (
            Kind("Enamel Mug", "mug", 9, 22, "Color", COLORS[:4], (("Capacity", ("300 ml", "350 ml", "400 ml")), ("Dishwasher safe", ("Yes", "No"))), "keeps its rim after a fall on stone tiles"),
            Kind("Cast Iron Skillet", "pan", 28, 79, "", (), (("Diameter", ("20 cm", "24 cm", "28 cm")), ("Weight", ("1.8 kg", "2.4 kg", "3.1 kg"))), "holds its heat when the steak goes in"),
            Kind("Electric Kettle", "kettle", 32, 89, "", (), (("Capacity", ("1.0 l", "1.5 l", "1.7 l")), ("Power", ("1800 W", "2200 W"))), "boils a litre before the toast is done"),
            Kind("Chef's Knife", "knife", 38, 129, "", (), (("Blade length", ("18 cm", "20 cm", "23 cm")), ("Steel", ("X50CrMoV15", "AUS-10", "Carbon steel"))), "goes through a ripe tomato without pressing"),
            Kind("Glass Storage Set", "jar", 19, 54, "", (), (("Pieces", ("4", "6", "8", "10")), ("Lid", ("Bamboo", "Silicone"))), "moves from freezer to oven without a crack"),
        ),
    ),
    (
        "home",
        "Home & Lighting",
        "Warm light, soft corners.",
        ("Lumo", "Ashgrove", "Tarn House", "Velt"),
        (
            Kind("Table Lamp", "lamp", 34, 119, "", (), (("Bulb", ("E14", "E27")), ("Cable length", ("1.5 m", "1.8 m", "2.0 m"))), "throws a wide circle on the desk and none in your eyes"),
            Kind("Wool Throw", "throw", 45, 139, "Color", COLORS, (("Size", ("130 x 170 cm", "140 x 200 cm")), ("Material", ("Lambswool", "Merino wool"))), "is warm without being heavy"),
            Kind("Wall Clock", "clock", 24, 72, "", (), (("Diameter", ("25 cm", "30 cm", "35 cm")), ("Movement", ("Silent sweep", "Quartz"))), "cannot be heard from the bed"),
            Kind("Scented Candle", "candle", 12, 38, "Scent", ("Cedar", "Fig Leaf", "Sea Salt"), (("Burn time", ("30 h", "45 h", "60 h")), ("Wax", ("Soy", "Beeswax"))), "fills a room slowly and leaves no soot"),
            Kind("Floor Cushion", "cushion", 29, 84, "Color", COLORS[1:5], (("Diameter", ("50 cm", "60 cm", "70 cm")), ("Filling", ("Buckwheat", "Recycled fibre"))), "keeps its shape through a long film"),
        ),
    ),
    (
        "office",
        "Office & Paper",
        "For desks where work happens.",
        ("Quillon", "Marrow & Finch", "Stackwell", "Brevet"),
        (
            Kind("Dotted Notebook", "book", 8, 27, "", (), (("Pages", ("144", "192", "240")), ("Paper", ("90 g/m2", "100 g/m2", "120 g/m2"))), "lies flat and takes fountain pen ink"),
            Kind("Fountain Pen", "pen", 22, 98, "Nib", ("Fine", "Medium", "Broad"), (("Filling", ("Cartridge", "Converter", "Piston")), ("Weight", ("18 g", "24 g", "31 g"))), "starts without a shake after a week in the drawer"),
            Kind("Desk Organizer", "box", 17, 58, "", (), (("Compartments", ("5", "7", "9")), ("Material", ("Walnut", "Beech", "Steel"))), "finds a place for every cable and pencil"),
            Kind("Office Chair", "chair", 149, 389, "", (), (("Maximum load", ("110 kg", "120 kg", "150 kg")), ("Armrests", ("Fixed", "Adjustable"))), "supports the lower back through a full day"),
            Kind("Monitor Stand", "screen", 26, 92, "", (), (("Height", ("10 cm", "12 cm", "15 cm")), ("Material", ("Bamboo", "Steel", "Oak"))), "brings the screen up to eye level"),
        ),
    ),
    (
        "electronics",
        "Electronics",
        "Small machines, tested by us for a month each.",
        ("Nordbeam", "Pulsar", "Okto", "Veridian"),
        (
            Kind("Wireless Headphones", "headphones", 49, 279, "", (), (("Battery life", ("24 h", "30 h", "40 h")), ("Noise cancelling", ("Yes", "No"))), "stays comfortable with glasses"),
            Kind("Portable Speaker", "speaker", 35, 159, "Color", COLORS[1:4], (("Battery life", ("10 h", "12 h", "18 h")), ("Water resistance", ("IPX5", "IPX7"))), "is loud enough for a garden table of eight"),
            Kind("Power Bank", "battery", 19, 79, "", (), (("Capacity", ("10000 mAh", "20000 mAh")), ("Ports", ("2", "3"))), "charges a phone four times"),
            Kind("Webcam", "camera", 29, 149, "", (), (("Resolution", ("1080p", "1440p", "4K")), ("Microphone", ("Mono", "Stereo"))), "makes a dim room look like morning"),
            Kind("Mechanical Keyboard", "keyboard", 59, 189, "Switches", ("Linear", "Tactile", "Silent"), (("Layout", ("65 percent", "75 percent", "Full size")), ("Connection", ("USB-C", "Bluetooth and USB-C"))), "can be taken apart and repaired"),
        ),
    ),
    (
        "outdoor",
        "Outdoor & Camping",
        "Gear for wet weekends.",
        ("Ridgeline", "Kestrel", "Bruk", "Far Fell"),
        (
            Kind("Trekking Backpack", "backpack", 79, 219, "Color", COLORS[:2] + COLORS[4:5], (("Volume", ("35 l", "48 l", "60 l")), ("Rain cover", ("Included", "Not included"))), "carries fifteen kilograms on the hips, not the shoulders"),
            Kind("Two-Person Tent", "tent", 129, 349, "", (), (("Weight", ("1.9 kg", "2.4 kg", "2.9 kg")), ("Water column", ("2000 mm", "3000 mm", "5000 mm"))), "goes up in the rain with the inner staying dry"),
            Kind("Sleeping Bag", "bag", 69, 239, "Size", SIZES[1:], (("Comfort limit", ("8 °C", "2 °C", "-4 °C")), ("Filling", ("Down", "Synthetic"))), "packs down to the size of a loaf"),
            Kind("Camp Stove", "stove", 34, 119, "", (), (("Boil time", ("2.5 min", "3.5 min", "4.5 min")), ("Fuel", ("Gas", "Multi-fuel"))), "burns steadily in the wind"),
            Kind("Headlamp", "torch", 18, 74, "", (), (("Brightness", ("200 lm", "350 lm", "500 lm")), ("Battery", ("AAA", "Rechargeable"))), "finds the path marks two bends ahead"),
        ),
    ),
    (
        "sports",
        "Sports & Fitness",
        "Move a little every day.",
        ("Vantor", "Steadfast", "Loopline", "Aero Peak"),
        (
            Kind("Yoga Mat", "mat", 22, 88, "Color", COLORS[:3], (("Thickness", ("4 mm", "5 mm", "6 mm")), ("Material", ("Natural rubber", "Cork", "TPE"))), "does not slide on a wooden floor"),
            Kind("Running Shoes", "shoe", 69, 169, "Size", SHOES, (("Drop", ("4 mm", "8 mm", "10 mm")), ("Weight", ("230 g", "260 g", "290 g"))), "is soft on the heel and quick off the toe"),
            Kind("Resistance Band Set", "band", 14, 42, "", (), (("Bands", ("3", "5", "7")), ("Material", ("Latex", "Fabric"))), "replaces half a gym in a hotel room"),
            Kind("Bicycle Helmet", "helmet", 39, 129, "Size", SIZES, (("Weight", ("250 g", "290 g", "340 g")), ("Light", ("Built in", "None"))), "sits firmly and breathes on climbs"),
            Kind("Water Bottle", "bottle", 12, 39, "Color", COLORS[2:], (("Capacity", ("500 ml", "750 ml", "1 l")), ("Insulated", ("Yes", "No"))), "does not leak upside down in a bag"),
        ),
    ),
    (
        "care",
        "Beauty & Care",
        "Short lists of ingredients.",
        ("Saltmarsh", "Plain & Good", "Birch Street", "Olea"),
        (
            Kind("Hand Cream", "tube", 6, 24, "", (), (("Content", ("50 ml", "75 ml", "100 ml")), ("Scent", ("None", "Lavender", "Almond"))), "soaks in before you reach for the phone"),
            Kind("Shampoo Bar", "soap", 7, 18, "Hair type", ("Dry", "Normal", "Oily"), (("Content", ("60 g", "80 g", "100 g")), ("Vegan", ("Yes", "No"))), "lasts as long as two bottles"),
            Kind("Beard Oil", "drop", 11, 34, "", (), (("Content", ("30 ml", "50 ml")), ("Scent", ("Cedar", "Bergamot", "None"))), "softens without shining"),
            Kind("Mineral Sunscreen", "sun", 13, 36, "", (), (("Protection", ("SPF 30", "SPF 50")), ("Content", ("50 ml", "100 ml"))), "does not sting in the eyes"),
            Kind("Bath Salts", "jar", 9, 29, "Scent", ("Eucalyptus", "Rose", "Sea Salt"), (("Content", ("350 g", "500 g", "1 kg")), ("Origin", ("Atlantic", "Dead Sea"))), "turns a cold evening around"),
        ),
    ),
    (
        "toys",
        "Toys & Games",
        "For rainy afternoons, ages four to ninety.",
        ("Little Oak", "Rookery", "Papertown", "Tumble & Co"),
        (
            Kind("Wooden Puzzle", "puzzle", 14, 46, "", (), (("Pieces", ("48", "100", "250", "500")), ("Age", ("4+", "6+", "8+"))), "smells of wood and fits with a click"),
            Kind("Board Game", "dice", 24, 79, "", (), (("Players", ("2-4", "2-5", "3-6")), ("Playing time", ("30 min", "45 min", "90 min"))), "is explained in five minutes and argued about for weeks"),
            Kind("Building Blocks", "blocks", 19, 89, "", (), (("Pieces", ("60", "120", "200")), ("Material", ("Beech", "Maple"))), "stacks high before it falls"),
            Kind("Plush Animal", "bear", 12, 44, "Animal", ("Badger", "Hare", "Otter"), (("Height", ("20 cm", "30 cm", "40 cm")), ("Washable", ("30 °C", "40 °C"))), "survives the washing machine with its smile"),
            Kind("Stunt Kite", "kite", 22, 68, "", (), (("Wingspan", ("120 cm", "150 cm", "180 cm")), ("Wind", ("8-30 km/h", "12-40 km/h"))), "turns on a coin in a steady breeze"),
        ),
    ),
)

SERIES = ("Alder", "Bramble", "Cinder", "Dune", "Ember", "Fjord", "Gale", "Harbor", "Isle", "Juniper", "Kelp", "Linden", "Moor", "Nook", "Orchard", "Pebble", "Quarry", "Raven", "Sable", "Thistle", "Umber", "Vale", "Willow", "Yarrow")  # fmt: skip

OPENINGS = (
    "The {brand} {series} {kind} {line}.",
    "Made for daily use, the {series} {kind} by {brand} {line}.",
    "{brand} has built the {series} for six years; this {kind} {line}.",
)
MIDDLES = (
    "We tried it in our own homes before we put it on the shelf.",
    "Spare parts are kept for ten years.",
    "It comes in a plain cardboard box without plastic.",
    "The maker is a family business with eleven people.",
    "It was redesigned last autumn after letters from our customers.",
)
CLOSINGS = ("Two-year guarantee.", "Five-year guarantee.", "Free returns within 30 days.", "Made in small batches; stock may run low.")

FIRST = ("Nora", "Elias", "Priya", "Tomas", "Ingrid", "Malik", "Sofia", "Henrik", "Aisha", "Oliver", "Mei", "Lucas", "Yara", "Jonas", "Clara", "Dmitri", "Esther", "Rafael", "Hanna", "Kofi", "Leila", "Marcus", "Nadia", "Owen", "Petra", "Quentin", "Rosa", "Samir", "Thea", "Victor")  # fmt: skip
LAST = ("Whitfield", "Bergstrom", "Raman", "Novak", "Halvorsen", "Okafor", "Marchetti", "Lindqvist", "Haddad", "Pemberton", "Chen", "Ferreira", "Antar", "Weiss", "Dubois", "Volkov", "Stein", "Ortega", "Keller", "Mensah", "Farahani", "Thorne", "Petrova", "Gallagher", "Kovacs", "Lemaire", "Delgado", "Nasser", "Sorensen", "Hale")  # fmt: skip
CITIES = (("Portland", "Oregon", "97205"), ("Madison", "Wisconsin", "53703"), ("Burlington", "Vermont", "05401"), ("Asheville", "North Carolina", "28801"), ("Boulder", "Colorado", "80302"), ("Duluth", "Minnesota", "55802"), ("Ithaca", "New York", "14850"), ("Savannah", "Georgia", "31401"), ("Santa Fe", "New Mexico", "87501"), ("Eugene", "Oregon", "97401"))  # fmt: skip
STREETS = ("Alder Street", "Mill Lane", "Orchard Road", "Quay Street", "Chestnut Avenue", "Station Road", "Hillcrest Drive", "Linden Court")

REVIEW_TITLES = {
    5: ("Exactly what I hoped for", "Would buy again", "Better than the photos", "A joy to use", "Worth every cent"),
    4: ("Very good, small flaws", "Solid choice", "Nearly perfect", "Happy with it", "Good value"),
    3: ("It is fine", "Mixed feelings", "Does the job", "Average", "Good idea, average make"),
    2: ("Expected more", "Not for me", "Disappointing finish", "Too many compromises", "Meh"),
    1: ("Broke within a month", "Sent it back", "Avoid", "Not as described", "Poor quality"),
}
REVIEW_LINES = {
    5: ("I use my {kind} every day and it looks like new.", "My sister asked where I got it within five minutes.", "The {series} replaced one that cost twice as much.", "Delivery took two days and everything was well packed."),
    4: ("The {kind} works as described.", "I would have liked one more color.", "The instructions are thin but you hardly need them.", "A little heavier than expected, otherwise great."),
    3: ("It does what it should, no more.", "The {series} is fine for the price.", "Delivery took longer than promised.", "I keep going back and forth about it."),
    2: ("The finish came off in two places.", "It feels cheaper than it looks.", "Customer service was friendly but slow.", "I expected more from {brand}."),
    1: ("Mine arrived damaged and the second one was no better.", "It stopped working after three weeks.", "The {kind} is smaller than the pictures suggest.", "I asked for my money back."),
}
REVIEW_TOPICS = {
    "battery": "The battery is the weak point: it was empty long before the evening.",
    "smell": "There was a strong chemical smell that took a week to go away.",
    "size": "Check the measurements, it runs small.",
    "gift": "I bought it as a gift and it was received very well.",
    "noise": "It makes a humming noise that gets on my nerves.",
    "cleaning": "Cleaning it is quick, a damp cloth is enough.",
}
ORDER_COMMENTS = ("Customer asked for delivery after 5 pm.", "Packed and handed to the carrier.", "Payment received.", "Customer called about a missing invoice; sent again.", "Gift wrapping requested.")
NICKNAMES = ("mountaingoat", "tea_and_toast", "J. Farrow", "bookish_bee", "Kilian", "Old Salt", "Marguerite", "the_real_dot", "Anders L.", "pixel_pia", "Wren", "Captain Crumb", "Ravi", "Lotte", "Bartholomew", "saltydog", "Imogen", "quietneighbor")  # fmt: skip
SEARCH_TERMS = ("mug", "tent", "wool throw", "headphones", "knife", "notebook", "running shoes", "gift", "lamp", "keyboard", "yoga", "candle", "backpack")
