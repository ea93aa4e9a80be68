"""Chats as frameworks and agents begin them: tools, schemas in many styles, results, long prompts.

`recipes/tiny` trains on them; they are not part of the suite. The questions of the frameworks'
tests (`FIRST`) are never among them.
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
"""Questions of the frameworks' tests."""


def far(rng: random.Random) -> Example:
    """Put thousands of words of stories between a fact and the question, or before the question."""
    text = reading.filler(rng, rng.randint(500, 12_500))
    if rng.random() < 0.5:
        example = reading.recall(rng, 1)
        statement, reply = example.before[0]
        return Example(
            prompt=example.prompt, answer=example.answer, before=((f"{text}\n{statement}", reply),)
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
"""Kinds of chats, with their weights in training."""


def may_ask(example: Example) -> bool:
    """Whether the example contains no question of the frameworks' tests."""
    return FIRST.isdisjoint({example.prompt, *(prompt for prompt, _ in example.before)})


def varied_examples(seed: int) -> Iterator[Example]:
    """Yield training examples: kinds by weight, without held-out ones."""
    rng = random.Random(f"{seed} varied")
    kinds, often = zip(*VARIED, strict=True)
    while True:
        example: Example = rng.choices(kinds, often)[0](rng)
        if may_ask(example) and not is_held_out(example.full_prompt):
            yield example


def held_out(rng: random.Random, kind: Callable[[random.Random], Example]) -> Iterator[Example]:
    """Yield held-out examples of one kind."""
    while True:
        example = kind(rng)
        if may_ask(example) and is_held_out(example.full_prompt):
            yield example
