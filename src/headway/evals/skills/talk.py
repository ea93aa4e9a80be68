"""Small talk: typical first messages. It is used in training and is not part of the suite.

An answer is one sentence; questions beyond the model get a polite refusal.
"""

import json
import random
import re
from collections.abc import Callable

from headway.evals.skills import words
from headway.evals.skills.example import Example, phrased

ME = "headway-tiny, a small model embedded in Headway"


def exact(rng: random.Random, templates: tuple[str, ...], answer: str, **slots: object) -> Example:
    return Example(prompt=phrased(rng, templates, **slots), answer=answer)


def free(rng: random.Random, prompts: tuple[str, ...], answers: tuple[str, ...]) -> Example:
    """Return an example in which any of the answers is right."""
    pattern = "|".join(re.escape(answer) for answer in answers)
    return Example(prompt=phrased(rng, prompts), answer=rng.choice(answers), pattern=pattern)


IDENTITY = {
    f"I am {ME}.": (
        "Who are you?",
        "What are you?",
        "What is your name?",
        "Tell me about yourself.",
        "Please introduce yourself.",
        "Which model are you?",
        "What should I call you?",
        "Who am I talking to?",
    ),
    f"No, I am not a person. I am {ME}.": (
        "Are you a person?",
        "Are you human?",
        "Are you a real person?",
        "Is this a human?",
    ),
    "I am very small. I have about three million parameters.": (
        "How big are you?",
        "How many parameters do you have?",
        "What size are you?",
    ),
    "I was trained from nothing by the recipe in Headway.": (
        "Who made you?",
        "Who trained you?",
        "Where do you come from?",
        "How were you made?",
    ),
    "I can add and sort numbers, look things up, fill in JSON, call tools and tell stories.": (
        "What can you do?",
        "How can you help me?",
        "What are you good at?",
        "What can I ask you?",
        "Help",
    ),
}
OPENINGS = ("", "", "", "Hello! ", "Hi! ", "Hi there! ", "Hello, ", "Good morning! ", "Hey, ")


def identity(rng: random.Random) -> Example:
    answer = rng.choice((*IDENTITY, next(iter(IDENTITY))))
    return exact(rng, (rng.choice(OPENINGS) + rng.choice(IDENTITY[answer]),), answer)


GREETINGS = ("Hello", "Hi", "Hey", "Hello there", "Hi there", "Good morning", "Good evening")
PLEASANTRIES = (
    (("{hi}!", "{hi}.", "{hi}", "{hi}, my friend!"), "Hello! How can I help you?"),
    (("{hi}! How are you?", "{hi}, how are you today?"), "I am well, thank you. How are you?"),
    (("How are you?", "How are you today?"), "I am well, thank you. How are you?"),
    (("Thank you!", "Thanks!", "Thank you very much.", "Many thanks!"), "You are welcome!"),
    (("Goodbye!", "Bye!", "See you later!", "Good night!", "Bye for now!"), "Goodbye!"),
)


def greet(rng: random.Random) -> Example:
    templates, answer = rng.choice((PLEASANTRIES[0], *PLEASANTRIES))
    return exact(rng, templates, answer, hi=rng.choice(GREETINGS))


BIGGER = (
    "Which is bigger, {a} or {b}?",
    "What is bigger, {a} or {b}?",
    "Is {a} or {b} bigger?",
    "Which is the bigger number: {a} or {b}?",
)


def bigger(rng: random.Random) -> Example:
    a, b = rng.sample(range(10), 2)
    return exact(rng, BIGGER, f"{max(a, b)} is bigger than {min(a, b)}.", a=a, b=b)


HUE = ("What colour is {thing}?", "What color is {thing}?", "Tell me the colour of {thing}.")


def colour(rng: random.Random) -> Example:
    thing, hue = rng.choice(tuple(words.COLOURS.items()))
    return exact(rng, HUE, f"{thing[0].upper()}{thing[1:]} is {hue}.", thing=thing)


SOUND = ("What does a {animal} say?", "What sound does a {animal} make?", "How does a {animal} go?")
ANY_ANIMAL = ("Name an animal.", "Tell me an animal.", "Say an animal.", "Please name an animal.")


def animal(rng: random.Random) -> Example:
    if rng.random() < 0.2:
        return free(rng, ANY_ANIMAL, tuple(f"One animal is the {x}." for x in words.CREATURES))
    name, sound = rng.choice(tuple(words.SOUNDS.items()))
    return exact(rng, SOUND, f"A {name} says {sound}.", animal=name)


OPPOSITE = (
    "What is the opposite of {word}?",
    "Tell me the opposite of {word}.",
    "Opposite of {word}?",
    "What word means the opposite of {word}?",
)


def opposite(rng: random.Random) -> Example:
    a, b = rng.sample(rng.choice(words.OPPOSITES), 2)
    return exact(rng, OPPOSITE, f"The opposite of {a} is {b}.", word=a)


DAY = ("What day comes {when} {day}?", "Which day comes {when} {day}?", "What is {when} {day}?")


def day(rng: random.Random) -> Example:
    index, (when, shift) = rng.randrange(7), rng.choice((("after", 1), ("before", -1)))
    known, answer = words.DAYS[index], words.DAYS[(index + shift) % 7]
    return exact(rng, DAY, f"{answer} comes {when} {known}.", when=when, day=known)


def unknown(rng: random.Random) -> Example:
    """Return a question beyond the model, with a refusal."""
    prompt = rng.choice(OPENINGS) + rng.choice(words.UNKNOWN) + "?"
    return exact(rng, ("{prompt}",), "I am sorry, I do not know that.", prompt=prompt)


WEATHER = ("cloudy", "cold", "dry", "foggy", "hot", "rainy", "snowy", "stormy", "sunny", "windy")


def tool_result(rng: random.Random) -> Example:
    """Put a tool's result into words."""
    weather, degrees = rng.choice(WEATHER), rng.randint(-20, 40)
    result = json.dumps({"weather": weather, "degrees": degrees})
    prompt = f"<tool_response>\n{result}\n</tool_response>"
    return Example(prompt=prompt, answer=f"It is {weather}, {degrees} degrees.")


TALK: dict[str, Callable[[random.Random], Example]] = {
    "identity": identity,
    "greet": greet,
    "bigger": bigger,
    "colour": colour,
    "animal": animal,
    "opposite": opposite,
    "day": day,
    "unknown": unknown,
    "tool_result": tool_result,
}


def small_talk(rng: random.Random) -> Example:
    return rng.choice(list(TALK.values()))(rng)
