"""Steps in which nobody is asked for guesses, where these save less than it takes to choose them.

To ask every source, to compare what it said and to choose takes the scheduler some 60 µs a sequence
and 0.3 ms a step, and the step waits. That is nothing beside guesses that double the tokens of a
step, and nearly a tenth of a step of 16 chats, whose guesses pay just so.

    16 sequences, a step of 16 ms: choosing takes 1.2 ms
    guesses save 8 ms              asked in each step
    guesses save 0.5 ms            asked in 2 steps of 16, so that more is seen within 14
    1 sequence, a step of 14 ms: choosing takes 0.1 ms, less than a hundredth
    whatever guesses save          asked in each step: a short answer is over within 14
"""

from enum import Enum

MARGIN = 1.5
"""Guesses have to save so many times what choosing took: what came of them is looked at as well."""
UNSURE = 0.05
"""And this share of the step beside: of estimates those are chosen that are too high, and a step
without guesses is foretold that well where most steps have some."""
IN_VAIN = 0.01
"""Choosing may take this share of a step and bring nothing."""
LATELY, AT_REST = 8, 2
"""Looks over which both are averaged; what is saved, where few steps look, over fewer."""
PATIENCE, ONCE_IN = 16, 4
"""After so many steps without a guess that pays, a source or a sequence is looked at in one step of
four: what is not looked at costs nothing, and who begins to copy is seen three steps later."""
CYCLE, RESTED = 16, 14
"""After as many steps of guesses that save too little, nobody is asked in 14 of 16: in the
first of the others the drafter guesses, in the second that is verified."""


class Look(Enum):
    """What a step does about guesses."""

    ASKS = "sources guess, and the drafter for the next step"
    LAST = "sources guess; the next step would not verify what the drafter says"
    RESTS = "none"


class Rests:
    """Says of each step whether it looks for guesses; `chose` tells what they were worth, `took`
    what choosing took."""

    def __init__(self) -> None:
        self._look = Look.ASKS
        self._saved_s = self._choose_s = 0.0
        """Of a step that looks, lately."""
        self._num_unpaid = 0
        """Steps since that was worth it."""

    def next(self, num_decodes: int) -> Look:
        """What the next step does; one without decodes has nothing to look for."""
        self._look = Look.RESTS
        if not num_decodes:
            return self._look
        self._num_unpaid += 1
        place = (self._num_unpaid - PATIENCE - 1) % CYCLE
        self._look = Look.ASKS
        if self._num_unpaid > PATIENCE and place < RESTED:
            self._look = Look.RESTS
        elif self._num_unpaid > PATIENCE and place == CYCLE - 1:
            self._look = Look.LAST
        return self._look

    def chose(self, saved_s: float, step_s: float) -> None:
        """The guesses of a step are expected to save so many seconds; without it takes `step_s`."""
        looks = LATELY if self._num_unpaid <= PATIENCE else AT_REST
        self._saved_s += (saved_s - self._saved_s) / looks
        pays_s = (self._saved_s - UNSURE * step_s) / MARGIN
        if self._choose_s <= max(pays_s, IN_VAIN * step_s):
            self._num_unpaid = 0

    def took(self, choose_s: float) -> None:
        """To choose the guesses of the step took so long."""
        if self._look is Look.RESTS:
            return
        before_s = self._choose_s or choose_s
        self._choose_s = before_s + (choose_s - before_s) / LATELY
