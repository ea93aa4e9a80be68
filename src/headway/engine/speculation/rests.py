"""Steps in which nobody is asked for guesses, where these save less than it takes to choose them.

To ask every source, to compare what it said and to choose takes the scheduler some 80 µs a sequence
and 0.3 ms a step, and the step waits. That is nothing beside guesses that double the tokens of a
step, and a tenth of a step of 16 chats, whose guesses pay just so.

    16 sequences, a step of 16 ms: choosing takes 1.6 ms
    guesses save 8 ms              asked in each step
    guesses save 0.5 ms            asked in 4 steps of 16, so that more is seen within 12
"""

from enum import Enum

CHOOSING_S, EACH_S = 3e-4, 1e-4
"""What guesses have to save: of a step, and of each sequence. A quarter more than choosing takes
behind a step of a 0.5B model, whose weights leave no room for anything else in the caches (two cores
of AMD Zen 5); for what is chosen by estimates is what they overestimate."""
LATELY = 8
"""Steps over which what guesses save is averaged."""
PATIENCE, ONCE_IN = 16, 4
"""After so many steps without a guess that pays, a source or a sequence is looked at in one step of
four: what is not looked at costs nothing, and who begins to copy is seen three steps later."""
CYCLE, RESTED = 16, 12
"""After as many steps of guesses that save too little, nobody is asked in 12 of 16."""


class Look(Enum):
    """What a step does about guesses."""

    ASKS = "sources guess, and the drafter for the next step"
    LAST = "sources guess; the next step would not verify what the drafter says"
    RESTS = "none"


class Rests:
    """Says of each step whether it looks for guesses; `chose` tells what they were worth."""

    def __init__(self) -> None:
        self._gain_s = 0.0
        """What guesses of late saved a step, less what choosing took."""
        self._num_unpaid = 0
        """Steps since that was worth it."""

    def next(self) -> Look:
        """What the next step does."""
        self._num_unpaid += 1
        place = (self._num_unpaid - PATIENCE - 1) % CYCLE
        if self._num_unpaid > PATIENCE and place < RESTED:
            return Look.RESTS
        is_last = self._num_unpaid > PATIENCE and place == CYCLE - 1
        return Look.LAST if is_last else Look.ASKS

    def chose(self, saved_s: float, num_decodes: int) -> None:
        """The guesses of a step are expected to save so many seconds, of so many sequences."""
        gain_s = saved_s - CHOOSING_S - EACH_S * num_decodes
        self._gain_s += (gain_s - self._gain_s) / LATELY
        if self._gain_s >= 0:
            self._num_unpaid = 0
