"""Training conversations put together from the examples of the skills.

It is given a seed, from which everything else follows.
It promises pieces of text, each marked with whether the model is to learn to write it.
"""

import random
from collections.abc import Iterator
from itertools import islice

from recipes.first.chatml import END_OF_TEXT, IM_END, message, opened
from recipes.first.skills import examples

SYSTEM = ("You are a helpful assistant.", "You are headway-first.", "Answer in one sentence.")

Piece = tuple[str, bool]


def turn(prompt: str, answer: str) -> list[Piece]:
    """A question to be read, an answer to be learned with its end, and the newline after it."""
    question = message("user", prompt) + opened("assistant")
    return [(question, False), (f"{answer}{IM_END}", True), ("\n", False)]


def conversations(seed: int) -> Iterator[list[Piece]]:
    """Endless conversations of one to three examples, some of them with a system message."""
    rng = random.Random(f"{seed} conversations")
    stream = examples(seed, held_out=False)
    while True:
        pieces: list[Piece] = []
        if rng.random() < 0.15:
            pieces.append((message("system", rng.choice(SYSTEM)), False))
        for example in islice(stream, rng.choice((1, 1, 1, 2, 3))):
            for prompt, answer in (*example.before, (example.prompt, example.answer)):
                pieces += turn(prompt, answer)
        yield [*pieces, (END_OF_TEXT, False)]
