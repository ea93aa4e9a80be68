"""Scores guesses that nobody verified: what came tells how many would have been kept.

A source that costs microseconds guesses in every step, whether or not the step verifies it. One
guess of it is kept until the tokens that came have decided it; then the next one is:

    guessed behind t9    a b c d
    came, one a step     a b x        2 of 4 would have been kept; the next is guessed behind x

So the guesses that are scored are those that verification of all would have seen, and `Acceptance`
learns the same with guesses verified, some of them, or none. (Scoring the first guess in each step
instead, replayed answers were kept 11% more than was expected.) A request that begins to copy is
seen before a step is spent on it.
"""

from headway.engine.speculation.acceptance import Acceptance, Own
from headway.engine.speculation.lookup import NO_GUESS, Guess
from headway.engine.speculation.rests import ONCE_IN


class Shadow:
    """The guess of one source for one sequence that is not decided yet; or when the next may be."""

    __slots__ = ("_beside", "_guess", "_start", "num_behind", "source")

    def __init__(self, source: str) -> None:
        self.source = source
        self._guess, self._start, self._beside = NO_GUESS, 0, ""
        self.num_behind = 0
        """Looks since its guess promised most."""

    def looks(self) -> bool:
        """Whether the source is asked: in each look, but where others promise more now and then."""
        self.num_behind += 1
        return self.num_behind <= ONCE_IN or self.num_behind % ONCE_IN == 0

    def settle(self, tokens: list[int], acceptance: Acceptance, own: Own) -> None:
        """Learn what became of the guess, if the `tokens` that are known now decide it."""
        guessed, match = self._guess
        if not guessed:
            return
        came = tokens[self._start : self._start + len(guessed)]
        if came == guessed:
            num_kept = len(guessed)
        elif came == guessed[: len(came)]:
            return
        else:
            num_kept = next(at for at, token in enumerate(came) if token != guessed[at])
        acceptance.observe(self.source, match, len(guessed), num_kept, own, self._beside)
        self._guess = NO_GUESS
        self._start += num_kept + 1

    def remember(self, tokens: list[int], guess: Guess, beside: str = "") -> None:
        """`guess` is of what follows `tokens`: scored unless one before it still is, or the token
        that verification would have given behind that one is not there yet."""
        if not self._guess.token_ids and len(tokens) >= self._start:
            self._guess, self._start, self._beside = guess, len(tokens), beside

    def next_at(self, known: int, most: int) -> int:
        """Behind how many of `known` tokens the next guess of `most` is made so late that these
        decide it."""
        return max(self._start, known - most)

    def close(self, tokens: list[int], acceptance: Acceptance, own: Own) -> None:
        """The sequence is over: what came so far is all that decides."""
        if not self._guess.token_ids:
            return
        self.settle(tokens, acceptance, own)
        guess, came = self._guess, len(tokens) - self._start
        if guess.token_ids and came > 0:
            acceptance.observe(self.source, guess.match, came, came, own, self._beside)
        self._guess = NO_GUESS
