"""Sources of guesses that cost microseconds: they guess in each step, verified or not."""

from typing import Protocol

from headway.core.plan import Sample
from headway.core.speculation_config import SpeculationConfig
from headway.engine.sequence import FINISHED, Sequence
from headway.engine.speculation.drafts import Drafts
from headway.engine.speculation.lookahead import Lookahead
from headway.engine.speculation.lookup import NO_GUESS, Guess, Lookup
from headway.engine.speculation.suffixes import MOST_ADDED, TAIL, PastAnswers

MOST_ENDED = 16
"""Answers that wait to be taken in, where nobody asks for guesses."""


class Source(Protocol):
    """Guesses what follows a sequence; `name` is as `--speculate` and the metrics have it."""

    name: str

    def guess(self, sequence: Sequence, most: int) -> Guess:
        """Up to `most` tokens that may follow it."""
        ...

    def came(self, sequence: Sequence, drafts: Drafts, sample: Sample) -> None:
        """Of these drafts, of whichever source, that is what became."""
        ...

    def left(self, sequence: Sequence) -> None:
        """A sequence is over, or was preempted: what is kept of it may go."""
        ...

    def forget_owner(self, owner: bytes) -> None:
        """Nothing is guessed again from what belongs to `owner` (`Principal.block_owner`), or to
        names that begin with it, in other sequences than its own."""
        ...


class FromItself:
    """What followed the last tokens where they stood in prompt or answer before."""

    name = "lookup"

    def __init__(self) -> None:
        self._by_id: dict[int, Lookup] = {}

    def guess(self, sequence: Sequence, most: int) -> Guess:
        lookup = self._by_id.get(sequence.sequence_id)
        if lookup is None:
            lookup = self._by_id[sequence.sequence_id] = Lookup(sequence.tokens)
        return lookup.guess(most)

    def would_have_guessed(self, sequence: Sequence, most: int, at: int) -> Guess:
        """What it would have said when `at` tokens were known; it has not heard of later ones."""
        lookup = self._by_id.get(sequence.sequence_id)
        if lookup is None:
            lookup = self._by_id[sequence.sequence_id] = Lookup(sequence.tokens)
        return lookup.guess(most, at)

    def came(self, sequence: Sequence, drafts: Drafts, sample: Sample) -> None:
        pass

    def left(self, sequence: Sequence) -> None:
        self._by_id.pop(sequence.sequence_id, None)

    def forget_owner(self, owner: bytes) -> None:
        pass


class FromPastAnswers:
    """The same in past answers of the same user; an answer that has ended may be given again."""

    name = "suffixes"

    def __init__(self) -> None:
        self.past = PastAnswers()
        self._ended: list[tuple[str, list[int], list[int], bytes]] = []
        """Answers that are not taken in yet: some at once take less than one by one."""

    def take_in(self) -> None:
        """Take in all that has ended."""
        ended, self._ended = self._ended, []
        for answer in ended:
            self.past.add(*answer)

    def guess(self, sequence: Sequence, most: int) -> Guess:
        if self._ended:
            self.take_in()
        return self.past.guess(sequence.request.principal.cache_salt, sequence.tokens, most)

    def came(self, sequence: Sequence, drafts: Drafts, sample: Sample) -> None:
        pass

    def left(self, sequence: Sequence) -> None:
        is_kept = sequence.state == FINISHED and not sequence.is_forgotten
        if is_kept and sequence.num_generated:
            begin, principal = sequence.num_prompt, sequence.request.principal
            tail = sequence.tokens[max(0, begin - TAIL) : begin]
            answer = sequence.tokens[begin : begin + MOST_ADDED]
            self._ended.append((principal.cache_salt, tail, answer, principal.block_owner()))
            if len(self._ended) >= MOST_ENDED:
                self.take_in()

    def forget_owner(self, owner: bytes) -> None:
        self.take_in()
        self.past.forget_owner(owner)


class Forced:
    """Where a grammar leaves one text, its tokens."""

    name = "forced"

    def guess(self, sequence: Sequence, most: int) -> Guess:
        if sequence.grammar is None:
            return NO_GUESS
        return Guess(sequence.grammar.forced()[:most], 0)

    def came(self, sequence: Sequence, drafts: Drafts, sample: Sample) -> None:
        pass

    def left(self, sequence: Sequence) -> None:
        pass

    def forget_owner(self, owner: bytes) -> None:
        pass


def make_sources(config: SpeculationConfig) -> list[Source]:
    """Those of the settings' sources that are here, not in the runtime."""
    known: list[type[Source]] = [FromItself, FromPastAnswers, Forced, Lookahead]
    return [source() for source in known if source.name in config.sources]
