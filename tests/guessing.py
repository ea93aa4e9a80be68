"""A speculator that is right at random, to hold the engine to the same tokens."""

import random
from collections.abc import Callable

from headway.engine.sequence import Sequence
from headway.engine.speculation import Drafts, Speculator
from headway.engine.speculation.drafts import fitting

LONGEST = 9


def ask(speculation: Speculator, decodes: list[Sequence], *given, **more) -> dict[int, Drafts]:
    """The guesses of a step with these decodes; none where it looks for none."""
    if not speculation.is_due(len(decodes)):
        return {}
    return speculation.plan(decodes, *given, **more)


class Guesser:
    """Guesses what `truth` says will come, each token wrong one time in five, or anything.

    `truth` gives all tokens that a sequence will generate, or none where nobody knows.
    """

    jumps, failure, drafting_s = True, "", 0.0

    def __init__(
        self, rng: random.Random, vocab_size: int, truth: Callable[[Sequence], list[int]]
    ) -> None:
        self.rng, self.vocab_size, self.truth = rng, vocab_size, truth
        self.num_guessed = self.num_kept = 0

    def is_due(self, num_decodes):
        return True

    def plan(self, decodes, beside, budget, max_s, *, prompts_wait=False):
        found = {}
        for sequence in decodes:
            if self.rng.random() < 0.2:
                continue
            guesses = fitting(sequence, self.guess(sequence), budget)
            budget -= len(guesses)
            found[sequence.sequence_id] = Drafts(guesses, "test", len(guesses))
        return found

    def guess(self, sequence: Sequence) -> list[int]:
        following = self.truth(sequence)[sequence.num_generated :]
        count = self.rng.randint(0, LONGEST)
        following += [self.rng.randrange(self.vocab_size) for _ in range(count)]
        return [
            token if self.rng.random() < 0.8 else self.rng.randrange(self.vocab_size)
            for token in following[:count]
        ]

    def num_after_prompt(self, sequence, start):
        return 0

    def observe(self, sequence, drafts, sample):
        num_kept = len(sample.token_ids) - 1
        assert 0 <= num_kept <= len(drafts.token_ids)
        self.num_guessed += len(drafts.token_ids)
        self.num_kept += num_kept

    def end_step(self, result):
        pass

    def learn(self, record):
        pass

    def forget(self, sequence):
        pass
