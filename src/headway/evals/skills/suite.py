"""The twelve skills of the suite, and streams of their examples for training and for testing.

A seed determines all examples. Test questions and the questions of DEMO are never trained on.
"""

import random
from collections.abc import Callable, Iterator

from headway.evals.skills.example import Example, is_held_out
from headway.evals.skills.reading import classify, lookup, lookup_at, recall, refuse
from headway.evals.skills.stories import tell
from headway.evals.skills.structured import extract, tool
from headway.evals.skills.symbols import arithmetic, copy, count, reverse, sort
from headway.evals.skills.talk import ME, small_talk

LEVELS = (1, 2, 3)
LEVEL_WEIGHTS = (5, 3, 2)
"""Weights of the levels in training: half of the examples are of the first level."""

TRAINING_WEIGHTS = {"arithmetic": 2, "sort": 2, "count": 2}
"""Skills that training sees twice as often as the others."""

TEST_SEED = 1_000_003

SKILLS: dict[str, Callable[[random.Random, int], Example]] = {
    "arithmetic": arithmetic,
    "sort": sort,
    "copy": copy,
    "reverse": reverse,
    "count": count,
    "lookup": lookup,
    "recall": recall,
    "classify": classify,
    "extract": extract,
    "tool": tool,
    "refuse": refuse,
    "story": tell,
}

DEMO = {
    "What is 2 + 3?": r"2 \+ 3 = 5\.",
    "What is 17 + 25?": r"17 \+ 25 = 42\.",
    "Sort these numbers: 7, 3, 5": r"3, 5, 7",
    "Reverse the letters: c a t": r"t a c",
    "Repeat: h e a d w a y": r"h e a d w a y",
    "Count the letter a in: b a n a n a": r"3",
    "Who are you?": rf"I am {ME}\.",
    "How many parameters do you have?": r"I am very small\. I have about three million param.*",
    "Hello!": r"Hello! How can I help you\?",
    "See you later": r"Goodbye!",
    "What colour is the sky?": r"The sky is blue\.",
    "What is the opposite of hot?": r"The opposite of hot is cold\.",
    "Is this positive or negative? The soup was wonderful.": r"positive",
    "Answer from the text only.\nAnna has a red kite.\nWhat colour is the kite of Anna?": r"Red\.",
    "Answer from the text only.\nAnna has a red kite.\nWhat colour is the kite of Tom?": (
        r"The text does not say\."
    ),
    "Tell me a story about a fox.": r".*\bfox\b.*\..*\..*The end\.",
    "What is the capital of France?": r"I am sorry, I do not know that\.",
}
"""Questions of a first chat, with the pattern of right answers."""


def examples(skill: str, level: int, seed: int) -> Iterator[Example]:
    """Yield held-out examples of one skill at one level; no question is repeated."""
    rng = random.Random(f"{seed} test {skill} {level}")
    return each_once(lambda: SKILLS[skill](rng, level))


def lookups(distance: int, seed: int) -> Iterator[Example]:
    """Yield held-out lookups with `distance` characters between list and question."""
    rng = random.Random(f"{seed} test lookup at {distance}")
    return each_once(lambda: lookup_at(rng, distance))


def each_once(draw: Callable[[], Example]) -> Iterator[Example]:
    """Yield each held-out example once; end after 10,000 draws without a new one."""
    prompts: set[str] = set()
    misses = 0
    while misses < 10_000:
        example = draw()
        if is_held_out(example.full_prompt, frozenset(DEMO)) and example.full_prompt not in prompts:
            prompts.add(example.full_prompt)
            misses = 0
            yield example
        misses += 1


def training_examples(seed: int, talk: float = 0.1) -> Iterator[Example]:
    """Yield training examples: skills and levels by weight, and a share `talk` of small talk."""
    rng = random.Random(f"{seed} train")
    skills = [skill for name, skill in SKILLS.items() for _ in range(TRAINING_WEIGHTS.get(name, 1))]
    while True:
        if rng.random() < talk:
            example = small_talk(rng)
        else:
            example = rng.choice(skills)(rng, rng.choices(LEVELS, LEVEL_WEIGHTS)[0])
        if not is_held_out(example.full_prompt, frozenset(DEMO)):
            yield example
