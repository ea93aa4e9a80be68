"""Short stories in the style of old children's books, drawn from a small grammar.

A story has six sentences about one hero; the last is "The end."
"""

import random
import re

from headway.evals.skills import words
from headway.evals.skills.example import Example, phrased

OPEN = (
    "Once upon a time there was a {mood} {hero} who lived {place}.",
    "Long ago there lived a {mood} {hero} {place}.",
    "There was once a {mood} little {hero} who lived {place}.",
)
FIND = (
    "One {time} the {hero} found a {thing} {where}.",
    "One {time} the {hero} went for a walk and saw a {thing} {where}.",
    "One {time} a {thing} lay {where}, and the {hero} picked it up.",
)
VISIT = (
    (
        'A {friend} came by and said, "That is mine, for I lost it in the {weather}." '
        "So the {hero} gave it back, and the {friend} was very glad."
    ),
    (
        'A {friend} called out, "Please help me, for I am lost in the {weather}!" '
        "So the {hero} took the {friend} by the hand and showed it the way home."
    ),
    (
        'A {friend} came to the door and said, "I am cold and hungry." '
        "The {hero} was kind, and gave the {friend} bread and milk by the fire."
    ),
)
CLOSE = (
    "From that day the {hero} and the {friend} were the best of friends.",
    "After that the {hero} was never {sad} again.",
    "And the {hero} and the {friend} lived happily for many years.",
)
SLOTS = {
    "mood": ("brave", "clever", "happy", "kind", "lonely", "merry", "poor", "young"),
    "place": (
        *("in a deep forest", "by the sea", "on a high hill", "near a quiet river"),
        *("in a little house", "at the edge of a village", "in a green valley"),
    ),
    "time": ("morning", "evening", "winter day", "summer day", "rainy day"),
    "thing": ("golden ring", "red ball", "little boat", "silver bell", "warm coat", "bright lamp"),
    "where": ("under a tree", "in the grass", "on the road", "by the water", "beside the gate"),
    "friend": ("bird", "mouse", "hare", "bee", "squirrel", "crow", "lamb"),
    "weather": ("storm", "snow", "wind", "rain", "dark"),
    "sad": ("sad", "lonely", "afraid", "hungry"),
}


def story(rng: random.Random, hero: str) -> str:
    """Return a story, e.g. "Once upon a time there was a kind fox who lived by the sea. …"."""
    slots = {name: rng.choice(choices) for name, choices in SLOTS.items()}
    sentences = [rng.choice(table) for table in (OPEN, FIND, VISIT, CLOSE)]
    return " ".join((*sentences, "The end.")).format(hero=hero, **slots)


TELL = (
    "Tell me a story about a {hero}.",
    "Tell me a short story about a {hero}.",
    "Write a story about a {hero}.",
    "Can you tell me a story about a {hero}?",
    "I want a story about a {hero}.",
    "Please tell me a story about a {hero}.",
    "I would like to hear a story about a {hero}.",
    "Make up a story about a {hero}.",
    "Do you know a story about a {hero}?",
)
WITH = " It should have a {thing} in it."
GO_ON = (
    "Go on with this story: {begun}",
    "Continue: {begun}",
    "Finish this story: {begun}",
    "How does this story end? {begun}",
)


def tell(rng: random.Random, level: int) -> Example:
    """Tell a story about a hero; about a hero and a thing; continue a story to its end.

    A right reply names the hero (and the thing), has three sentences or more and "The end." last.
    """
    hero = rng.choice(words.HEROES)
    text = story(rng, hero)
    thing = next(thing for thing in SLOTS["thing"] if thing in text)
    names: tuple[str, ...]
    if level == 3:
        sentences = text.split(". ")
        cut = rng.randint(1, 2)
        begun, text = ". ".join(sentences[:cut]) + ".", ". ".join(sentences[cut:])
        prompt, names = rng.choice(GO_ON).format(begun=begun), (hero,)
    else:
        prompt = phrased(rng, TELL, hero=hero)
        prompt += WITH.format(thing=thing) if level == 2 else ""
        names = (hero, thing) if level == 2 else (hero,)
    held = "".join(rf"(?=.*\b{re.escape(name)}\b)" for name in names)
    return Example(prompt=prompt, answer=text, pattern=rf"{held}.*\..*\..*The end\.")
