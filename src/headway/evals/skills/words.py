"""The word lists of the skills and stories.

A new word changes the suite: the tokenizer and the models then need to be trained again.
"""


def row(text: str) -> tuple[str, ...]:
    """Split at spaces: "cat dog" becomes ("cat", "dog")."""
    return tuple(text.split())


NOUNS = row(
    """apple ball bed bell bird boat book box bread bridge bus cake candle chair clock cloud coat
    cup desk door drum egg farm fire fish flag flower fork garden gate glass gold hat hill home
    horse house island jar key kite lake lamp leaf lemon letter light map milk mirror moon
    mountain nest night ocean paper path pen pencil piano plate pond queen rain ring river road
    roof rope rose sail sand school ship shoe silver snow song spoon star stone storm street sun
    table tent tower train tree valley wall water wheel wind window wood"""
)

CREATURES = row(
    """bear cat cow dog duck fox frog goat hare hen horse lion mouse pig rabbit sheep tiger
    wolf"""
)

HEROES = (*CREATURES, "boy", "girl", "king", "queen", "sailor", "farmer", "giant", "princess")

SOUNDS = {
    "bee": "buzz",
    "cat": "meow",
    "cow": "moo",
    "crow": "caw",
    "dog": "woof",
    "duck": "quack",
    "frog": "croak",
    "hen": "cluck",
    "horse": "neigh",
    "lion": "roar",
    "mouse": "squeak",
    "pig": "oink",
    "sheep": "baa",
    "snake": "hiss",
    "wolf": "howl",
}

HUES = ("black", "blue", "brown", "green", "grey", "orange", "pink", "purple", "red", "white")

COLOURS = {
    "a banana": "yellow",
    "a carrot": "orange",
    "a cherry": "red",
    "a crow": "black",
    "a frog": "green",
    "a lemon": "yellow",
    "a lime": "green",
    "a strawberry": "red",
    "a tomato": "red",
    "blood": "red",
    "coal": "black",
    "grass": "green",
    "milk": "white",
    "snow": "white",
    "the moon": "white",
    "the night": "black",
    "the sea": "blue",
    "the sky": "blue",
    "the sun": "yellow",
    "wood": "brown",
}

OPPOSITES = (
    *(("big", "small"), ("hot", "cold"), ("day", "night"), ("up", "down"), ("in", "out")),
    *(("happy", "sad"), ("fast", "slow"), ("old", "new"), ("open", "closed"), ("good", "bad")),
    *(("high", "low"), ("wet", "dry"), ("black", "white"), ("left", "right"), ("hard", "soft")),
    *(("long", "short"), ("light", "dark"), ("yes", "no"), ("full", "empty"), ("rich", "poor")),
)

DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")

NAMES = row(
    """Alice Anna Ben Clara Daniel David Ella Emma Eva Frank George Grace Hannah Harry Henry Ida
    Jack James Jane John Julia Kate Laura Leo Lily Lucy Maria Mark Martha Mary Max Nora Oliver
    Oscar Paul Peter Rosa Ruth Sam Sara Simon Sophie Thomas Tom Will"""
)

UNKNOWN = (
    "What is the capital of France",
    "What is the capital of Japan",
    "Who wrote Hamlet",
    "Who won the football game",
    "What is the weather today",
    "Will it rain tomorrow",
    "What time is it",
    "How tall is the tower",
    "How far away is the moon",
    "How do I cook rice",
    "How do I fix a bicycle",
    "How does a computer work",
    "What is the meaning of life",
    "What is gravity",
    "What is the price of gold",
    "When did the war end",
    "Where is the nearest station",
    "Who is the president",
    "Why is the sea salty",
    "Can you write a program",
    "Can you translate this letter",
    "What is the square root of 144",
    "Explain how an engine works",
    "Write an essay about history",
)

TOWNS = row(
    """Athens Berlin Bergen Boston Cairo Chicago Cork Delhi Dover Dublin Florence Geneva Hamburg
    Lima Lisbon London Lyon Madrid Milan Moscow Naples Oslo Oxford Paris Prague Quebec Rome Sofia
    Sydney Tokyo Turin Venice Vienna Warsaw York Zurich"""
)

PRAISE = row(
    """beautiful brilliant charming clean comfortable delicious excellent fine fresh friendly good
    great helpful lovely nice perfect pleasant splendid superb wonderful"""
)
BLAME = row(
    """awful bad boring broken cold dirty disappointing dreadful dull horrible nasty noisy poor
    rude slow sour stale terrible ugly unpleasant"""
)
REVIEWED = row(
    """bread breakfast cake concert coffee dinner film garden hotel journey lunch market meal
    museum music play room service soup tea train view waiter weather"""
)
KINDS = {
    "animal": CREATURES,
    "food": row("apple bread cake cheese egg fish honey jam lemon milk pear pie rice salt soup"),
    "clothing": row("belt boot cap cloak coat dress glove hat scarf shirt shoe skirt sock vest"),
    "tool": row("axe broom drill file hammer knife ladder needle pliers rake ruler saw spade"),
    "vehicle": row("bicycle boat bus car cart coach ferry lorry ship sledge tram train wagon"),
}

INTERLUDES = (
    ("What is 2 + 2?", "2 + 2 = 4."),
    ("What is 5 - 3?", "5 - 3 = 2."),
    ("Repeat: a b c", "a b c"),
    ("Reverse: x y z", "z y x"),
    ("How are you?", "I am well, thank you. How are you?"),
    ("Thank you!", "You are welcome!"),
    ("What does a cow say?", "A cow says moo."),
    ("What colour is grass?", "Grass is green."),
    ("What is the opposite of big?", "The opposite of big is small."),
    ("What day comes after Monday?", "Tuesday comes after Monday."),
    ("Sort: 3, 1, 2", "1, 2, 3"),
    ("What is the capital of Japan?", "I am sorry, I do not know that."),
)
