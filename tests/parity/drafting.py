"""A drafter that is asked in every step, and requests that share, find and copy blocks."""

import random

from headway.core.request import Request, SamplingParams
from headway.engine.speculation import Drafts
from headway.engine.speculation.drafts import fitting

COUNT = 5


class Proposals:
    """Asks for `COUNT` guesses of everybody in each step; keeps what it was told, and verifies."""

    jumps, failure, drafting_s = False, "", 0.0

    def __init__(self) -> None:
        self.told: list[tuple[list[int], list[int]]] = []
        """(all tokens known, guesses of what follows)."""
        self._next: dict[int, list[int]] = {}
        self.num_kept = self.num_guessed = 0

    def is_due(self, num_decodes):
        return True

    def plan(self, decodes, beside, budget, max_s, *, prompts_wait=False):
        found = {}
        for sequence in decodes:
            guesses = fitting(sequence, self._next.pop(sequence.sequence_id, []), budget)
            budget -= len(guesses)
            room = sequence.max_len - len(sequence.tokens) - len(guesses) - 2
            most = max(min(COUNT, room), 0)
            found[sequence.sequence_id] = Drafts(guesses, "draft", propose=most)
        return found

    def num_after_prompt(self, sequence, start):
        return min(COUNT, max(sequence.max_len - len(sequence.tokens) - 2, 0))

    def observe(self, sequence, drafts, sample):
        num_kept, proposed = len(sample.token_ids) - 1, sample.drafts
        self._next[sequence.sequence_id] = proposed
        self.num_guessed += len(drafts.token_ids)
        self.num_kept += num_kept
        if proposed and sequence.request.sampling.greedy:
            self.told.append((list(sequence.tokens), proposed))

    def end_step(self, result):
        pass

    def learn(self, record):
        pass

    def forget(self, sequence):
        self._next.pop(sequence.sequence_id, None)


class Foreknowing(Proposals):
    """Verifies what comes, up to a wrong token now and then, in place of the drafter's guesses."""

    def __init__(self, answers: dict[tuple[int, int], list[int]]) -> None:
        super().__init__()
        self.answers, self.rng = answers, random.Random(7)

    def plan(self, decodes, beside, budget, max_s, *, prompts_wait=False):
        found = super().plan(decodes, beside, 0, max_s)
        for sequence in decodes:
            answer = self.answers[sequence.request.request_id, sequence.index]
            follows = answer[len(sequence.tokens) - sequence.num_prompt :][: self.rng.randrange(6)]
            if follows and self.rng.random() < 0.5:
                follows[-1] = (follows[-1] + 1) % 4000
            guesses = fitting(sequence, follows, budget)
            budget -= len(guesses)
            room = sequence.max_len - len(sequence.tokens) - len(guesses) - 2
            most = max(min(COUNT, room), 0)
            found[sequence.sequence_id] = Drafts(guesses, "other", propose=most)
        return found


def some_requests(rng: random.Random, count: int, *, kernels: object = "auto") -> list[Request]:
    """Prompts that begin alike, so that blocks are shared and found again; some are sampled.

    With `kernels` of torch none is: the last place of its products depends on the rows beside, so
    a draw that falls between two tokens (1,857 and 1,858, with seed 0 on a Xeon) may give either.
    """
    common = [rng.randrange(3, 4000) for _ in range(40)]
    found = []
    for number in range(count):
        prompt = common[: rng.choice([5, 16, 33, 40])] + [
            rng.randrange(3, 4000) for _ in range(rng.choice([1, 3, 40]))
        ]
        temperature = rng.choice([0.0, 0.0, 1.0])
        sampling = SamplingParams(
            temperature=0.0 if kernels == "torch" else temperature,
            seed=number,
            max_tokens=20,
            ignore_eos=True,
            n=rng.choice([1, 1, 3]),
        )
        found.append(Request(number, prompt, sampling))
    return found
