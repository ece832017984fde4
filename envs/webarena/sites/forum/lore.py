"""The words the forum's content is made of."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Topic:
    """A forum: title templates with {a} and {b} drawn from its word lists, what posts and comments say."""

    name: str
    title: str
    description: str
    rules: str
    titles: tuple[str, ...]
    a: tuple[str, ...]
    b: tuple[str, ...]
    bodies: tuple[str, ...]
    comments: tuple[str, ...]


TOPICS = (
    Topic("gardening", "Gardening", "Soil, seeds and stubborn slugs.", "Name your climate. No selling.",
        ("When do you plant {a} in {b}?", "My {a} looks pale in {b}, what am I missing?", "First {a} of the year!", "Growing {a} in {b}: what worked for me", "Slugs ate all my {a} overnight", "Is it too late to sow {a}?", "Compost from {b}, is it good for {a}?"),
        ("tomatoes", "runner beans", "garlic", "raspberries", "chard", "sweet peas", "dahlias", "kale", "strawberries"),
        ("heavy clay", "a north-facing yard", "raised beds", "large pots", "sandy soil", "an unheated greenhouse"),
        ("I am in a cool coastal climate with late frosts. The {a} went in two weeks ago and I keep reading opposite advice.", "Third season with {a} here. This year I mulched early and watered less often, but deeply. The difference is visible.", "The soil test says pH 6.1 and low on potassium. Everything else grows well, only the {a} sulk."),
        ("Mulch, mulch, mulch.", "Wait until the nights stay above eight degrees.", "I lost mine to the same frost.", "Wood ash helped me with potassium, but go easy.", "A photo of the leaves would help.", "Copper tape did nothing for me, beer traps did.")),
    Topic("cooking", "Cooking", "What is on the stove tonight.", "Give amounts in grams where you can.",
        ("How do you keep {a} from sticking?", "{a} with {b}, a winter classic", "What is your trick for {a}?", "Leftover {b}: ideas?", "I made {a} for the first time", "Is {b} worth buying for {a}?", "Cheap weeknight {a}"),
        ("dumplings", "risotto", "flatbread", "lentil soup", "gnocchi", "shakshuka", "pancakes", "fish stew"),
        ("fennel", "smoked paprika", "miso", "browned butter", "pickled lemons", "black garlic"),
        ("I followed the recipe to the gram and the {a} still came out heavy. Flour was plain, oven at 200 degrees.", "My grandmother made {a} every Sunday. I finally wrote it down: start with onions, take your time, finish with {b}.", "Two people, one small kitchen, forty minutes. That is all {a} should take."),
        ("Let the dough rest longer.", "More salt, almost always.", "Cast iron, medium heat, patience.", "We add a spoon of vinegar at the end.", "Tried it tonight and the kids asked for seconds.", "That is not how my aunt would do it, but it looks great.")),
    Topic("cycling", "Cycling", "Two wheels, any weather.", "Be kind about other people's bikes.",
        ("Which {a} for {b}?", "{a} keeps slipping on {b}", "Rode {b} in the rain, lessons learned", "Is a new {a} worth it?", "Show me your {a}", "Squeaking {a} after {b}"),
        ("chain", "rear derailleur", "saddle", "tubeless tires", "dynamo light", "panniers", "brake pads"),
        ("a gravel tour", "the daily commute", "long climbs", "winter roads", "a 200 km ride", "cobblestones"),
        ("The {a} has 4000 km on it. Cleaned it twice, no change.", "I commute 14 km each way and would rather fix things before they break. What do you look for in a {a}?", "After {b} I found out what was loose. Nearly everything."),
        ("Check the cable tension first.", "Wax it. You will never go back.", "Your local shop will do that in ten minutes.", "Wider tires solved that for me.", "I had this, it was the bottom bracket.", "Mudguards are the answer to most questions.")),
    Topic("books", "Books", "Reading together, slowly.", "Mark spoilers.",
        ("Just finished {a} and I have questions", "Books like {a}?", "Is {a} worth a second try?", "Reading {a} during {b}", "The ending of {a}", "What did you read in {b}?"),
        ("The Salt Almanac", "A House of Small Rooms", "Winter Cartography", "The Lighthouse Ledger", "Nine Tall Ships", "The Quiet Orchard", "Letters to Marlow"),
        ("February", "a long train ride", "a week without internet", "the holidays", "one sitting"),
        ("I was not prepared for the second half of {a}. The narrator says one thing and the letters say another.", "Looking for something with the same mood as {a}: weather, silence, and people who do not say what they mean.", "I gave up on {a} at page eighty. Friends insist I stopped too early."),
        ("Read it again in ten years.", "The letters are forged, I am sure of it.", "The translation makes all the difference.", "I liked the first half better.", "Try the audiobook, the reader is wonderful.", "Adding it to my list.")),
    Topic("homelab", "Homelab", "Servers in cupboards.", "No pictures of passwords.",
        ("{a} died during {b}", "Moving {a} to a used thin client", "How much power does {a} draw?", "Quiet fans for {a}?", "Is {b} worth the trouble for {a}?", "Finally documented {a}"),
        ("the backup server", "my NAS", "a reverse proxy", "the old switch", "a photo library", "my mail server"),
        ("an upgrade", "a heat wave", "full disk encryption", "a power cut", "network segmentation"),
        ("It ran for 611 days. Then {b} happened. The disks are fine, the power supply is not.", "Idle draw is 23 watts, 41 under load. I measured for a week with a plug meter.", "I keep three copies, two kinds of media, one somewhere else. It paid off this week."),
        ("RAID is not a backup.", "Check the SMART values before you trust it.", "23 watts is quite good.", "I gave up self-hosting mail and sleep better.", "Label your cables, future you will be grateful.", "It is always DNS.")),
    Topic("astronomy", "Astronomy", "Looking up.", "Say which instrument you used.",
        ("Saw {a} from {b} last night", "Best eyepiece for {a}?", "{a} with a small telescope", "Is {b} dark enough for {a}?", "First sketch of {a}", "When is {a} highest this month?"),
        ("the Orion Nebula", "Jupiter's moons", "the Pleiades", "Saturn", "the Andromeda Galaxy", "a double shadow transit"),
        ("a city balcony", "the hills", "a parking lot", "the coast", "my back garden"),
        ("Seeing was about seven out of ten, a little wind. {a} was obvious once my eyes had adjusted for half an hour.", "I own an 8 inch Dobsonian and two eyepieces. For {a} I would like something with a wider field.", "No moon, no clouds, minus four degrees. Worth every minute."),
        ("Averted vision helps a lot.", "A star chart on paper beats the phone.", "Let the mirror cool for an hour.", "I envy your sky.", "Lovely description, thank you.", "A 32 mm would do that nicely.")),
    Topic("woodworking", "Woodworking", "Measure twice.", "Wear eye protection in photos, please.",
        ("Which finish for {a}?", "My first attempt at {a}", "Hand-cut {b} for {a}", "Gluing up {a} alone", "{a} from reclaimed oak", "How strong are {b} really?"),
        ("a workbench", "a bookcase", "a stool", "a cutting board", "a toolbox", "a cradle"),
        ("dovetails", "mortise and tenon joints", "wooden dowels", "box joints"),
        ("It took four weekends and one new chisel. {a} is not perfect but it stands level.", "I plan {a} in ash, 120 cm wide. Movement worries me more than strength.", "The glue set faster than I could clamp. Next time in two steps."),
        ("Hard wax oil and be done.", "Sharpen before you blame the wood.", "Clamps: you never have enough.", "That grain is beautiful.", "Leave a gap for movement.", "My first one had a wobble too.")),
    Topic("languages", "Language Learning", "One word a day, or ten.", "Corrections are welcome here.",
        ("How long until {a} feels natural?", "Learning {a} through {b}", "{b} for {a}: what do you use?", "I dreamt in {a} last night", "Stuck at intermediate {a}", "Funny mistakes in {a}"),
        ("Portuguese", "Finnish", "Japanese", "Welsh", "Turkish", "Swahili"),
        ("podcasts", "children's books", "flash cards", "a language exchange", "old films"),
        ("Two years of {a}, thirty minutes a day. I read the newspaper but I still freeze when somebody asks me something.", "I told my teacher I was pregnant when I meant embarrassed. She was very kind about it.", "{b} did more for my {a} than any course."),
        ("Speak from day one, badly.", "The plateau is real, keep going.", "Songs! You will never forget the endings.", "I label everything in the kitchen.", "That mistake is a classic.", "Ten new words a day is plenty.")),
    Topic("boardgames", "Board Games", "Dice, cards and grudges.", "No spoilers for legacy games.",
        ("{a} with {b}?", "Rules question about {a}", "{a} after fifty plays", "Games like {a}", "Teaching {a} to {b}", "Is the {a} expansion worth it?"),
        ("Harbor Lords", "Nine Bridges", "Moss and Stone", "The Last Ferry", "Copper Valley", "Paper Dragons"),
        ("two players", "children", "six people", "my parents", "beginners"),
        ("We play {a} every Thursday. The opening feels solved but the end game never does.", "The manual says you may trade at any time, but does that include the auction?", "It took an hour to explain and three to play. Nobody wanted to stop."),
        ("Page 14, second paragraph: no trading in auctions.", "House rule: the youngest starts.", "It shines with four.", "We banned that strategy.", "Sleeve your cards.", "My copy is missing the ferry.")),
    Topic("localfood", "Local Food Finds", "Markets, bakeries, hidden kitchens.", "Say where it is.",
        ("Best {a} near {b}?", "The {a} at {b} has closed", "Found wonderful {a} at {b}", "Who still makes proper {a}?", "{b} on a Sunday: go for the {a}"),
        ("rye bread", "dumplings", "goat cheese", "cinnamon buns", "tamales", "cider"),
        ("the harbor market", "Mill Lane", "the old station", "Quay Street", "the university"),
        ("Went there at eight and the queue was already around the corner. The {a} sold out by nine.", "The owner told me they will move in May. Same people, new oven.", "Cash only, friendly, and the best {a} I have had in years."),
        ("Thanks, going on Saturday.", "They also make excellent soup.", "It was better before they renovated.", "Try the place next door as well.", "Cash only, be warned.", "I know the baker, lovely person.")),
)  # fmt: skip

NAMES = ("mossy_kettle", "harborlight", "tinwhistle", "LateBloomer", "papercrane", "north_of_nine", "quietgravel", "saltandrye", "ferngully_", "oldoaktree", "bluebicycle", "nightheron", "cardboardking", "thimble", "ottersden", "wandering_ada", "juniper_jo", "lowtide", "marginalia", "plainflour", "rustybell", "secondbreakfast", "stargazer_lily", "sundaypaper", "twelvestrings", "umbrella_stand", "velvetmole", "windowseat", "yellowdoor", "zigzag_stitch", "brasshinge", "cloudberry", "dovetail_dan", "eightyacres", "foghorn", "greenthumbgus", "hazelwick", "inkwell", "jackdaw", "kindlingwood")  # fmt: skip
BIOS = ("Lurker since the beginning.", "Two cats, one garden, no plan.", "I answer on Sundays.", "Retired engineer, still curious.", "Here for the recipes.", "")
CLOSERS = ("Any advice is welcome.", "What would you do?", "Thanks for reading.", "Happy to answer questions.", "Curious what others think.", "")
REPLIES = ("Seconded.", "I disagree, but politely.", "Do you have a source for that?", "This is the answer.", "Same here, two years ago.", "Could you say more?", "Thank you, that helped.", "It depends, as always.", "Good point.", "I tried that and it made things worse.")
DOMAINS = ("thequietreview.example", "weekendworkshop.example", "fieldnotes.example", "slowalmanac.example")
