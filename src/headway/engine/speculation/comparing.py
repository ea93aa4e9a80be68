"""Who is asked for guesses in a step, and of each sequence the candidate that promises most.

asked      the sources guess, and what they guessed before is scored by the tokens that came
compared   the chances of each guess are reckoned
passed     the first guess is worth less than the cheapest row takes: none of them is chosen,
           whatever the others are, and nothing more is reckoned

at rest    some of the sequences are asked; where these promise to save enough, the others are
           asked too, and all are compared
"""

from collections.abc import Sequence as TypingSequence

from headway.core.speculation_config import SpeculationConfig
from headway.engine.cost import StepCost
from headway.engine.sequence import Sequence
from headway.engine.speculation.acceptance import BEGINS, Acceptance, Own
from headway.engine.speculation.asking import Asking
from headway.engine.speculation.candidates import (
    NO_CANDIDATE,
    Candidate,
    Guessing,
    Said,
    said_beside,
)
from headway.engine.speculation.controller import PlainStep, least_value
from headway.engine.speculation.drafts import Drafts
from headway.engine.speculation.lookahead import KINDS, Lookahead
from headway.engine.speculation.lookup import Guess
from headway.engine.speculation.price import DraftPrice
from headway.engine.speculation.rests import Rests
from headway.engine.speculation.shadow import Shadow
from headway.engine.speculation.sources import Forced, FromItself, make_sources
from headway.engine.speculation.trials import Trials

MADE_UP = 2
"""At rest, guesses that a sequence is asked for of tokens that are known by now."""
ASKED_AT_REST = 8
"""Of many sequences: where the traffic changes it does for most of them."""


class Comparing:
    """The sources of an engine, what is known of their guesses, and who of them is asked."""

    def __init__(self, config: SpeculationConfig, cost: StepCost) -> None:
        self.config, self.cost = config, cost
        self.acceptance = Acceptance()
        self.sources = make_sources(config)
        self.lookahead = next((s for s in self.sources if isinstance(s, Lookahead)), None)
        self.drafter, self.asking = config.drafter, None
        if self.drafter:
            price = DraftPrice(cost, config.draft_share, at_once=config.medusa is not None)
            self.asking = Asking(price, cost)
        self.trials, self.rests = Trials(cost), Rests()
        self._by_id: dict[int, Guessing] = {}
        self._num_looks = 0
        """At rest: who is asked in a look is others than before."""

    def _state(self, sequence: Sequence) -> Guessing:
        state = self._by_id.get(sequence.sequence_id)
        if state is None:
            names = [source.name for source in self.sources]
            if sequence.grammar is None:
                names = [name for name in names if name != Forced.name]
            state = Guessing({name: Shadow(name) for name in names})
            self._by_id[sequence.sequence_id] = state
        return state

    def _ask(
        self, decodes: TypingSequence[Sequence], states: list[Guessing], turns: list[bool]
    ) -> None:
        """Let the sources guess of those whose turn it is; what they guessed before is scored by
        the tokens that came. All are scored before any is compared: shares are reckoned once."""
        most, acceptance = self.config.max_drafts, self.acceptance
        is_resting = self.rests.is_resting
        for sequence, state, turn in zip(decodes, states, turns, strict=True):
            if not turn:
                continue
            tokens, own, num_generated = sequence.tokens, state.own, sequence.num_generated
            state.drafted, state.proposed = state.proposed, []
            state.is_open = state.all_looked = True
            said = state.said = list[Said]()
            if state.drafted:
                said.append(Said(Guess(state.drafted, 0), self.drafter))
            for source in self.sources:
                shadow = state.shadows.get(source.name)
                if shadow is None:
                    continue
                if not (shadow.looks() or is_resting):
                    state.all_looked = False
                    continue
                if is_resting and isinstance(source, FromItself):
                    self._make_up(sequence, source, shadow, own)
                guess = source.guess(sequence, most)
                shadow.settle(tokens, acceptance, own)
                if guess.token_ids:
                    beside = said_beside(guess.token_ids, state.drafted)
                    if not isinstance(guess.match, tuple) and guess.match > num_generated:
                        beside = BEGINS + beside
                    shadow.remember(tokens, guess, beside)
                    said.append(Said(guess, source.name, beside))

    def _make_up(self, sequence: Sequence, source: FromItself, shadow: Shadow, own: Own) -> None:
        """Score what `source` would have guessed since it was asked last: of traffic that has
        changed the first look tells, not the one behind it."""
        tokens, most, acceptance = sequence.tokens, self.config.max_drafts, self.acceptance
        for _ in range(MADE_UP):
            shadow.settle(tokens, acceptance, own)
            at = max(shadow.next_at(len(tokens), most), sequence.num_prompt + 1)
            if at >= len(tokens):
                return
            guess = source.would_have_guessed(sequence, most, at)
            if not guess.token_ids:
                return
            begins = isinstance(guess.match, int) and guess.match > at - sequence.num_prompt
            shadow.remember(tokens[:at], guess, BEGINS if begins else "")

    def _candidates(
        self,
        decodes: TypingSequence[Sequence],
        states: list[Guessing],
        plain: PlainStep,
        price: float,
        least: float,
    ) -> list[Candidate]:
        """Of each decode the one that promises most, if a guess is worth more than `least`.

        At rest half of them are asked, or few of many, and others in the next look; all where that
        finds something. Where a trial is due, the likeliest guess is looked at whatever it is.
        """
        if self.lookahead is not None:
            worth = least_value(plain, self.cost, self.config.max_drafts)
            self.lookahead.begin(self.acceptance.shares(self.lookahead.name, KINDS), worth)
        turns = [state.looks for state in states]
        if self.rests.is_resting:
            parts = max(len(states) // ASKED_AT_REST, 2)
            self._num_looks += 1
            turns = [
                (at + self._num_looks) % parts == 0 or bool(each.proposed)
                for at, each in enumerate(states)
            ]
        self._ask(decodes, states, turns)
        best, firsts = [NO_CANDIDATE] * len(states), [0.0] * len(states)
        if not self.rests.is_resting:
            self._compare(decodes, states, turns, price, least, best, firsts)
        elif self._may_end_rest(states, turns, plain, price, least, firsts):
            others = [not turn for turn in turns]
            self._ask(decodes, states, others)
            self._compare(decodes, states, [True] * len(turns), price, least, best, firsts)
        top = max(firsts)
        finds = any(candidate.chances for candidate in best)
        if top > 0 and not finds and self.trials.is_due(plain):
            at = firsts.index(top)
            best[at] = self._best(decodes[at], states[at], price)
        return best

    def _compare(
        self,
        decodes: TypingSequence[Sequence],
        states: list[Guessing],
        turns: list[bool],
        price: float,
        least: float,
        best: list[Candidate],
        firsts: list[float],
    ) -> None:
        """Fill in the candidates of those whose turn it is, or where a first guess is worth no more
        than `least`, its chance."""
        refills = self._refills
        for at, (sequence, state, turn) in enumerate(zip(decodes, states, turns, strict=True)):
            if turn and least > 0:
                firsts[at], _ = self._first(state)
            if turn and (least <= 0 or least < firsts[at] + (1 - firsts[at]) * refills):
                best[at] = self._best(sequence, state, price)

    def _may_end_rest(
        self,
        states: list[Guessing],
        turns: list[bool],
        plain: PlainStep,
        price: float,
        least: float,
        firsts: list[float],
    ) -> bool:
        """Whether guesses save enough, if others have as good ones as those whose turn it is."""
        refills, promised = self._refills, 0.0
        for at, (state, turn) in enumerate(zip(states, turns, strict=True)):
            if not turn:
                continue
            firsts[at], said = self._first(state)
            chance = firsts[at]
            if said is not None and chance + (1 - chance) * refills > max(least, price):
                count = len(said.guess.token_ids)
                chances = self.acceptance.chances(
                    said.source, said.guess.match, count, state.own, said.beside
                )
                values = [chance + (1 - chance) * refills for chance in chances]
                promised += sum([value - price for value in values if value > price])
        token_s = plain.worth_s(self.cost) / max(sum(turns), 1)
        return self.rests.may_end(promised * token_s, self.cost.seconds(plain.work))

    def _first(self, state: Guessing) -> tuple[float, Said | None]:
        """The best chance of a first guess, and whose it is: that is looked at next time as well.

        What the drafter is worth beside is told of that guess alone, as none of it pays.
        """
        top, found_top, first = 0.0, 0.0, None
        state.found, state.num_paying = NO_CANDIDATE, 0 if state.all_looked else -1
        for said in state.said:
            (token_ids, match), source, beside = said
            chance = self.acceptance.first(source, match, state.own, beside)
            if chance > top:
                top, first = chance, said
            if self.asking is not None and source != self.drafter and chance > found_top:
                found_top = chance
                state.found = Candidate(Drafts(token_ids, source, match), [chance], [chance])
        if first is not None and first.source in state.shadows:
            state.shadows[first.source].num_behind = 0
        return top, first

    def _best(self, sequence: Sequence, state: Guessing, price: float) -> Candidate:
        """The candidate that promises most tokens beyond the `price` of its rows."""
        best, worth = NO_CANDIDATE, 0.0
        found, found_worth = NO_CANDIDATE, 0.0
        for said in state.said:
            drafts = said.fitting(sequence, self.config.max_drafts)
            if not drafts.token_ids:
                continue
            chances = self.acceptance.chances(
                drafts.source, drafts.match, len(drafts.token_ids), state.own, said.beside
            )
            promised = sum([chance - price for chance in chances if chance > price])
            if promised > worth or not best.chances:
                values = [chance + (1 - chance) * self._refills for chance in chances]
                best, worth = Candidate(drafts, chances, values), promised
            if drafts.source != self.drafter and (promised > found_worth or not found.chances):
                found, found_worth = Candidate(drafts, chances, chances), promised
        state.found, state.num_paying = found, -1
        if state.all_looked:
            state.num_paying = sum([chance > price for chance in found.chances])
        if best.drafts.source in state.shadows:
            state.shadows[best.drafts.source].num_behind = 0
        return best

    @property
    def _refills(self) -> float:
        """What a row of a guess that is wrong brings."""
        return self.lookahead.worth if self.lookahead is not None else 0.0
