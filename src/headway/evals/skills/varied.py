"""Chats as frameworks and agents begin them: tools and schemas in any dress, results, long prompts.

They are trained on, in `recipes/tiny`, and are no part of the suite, whose questions stay as they
are. It is given a seed or a `random.Random`, and yields examples with one right answer.
It promises that what is asked in the tests of the frameworks (`FIRST`) is never among them.
"""

import random
from collections.abc import Callable, Iterator

from headway.evals.skills import reading, words
from headway.evals.skills.calls import answered, called, instructed, uncalled
from headway.evals.skills.example import Example, is_held_out
from headway.evals.skills.records import final, shown, unseen

FIRST = frozenset(
    {
        "Anna is 30 years old.",
        "Extract: Anna is 30 years old.",
        "What is the weather in Paris?",
        "What is the weather in San Francisco?",
        "What's the weather in Tokyo?",
    }
)
"""What the tests of the frameworks ask."""


def far(rng: random.Random) -> Example:
    """A fact, thousands of words of stories, and the question; or a question after the stories."""
    text = reading.filler(rng, rng.randint(500, 12_500))
    if rng.random() < 0.5:
        example = reading.recall(rng, 1)
        told, said = example.before[0]
        return Example(
            prompt=example.prompt, answer=example.answer, before=((f"{text}\n{told}", said),)
        )
    table = {key: rng.randint(10, 99) for key in rng.sample(words.NOUNS, rng.choice((4, 8, 16)))}
    items = ", ".join(f"{key}: {number}" for key, number in table.items())
    key = rng.choice(list(table))
    listed = rng.choice(reading.LIST).format(items=items)
    question = rng.choice(reading.LOOKUP).format(key=key)
    return Example(prompt=f"{listed}\n\n{text}\n{question}", answer=f"Found {key}: {table[key]}")


VARIED: tuple[tuple[Callable[[random.Random], Example], int], ...] = (
    (called, 30),
    (uncalled, 10),
    (instructed, 6),
    (answered, 22),
    (unseen, 12),
    (shown, 16),
    (final, 18),
    (far, 1),
)
"""What a framework's chat may be, and how often training sees it."""


def may_ask(example: Example) -> bool:
    """Whether nothing in it is asked by the tests of the frameworks."""
    return FIRST.isdisjoint({example.prompt, *(prompt for prompt, _ in example.before)})


def varied_examples(seed: int) -> Iterator[Example]:
    """Endless examples for training: kinds by weight, nothing that is held out."""
    rng = random.Random(f"{seed} varied")
    kinds, often = zip(*VARIED, strict=True)
    while True:
        example: Example = rng.choices(kinds, often)[0](rng)
        if may_ask(example) and not is_held_out(example.asked):
            yield example


def held_out(rng: random.Random, kind: Callable[[random.Random], Example]) -> Iterator[Example]:
    """Endless examples of one kind that training never sees."""
    while True:
        example = kind(rng)
        if may_ask(example) and is_held_out(example.asked):
            yield example
