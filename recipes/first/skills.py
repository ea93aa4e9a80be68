"""Seeded generators of short chats, one for each skill the model should have.

Each is given a `random.Random` and returns an `Example` whose answer a regular expression checks.
A prompt is either for training or for testing, never both: `is_held_out` decides from its text.
"""

import random
import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from recipes.first import words
from recipes.first.stories import story

ME = "headway-first, a small model embedded in Headway"

DEMO = {
    "What is 2 + 3?": r"2 \+ 3 = 5\.",
    "6 + 8": r"6 \+ 8 = 14\.",
    "Can you add 4 and 4?": r"4 \+ 4 = 8\.",
    "How much is 6 minus 2?": r"6 - 2 = 4\.",
    "Which is bigger, 4 or 7?": r"7 is bigger than 4\.",
    "Repeat the word river.": r"The word is river\.",
    "Reverse the letters: c a t": r"Reversed: t a c",
    "What is the first word in this list: moon, river, apple?": r"The first word is moon\.",
    "What is the last word in this list: sun, boat, tree?": r"The last word is tree\.",
    "Who are you?": rf"I am {ME}\.",
    "How many parameters do you have?": r"I am very small\. I have about one million parameters\.",
    "Hello!": r"Hello! How can I help you\?",
    "See you later": r"Goodbye!",
    "What colour is the sky?": r"The sky is blue\.",
    "What does a cow say?": r"A cow says moo\.",
    "Name an animal.": r"One animal is the \w+\.",
    "What is the opposite of hot?": r"The opposite of hot is cold\.",
    "What day comes after Monday?": r"Tuesday comes after Monday\.",
    "Tell me a story about a fox.": r".*\bfox\b.*\..*\..*\. The end\.",
    "What is the capital of France?": r"I am sorry, I do not know that\.",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """One question, its answer, the pattern of right answers, and the turns before it."""

    prompt: str
    answer: str
    pattern: str
    before: tuple[tuple[str, str], ...] = ()

    @property
    def asked(self) -> str:
        """All that the person said: the prompts of the earlier turns and this one."""
        return "\n".join((*(prompt for prompt, _ in self.before), self.prompt))

    def accepts(self, reply: str) -> bool:
        """Whether the whole reply is a right answer."""
        return re.fullmatch(self.pattern, reply.strip(), re.DOTALL) is not None


def is_held_out(asked: str) -> bool:
    """A tenth of all prompts, and every prompt of the demo, is kept for testing."""
    return asked in DEMO or zlib.crc32(asked.encode()) % 10 == 0


def typed(rng: random.Random, prompt: str) -> str:
    """The prompt as a hurried person types it: "What is 2 + 3?" may become "what is 2 + 3"."""
    if rng.random() < 0.15:
        prompt = prompt[0].lower() + prompt[1:]
    if rng.random() < 0.15:
        prompt = prompt.rstrip("?.!")
    return prompt


def exact(rng: random.Random, templates: tuple[str, ...], answer: str, **slots: object) -> Example:
    """An example with a single right answer and a phrasing drawn from the templates."""
    prompt = typed(rng, rng.choice(templates).format(**slots))
    return Example(prompt=prompt, answer=answer, pattern=re.escape(answer))


def free(rng: random.Random, prompts: tuple[str, ...], answers: tuple[str, ...]) -> Example:
    """An example where any of the answers is right."""
    pattern = "|".join(re.escape(answer) for answer in answers)
    prompt = typed(rng, rng.choice(prompts))
    return Example(prompt=prompt, answer=rng.choice(answers), pattern=pattern)


ADD = (
    "What is {a} + {b}?",
    "What is {a} plus {b}?",
    "{a} + {b}",
    "{a} + {b} = ?",
    "{a}+{b}",
    "{a} plus {b}?",
    "Add {a} and {b}.",
    "Please add {a} and {b}.",
    "How much is {a} + {b}?",
    "How much is {a} plus {b}?",
    "Can you add {a} and {b}?",
    "What is the sum of {a} and {b}?",
)


def add(rng: random.Random) -> Example:
    a, b = rng.randrange(10), rng.randrange(10)
    return exact(rng, ADD, f"{a} + {b} = {a + b}.", a=a, b=b)


SUBTRACT = (
    "What is {a} - {b}?",
    "What is {a} minus {b}?",
    "{a} - {b}",
    "{a} - {b} = ?",
    "{a}-{b}",
    "{a} minus {b}?",
    "Take {b} from {a}.",
    "How much is {a} - {b}?",
    "How much is {a} minus {b}?",
)


def subtract(rng: random.Random) -> Example:
    b, a = sorted((rng.randrange(10), rng.randrange(10)))
    return exact(rng, SUBTRACT, f"{a} - {b} = {a - b}.", a=a, b=b)


BIGGER = (
    "Which is bigger, {a} or {b}?",
    "Which number is bigger, {a} or {b}?",
    "Is {a} or {b} bigger?",
    "Tell me which is bigger: {a} or {b}.",
    "Which is the bigger number: {a} or {b}?",
)


def bigger(rng: random.Random) -> Example:
    a, b = rng.sample(range(10), 2)
    return exact(rng, BIGGER, f"{max(a, b)} is bigger than {min(a, b)}.", a=a, b=b)


COPY = (
    "Repeat the word {word}.",
    "Say the word {word}.",
    "Copy this word: {word}",
    "Please repeat: {word}",
    "Please say the word {word}.",
    "Repeat after me: {word}",
    "Can you say {word}?",
    "Write the word {word}.",
)


def made_up(rng: random.Random) -> str:
    """A word nobody has seen, of two or three syllables such as "ba", "ne" and "rol"."""
    syllables = [rng.choice("bdfgklmnprst") + rng.choice("aeiou") for _ in range(rng.randint(2, 3))]
    return "".join(syllables) + rng.choice(("", "", "l", "n", "r", "s", "t"))


def copy(rng: random.Random) -> Example:
    word = rng.choice(words.NOUNS) if rng.random() < 0.5 else made_up(rng)
    return exact(rng, COPY, f"The word is {word}.", word=word)


REVERSE = (
    "Reverse the letters: {letters}",
    "Reverse these letters: {letters}",
    "Reverse: {letters}",
    "Please reverse: {letters}",
    "Write these letters backwards: {letters}",
    "Say these letters in reverse: {letters}",
)


def reverse(rng: random.Random) -> Example:
    letters = [rng.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(rng.randint(2, 4))]
    answer = "Reversed: " + " ".join(reversed(letters))
    return exact(rng, REVERSE, answer, letters=" ".join(letters))


ENDS = (
    "What is the {end} word in this list: {items}?",
    "What is the {end} word of this list: {items}?",
    "Which word is {end}: {items}?",
    "Which word comes {end} in {items}?",
    "Give me the {end} word: {items}",
    "Tell me the {end} one: {items}",
)


def ends(rng: random.Random) -> Example:
    items = rng.sample(words.NOUNS + words.CREATURES, rng.randint(2, 5))
    end, item = rng.choice((("first", items[0]), ("last", items[-1])))
    return exact(rng, ENDS, f"The {end} word is {item}.", end=end, items=", ".join(items))


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
    "I am very small. I have about one million parameters.": (
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
    "I can add small numbers, copy words, reverse letters and tell short stories.": (
        "What can you do?",
        "How can you help me?",
        "What are you good at?",
        "What can I ask you?",
    ),
}
OPENINGS = ("", "", "", "Hello! ", "Hi! ", "Hi there! ", "Hello, ", "Good morning! ", "Hey, ")


def identity(rng: random.Random) -> Example:
    answer = rng.choice((*IDENTITY, next(iter(IDENTITY))))
    return exact(rng, (rng.choice(OPENINGS) + rng.choice(IDENTITY[answer]),), answer)


GREETINGS = ("Hello", "Hi", "Hey", "Hello there", "Hi there", "Good morning", "Good evening")
PLEASANTRIES = (
    (("{hi}!", "{hi}.", "{hi}, headway!", "{hi}, my friend!"), "Hello! How can I help you?"),
    (("{hi}! How are you?", "{hi}, how are you today?"), "I am well, thank you. How are you?"),
    (("How are you?", "How are you today?"), "I am well, thank you. How are you?"),
    (("Thank you!", "Thanks!", "Thank you very much.", "Many thanks!"), "You are welcome!"),
    (("Goodbye!", "Bye!", "See you later!", "Good night!", "Bye for now!"), "Goodbye!"),
)


def greet(rng: random.Random) -> Example:
    templates, answer = rng.choice((PLEASANTRIES[0], *PLEASANTRIES))
    return exact(rng, templates, answer, hi=rng.choice(GREETINGS))


MEET = ("My name is {name}.", "I am {name}.", "Hello, I am {name}.", "Hi! My name is {name}.")
RECALL = ("What is my name?", "Do you know my name?", "Who am I?", "Can you tell me my name?")


def meet(rng: random.Random) -> Example:
    name = rng.choice(words.NAMES)
    return exact(rng, MEET, f"Hello, {name}! Nice to meet you.", name=name)


def remember(rng: random.Random) -> Example:
    """Two turns: a name is given in the first and asked for in the second."""
    first = meet(rng)
    name = next(name for name in words.NAMES if f"{name}!" in first.answer)
    answer = f"Your name is {name}."
    before = ((first.prompt, first.answer),)
    prompt = typed(rng, rng.choice(RECALL))
    return Example(prompt=prompt, answer=answer, pattern=re.escape(answer), before=before)


HUE = ("What colour is {thing}?", "What color is {thing}?", "Tell me the colour of {thing}.")
ANY_HUE = (
    "Name a colour.",
    "Name a color.",
    "Tell me a colour.",
    "Give me a colour.",
    "Say a colour.",
    "Pick a colour.",
    "Can you name a colour?",
)


def colour(rng: random.Random) -> Example:
    if rng.random() < 0.2:
        return free(rng, ANY_HUE, tuple(f"One colour is {hue}." for hue in words.HUES))
    thing, hue = rng.choice(tuple(words.COLOURS.items()))
    return exact(rng, HUE, f"{thing[0].upper()}{thing[1:]} is {hue}.", thing=thing)


SOUND = ("What does a {animal} say?", "What sound does a {animal} make?", "How does a {animal} go?")
ANY_ANIMAL = (
    "Name an animal.",
    "Tell me an animal.",
    "Give me an animal.",
    "Say an animal.",
    "Pick an animal.",
    "Can you name an animal?",
    "Please name an animal.",
)


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


TELL = (
    "Tell me a story about a {hero}.",
    "Tell me a short story about a {hero}.",
    "Write a story about a {hero}.",
    "Can you tell me a story about a {hero}?",
    "I want a story about a {hero}.",
)
TELL_ANY = ("Tell me a story.", "Tell me a short story.", "Please tell me a story.")


def tell(rng: random.Random) -> Example:
    """A story is right when its hero is the one asked for and it ends as stories do."""
    hero, named = rng.choice(words.HEROES), rng.random() < 0.8
    prompt = typed(rng, rng.choice(TELL if named else TELL_ANY).format(hero=hero))
    pattern = rf".*\b{hero if named else '[Tt]here (was|lived)'}\b.*\..*\..*\. The end\."
    return Example(prompt=prompt, answer=story(rng, hero), pattern=pattern)


def unknown(rng: random.Random) -> Example:
    """Questions beyond the model, which it should decline."""
    prompt = rng.choice(OPENINGS) + rng.choice(words.UNKNOWN) + "?"
    return exact(rng, ("{prompt}",), "I am sorry, I do not know that.", prompt=prompt)


# A weight of 3 is drawn three times as often as a weight of 1.
SKILLS: dict[str, tuple[int, Callable[[random.Random], Example]]] = {
    "add": (3, add),
    "subtract": (2, subtract),
    "bigger": (1, bigger),
    "copy": (3, copy),
    "reverse": (3, reverse),
    "ends": (3, ends),
    "identity": (1, identity),
    "greet": (1, greet),
    "meet": (1, meet),
    "remember": (1, remember),
    "colour": (1, colour),
    "animal": (1, animal),
    "opposite": (1, opposite),
    "day": (1, day),
    "tell": (2, tell),
    "unknown": (1, unknown),
}


def examples(seed: int, *, held_out: bool, skill: str | None = None) -> Iterator[Example]:
    """An endless stream of examples, all for training or all for testing."""
    rng = random.Random(f"{seed} {held_out}")
    names = [skill] if skill else list(SKILLS)
    weights = [SKILLS[name][0] for name in names]
    while True:
        example = SKILLS[rng.choices(names, weights)[0]][1](rng)
        if is_held_out(example.asked) == held_out:
            yield example
