"""Steps in which nobody is asked for guesses, where these save less than it takes to choose them.

To ask every source, to compare what it said and to choose takes the scheduler some microseconds a
sequence, and the step waits. That is nothing beside guesses that double the tokens of a step, and
more than some guesses save.

    32 sequences, and each row takes what a token of a sequence takes
    whatever anybody guesses       nobody is asked at all: guesses gain 3% at most, were all right
    16 sequences, a step of 16 ms: choosing takes 0.24 ms, 1.5% of it
    guesses save 8 ms              asked in each step
    guesses save 0.5 ms            asked in 2 steps of 10, which takes 0.3% of the time; nothing is
                                   verified, for what a step takes is foretold no better than that
    1 sequence, a step of 14 ms: choosing takes 0.04 ms, less than 0.3%
    whatever guesses save          asked in each step: a short answer is over within 14
"""

from enum import Enum
from math import ceil

MARGIN = 1.5
"""Guesses have to save so many times what choosing took: what came of them is looked at as well."""
UNSURE = 0.05
"""And this share of the step with them beside: of estimates those are chosen that are too high, and
no step is foretold better. (Of the step without: 32 copies with a guess each took 5% longer for a
token than without, and seemed to take less.)"""
LEAST_GAIN = 0.03
"""Guesses that take time to make have to raise the rate by this share, and those that take none
have to be able to: steps that seem 3% better are as often worse."""
LEAST_HOPE = 0.1
"""What guesses have to be able to gain where none has paid of late: not all of them will be right,
and what a row takes is foretold no better."""
IN_VAIN = 0.003
"""Of the time, what looks may take that bring nothing, as far as a look in each `CYCLE` allows."""
LATELY, AT_REST = 8, 2
"""Looks over which both are averaged; what is saved, where few steps look, over fewer."""
PATIENCE, ONCE_IN = 16, 4
"""After so many steps without a guess that pays, a source or a sequence is looked at in one step of
four: what is not looked at costs nothing, and who begins to copy is seen three steps later."""
AT_START = 8
"""The same before any guess has paid, and steps in which guesses are verified that seem to pay
there, so that it is known what their rows take: 22 steps of 32 chats took 7% longer than without,
and 16 copies that verified none went on without guesses that gain a twentieth."""
HOPELESS = 15
"""Where no guess could pay, so many steps go by until that is reckoned again."""
CYCLE, LOOKS = 16, 2
"""After as many steps of guesses that save too little, somebody is asked in 2 of at most 16: in the
first of them the drafter guesses, in the second that is verified. Where the drafter is not asked
there is no second."""


class Look(Enum):
    """What a step does about guesses."""

    ASKS = "sources guess, and the drafter for the next step"
    LAST = "sources guess; the next step would not verify what the drafter says"
    RESTS = "none"


class Rests:
    """Says of each step whether it looks for guesses; `chose` tells what they were worth, `took`
    what choosing took."""

    def __init__(self) -> None:
        self.look = Look.ASKS
        """What the step does that was asked about last."""
        self._saved_s = 0.0
        self._choose_s: float | None = None
        """Of a step that looks, lately; None before one has."""
        self._step_s = 1.0
        """What the last of them takes."""
        self._num_unpaid, self._has_paid = 0, False
        """Steps since that was worth it, and whether it ever was."""
        self._num_tried = 0
        """Steps in which guesses were verified that had to show yet what they are worth."""
        self._place, self._cycle = 0, CYCLE
        """Steps since the last looks ended, and how many it is from looks to looks."""
        self._num_hopeless, self._num_rows = 0, 0
        """So many steps rest in which there are so many decodes or more."""
        self.is_hopeless = False
        """Whether the step that was asked about last rests since no guess could pay."""

    @property
    def is_resting(self) -> bool:
        """Whether guesses have saved too little for so long that most steps look for none."""
        return self._num_unpaid > (PATIENCE if self._has_paid else AT_START)

    @property
    def _is_trusted(self) -> bool:
        """Whether guesses that seem to save something are verified: they have of late, or few were
        tried."""
        return self._num_tried < AT_START or (self._has_paid and not self.is_resting)

    @property
    def least_gain(self) -> float:
        """The share by which guesses that take time to make have to raise the rate: at rest, and
        where none has paid yet, by so much that they are verified in the next look."""
        if self._is_trusted:
            return LEAST_GAIN
        return AT_REST * (UNSURE + MARGIN * (self._choose_s or 0.0) / self._step_s)

    @property
    def is_doubtful(self) -> bool:
        """Whether the last step that looked did not pay, or there was none."""
        return self._num_unpaid != 1 or not self._has_paid

    def next(self, num_decodes: int) -> Look:
        """What the next step does; one without decodes has nothing to look for."""
        self.look, self.is_hopeless = Look.RESTS, False
        if not num_decodes:
            return self.look
        if self._num_hopeless and num_decodes >= self._num_rows:
            self._num_hopeless -= 1
            self.is_hopeless = True
            return self.look
        self._num_hopeless = 0
        self._num_unpaid += 1
        if not self.is_resting:
            self.look, self._place = Look.ASKS, 0
            return self.look
        self._place += 1
        left = self._cycle - self._place
        if left <= 0:
            self.look, self._place = Look.LAST, 0
        elif left < LOOKS:
            self.look = Look.ASKS
        return self.look

    def hopes(self, most_gained: float, num_decodes: int) -> bool:
        """Whether somebody is asked where guesses, all of them right, would raise the rate by this
        share; else the step rests, and a few more as long as there are as many decodes."""
        has_paid = self._has_paid and not self.is_resting
        if most_gained > (LEAST_GAIN if has_paid else LEAST_HOPE):
            return True
        self.look, self.is_hopeless = Look.RESTS, True
        self._num_unpaid -= 1
        self._num_hopeless, self._num_rows = HOPELESS, num_decodes
        return False

    def asked(self, drafter: bool) -> None:
        """Whether the drafter guesses in this step; else the next look, at rest, has nothing to
        verify."""
        if self.is_resting and not drafter:
            self._place = 0

    def may_end(self, saved_s: float, step_s: float) -> bool:
        """Whether guesses that save so much of a step are worth a closer look, at rest."""
        return saved_s > UNSURE * step_s

    def chose(self, saved_s: float, step_s: float) -> bool:
        """The guesses of a step are expected to save so many seconds; with them it takes `step_s`.

        Whether they are verified: at rest, and where a few were tried and none paid, only where
        they save enough.
        """
        was_trusted, self._step_s = self._is_trusted, step_s
        lately = LATELY if self._has_paid and not self.is_resting else AT_REST
        self._saved_s += (saved_s - self._saved_s) / lately
        self._num_tried += saved_s > 0
        if self._choose_s is None:  # nobody can say that it does not pay
            self._num_unpaid, self._has_paid = 0, True
            return True
        pays_s = (self._saved_s - UNSURE * step_s) / MARGIN
        may_take_s = IN_VAIN * step_s
        if self._choose_s <= max(pays_s, may_take_s):
            self._num_unpaid, self._has_paid = 0, True
        else:
            self._cycle = min(ceil(LOOKS * self._choose_s / may_take_s), CYCLE)
        return was_trusted or not self._num_unpaid

    def took(self, choose_s: float) -> None:
        """To choose the guesses of the step took so long."""
        if self.look is Look.RESTS:
            return
        if self._choose_s is None:
            self._choose_s, self._has_paid = choose_s, False
        self._choose_s += (choose_s - self._choose_s) / LATELY


class NeverRests(Rests):
    """Looks for guesses in each step, and takes all that pay: for measurements and tests, whose
    steps are not to depend on a clock."""

    def next(self, num_decodes: int) -> Look:
        self.look = Look.ASKS if num_decodes else Look.RESTS
        return self.look

    def hopes(self, most_gained: float, num_decodes: int) -> bool:
        return True

    def chose(self, saved_s: float, step_s: float) -> bool:
        return True
