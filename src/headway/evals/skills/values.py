"""Values for arguments and fields: places, people, and invented words.

Many values are in no list, so that a model learns to copy from its prompt instead of recalling.
"""

import random
from collections.abc import Callable

from headway.evals.skills import words
from headway.evals.skills.words import row

PLACES = (
    *("San Francisco", "New York", "Los Angeles", "Buenos Aires", "Hong Kong", "Mexico City"),
    *("New Delhi", "Cape Town", "San Diego", "Rio de Janeiro", "Kuala Lumpur", "Las Vegas"),
    *row(
        """Amsterdam Austin Baghdad Bangkok Barcelona Beijing Brussels Budapest Copenhagen Dallas
        Denver Detroit Dresden Frankfurt Helsinki Houston Istanbul Jakarta Karachi Kyoto Lagos
        Manila Melbourne Miami Montreal Mumbai Munich Nairobi Osaka Philadelphia Phoenix Portland
        Santiago Seattle Seoul Shanghai Singapore Stockholm Taipei Toronto Utrecht Vancouver
        Washington Wellington Zagreb"""
    ),
)
PEOPLE = row(
    """Aaron Adam Alex Amir Andrew Bella Bob Brian Carlos Carol Chen Chloe Chris Diana Dmitri Edward
    Elena Eric Fatima Felix Fiona Gabriel Ines Ivan Jason Jennifer Jessica Joe Jose Karen Kevin
    Laila Lars Linda Lisa Lukas Michael Mia Mohammed Nina Noah Olga Omar Pedro Priya Rachel Ravi
    Robert Ryan Sarah Sofia Stefan Steven Susan Tara Tim Victor Wei William Yuki Yusuf Zoe"""
)
SURNAMES = row(
    """Adams Baker Brown Carter Clark Cooper Davis Doe Evans Fischer Garcia Green Hall Harris
    Jackson Johnson Jones Kim King Lee Lopez Martin Miller Moore Muller Nguyen Novak Patel Rossi
    Schmidt Scott Silva Smith Taylor Turner Walker White Wilson Wood Young"""
)
JOBS = row(
    """actor baker builder carpenter cook dentist designer doctor driver engineer farmer gardener
    journalist lawyer librarian manager nurse painter pilot plumber programmer sailor scientist
    singer student tailor teacher writer"""
)
LANGUAGES = row("Dutch English French German Greek Hindi Italian Japanese Polish Spanish Swedish")
ROOMS = row("attic bathroom bedroom cellar garage garden hall kitchen office")
TOPICS = (
    *words.NOUNS,
    *row(
        """art biology chess coffee cooking dinosaurs football geology history jazz mathematics
        medicine money music painting physics planets poetry politics robots sailing sport tea
        travel volcanoes whales"""
    ),
)
FIRST, VOWELS, LAST = "b c d f g h j k l m n p r s t v w z".split(), "aeiou", "dklmnrstx"


def invented(rng: random.Random) -> str:
    """Return a word that is in no list: "kavoro", "zelim", "bun"."""
    body = "".join(rng.choice(FIRST) + rng.choice(VOWELS) for _ in range(rng.randint(1, 3)))
    return body + (rng.choice(LAST) if len(body) < 4 or rng.random() < 0.5 else "")


def place(rng: random.Random) -> str:
    """Return a town, real or invented, of one or two words."""
    dice = rng.random()
    if dice < 0.35:
        return rng.choice(PLACES)
    if dice < 0.6:
        return rng.choice(words.TOWNS)
    name = invented(rng).capitalize()
    first = rng.choice(("San", "New", "Port", "Saint", "North", "Bad", invented(rng).capitalize()))
    return f"{first} {name}" if rng.random() < 0.3 else name


def person(rng: random.Random) -> str:
    """Return a first name, sometimes with a surname."""
    dice = rng.random()
    known = rng.choice(words.NAMES if dice < 0.4 else PEOPLE)
    first = known if dice < 0.75 else invented(rng).capitalize()
    if rng.random() < 0.75:
        return first
    return f"{first} {rng.choice((*SURNAMES, invented(rng).capitalize()))}"


def number(rng: random.Random) -> int:
    return rng.randint(1, rng.choice((9, 99, 99, 999, 9999)))


def fraction(rng: random.Random) -> float:
    return rng.randint(1, 999) / rng.choice((2, 4, 10, 10, 100))


def topic(rng: random.Random) -> str:
    """Return one to three words about anything: "red kavoro", "history of tea"."""
    noun = rng.choice(TOPICS) if rng.random() < 0.6 else invented(rng)
    dice = rng.random()
    if dice < 0.5:
        return noun
    if dice < 0.8:
        return f"{rng.choice((*words.HUES, *words.PRAISE, invented(rng)))} {noun}"
    return f"{rng.choice(TOPICS)} of {noun}"


def code(rng: random.Random) -> str:
    """Return an order number or a ticker: "A-1043", "KVZ", "87120"."""
    letters = "".join(rng.choices("ABCDEFGHIJKLMNOPQRSTUVWXYZ", k=rng.randint(1, 4)))
    digits = str(rng.randint(10, 99999))
    return rng.choice((letters + digits, f"{letters}-{digits}", digits, letters + "X"))


def file(rng: random.Random) -> str:
    folder = rng.choice(("", "", "src/", "docs/", f"{invented(rng)}/", "/tmp/"))
    stem = rng.choice((rng.choice(words.NOUNS), invented(rng)))
    return f"{folder}{stem}.{rng.choice(('txt', 'py', 'md', 'json', 'csv'))}"


def email(rng: random.Random) -> str:
    user = rng.choice((rng.choice(words.NAMES).lower(), invented(rng)))
    return f"{user}@{rng.choice(('example', invented(rng)))}.{rng.choice(('com', 'org', 'net'))}"


VALUES: dict[str, tuple[str, Callable[[random.Random], object]]] = {
    "place": ("string", place),
    "person": ("string", person),
    "number": ("integer", number),
    "fraction": ("number", lambda rng: fraction(rng) if rng.random() < 0.3 else number(rng)),
    "topic": ("string", topic),
    "code": ("string", code),
    "file": ("string", file),
    "email": ("string", email),
    "day": ("string", lambda rng: rng.choice(words.DAYS)),
    "language": ("string", lambda rng: rng.choice(LANGUAGES)),
    "room": ("string", lambda rng: rng.choice(ROOMS)),
    "job": ("string", lambda rng: rng.choice(JOBS)),
    "hue": ("string", lambda rng: rng.choice(words.HUES)),
    "thing": ("string", lambda rng: rng.choice((rng.choice(words.NOUNS), invented(rng)))),
}
"""Kind of value → its JSON type, and the function that draws one."""
