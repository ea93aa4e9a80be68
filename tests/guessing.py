"""A speculator that is right at random, to hold the engine to the same tokens."""

import random
from collections.abc import Callable

from headway.engine.sequence import Sequence
from headway.engine.speculation import Drafts
from headway.engine.speculation.drafts import fitting

LONGEST = 9


class Guesser:
    """Guesses what `truth` says will come, each token wrong one time in five, or anything.

    `truth` gives all tokens that a sequence will generate, or none where nobody knows.
    """

    jumps, failure = True, ""

    def __init__(
        self, rng: random.Random, vocab_size: int, truth: Callable[[Sequence], list[int]]
    ) -> None:
        self.rng, self.vocab_size, self.truth = rng, vocab_size, truth
        self.num_guessed = self.num_kept = 0

    def plan(self, decodes, beside, budget, most_s):
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

    def first(self, sequence):
        return 0

    def came(self, sequence, drafts, sample):
        num_kept = len(sample.token_ids) - 1
        assert 0 <= num_kept <= len(drafts.token_ids)
        self.num_guessed += len(drafts.token_ids)
        self.num_kept += num_kept

    def ended(self, result):
        pass

    def left(self, sequence):
        pass
