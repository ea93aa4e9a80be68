"""The word lists the skills and stories draw from.

Nothing is given: the lists are written here by hand, in alphabetical or natural order.
Adding a word is adding it to a row, after which tokenizer, data and training are run again.
"""


def row(text: str) -> tuple[str, ...]:
    """Words parted by spaces: "cat dog" becomes ("cat", "dog")."""
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
