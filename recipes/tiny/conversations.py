"""Training conversations put together from the examples of the skills.

It is given a seed, from which everything else follows.
It promises pieces of text, each with how much the model is to learn to write it.
"""

import random
from collections.abc import Iterator
from itertools import islice

from recipes.tiny.chatml import END_OF_TEXT, IM_END, message, opened

from headway.evals.skills.suite import training_examples
from headway.evals.skills.varied import varied_examples

SYSTEM = ("You are a helpful assistant.", "You are headway-tiny.", "Answer in one sentence.")

Piece = tuple[str, float]
READ, WRITTEN = 0.1, 1.0
"""What is asked counts a little: a schema that names its fields twice teaches to look back."""


def turn(prompt: str, answer: str) -> list[Piece]:
    """A question to be read, an answer to be learned with its end, and the newline after it."""
    question = message("user", prompt) + opened("assistant")
    return [(question, READ), (f"{answer}{IM_END}", WRITTEN), ("\n", 0)]


def conversations(seed: int, varied: float = 0.0) -> Iterator[list[Piece]]:
    """Endless conversations of one to three examples; one with a system message stands alone.

    A share of `varied` is as frameworks and agents begin them, each of one example.
    """
    rng = random.Random(f"{seed} conversations")
    stream, others = training_examples(seed), varied_examples(seed)
    while True:
        if varied and rng.random() < varied:
            chosen = [next(others)]
        else:
            chosen = list(islice(stream, rng.choice((1, 1, 1, 2, 3))))
        if any(example.system for example in chosen):
            chosen = [example for example in chosen if example.system][:1]
        system = chosen[0].system or (rng.choice(SYSTEM) if rng.random() < 0.15 else "")
        pieces = [(message("system", system), READ)] if system else []
        for example in chosen:
            for prompt, answer in (*example.before, (example.prompt, example.answer)):
                pieces += turn(prompt, answer)
        yield [*pieces, (END_OF_TEXT, 0)]
